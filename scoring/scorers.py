"""Scorers that run in processes of their own (safety/workers.py): libraries that may never end, on a model's text."""

import logging
from collections.abc import Callable
from functools import cache

from data import parse_gym

# The libraries are optional, and imported by the processes that score.


def math_scorer() -> Callable:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off; ours is the process

    def parse(text: str) -> list:
        return math_verify.parse(text, parsing_timeout=None)

    def expression(text: str) -> list:
        """A text that is nothing but an expression: marked as LaTeX, or only a number in it would be found."""
        return parse(text) if "$" in text or "\\boxed" in text else parse(f"${text}$") or parse(text)

    def scorer(given: str, is_expression: bool, answer: str) -> float | None:
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
