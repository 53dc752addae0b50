"""Scorers that run in processes of their own (safety/workers.py): libraries that may never end, on a model's text."""

import logging
import re
from collections.abc import Callable
from functools import cache

from data import parse_gym

# The libraries are optional, and imported by the processes that score.

LONGEST = 1000  # characters of an answer whose words are looked at
ESCAPED = re.compile(r"\\[$!]")  # a dollar as a currency, and TeX's narrow space back
FUNCTION = re.compile(r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan)|sinh|cosh|tanh|cot|sec|csc|log|ln|exp|pi)(?![A-Za-z])")
UNIT = re.compile(r"([^=]*\d[^A-Za-z=]*)\s(?=[A-Za-z /.-]*[A-Za-z]{3})[A-Za-z][A-Za-z /.-]*")  # 5 eggs, 1/2 of a cup
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z][A-Za-z ,.'-]*")


def math_scorer() -> Callable:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off; ours is the process

    def parse(text: str) -> list:
        text = BOX.sub(lambda box: rf"\boxed{{{spelled(box[1])}}}", text)
        return math_verify.parse(text, parsing_timeout=None)

    def spelled(text: str) -> str:
        """An expression as LaTeX: functions as commands, without a unit, words as a text."""
        text = FUNCTION.sub(r"\\\1", text)
        if len(text) > LONGEST:
            return text
        if found := UNIT.fullmatch(text):
            return found[1]
        return rf"\text{{{text}}}" if WORDS.fullmatch(text) else text  # else a product: "listen" would be "silent"

    def expression(text: str) -> list:
        """A text that is nothing but an expression: marked as LaTeX, or only a number in it would be found."""
        text = ESCAPED.sub("", text).strip("* ")
        if "$" in text or "\\boxed" in text:
            return parse(text)
        return parse(f"${spelled(text)}$") or parse(text)

    def scorer(given: str, is_expression: bool, answer: str) -> float | None:
        given, answer = (text.replace("\u2212", "-") for text in (given, answer))  # the minus sign of typography
        gold = expression(answer)
        if not gold:
            return None
        found = expression(given) if is_expression else parse(given)
        return float(math_verify.verify(gold, found, timeout_seconds=None))

    return scorer


def reasoning_gym_scorer() -> Callable:
    import reasoning_gym as gym

    @cache
    def dataset(task: str):
        name, parameters = parse_gym(task)
        return gym.create_dataset(name, **parameters)

    return lambda text, task, entry: float(dataset(task).score_answer(text, entry))
