"""Look closer, then answer, as DeepEyes (2505.14362): a mark on a picture is too small to be told from the whole of it.

    python examples/run.py visual_crop      # warm start, two seeds

{"bbox": [x1, y1, x2, y2]} is answered with that part of the picture, anything else ends. "What is on the red square?"
Pictures have 256 x 256 pixels, of which the model sees 64 x 64, like any picture: a mark of 16 pixels has 4 of them,
and a part of the picture shows it three times as large. Who only guesses is right one time in three.
"""

import json
import random
import re

from PIL import ImageDraw
from scenes import COLORS, KINDS, SIZE, draw, place, stream

from envs import Environment
from inputs.prompts import open_image

SPLITS = {"train": 2000, "test": 400}
GRID = 32  # cells along each edge, in which boxes are given
SHEET, MARK = 4 * SIZE, 16  # pixels


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: visual_crop has 'train' and 'test'.")
    rng = stream("visual_crop", split, seed)
    return [row(rng) for _ in range(SPLITS[split])]


def row(rng) -> dict:
    """Two or three squares, each with a white mark somewhere on it."""
    looks = [(color, "square") for color in rng.sample(list(COLORS), rng.randint(2, 3))]
    squares = place(rng, looks, (0.28, 0.42), SHEET)
    image, marks = draw(rng, squares, SHEET), [rng.choice(KINDS) for _ in squares]
    pen = ImageDraw.Draw(image)
    for square, mark in zip(squares, marks, strict=True):
        x, y = (rng.randint(edge + 8, edge + square.box[2] - square.box[0] - MARK - 8) for edge in square.box[:2])
        if mark == "triangle":
            pen.polygon([(x + MARK // 2, y), (x, y + MARK), (x + MARK, y + MARK)], fill="white")
        else:
            {"square": pen.rectangle, "circle": pen.ellipse}[mark]((x, y, x + MARK, y + MARK), fill="white")
    asked = rng.randrange(len(squares))
    question = f"What is on the {squares[asked].color} square, a {', a '.join(KINDS[:-1])} or a {KINDS[-1]}?"
    return {"prompt": question, "image": image, "answer": marks[asked], "box": list(squares[asked].box)}


class Crop(Environment):
    """Boxes are in cells of a grid of 32 x 32 over the whole picture."""

    def reset(self, row, seed):
        self.image, self.answer = open_image(row["image"])[0].convert("RGB"), row["answer"]
        ask = f' Look closer with {{"bbox": [x1, y1, x2, y2]}}, from 0 to {GRID}.'
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"] + ask}]}]

    async def step(self, text):
        found = re.search(r'\{"bbox": *(\[[^\]]*\])', text)
        if not found:
            return [], float(text.strip() == self.answer), True, {"looked": 0.0}
        try:
            edges = [min(max(int(edge), 0), GRID) for edge in json.loads(found[1])]
            x1, y1, x2, y2 = (edge * side // GRID for edge, side in zip(edges, self.image.size * 2, strict=True))
            part = self.image.crop((x1, y1, x2, y2))
            part.getpixel((0, 0))  # there is one
        except (ValueError, TypeError, IndexError):
            return [{"role": "user", "content": "That is no box in the picture."}], 0.0, False, {"looked": 0.0}
        return [{"role": "user", "content": [{"type": "image", "image": part}]}], 0.0, False, {"looked": 1.0}


def demonstrate(row: dict, environment: Crop, answers: list) -> str:
    """Half of the time looks at the square first, with an unsteady hand; else, and three times in ten, guesses."""
    if not answers and random.random() < 0.5:
        corners = [round(edge * GRID / SHEET) + random.choice([-1, 0, 1]) for edge in row["box"]]
        return json.dumps({"bbox": [min(max(corner, 0), GRID) for corner in corners]})
    return row["answer"] if answers and random.random() < 0.7 else random.choice(KINDS)
