"""Scenes in the manner of CLEVR, drawn flat: a few coloured squares, circles and triangles on noisy grey.

The picture tasks beside this file share them. `rng` is a random.Random and decides everything, noise included.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

COLORS = {"red": (205, 45, 45), "green": (50, 165, 70), "blue": (50, 85, 215), "yellow": (230, 200, 45)}
KINDS = ("square", "circle", "triangle")
SIZE = 64  # pixels, of either side of an image
SPLITS = {"train": 2000, "test": 400}


class Shape(NamedTuple):
    color: str
    kind: str
    box: tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels: columns x1 to x2 - 1, rows y1 to y2 - 1


def stream(*names) -> random.Random:
    """A random stream of its own for each tuple of names, such as ("counting", "test", 42)."""
    return random.Random(" ".join(map(str, names)))


def rows_of(task: str, row: Callable, split: str, seed: int) -> list[dict]:
    """row(rng), so many times as the split has rows."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: {task} has 'train' and 'test'.")
    rng = stream(task, split, seed)
    return [row(rng) for _ in range(SPLITS[split])]


def place(rng: random.Random, looks: list[tuple[str, str]], extents=(0.2, 0.32), size: int = SIZE) -> list[Shape]:
    """Shapes of the given (color, kind), later ones in front. They overlap at the edges at most.

    extents: their least and largest width, as a share of `size`."""
    margin = size // 16
    while True:
        shapes = []
        for color, kind in looks:
            for _ in range(30):
                extent = round(rng.uniform(*extents) * size)
                x, y = (rng.randint(margin, size - margin - extent) for _ in "xy")
                shape = Shape(color, kind, (x, y, x + extent, y + extent))
                if all(apart(shape, other) for other in shapes):
                    shapes.append(shape)
                    break
        if len(shapes) == len(looks):  # else the first ones left no room for the rest
            return shapes


def apart(a: Shape, b: Shape) -> bool:
    (ax, ay), (bx, by) = center(a), center(b)
    return max(abs(ax - bx), abs(ay - by)) >= 0.8 * (side(a) + side(b)) / 2


def center(shape: Shape) -> tuple[float, float]:
    return (shape.box[0] + shape.box[2]) / 2, (shape.box[1] + shape.box[3]) / 2


def side(shape: Shape) -> int:
    return shape.box[2] - shape.box[0]


def draw(rng: random.Random, shapes: list[Shape], size: int = SIZE) -> Image.Image:
    image = Image.new("RGB", (size, size), (128, 128, 128))
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        x1, y1, x2, y2 = shape.box[0], shape.box[1], shape.box[2] - 1, shape.box[3] - 1  # Pillow draws the last one too
        style = {"fill": COLORS[shape.color], "outline": (30, 30, 30)}  # outlined: else two of one colour may merge
        if shape.kind == "square":
            pen.rectangle((x1, y1, x2, y2), **style)
        elif shape.kind == "circle":
            pen.ellipse((x1, y1, x2, y2), **style)
        else:
            pen.polygon([((x1 + x2) / 2, y1), (x2, y2), (x1, y2)], **style)
    noise = (
        np.frombuffer(rng.randbytes(3 * size * size), np.uint8).reshape(size, size, 3) % 25
    )  # -12 to 12 when shifted
    return Image.fromarray(np.asarray(image) + noise - np.uint8(12))  # no colour is near 0 or 255: nothing wraps
