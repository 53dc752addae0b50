"""Rewards that read the text of a completion: numbers and matches; with what others need for theirs.

Called as rewards.py says; the names on the command line are in its REWARDS. Instructions are in instructions.py.
"""

import re
import textwrap
import unicodedata
from decimal import Decimal

from inputs.parts import text_of_parts


def completion_text(completion) -> str:
    """The text of a completion: a string itself, or the assistant's part of a list of chat messages."""
    if isinstance(completion, str):
        return completion
    return "\n".join(text_of_parts(m.get("content")) for m in completion if m.get("role") == "assistant")


def answer_part(text: str) -> str:
    """What the model commits to: text after the last </think>, and within it the last <answer>...</answer>, if any."""
    found = tagged(text)
    return text.rpartition("</think>")[2].strip() if found is None else found


def tagged(text: str) -> str | None:
    """What stands in the last <answer>...</answer> after the last </think>; None without both tags."""
    text = text.rpartition("</think>")[2]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def answer_parts(completions, trajectories=None) -> list[str]:
    """`answer_part` of each completion. Of several turns without tags it is that of the last turn: what was said before
    are calls of tools and talk, and compared as a whole the right answer would be worth less for them.

    trajectories: of the completions, where these may be strings, which do not tell one turn from another."""
    lasts = completions if trajectories is None else [t.info["completion"] for t in trajectories]
    parts = []
    for completion, last in zip(completions, lasts, strict=True):
        found = tagged(completion_text(completion))
        said = last if isinstance(last, str) else [m for m in last if m.get("role") == "assistant"][-1:]
        parts.append(answer_part(completion_text(said)) if found is None else found)
    return parts


def answers(wanted) -> list:
    """The right answers of a row: one, or several in a list, a tuple or an array, as pandas has them."""
    wanted = wanted.tolist() if hasattr(wanted, "tolist") else wanted
    return list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]


FENCE = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)


def fenced(text: str, *languages: str) -> list[str]:
    """The blocks ```language that are in one of these, whatever stands in others; if none is, those without a name."""
    found = [((info.split() or [""])[0].lower(), textwrap.dedent(body)) for info, body in FENCE.findall(text)]
    named = [body for language, body in found if language in languages]
    return named or [body for language, body in found if not language]


def python_of(text: str) -> str | None:
    """The last program in ```python blocks of what the model commits to; None without one."""
    return (fenced(answer_part(text), "python", "python3", "py") or [None])[-1]


NUMBER = re.compile(
    r"(?:(?<![\w)])[-\u2212])?"  # a minus, unless it subtracts: "5-3" is 5 and 3
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"  # 1,234 or 1234 or nothing before .5
    r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)


def numbers(text: str) -> list[Decimal]:
    """All numbers in the text, exactly: "1,234.50 and -3" -> [1234.50, -3]."""
    return [Decimal(found.replace(",", "").replace("\u2212", "-")) for found in NUMBER.findall(text)]


def last_number(completions, answer, **columns) -> list[float | None]:
    """1 if the last number in the completion equals the answer's; GSM8K's "... #### 72" may stay as it is."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        target = numbers(str(wanted).rpartition("####")[2])
        if wanted is not None and len(target) != 1:
            raise ValueError(f"answer {wanted!r} is not one number; use --reward_funcs math or exact_match for it")
        found = numbers(completion_text(completion))
        scores.append(None if wanted is None else float(bool(found) and found[-1] == target[0]))
    return scores


def normalise(text) -> str:
    """Unicode form, case, white space and punctuation at the ends do not count."""
    text = str(text)
    if len(text) <= 10_000:  # a long run of accents would take NFKC seconds: its time grows with the square
        text = unicodedata.normalize("NFKC", text)
    text = " ".join(text.casefold().split())
    return text.strip(" .,;:!?'\"`*") or text  # an answer may be nothing but a sign


def exact_match(completions, answer, trajectories=None, **columns) -> list[float | None]:
    """1 if the completion's `answer_part` is the answer, or one of them where the answer is a list, both normalised."""
    scores = []
    for part, wanted in zip(answer_parts(completions, trajectories), answer, strict=True):
        given = normalise(part)
        scores.append(None if wanted is None else float(given in [normalise(each) for each in answers(wanted)]))
    return scores
