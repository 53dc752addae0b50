"""GSM8K's own columns and its own grader: `question`, and `answer`, a solution that ends in "#### 72"."""

import re

from published import format_row, published

from rewards import completion_text

RESULT = re.compile(r"#### (-?[0-9.,]+)")


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    return [format_row(row) for row in published("openai/gsm8k", split, source, config="main")]


def result(text: str) -> str | None:
    """The number after the first "#### ", as a text without commas, which the grader compares as it stands."""
    found = RESULT.search(text)
    return found[1].replace(",", "") if found else None


def strict(completions, answer, **columns) -> list[float]:
    """1 if the completion gives the answer behind ####, as openai's grader and verl's strict one have it."""
    texts = [completion_text(completion) for completion in completions]
    return [float(result(text) == result(right) is not None) for text, right in zip(texts, answer, strict=True)]


strict.per_trajectory = True
