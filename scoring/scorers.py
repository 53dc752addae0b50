"""Answers in mathematics, tasks of reasoning-gym: scorers that run in processes of their own (safety/processes.py), as
they are libraries that may never end on a model's text.

They are optional, and imported by the processes that score.
"""

import json
import logging
import re
from collections.abc import Callable
from functools import cache

from safety.processes import WorkerPool
from scoring.text import answer_part, answer_parts, completion_text, numbers, tagged

POOLS = {"math": WorkerPool("math"), "reasoning_gym": WorkerPool("reasoning_gym")}  # their processes start on first use

LONGEST = 1000  # characters of an answer whose words are looked at
ESCAPED = re.compile(r"\\[$!]")  # a dollar as a currency, and TeX's narrow space back
FUNCTION = re.compile(r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan)|sinh|cosh|tanh|cot|sec|csc|log|ln|exp|pi)(?![A-Za-z])")
UNIT = re.compile(r"([^=]*\d[^A-Za-z=]*)\s(?=[A-Za-z /.-]*[A-Za-z]{3})[A-Za-z][A-Za-z /.-]*")  # 5 eggs, 1/2 of a cup
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
FRACTIONS = {"\u00bd": "12", "\u00bc": "14", "\u00be": "34", "\u2153": "13", "\u2154": "23"}
SIGNS = {sign: rf"\frac{{{a}}}{{{b}}}" for sign, (a, b) in FRACTIONS.items()}
SIGNS = str.maketrans(SIGNS | {"\u221e": r"\infty "} | dict.fromkeys("\u00b7\u22c5\u2219", r"\cdot "))
RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b"
LOWERED = str.maketrans(RAISED, "0123456789-")
POWER_OF_TEN = re.compile(r"(?:([0-9.]+)\s*(?:\\times|\\cdot|\*)\s*|(?<![\w.]))10\s*(?:\^|\*\*)\s*\{?([0-9]{1,3})\}?")
WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z][A-Za-z ,.'-]*")


def math_equal(completions, answer, **columns) -> list[float | dict | None]:
    """1 if math-verify finds the answer's value in the completion; None where it cannot read the answer itself.

    The answer may be LaTeX, a plain expression or GSM8K's "... #### 72". Where it is a whole number, an equal sum that
    was not worked out, such as the question's own, gets {"reward": 0, "unevaluated": 1}. Every completion has a time
    limit of its own (safety/processes.py: ITEM_TIMEOUT); over it: {"reward": 0, "timeout": 1}.
    """
    requests: list = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = completion_text(completion)
        gold = "" if wanted is None else str(wanted).rpartition("####")[2].strip()
        inside = tagged(text)  # without both tags the answer is in a sentence
        given = answer_part(text).replace("<answer>", " ") if inside is None else inside
        requests.append((given, inside is not None, gold) if gold else None)
    return POOLS["math"].map(requests)


def reasoning_gym(completions, metadata, answer, trajectories=None, **columns) -> list[float | dict | None]:
    """The score, 0 to 1, that the row's reasoning-gym task gives to the completion's `answer_part`. Many tasks give
    part of the points for an answer that stands in a sentence, so ask for <answer> tags or nothing but the answer.

    Rows of load_rows name their task with its parameters (`reasoning_gym_task`); elsewhere metadata's source_dataset
    does. Over the time limit: {"reward": 0, "timeout": 1}; a scorer that fails: {"reward": 0, "scorer_error": 1}.
    """
    empty = [None] * len(completions)
    questions, tasks = columns.get("question", empty), columns.get("reasoning_gym_task", empty)
    requests = []
    parts = answer_parts(completions, trajectories)
    for part, meta, a, q, task in zip(parts, metadata, answer, questions, tasks, strict=True):
        meta = json.loads(meta) if isinstance(meta, str) else meta
        task = task or (meta or {}).get("source_dataset")
        if task is not None:
            gym_task(task)
        requests.append(task and (part, task, {"question": q, "answer": a, "metadata": meta}))
    return POOLS["reasoning_gym"].map(requests)


@cache
def gym_task(task: str) -> tuple[str, dict]:
    """Name and parameters of a task; ConfigError for one that is not there."""
    from data import parse_gym

    return parse_gym(task)


math_equal.per_trajectory = reasoning_gym.per_trajectory = True


# ---- in a process of its own ----------------------------------------------------------------------------------------


def reasoning_gym_scorer() -> Callable:
    import reasoning_gym as gym

    @cache
    def dataset(task: str):
        name, parameters = gym_task(task)
        return gym.create_dataset(name, **parameters)

    return lambda text, task, entry: float(dataset(task).score_answer(text, entry))


def math_scorer() -> Callable:
    import math_verify  # noqa: F401 - now, and not in the first answer's time

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off; ours is the process
    return equals


def equals(given: str, is_expression: bool, answer: str) -> float | dict | None:
    given, answer = (text.replace("\u2212", "-") for text in (given, answer))  # the minus sign of typography
    best = None
    # Signs as LaTeX come second, not first: the one of "5 m\u00b2" belongs to a unit.
    for said, gold in dict.fromkeys([(given, answer), (in_latex(given), in_latex(answer))]):
        found = compared(said, is_expression, gold)
        if found == 1:
            return found
        best = found if found or best is None else best
    return best


def compared(given: str, is_expression: bool, answer: str) -> float | dict | None:
    from math_verify import verify

    gold = expression(answer)
    if not gold:
        return None
    found = expression(given) if is_expression else parse(given)
    if not verify(gold, found, timeout_seconds=None):
        return 0.0
    whole = gold[0] if getattr(gold[0], "is_Integer", False) else None
    said = " ".join(part for part in found if isinstance(part, str))[:LONGEST]
    # Equal to a number, but perhaps the question over again, such as 12*34 for 408.
    return 1.0 if whole is None or is_written(int(whole), said) else {"reward": 0.0, "unevaluated": 1.0}


def is_written(whole: int, said: str) -> bool:
    """Whether the number stands in the text as one writes it: its digits, also of 408.0, 4.08*10^2 and 40,800%."""
    plain = POWER_OF_TEN.sub(lambda found: f"{found[1] or 1}e{found[2]}", said.replace("{,}", ","))
    return any(abs(number) in (abs(whole), 100 * abs(whole)) for number in numbers(plain))


def expression(text: str) -> list:
    """A text that is nothing but an expression: marked as LaTeX, or only a number in it would be found."""
    text = ESCAPED.sub("", text).strip("* ")
    if "$" in text or "\\boxed" in text:
        return parse(text)
    return parse(f"${spelled(text)}$") or parse(text)


def parse(text: str) -> list:
    import math_verify

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


def in_latex(text: str) -> str:
    """Roots, powers, fractions and thousands in signs as models write them."""
    text = re.sub(r"\u221a\s*(\d+(?:\.\d+)?|[A-Za-z]|\([^()]*\))", r"\\sqrt{\1}", text).translate(SIGNS)
    text = re.sub(f"[{RAISED}]+", lambda found: "^{" + found[0].translate(LOWERED) + "}", text)
    return re.sub(r"(?<=\d)\\,(?=\d{3}(?!\d))", "", text)
