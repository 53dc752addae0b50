"""Geometry on squared paper: measure a figure, then reckon. Answers are numbers, for the reward `math`.

    python examples/run.py geometry      # warm start, two seeds

Rectangles, right triangles and circles of random place and size, to scale. Splits "train" (2,000 rows) and "test" (200)
are streams of their own: pictures never recur, the few hundred numeric problems do.
"""

import random

from PIL import Image, ImageDraw
from scenes import stream

SPLITS = {"train": 2000, "test": 200}
SQUARES, SIDE, MARGIN = 9, 10, 3  # of the paper, along each edge; pixels of a square, and around all of them


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: geometry has 'train' and 'test'.")
    rng = stream("geometry", split, seed)
    return [rng.choice([triangle, rectangle, circle])(rng) for _ in range(SPLITS[split])]


def demonstrate(row: dict, environment, answers: list) -> str:
    """One who reckons carelessly: three answers in ten are any number."""
    return row["answer"] if random.random() < 0.7 else str(random.randint(1, 60))


def row(question: str, image: Image.Image, answer: int) -> dict:
    return {"prompt": f"{question} A square is 1 wide. Answer with a number.", "image": image, "answer": str(answer)}


def paper(rng, width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw, tuple, dict]:
    """Squared paper, its pen, a box of so many squares somewhere on it (left, top, right, bottom) and the colours."""
    size = SQUARES * SIDE + 2 * MARGIN
    image = Image.new("RGB", (size, size), rng.choice(["white", "ivory", "aliceblue", "honeydew"]))
    pen = ImageDraw.Draw(image)
    for at in range(MARGIN, size, SIDE):
        pen.line((at, MARGIN, at, size - MARGIN), fill="lightgray")
        pen.line((MARGIN, at, size - MARGIN, at), fill="lightgray")
    left, top = (MARGIN + SIDE * rng.randint(0, SQUARES - squares) for squares in (width, height))
    colors = {"outline": rng.choice(["black", "navy", "darkred", "darkgreen"]), "width": 2}
    colors["fill"] = rng.choice(["gold", "salmon", "skyblue", "plum", "lightgreen"])
    return image, pen, (left, top, left + SIDE * width, top + SIDE * height), colors


def rectangle(rng) -> dict:
    a, b = rng.randint(1, SQUARES), rng.randint(1, SQUARES)
    image, pen, box, colors = paper(rng, a, b)
    pen.rectangle(box, **colors)
    asked, answer = rng.choice([("area", a * b), ("perimeter", 2 * (a + b))])
    return row(f"What is the {asked} of the rectangle?", image, answer)


def triangle(rng) -> dict:
    """The right angle is at the lower left."""
    a, b = rng.randint(2, SQUARES), rng.randint(2, SQUARES)
    image, pen, (left, top, right, bottom), colors = paper(rng, a, b)
    pen.polygon([(left, bottom), (left, top), (right, bottom)], **colors)
    asked, answer = rng.choice([("twice the area", a * b), ("the square of the longest side", a * a + b * b)])
    return row(f"What is {asked} of the right triangle?", image, answer)


def circle(rng) -> dict:
    """Answers about pi are multiples of it."""
    radius = rng.randint(1, SQUARES // 2)
    image, pen, box, colors = paper(rng, 2 * radius, 2 * radius)
    pen.ellipse(box, **colors)
    questions = [("What is the diameter of the circle?", 2 * radius)]
    questions += [("The area of the circle is pi times what?", radius**2)]
    question, answer = rng.choice(questions)
    return row(question, image, answer)
