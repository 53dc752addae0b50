"""Drawn geometry: read the labels off a figure, then reckon. Answers are numbers, for the reward `math`.

    python examples/run.py geometry      # warm start, one seed

Right triangles (Pythagorean, so that every side is whole), rectangles and circles of random place and size; the drawing
is not to scale. Splits "train" (2,000 rows) and "test" (200) are streams of their own: pictures never recur, the few
hundred numeric problems do.
"""

import random

from PIL import Image, ImageDraw, ImageFont
from scenes import stream

SPLITS = {"train": 2000, "test": 200}
SIZE = 96  # pixels: the least at which the labels are legible
TRIPLES = [(3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (6, 8, 10), (9, 12, 15), (12, 16, 20)]
FONT = ImageFont.load_default(size=15)


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: geometry has 'train' and 'test'.")
    rng = stream("geometry", split, seed)
    return [rng.choice([triangle, rectangle, circle])(rng) for _ in range(SPLITS[split])]


def blind(split: str = "test", seed: int = 42) -> list[dict]:
    """The rows with the pictures of others: what a model gets right of these it has guessed, not seen."""
    shown = rows(split, seed)
    return [row | {"image": other["image"]} for row, other in zip(shown, shown[1:] + shown[:1], strict=True)]


def demonstrate(row: dict, environment, answers: list) -> str:
    """One who reckons carelessly: three answers in ten are any number."""
    return row["answer"] if random.random() < 0.7 else str(random.randint(1, 60))


def row(question: str, image: Image.Image, answer: int) -> dict:
    return {"prompt": f"{question} Answer with a number.", "image": image, "answer": str(answer)}


def canvas(rng) -> tuple[Image.Image, ImageDraw.ImageDraw, str]:
    """A light sheet, its pen and a dark colour to draw the lines in."""
    image = Image.new("RGB", (SIZE, SIZE), rng.choice(["white", "ivory", "aliceblue", "honeydew"]))
    return image, ImageDraw.Draw(image), rng.choice(["black", "navy", "darkred", "darkgreen"])


def label(pen, x: float, y: float, text) -> None:
    pen.text((x, y), str(text), font=FONT, fill="black", anchor="mm")


def triangle(rng) -> dict:
    """The right angle is at the lower left; two of the three sides are labelled."""
    a, b, c = rng.choice(TRIPLES)
    a, b = rng.choice([(a, b), (b, a)])  # a stands up, b lies
    image, pen, ink = canvas(rng)
    x, y, width, height = rng.randint(24, 30), rng.randint(70, 76), rng.randint(46, 60), rng.randint(48, 62)
    pen.polygon([(x, y), (x, y - height), (x + width, y)], outline=ink, width=2)
    pen.rectangle((x, y - 6, x + 6, y), outline=ink)
    asked = rng.choice(["hypotenuse", "area", "upright", "lying"])
    if asked != "upright":
        label(pen, x - 12, y - height / 2, a)
    if asked != "lying":
        label(pen, x + width / 2, y + 11, b)
    if asked in ("upright", "lying"):
        label(pen, x + width / 2 + 12, y - height / 2 - 8, c)
    if asked == "area":
        return row("What is the area of the right triangle?", image, a * b // 2)
    answer = {"hypotenuse": c, "upright": a, "lying": b}[asked]
    return row("How long is the side of the right triangle that has no label?", image, answer)


def rectangle(rng) -> dict:
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    image, pen, ink = canvas(rng)
    x, y, width, height = rng.randint(24, 32), rng.randint(6, 14), rng.randint(40, 60), rng.randint(30, 56)
    pen.rectangle((x, y, x + width, y + height), outline=ink, width=2)
    label(pen, x - 12, y + height / 2, a)
    label(pen, x + width / 2, y + height + 11, b)
    asked, answer = rng.choice([("area", a * b), ("perimeter", 2 * (a + b))])
    return row(f"What is the {asked} of the rectangle?", image, answer)


def circle(rng) -> dict:
    """Its label is the radius; answers about pi are multiples of it."""
    radius = rng.randint(2, 20)
    image, pen, ink = canvas(rng)
    r = rng.randint(30, 42)
    x, y = rng.randint(r + 2, SIZE - r - 2), rng.randint(r + 2, SIZE - r - 2)
    pen.ellipse((x - r, y - r, x + r, y + r), outline=ink, width=2)
    pen.ellipse((x - 2, y - 2, x + 2, y + 2), fill=ink)
    pen.line((x, y, x + r, y), fill=ink, width=2)
    label(pen, x + r / 2, y - 10, radius)
    questions = [("What is the diameter of the circle?", 2 * radius)]
    questions += [("The area of the circle is pi times what?", radius**2)]
    questions += [("The circumference of the circle is pi times what?", 2 * radius)]
    question, answer = rng.choice(questions)
    return row(question, image, answer)
