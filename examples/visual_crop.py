"""Look closer, then answer, as DeepEyes (2505.14362): the picture is large, and what is asked about is small in it.

    python examples/run.py visual_crop      # warm start, two seeds

{"bbox": [x1, y1, x2, y2]} is answered with that part of the picture, anything else ends. Nine scenes of counting.py
make one picture of 192 x 192 pixels, of which the tiny model sees 64 x 64, like of any picture; the part that the
question names, cut out, it sees as it is.
"""

import json
import random
import re

import counting
from PIL import Image
from scenes import SIZE, rows_of

from envs import Environment
from inputs.pictures import load_image

PLACES = [f"{row} {column}" for row in ("upper", "middle", "lower") for column in ("left", "middle", "right")]
GRID = 6  # cells along each edge, in which boxes are given: a scene is two wide


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    return rows_of("visual_crop", row, split, seed)


def row(rng) -> dict:
    image, asked = Image.new("RGB", (3 * SIZE, 3 * SIZE)), rng.randrange(9)
    scenes = [counting.row(rng, most=4) for _ in PLACES]
    for place, scene in enumerate(scenes):
        image.paste(scene["image"], (place % 3 * SIZE, place // 3 * SIZE))
    x, y = 2 * (asked % 3), 2 * (asked // 3)
    prompt = f"Look at the {PLACES[asked]} part. {scenes[asked]['prompt']}"
    return {"prompt": prompt, "image": image, "answer": scenes[asked]["answer"], "box": [x, y, x + 2, y + 2]}


class Crop(Environment):
    """Boxes are in cells of a grid of 6 x 6 over the whole picture."""

    def reset(self, row, seed):
        self.image, self.answer, self.shown = load_image(row["image"])[0], row["answer"], None
        ask = f' To look closer, answer {{"bbox": [x1, y1, x2, y2]}} first, each from 0 to {GRID}.'
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"] + ask}]}]

    async def step(self, text):
        found = re.search(r'\{"bbox": *(\[[^\]]*\])', text)
        if not found:
            number = re.search(r"\d+", text)
            return [], float(bool(number) and number[0] == self.answer), True, {"looked": 0.0}
        try:
            edges = [min(max(int(edge), 0), GRID) for edge in json.loads(found[1])]
            x1, y1, x2, y2 = (edge * side // GRID for edge, side in zip(edges, self.image.size * 2, strict=True))
            part = self.image.crop((x1, y1, x2, y2))
            part.getpixel((0, 0))  # there is one
            self.shown = edges
        except (ValueError, TypeError, IndexError):
            return [{"role": "user", "content": "That is no box in the picture."}], 0.0, False, {"looked": 0.0}
        return [{"role": "user", "content": [{"type": "image", "image": part}]}], 0.0, False, {"looked": 1.0}


def demonstrate(row: dict, environment: Crop, answers: list) -> str:
    """Looks first six times in ten, one time in six at any part, and answers right in nine of ten cases then; who has
    not looked, or looked elsewhere, says any number."""
    if not answers and random.random() < 0.6:
        x, y = 2 * random.randrange(3), 2 * random.randrange(3)
        return json.dumps({"bbox": row["box"] if random.random() < 0.8 else [x, y, x + 2, y + 2]})
    return row["answer"] if environment.shown == row["box"] and random.random() < 0.9 else str(random.randint(0, 4))
