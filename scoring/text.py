"""Rewards that read the text of a completion: numbers, matches, choices, repetition, format.

Called as rewards.py says; the names on the command line are in its REWARDS. Instructions are in instructions.py.
"""

import re
import string
import textwrap
import unicodedata
from collections import Counter
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


# Not of F1, H2O (with a subscript, too) or C-shaped.
CHOICE = re.compile(r"(?<![A-Za-z0-9'\u2019])\(?([A-H])\)?(?![A-Za-z0-9'\u2019\u2080-\u2089]|-[A-Za-z])")
# What stands behind "The answer is C) " or a first "C) " is the choice's text, up to another one: "C) Vitamin D".
CHOICE_TEXT = re.compile(
    r"((?:[Aa]nswer(?: is)?[\s:*]*\(?[A-H]\)\**[ \t]+(?=\w)|\A\W*[A-H]\)\**[ \t]+(?=[A-Z0-9])))(?:(?!\(?[A-H]\))[^\n])*"
)


def multiple_choice(completions, answer, **columns) -> list[float | None]:
    """1 if the last choice named in the completion's `answer_part` is the answer: "B", "(B)", "B) Paris", "The answer
    is B." A choice is a capital letter from A to H by itself, which is not part of a choice's text; the answer is such
    a letter, or its number from 0."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        right = str(wanted).strip(" ().").upper()
        right = chr(ord("A") + int(right)) if re.fullmatch("[0-7]", right) else right
        if wanted is not None and not CHOICE.fullmatch(right):
            raise ValueError(f"answer {wanted!r} is no letter from A to H, nor its number from 0")
        found = CHOICE.findall(CHOICE_TEXT.sub(r"\1", answer_part(completion_text(completion))))
        scores.append(None if wanted is None else float(bool(found) and found[-1] == right))
    return scores


ARTICLES = re.compile(r"\b(a|an|the)\b")


def squad_tokens(text) -> list[str]:
    """Words as SQuAD's evaluation compares them (1606.05250): lower case, no punctuation, no articles."""
    text = "".join(c for c in str(text).lower() if c not in string.punctuation)
    return ARTICLES.sub(" ", text).split()


def squad_scores(completions, answer, trajectories=None) -> list[tuple[float, float] | None]:
    """(exact match, F1 over words) of every completion's `answer_part` with the best of its answers."""
    scores = []
    for part, wanted in zip(answer_parts(completions, trajectories), answer, strict=True):
        given, best = squad_tokens(part), (0.0, 0.0)
        for one in answers(wanted):
            words = squad_tokens(one)
            common = sum((Counter(given) & Counter(words)).values())
            best = max(best, (float(given == words), 2 * common / max(len(given) + len(words), 1)))
        scores.append(None if wanted is None else best)
    return scores


def squad_em(completions, answer, trajectories=None, **columns) -> list[float | None]:
    """1 if the completion's `answer_part` is an answer, compared as in SQuAD."""
    return [None if score is None else score[0] for score in squad_scores(completions, answer, trajectories)]


def squad_f1(completions, answer, trajectories=None, **columns) -> list[float | None]:
    """Overlap in words with the best of the answers, 0 to 1."""
    return [None if score is None else score[1] for score in squad_scores(completions, answer, trajectories)]


def repetition(completion_ids, **columns) -> list[float]:
    """-(share of 3-grams of tokens that occurred before in the completion), from 0 to -1."""
    scores = []
    for ids in completion_ids:
        grams = list(zip(ids, ids[1:], ids[2:], strict=False))
        scores.append(len(set(grams)) / len(grams) - 1 if grams else 0.0)
    return scores


def format_tags(completions, **columns) -> list[float]:
    """1 if the completion is <think>...</think> <answer>...</answer>, each tag once and nothing around them."""
    pattern = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    texts = [completion_text(completion) for completion in completions]
    return [float(all(text.count(tag) == 1 for tag in tags) and bool(pattern.fullmatch(text))) for text in texts]
