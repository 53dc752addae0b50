"""Rewards of choices, of answers as SQuAD compares them, of repetition and of the format."""

import re
import string
from collections import Counter

from scoring.text import answer_part, answer_parts, answers, completion_text

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


for _function in (multiple_choice, squad_em, squad_f1, repetition, format_tags):
    _function.per_trajectory = True
