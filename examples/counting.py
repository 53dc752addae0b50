"""Counting what a picture shows, as in CLEVR: "How many red circles?", 1 to 6 shapes, answers 0 to 6.

    python examples/run.py counting      # a tiny model that sees a little, three seeds beside a live server

Half of the questions name a colour and a kind, the others one of them or neither. How many shapes match is drawn
first, uniformly from 0 to all of them: with colours and kinds at random, nearly every answer would be 0 or 1.
"""

import re

from scenes import COLORS, KINDS, draw, place, rows_of


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    return rows_of("counting", row, split, seed)


def row(rng, most: int = 6) -> dict:
    total = rng.randint(1, most)
    color, kind = rng.choice(list(COLORS)), rng.choice(KINDS)
    asked = rng.choice(["both", "both", "both", "color", "kind", "neither"])
    color, kind = color if asked in ("both", "color") else None, kind if asked in ("both", "kind") else None
    looks = [(c, k) for c in COLORS for k in KINDS]
    matching = [look for look in looks if matches(look, color, kind)]
    others = [look for look in looks if look not in matching]
    wanted = rng.randint(0, total) if others else total
    chosen = rng.choices(matching, k=wanted) + (rng.choices(others, k=total - wanted) if others else [])
    rng.shuffle(chosen)
    return {"prompt": question(color, kind), "image": draw(rng, place(rng, chosen)), "answer": str(wanted)}


def matches(look: tuple[str, str], color: str | None, kind: str | None) -> bool:
    return color in (None, look[0]) and kind in (None, look[1])


def question(color: str | None, kind: str | None) -> str:
    return f"How many {color + ' ' if color else ''}{kind or 'shape'}s? Answer with a number."


def count(completions, answer, **columns) -> list[float]:
    """1 if the first whole number in the completion is the answer. Prompts are strings, so completions are."""
    found = [re.search(r"\d+", completion) for completion in completions]
    return [float(f is not None and int(f[0]) == int(a)) for f, a in zip(found, answer, strict=True)]
