"""Public picture tasks as rows: CLEVR counting (R1-V), RefCOCO boxes, Geometry3K.

r1v_counting.yaml, grounding.yaml and geometry3k.yaml train on them. Written from the data sets' published columns.
`boxes` is the reward of the second.
"""

import json
import re

from published import example, published

from scoring.text import completion_text

BOX_SIDE = 1000  # boxes are asked for in thousandths of the picture
SIDE = r"\s*-?\d[\d.]*\s*"
BOX = re.compile(rf"\[{SIDE},{SIDE},{SIDE},{SIDE}\]")
THINK = "First think in <think> </think>, then give the {what} in <answer> </answer>."


def clevr(split: str = "train", seed: int = 42, source: str | None = None):
    """`image`, `problem`, and `solution`, which is "<answer> 3 </answer>"."""
    return made(
        published("leonardPKU/clevr_cogen_a_train", split, source, test=None),
        lambda row: {
            "prompt": f"{row['problem']} {THINK.format(what='number')}",
            "answer": re.sub(r"</?answer>", "", row["solution"]).strip(),
        },
        drop=["problem", "solution"],
    )


def refcoco(split: str = "train", seed: int = 42, source: str | None = None):
    """`image`, `answer`, a list of descriptions, and `bbox`: x, y, width, height. RefCOCO's evaluation splits alone are
    on the hub: trained on val, held out is testA."""

    def row_of(row):
        x, y, width, height = row["bbox"]
        across, down = BOX_SIDE / row["image"].width, BOX_SIDE / row["image"].height
        box = [x * across, y * down, (x + width) * across, (y + height) * down]
        ask = f"Where is: {row['answer'][0]}? Answer with its box as [x1, y1, x2, y2] on a scale from 0 to {BOX_SIDE}."
        return {"prompt": ask, "box": box}

    rows = published("lmms-lab/RefCOCO", split, source, train="val", test="testA")
    names = getattr(rows, "column_names", None) or list(rows[0])
    return made(rows, row_of, drop=[name for name in names if name != "image"])


def geometry3k(split: str = "train", seed: int = 42, source: str | None = None):
    """`images`, a list of one, `problem`, which begins with <image>, and `answer`, a number or LaTeX."""
    return made(
        published("hiyouga/geometry3k", split, source),
        lambda row: {"prompt": row["problem"].replace("<image>", "").strip() + " Put the result into \\boxed{}."},
        drop=["problem"],
    )


def made(rows, row_of, drop=()):
    """row_of(row) of each, without the columns `drop`. A Dataset stays one: its pictures are decoded when used."""
    if isinstance(rows, list):
        return [{key: value for key, value in (row | row_of(row)).items() if key not in drop} for row in rows]
    return rows.map(row_of, remove_columns=list(drop))


def boxes(completions, box, **columns) -> list[dict | None]:
    """0.5 * IoU^2 + 0.5 * format of the last [x1, y1, x2, y2] in the answer."""
    iou, scores = example("grounding.py:iou"), []
    for completion, true_box in zip(completions, box, strict=True):
        if true_box is None:
            scores.append(None)
            continue
        found = BOX.findall(completion_text(completion))
        try:
            x1, y1, x2, y2 = map(float, json.loads(found[-1])) if found else [0, 0, 0, 0]
        except (ValueError, OverflowError):  # one may have hundreds of digits
            x1 = y1 = x2 = y2 = 0
        form = float(x1 < x2 and y1 < y2)
        overlap = iou((x1, y1, x2, y2), true_box) if form else 0.0
        scores.append({"reward": 0.5 * overlap**2 + 0.5 * form, "iou": overlap, "format": form})
    return scores


boxes.per_trajectory = True
