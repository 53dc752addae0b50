"""MATH (2103.03874), 7,500 problems to train on and 5,000 held out; for the reward `math`."""

from published import format_row, published


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    return [format_row(row) for row in published("DigitalLearningGmbH/MATH-lighteval", split, source)]
