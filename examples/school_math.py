"""Math in the published form of GSM8K and MATH: their columns, prepared by one `format_row`, for the reward `math`.

    python examples/run.py school_math               # on rows made here; two seeds
    python examples/school_math.py --reward_funcs math --dataset_id openai/gsm8k --dataset_config main ...
    python examples/school_math.py --reward_funcs math --dataset_id EleutherAI/hendrycks_math --dataset_config algebra

GSM8K (2110.14168) has `question` and `answer`, which ends in "#### 72". MATH (2103.03874) has `problem`, `level`,
`type` and `solution`, with the result in \\boxed{}. This file is a train script, too: train_grpo.py with this
format_row. Rows made here have the same columns, but one step and small numbers. The hub's were never downloaded for
this; the tests read folders of the same columns by the code that reads the hub.
"""

import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
NAMES, THINGS = ["Ann", "Ben", "Cleo", "Dan", "Eva", "Finn"], ["apples", "books", "coins", "pens", "shells", "stamps"]


def format_row(row: dict) -> dict:
    """A row of GSM8K, of MATH, or one that is ready -> one with `prompt` and `answer`; other columns stay."""
    if "prompt" in row:
        return row
    ask, answer = " Give the result after ####.", row.get("answer")
    if "problem" in row:  # MATH; MATH-500 has the result as `answer`, too
        ask, answer = " Put the result into \\boxed{}.", answer or boxed(row["solution"])
    return row | {
        "prompt": [{"role": "user", "content": row.get("question", row.get("problem")) + ask}],
        "answer": answer,
    }


def boxed(solution: str) -> str | None:
    """What is in the last \\boxed{...}; None without one, and `math` leaves the row out."""
    inside = solution.rpartition("\\boxed{")[2] if "\\boxed{" in solution else ""
    depth = 1
    for position, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return inside[:position]
    return None


def gsm8k(split: str = "train", seed: int = 42) -> list[dict]:
    """Rows made here, as GSM8K publishes its own; the first numbers of those held out are odd, of the others even."""
    return [as_gsm8k(chance, split == "test") for chance in chances("gsm8k", split, seed)]


def as_gsm8k(chance: random.Random, odd: bool) -> dict:
    name, thing, a, b = (
        chance.choice(NAMES),
        chance.choice(THINGS),
        2 * chance.randint(6, 20) + odd,
        chance.randint(2, 9),
    )
    story, sign, result = chance.choice(
        [
            (f"{name} has {a} {thing} and gets {b} more. How many {thing} has {name} now?", "+", a + b),
            (f"{name} has {a} {thing} and gives {b} away. How many {thing} has {name} left?", "-", a - b),
            (f"{name} has {a} boxes with {b} {thing} each. How many {thing} has {name}?", "*", a * b),
        ]
    )
    return {"question": story, "answer": f"{name} has {a}{sign}{b}=<<{a}{sign}{b}={result}>>{result}.\n#### {result}"}


def math(split: str = "train", seed: int = 42) -> list[dict]:
    """Rows made here, as MATH publishes its own; what is added is odd in those held out, even in the others."""
    return [as_math(chance, split == "test") for chance in chances("math", split, seed)]


def as_math(chance: random.Random, odd: bool) -> dict:
    a, b, x = chance.randint(2, 9), 2 * chance.randint(1, 14) + odd, chance.randint(2, 12)
    problem, steps, result, kind = chance.choice(
        [
            (f"Solve ${a}x + {b} = {a * x + b}$ for $x$.", f"${a}x = {a * x}$", x, "Algebra"),
            (f"What is $\\frac{{{a * x}}}{{{a}}} + {b}$?", f"$\\frac{{{a * x}}}{{{a}}} = {x}$", x + b, "Prealgebra"),
        ]
    )
    solution = f"We have {steps}, so the answer is $\\boxed{{{result}}}$."
    return {"problem": problem, "level": "Level 1", "type": kind, "solution": solution}


def chances(name: str, split: str, seed: int) -> list[random.Random]:
    """A random stream a row."""
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: school math has 'train' and 'test'.")
    return [random.Random(f"{name} {split} {seed} {n}") for n in range(1000 if split == "train" else 60)]


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    """Both kinds, prepared."""
    return [format_row(row) for row in gsm8k(split, seed) + math(split, seed)]


def demonstrate(row: dict, environment, answers: list) -> str:
    """The published solution, without what a calculator computed in it."""
    return re.sub(r"<<.*?>>", "", row.get("solution", row["answer"]))


if __name__ == "__main__":
    from config import TrainConfig, parse_args

    config = parse_args(TrainConfig, description=__doc__.split("\n")[0])
    import train_grpo

    train_grpo.format_row = format_row
    train_grpo.main(config)
