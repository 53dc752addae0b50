"""What the recipes share: rows of published data sets, from the hub or from a file with the same columns.

--dataset_id recipes/gsm8k.py:rows                                # openai/gsm8k, from the hub
--dataset_id 'recipes/gsm8k.py:rows?source=school_{split}.jsonl'  # your own, where there is no hub
--dataset_id 'recipes/gsm8k.py:rows?source=school.jsonl'          # its last tenth is held out
"""

from collections.abc import Callable
from pathlib import Path

from config import ConfigError, load_function
from data import load_file, load_hub, names_file
from inputs.pictures import opened_value

ROOT = Path(__file__).resolve().parent.parent
MOST_HELD_OUT = 1000  # rows


def published(
    hub_id: str,
    split: str,
    source: str | None = None,
    config: str | None = None,
    train: str = "train",
    test: str | None = "test",
    key: Callable | None = None,
):
    """Rows of `split`, "train" or "test": a list, or a `datasets.Dataset`.

    train, test: the hub's names of the two; no test: the last tenth of the rows is held out, at most MOST_HELD_OUT.
    source: a file, or a folder that `datasets` loads, to read instead. Of a file, too, the last tenth is held out,
    unless its name has {split} in it.
    key: of rows with the same key(row) the first one stays, before any are held out.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split {split!r}: recipes have 'train' and 'test'.")
    if source and names_file(file := source.format(split=split)):
        rows = [
            row | {column: opened_value(row[column]) for column in ("image", "images") if column in row}
            for row in load_file(file)
        ]
        parted = file == source
    else:
        hub_id, config = (source, None) if source else (hub_id, config)
        rows = load_hub(hub_id, config, test if test and split == "test" else train)
        parted = test is None
    if key:
        first: dict = {}
        for place, row in enumerate(rows):
            first.setdefault(key(row), place)
        rows = at(rows, first.values())
    return part(rows, split) if parted else rows


def part(rows, split: str):
    """The rows before the last tenth, or the last tenth."""
    if len(rows) < 2:
        raise ConfigError(f"{len(rows)} rows cannot be parted into some to train on and some held out; give more.")
    first = len(rows) - min(max(len(rows) // 10, 1), MOST_HELD_OUT)
    return at(rows, range(first, len(rows)) if split == "test" else range(first))


def at(rows, places):
    return [rows[place] for place in places] if isinstance(rows, list) else rows.select(places)


def format_row(row: dict) -> dict:
    """A row of GSM8K (2110.14168: `question`, and `answer`, which ends in "#### 72") or of MATH (2103.03874: `problem`,
    and `solution`, with the result in \\boxed{}) -> one with `prompt` and `answer`; other columns stay."""
    ask, answer = " Give the result after ####.", row.get("answer")
    if "problem" in row:  # MATH-500 has the result as `answer`, too
        ask, answer = " Put the result into \\boxed{}.", answer or boxed(row["solution"])
    asked = [{"role": "user", "content": row.get("question", row.get("problem")) + ask}]
    return row | {"prompt": asked, "answer": answer}


def boxed(solution: str) -> str | None:
    """What is in the last \\boxed{...}; None without one, and `math` leaves the row out."""
    inside = solution.rpartition("\\boxed{")[2] if "\\boxed{" in solution else ""
    depth = 1
    for position, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return inside[:position]
    return None


def example(name: str):
    """A function or class of the examples: "grounding.py:iou"."""
    return load_function(f"{ROOT}/examples/{name}")
