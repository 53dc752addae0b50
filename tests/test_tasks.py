"""The rules of the examples' tasks: good play earns 1, random play little; held-out rows are new."""

import asyncio
import random
import sys
from pathlib import Path

import datasets
import pytest

from config import load_function
from data import load_rows
from scoring.scorers import math_equal

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "examples"))
import school_math  # noqa: E402
import shop  # noqa: E402
import sums  # noqa: E402


@pytest.mark.parametrize("example", ["arithmetic", "search", "shop", "school_math", "sums"])
def test_held_out_rows_are_new(example):
    rows = load_function(f"{ROOT}/examples/{example}.py:rows")

    def keys(split: str, seed: int) -> set:
        return {str(sorted(row.items())) for row in rows(split, seed)}

    trained, held_out = keys("train", 0), keys("test", 0)
    assert 20 < len(held_out) < len(trained) and not held_out & trained
    assert list(rows("test", 0)) == list(rows("test", 0)) != list(rows("test", 1))
    with pytest.raises(ValueError, match="'train' and 'test'"):
        rows("validation", 0)


# ---- shop -----------------------------------------------------------------------------------------------------------


def played(row: dict, turn, most: int = 8) -> tuple[float, dict]:
    """(the sum of rewards, metrics) of one visit in which `turn`(shop) is what is said each time."""

    async def play():
        at, total, done = shop.Shop(), 0.0, False
        at.reset(row, 0)
        for _ in range(most):
            _, reward, done, _ = await at.step(turn(at))
            total += reward
            if done:
                break
        return total + (at.score() or 0.0), at.metrics()

    return asyncio.run(play())


def test_who_knows_the_shop_earns_1_and_chance_little():
    rows, chance = shop.rows("train", 0)[:200], random.Random(0)
    assert all(played(row, shop.next_action)[0] == 1 for row in rows)
    lost = [played(row, lambda at: chance.choice(at.actions()))[0] for row in rows]
    assert sum(lost) / len(lost) < 0.2


# ---- sums and school math -------------------------------------------------------------------------------------------


def test_no_sum_is_held_out_in_one_order_and_trained_in_the_other():
    def pairs(split: str) -> set:
        return {frozenset(row["prompt"][0]["content"].split("?")[0].split()[-3::2]) for row in sums.rows(split, 42)}

    assert len(pairs("test")) == 60 and not pairs("train") & pairs("test")


@pytest.mark.parametrize("name, columns, solution", [
    ("gsm8k", {"question", "answer"}, "answer"),
    ("math", {"problem", "level", "type", "solution"}, "solution"),
])  # fmt: skip
def test_school_math_as_published(tmp_path, name, columns, solution):
    """Parquet files of the published columns, read as a hub id is; what they give as the solution is right."""
    for split in ("train", "test"):
        rows = getattr(school_math, name)(split, 0)
        assert all(set(row) == columns for row in rows)
        datasets.Dataset.from_list(rows[:40]).to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    rows = load_rows(str(tmp_path), split="test", format_row=school_math.format_row)
    assert len(rows) == 40 and all(columns | {"prompt", "answer"} == set(row) for row in rows)
    wanted = [row["answer"] for row in rows]
    assert math_equal([row[solution] for row in rows], wanted) == [1.0] * 40
    assert sum(math_equal(["\\boxed{1} #### 1"] * 40, wanted)) < 4
