"""Public picture tasks from the Hugging Face hub as rows: CLEVR counting, RefCOCO boxes, Geometry3K.

    torchrun --nproc_per_node=4 train_grpo.py --model_id Qwen/Qwen2.5-VL-3B-Instruct --max_pixels 401408 \\
        --dataset_id examples/hub_pictures.py:clevr --reward_funcs examples/counting.py:count
        --dataset_id examples/hub_pictures.py:refcoco --reward_funcs examples/hub_pictures.py:boxes
        --dataset_id examples/hub_pictures.py:geometry3k --reward_funcs math

Written from the data sets' published columns; no run of it is recorded yet.
"""

import json
import re

from datasets import load_dataset
from grounding import iou

from rewards import completion_text

CLEVR_HELD_OUT, BOX_SIDE = 1000, 1000  # rows of CLEVR's one split; boxes are asked for in thousandths of the picture


def clevr(split: str = "train", seed: int = 42):
    rows = load_dataset("leonardPKU/clevr_cogen_a_train", split="train").train_test_split(CLEVR_HELD_OUT, seed=seed)
    return rows[split].map(
        lambda row: {
            "prompt": f"{row['problem']} Answer with a number.",
            "answer": re.sub(r"\D", "", row["solution"]),
        },
        remove_columns=["problem", "solution"],
    )


def refcoco(split: str = "train", seed: int = 42):
    """RefCOCO's evaluation splits alone are on the hub: trained on val, held out is testA."""

    def row_of(row):
        x, y, width, height = row["bbox"]
        across, down = BOX_SIDE / row["image"].width, BOX_SIDE / row["image"].height
        box = [x * across, y * down, (x + width) * across, (y + height) * down]
        ask = f"Where is: {row['answer'][0]}? Answer with its box as [x1, y1, x2, y2] on a scale from 0 to {BOX_SIDE}."
        return {"prompt": ask, "box": box}

    rows = load_dataset("lmms-lab/RefCOCO", split={"train": "val", "test": "testA"}[split])
    return rows.map(row_of, remove_columns=[name for name in rows.column_names if name != "image"])


def boxes(completions, box, **columns) -> list[dict]:
    """0.5 * IoU^2 + 0.5 * format of the last [x1, y1, x2, y2] in the answer."""
    scores = []
    for completion, true_box in zip(completions, box, strict=True):
        found = re.findall(r"\[[\d\s.,]+\]", completion_text(completion))
        try:
            x1, y1, x2, y2 = json.loads(found[-1]) if found else [0, 0, 0, 0]
        except ValueError:
            x1 = y1 = x2 = y2 = 0
        form = float(x1 < x2 and y1 < y2)
        overlap = iou((x1, y1, x2, y2), true_box) if form else 0.0
        scores.append({"reward": 0.5 * overlap**2 + 0.5 * form, "iou": overlap, "format": form})
    return scores


def geometry3k(split: str = "train", seed: int = 42):
    rows = load_dataset("hiyouga/geometry3k", split=split)
    return rows.map(
        lambda row: {"prompt": row["problem"].replace("<image>", "").strip() + " Put the result into \\boxed{}."},
        remove_columns=["problem"],
    )
