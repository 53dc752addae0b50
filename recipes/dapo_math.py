"""DAPO-Math-17k: whole numbers as answers, on a last line "Answer: 34"; held out is AIME 2024, in the same columns.

`prompt` is a chat with the instruction in it, `reward_model` has `ground_truth`. On the hub every question stands there
about a hundred times, and those of AIME 32 times (DAPO's issue 36, verl's 3065): here once.
"""

import re

from published import published

from rewards import completion_text

HUB = {"train": "BytedTsinghua-SIA/DAPO-Math-17k", "test": "BytedTsinghua-SIA/AIME-2024"}
ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
UNITS = r"\\[!;,]|\^\{?\\circ\}?|degrees|dollars|points|ways|integers|square|units|cents|hours|minutes|cm|km|[$\s\\]"


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    test = None if source else "train"  # AIME's only split; of a folder the last tenth is held out
    found = published(HUB.get(split, ""), split, source, test=test, key=lambda row: row["prompt"][-1]["content"])
    return [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in found]


def plain(text: str) -> str:
    """As DAPO's grader compares: what follows the last =, without \\boxed{}, \\text{}, $, commas, blanks and units."""
    text = re.sub(r"\\(?:boxed|text|textbf|mathrm)\{(.*?)\}", r"\1", text.rpartition("=")[2])
    text = re.sub(UNITS, "", text)
    return text.replace(",", "") if text.replace(",", "").isdecimal() else text


def dapo(completions, answer, **columns) -> list[float]:
    """1 if the last "Answer:" in the last 300 characters is the answer, else -1."""
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        found = ANSWER.findall(completion_text(completion)[-300:])
        scores.append(1.0 if found and plain(found[-1]) == plain(str(right)) else -1.0)
    return scores


dapo.per_trajectory = True
