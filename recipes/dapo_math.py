"""DAPO-Math-17k: whole numbers as answers, on a last line "Answer: 34"; held out is AIME 2024, in the same columns.

`prompt` is a chat with the instruction in it, `reward_model` has `ground_truth`. On the hub every question stands there
about a hundred times, and those of AIME 32 times (DAPO's issue 36, verl's 3065): here once.
"""

import re

from published import published

from rewards import completion_text

HUB = {"train": "BytedTsinghua-SIA/DAPO-Math-17k", "test": "BytedTsinghua-SIA/AIME-2024"}
ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
# The words that verl's grader removes, spelled as there.
WORDS = "square ways integers dollars mph inches hours km units sue points feet minutes digits cents degrees cm gm "
WORDS += "pounds meters meals edges students childrentickets multiples"
NOTHING = r"\\text\{[s.]?\}|\\mathrm\{th\}|\^(?:\\circ|\{\\circ\})|\\;|,\\!|\{,\}|\"|\\l?dots"  # removed as words are


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    test = None if source else "train"  # AIME's only split; of a folder the last tenth is held out
    found = published(HUB.get(split, ""), split, source, test=test, key=lambda row: row["prompt"][-1]["content"])
    return [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in found]


def plain(text: str) -> str:
    """As verl's math_dapo.py compares whole numbers: what follows the last =, of that what stands between the first two
    dollars, without units, blanks, \\text{} and \\boxed{}."""
    text = re.sub("an? ", "", text.rpartition("=")[2]).replace(".$", "$")
    text = re.sub(r"\\?[ ]|\\\$", "", text).replace("mbox", "text").replace("\\text{m}", "\\text{}")
    text = re.sub(r",?\\text\{and\}", ",", text)
    text = re.sub(r"\\text\{\}\^[23]", "", re.sub(WORDS.replace(" ", "|"), "", text))
    parts = re.sub(NOTHING, "", text).split("$")
    text = parts[1] if len(parts) > 2 else "".join(parts)
    for name in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{name}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    return text.replace(",", "") if text.replace(",", "").isdigit() else text.strip()


def dapo(completions, answer, **columns) -> list[float]:
    """1 if the last "Answer:" in the last 300 characters is the answer, else -1."""
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        found = ANSWER.findall(completion_text(completion)[-300:])
        scores.append(1.0 if found and plain(found[-1]) == plain(str(right)) else -1.0)
    return scores


dapo.per_trajectory = True
