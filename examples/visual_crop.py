"""Look closer, then answer: {"bbox": [x1, y1, x2, y2]} is answered with that part of the picture, anything else ends.

... --env examples/visual_crop.py:Crop --dataset_id examples/counting.py:rows
"""

import json
import re

from PIL import Image

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
