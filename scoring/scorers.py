"""Scorers of mathematical answers and of reasoning-gym tasks. Both are libraries that may never finish on a model's
text, so they run in their own processes (safety/processes.py).

The libraries are optional, and imported only by these processes.
"""

import json
import logging
import re
from collections.abc import Callable
from functools import cache

from safety.processes import WorkerPool
from scoring.text import answer_part, answer_parts, completion_text, numbers, tagged

POOLS = {"math": WorkerPool("math"), "reasoning_gym": WorkerPool("reasoning_gym")}  # their processes start on first use

LONGEST = 1000  # characters; the words of a longer answer are not examined
ESCAPED = re.compile(r"\\[$!]")  # the currency's dollar, and TeX's negative thin space
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
    """1 if math-verify finds the answer's value in the completion; None if it cannot read the answer itself.

    The answer may be LaTeX, a plain expression or GSM8K's "... #### 72". If it is a whole number, an equal sum that was
    not worked out, such as one copied from the question, gets {"reward": 0, "unevaluated": 1}. Each completion has its
    own time limit (safety/processes.py: ITEM_TIMEOUT); over it: {"reward": 0, "timeout": 1}.
    """
    requests: list = []
    for completion, answer_value in zip(completions, answer, strict=True):
        text = completion_text(completion)
        gold = "" if answer_value is None else str(answer_value).rpartition("####")[2].strip()
        inside = tagged(text)  # None: the answer is somewhere in a sentence
        candidate = answer_part(text).replace("<answer>", " ") if inside is None else inside
        requests.append((candidate, inside is not None, gold) if gold else None)
    return POOLS["math"].map(requests)


def reasoning_gym(completions, metadata, answer, trajectories=None, **columns) -> list[float | dict | None]:
    """The score, 0 to 1, that the row's reasoning-gym task gives to the completion's `answer_part`. Many tasks give
    partial credit for an answer within a sentence, so ask for <answer> tags or for nothing but the answer.

    Rows of load_rows name their task with its parameters (`reasoning_gym_task`); for other rows metadata's
    source_dataset names it. Over the time limit: {"reward": 0, "timeout": 1}; if the scorer fails:
    {"reward": 0, "scorer_error": 1}.
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
    """Name and parameters of a task; ConfigError if it does not exist."""
    from data import parse_gym

    return parse_gym(task)


math_equal.per_trajectory = reasoning_gym.per_trajectory = True


# ---- in their own processes ------------------------------------------------------------------------------------------


def reasoning_gym_scorer() -> Callable:
    import reasoning_gym as gym

    @cache
    def dataset(task: str):
        name, parameters = gym_task(task)
        return gym.create_dataset(name, **parameters)

    return lambda text, task, entry: float(dataset(task).score_answer(text, entry))


def math_scorer() -> Callable:
    import math_verify  # noqa: F401 - now, not within the first answer's time limit

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that its time limits are off
    return equals


def equals(candidate: str, is_expression: bool, answer: str) -> float | dict | None:
    candidate, answer = (text.replace("\u2212", "-") for text in (candidate, answer))  # the typographic minus sign
    best = None
    # Signs as LaTeX come second: the one in "5 m\u00b2" belongs to a unit.
    for form, gold in dict.fromkeys([(candidate, answer), (in_latex(candidate), in_latex(answer))]):
        score = score_form(form, is_expression, gold)
        if score == 1:
            return score
        best = score if score or best is None else best
    return best


def score_form(candidate: str, is_expression: bool, answer: str) -> float | dict | None:
    from math_verify import verify

    gold = expression(answer)
    if not gold:
        return None
    values = expression(candidate) if is_expression else parse(candidate)
    if not verify(gold, values, timeout_seconds=None):
        return 0.0
    gold_number = gold[0] if getattr(gold[0], "is_Integer", False) else None
    texts = " ".join(part for part in values if isinstance(part, str))[:LONGEST]
    # Equal to the number, but perhaps only the question again, such as 12*34 for 408.
    return 1.0 if gold_number is None or is_written(int(gold_number), texts) else {"reward": 0.0, "unevaluated": 1.0}


def is_written(number: int, text: str) -> bool:
    """Whether the text contains the number in digits, also as 408.0, 4.08*10^2 or 40,800%."""
    plain = POWER_OF_TEN.sub(lambda match: f"{match[1] or 1}e{match[2]}", text.replace("{,}", ","))
    return any(abs(value) in (abs(number), 100 * abs(number)) for value in numbers(plain))


def expression(text: str) -> list:
    """Parses a text that is nothing but an expression. It is marked as LaTeX; otherwise only a number in it would be
    found."""
    text = ESCAPED.sub("", text).strip("* ")
    if "$" in text or "\\boxed" in text:
        return parse(text)
    return parse(f"${latex_of(text)}$") or parse(text)


def parse(text: str) -> list:
    import math_verify

    text = BOX.sub(lambda box: rf"\boxed{{{latex_of(box[1])}}}", text)
    return math_verify.parse(text, parsing_timeout=None)


def latex_of(text: str) -> str:
    """An expression as LaTeX: functions become commands, a unit is dropped, words become text."""
    text = FUNCTION.sub(r"\\\1", text)
    if len(text) > LONGEST:
        return text
    if match := UNIT.fullmatch(text):
        return match[1]
    return rf"\text{{{text}}}" if WORDS.fullmatch(text) else text  # as products "listen" and "silent" would be equal


def in_latex(text: str) -> str:
    """Signs that models write, as LaTeX: roots, powers, fractions and thousands."""
    text = re.sub(r"\u221a\s*(\d+(?:\.\d+)?|[A-Za-z]|\([^()]*\))", r"\\sqrt{\1}", text).translate(SIGNS)
    text = re.sub(f"[{RAISED}]+", lambda match: "^{" + match[0].translate(LOWERED) + "}", text)
    return re.sub(r"(?<=\d)\\,(?=\d{3}(?!\d))", "", text)
