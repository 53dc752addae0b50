"""Rewards for multiple choice, for answers compared as in SQuAD, for repetition and for the format."""

import re
import string
from collections import Counter

from scoring.text import answer_part, answer_parts, answers, completion_text

# Does not match within F1, H2O (also with a subscript) or C-shaped.
CHOICE = re.compile(r"(?<![A-Za-z0-9'\u2019])\(?([A-H])\)?(?![A-Za-z0-9'\u2019\u2080-\u2089]|-[A-Za-z])")
# Text after "The answer is C) ", or after "C) " at the start, belongs to that choice until the next: "C) Vitamin D".
CHOICE_TEXT = re.compile(
    r"((?:[Aa]nswer(?: is)?[\s:*]*\(?[A-H]\)\**[ \t]+(?=\w)|\A\W*[A-H]\)\**[ \t]+(?=[A-Z0-9])))(?:(?!\(?[A-H]\))[^\n])*"
)


def multiple_choice(completions, answer, **columns) -> list[float | None]:
    """1 if the last choice named in the completion's `answer_part` is the answer: "B", "(B)", "B) Paris", "The answer
    is B." A choice is a single capital letter from A to H that is not part of a choice's text. The column `answer`
    holds such a letter, or its number from 0."""
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        gold_letter = str(gold).strip(" ().").upper()
        gold_letter = chr(ord("A") + int(gold_letter)) if re.fullmatch("[0-7]", gold_letter) else gold_letter
        if gold is not None and not CHOICE.fullmatch(gold_letter):
            raise ValueError(f"answer {gold!r} is no letter from A to H, nor its number from 0")
        choices = CHOICE.findall(CHOICE_TEXT.sub(r"\1", answer_part(completion_text(completion))))
        scores.append(None if gold is None else float(bool(choices) and choices[-1] == gold_letter))
    return scores


ARTICLES = re.compile(r"\b(a|an|the)\b")


def squad_tokens(text) -> list[str]:
    """Words as SQuAD's evaluation compares them (1606.05250): lower case, no punctuation, no articles."""
    text = "".join(c for c in str(text).lower() if c not in string.punctuation)
    return ARTICLES.sub(" ", text).split()


def squad_scores(completions, answer, trajectories=None) -> list[tuple[float, float] | None]:
    """(exact match, F1 over words) of each completion's `answer_part` against the best of its answers."""
    scores = []
    for part, gold in zip(answer_parts(completions, trajectories), answer, strict=True):
        part_words, best = squad_tokens(part), (0.0, 0.0)
        for answer_text in answers(gold):
            words = squad_tokens(answer_text)
            common = sum((Counter(part_words) & Counter(words)).values())
            best = max(best, (float(part_words == words), 2 * common / max(len(part_words) + len(words), 1)))
        scores.append(None if gold is None else best)
    return scores


def squad_em(completions, answer, trajectories=None, **columns) -> list[float | None]:
    """1 if the completion's `answer_part` equals one of the answers, compared as in SQuAD."""
    return [None if score is None else score[0] for score in squad_scores(completions, answer, trajectories)]


def squad_f1(completions, answer, trajectories=None, **columns) -> list[float | None]:
    """F1 over words with the best of the answers, from 0 to 1."""
    return [None if score is None else score[1] for score in squad_scores(completions, answer, trajectories)]


def repetition(completion_ids, **columns) -> list[float]:
    """-(share of token 3-grams that occurred earlier in the completion), from 0 to -1."""
    scores = []
    for ids in completion_ids:
        grams = list(zip(ids, ids[1:], ids[2:], strict=False))
        scores.append(len(set(grams)) / len(grams) - 1 if grams else 0.0)
    return scores


def format_tags(completions, **columns) -> list[float]:
    """1 if the completion is <think>...</think> <answer>...</answer>, with each tag once and nothing around them."""
    pattern = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    texts = [completion_text(completion) for completion in completions]
    return [float(all(text.count(tag) == 1 for tag in tags) and bool(pattern.fullmatch(text))) for text in texts]


for _function in (multiple_choice, squad_em, squad_f1, repetition, format_tags):
    _function.per_trajectory = True
