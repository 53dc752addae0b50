"""Look closer, then answer: {"bbox": [x1, y1, x2, y2]} is answered with that part of the picture, anything else ends.

python examples/run.py visual_crop      # with the questions of counting.py
"""

import json
import random
import re

from PIL import Image
from scenes import SIZE

from envs import Environment
from inputs.prompts import open_image


class Crop(Environment):
    """Boxes are in pixels of the whole picture; what they hold is shown `scale` times as large."""

    def __init__(self, scale: float = 2.0):
        self.scale = scale

    def reset(self, row, seed):
        self.image, self.answer = open_image(row["image"])[0].convert("RGB"), str(row["answer"])
        ask = ' To look closer, answer {"bbox": [x1, y1, x2, y2]} first.'
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"] + ask}]}]

    async def step(self, text):
        found = re.search(r'\{"bbox": *(\[[^\]]*\])', text)
        if not found:
            number = re.search(r"\d+", text)
            return [], float(bool(number) and number[0] == self.answer), True, {"looked": 0.0}
        try:
            x1, y1, x2, y2 = (int(edge) for edge in json.loads(found[1]))
            part = self.image.crop((max(x1, 0), max(y1, 0), min(x2, self.image.width), min(y2, self.image.height)))
            part = part.resize([int(self.scale * side) for side in part.size], Image.Resampling.BICUBIC)
        except ValueError:
            return [{"role": "user", "content": "That is no box in the picture."}], 0.0, False, {"looked": 0.0}
        return [{"role": "user", "content": [{"type": "image", "image": part}]}], 0.0, False, {"looked": 1.0}


def demonstrate(row: dict, environment: Crop, answers: list) -> str:
    """Half of the time looks at a part first; half of the answers are one off."""
    if not answers and random.random() < 0.5:
        x, y = random.randrange(SIZE // 2), random.randrange(SIZE // 2)
        return f'{{"bbox": [{x}, {y}, {x + SIZE // 2}, {y + SIZE // 2}]}}'
    return str(max(0, int(row["answer"]) + random.choice([0, 0, 1, -1])))
