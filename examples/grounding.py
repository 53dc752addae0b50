"""Boxes in a picture, as in RefCOCO and LISA: "Where is the red circle?" is answered with the corners x1 y1 x2 y2.

Coordinates are whole numbers on a grid of GRID x GRID cells over the image; `box` holds the true corners in pixels.

    python examples/run.py grounding      # a tiny model that sees a little, three seeds beside a live server
"""

import re

from scenes import COLORS, KINDS, SIZE, draw, place, rows_of

GRID = 32
EXTENTS = (0.28, 0.42)  # of the shapes, as a share of the image


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    return rows_of("grounding", row, split, seed)


def row(rng, fewest: int = 2, most: int = 3) -> dict:
    looks = rng.sample([(color, kind) for color in COLORS for kind in KINDS], rng.randint(fewest, most))
    shapes = place(rng, looks, EXTENTS)
    target = rng.choice(shapes)
    return {
        "prompt": f"Where is the {target.color} {target.kind}? Answer with x1 y1 x2 y2.",
        "image": draw(rng, shapes),
        "answer": " ".join(str(round(edge * GRID / SIZE)) for edge in target.box),
        "box": list(target.box),
    }


def grounding(completions, box, **columns) -> list[dict]:
    """0.5 * IoU^2 + 0.5 * format, where format is 1 for exactly four whole numbers with x1 < x2 and y1 < y2.

    A box that covers the shape and as much again (IoU 1/2) scores .5 * .25 + .5 = .625, one beside it .5. GRID limits
    the rest: the answer itself has a mean IoU of .89.
    """
    scores = []
    for completion, true_box in zip(completions, box, strict=True):
        corners = read_box(completion)
        overlap = iou(corners, true_box) if corners else 0.0
        form = float(corners is not None)
        scores.append({"reward": 0.5 * overlap**2 + 0.5 * form, "iou": overlap, "format": form})
    return scores


def iou(a, b) -> float:
    """Intersection over union of two boxes x1, y1, x2, y2."""
    width, height = (max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (a, b)]
    return width * height / (sum(areas) - width * height)


def read_box(completion: str) -> list[float] | None:
    """Corners in pixels, or None if the completion is no box."""
    corners = [int(number) * SIZE / GRID for number in re.findall(r"\d+", completion)]
    return corners if len(corners) == 4 and corners[0] < corners[2] and corners[1] < corners[3] else None
