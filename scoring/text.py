"""Rewards that read a completion's text, for numbers and matches, and helpers for other rewards.

rewards.py says how they are called; its REWARDS has their names on the command line.
"""

import re
import textwrap
import unicodedata
from decimal import Decimal

from inputs.parts import text_of_parts


def completion_text(completion) -> str:
    """The text of a completion: the string itself, or the assistant's text in a list of chat messages."""
    if isinstance(completion, str):
        return completion
    return "\n".join(text_of_parts(m.get("content")) for m in completion if m.get("role") == "assistant")


def answer_part(text: str) -> str:
    """The text that the model commits to: after the last </think>, and within it the last <answer>...</answer>, if
    any."""
    inside = tagged(text)
    return text.rpartition("</think>")[2].strip() if inside is None else inside


def tagged(text: str) -> str | None:
    """The content of the last <answer>...</answer> after the last </think>; None without both tags."""
    text = text.rpartition("</think>")[2]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def answer_parts(completions, trajectories=None) -> list[str]:
    """`answer_part` of each completion. Of several turns without tags, only the last turn counts: earlier turns hold
    tool calls and talk, which would lower the score of a right answer.

    trajectories: of the completions; needed where these may be strings, which do not separate turns.
    """
    last_turns = completions if trajectories is None else [t.info["completion"] for t in trajectories]
    parts = []
    for completion, last in zip(completions, last_turns, strict=True):
        inside = tagged(completion_text(completion))
        last_messages = last if isinstance(last, str) else [m for m in last if m.get("role") == "assistant"][-1:]
        parts.append(answer_part(completion_text(last_messages)) if inside is None else inside)
    return parts


def answers(gold) -> list:
    """The right answers of a row: one, or several in a list, a tuple or an array, as in pandas."""
    gold = gold.tolist() if hasattr(gold, "tolist") else gold
    return list(gold) if isinstance(gold, (list, tuple)) else [gold]


FENCE = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)


def fenced_blocks(text: str, *languages: str) -> list[str]:
    """The ```language blocks in one of these languages; if there are none, those without a language."""
    blocks = [((info.split() or [""])[0].lower(), textwrap.dedent(body)) for info, body in FENCE.findall(text)]
    of_languages = [body for language, body in blocks if language in languages]
    return of_languages or [body for language, body in blocks if not language]


def python_of(text: str) -> str | None:
    """The last program in ```python blocks of the model's answer; None without one."""
    return (fenced_blocks(answer_part(text), "python", "python3", "py") or [None])[-1]


NUMBER = re.compile(
    r"(?:(?<![\w)])[-\u2212])?"  # a minus, unless it subtracts: "5-3" is 5 and 3
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"  # 1,234 or 1234 or nothing before .5
    r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)


def numbers(text: str) -> list[Decimal]:
    """All numbers in the text, exactly: "1,234.50 and -3" -> [1234.50, -3]."""
    return [Decimal(match.replace(",", "").replace("\u2212", "-")) for match in NUMBER.findall(text)]


def last_number(completions, answer, **columns) -> list[float | None]:
    """1 if the last number in the completion equals the answer's. GSM8K's "... #### 72" is read as 72."""
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        target = numbers(str(gold).rpartition("####")[2])
        if gold is not None and len(target) != 1:
            raise ValueError(f"answer {gold!r} is not one number; use --reward_funcs math or exact_match for it")
        numbers_found = numbers(completion_text(completion))
        scores.append(None if gold is None else float(bool(numbers_found) and numbers_found[-1] == target[0]))
    return scores


def normalise(text) -> str:
    """Removes differences in Unicode form, case, white space, and punctuation at the ends."""
    text = str(text)
    if len(text) <= 10_000:  # NFKC takes quadratic time, seconds for a long run of accents
        text = unicodedata.normalize("NFKC", text)
    text = " ".join(text.casefold().split())
    return text.strip(" .,;:!?'\"`*") or text  # an answer may consist of punctuation alone


def exact_match(completions, answer, trajectories=None, **columns) -> list[float | None]:
    """1 if the completion's `answer_part` is the answer, or one of a list of answers, both normalised."""
    scores = []
    for part, gold in zip(answer_parts(completions, trajectories), answer, strict=True):
        candidate = normalise(part)
        scores.append(None if gold is None else float(candidate in [normalise(text) for text in answers(gold)]))
    return scores
