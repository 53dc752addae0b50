"""The rules of the examples' tasks: good play earns 1, random play little; held-out rows are new."""

import asyncio
import random
import sys
from pathlib import Path

import pytest

from config import load_function

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "examples"))
import shop  # noqa: E402
import sums  # noqa: E402


@pytest.mark.parametrize("example", ["arithmetic", "search", "shop", "sums"])
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


# ---- sums -----------------------------------------------------------------------------------------------------------


def test_no_sum_is_held_out_in_one_order_and_trained_in_the_other():
    def pairs(split: str) -> set:
        return {frozenset(row["prompt"][0]["content"].split("?")[0].split()[-3::2]) for row in sums.rows(split, 42)}

    assert len(pairs("test")) == 60 and not pairs("train") & pairs("test")
