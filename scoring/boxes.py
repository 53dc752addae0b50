"""Boxes that a model wrote as [x1, y1, x2, y2], on whatever scale the prompt asked for.

--reward_funcs scoring/boxes.py:boxes      column `box`: x1, y1, x2, y2 on that scale
"""

import json
import re

from scoring.text import completion_text

SIDE = r"\s*-?\d[\d.]*\s*"
BOX = re.compile(rf"\[{SIDE},{SIDE},{SIDE},{SIDE}\]")


def boxes(completions, box, **columns) -> list[dict | None]:
    """0.5 * IoU^2 + 0.5 * format of the last [x1, y1, x2, y2] in the answer."""
    scores = []
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


def iou(a, b) -> float:
    """Intersection over union of two boxes x1, y1, x2, y2."""
    width, height = (max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (a, b)]
    return width * height / (sum(areas) - width * height)
