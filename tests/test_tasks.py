"""The rules of the examples' tasks: good play earns 1, random play little, and nothing a model says breaks them."""

import asyncio
import itertools
import random
import sys
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config import TrainConfig
from data import load_rows
from envs import adapters
from envs.tools import PARSERS
from plugins import load_function
from rewards import math_equal
from scoring.instructions import instructions

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "examples"))
import instructions as followed  # noqa: E402
import programs  # noqa: E402
import school_math  # noqa: E402
import shop  # noqa: E402
import sums  # noqa: E402
import user  # noqa: E402

DESK = TrainConfig(env=f"{ROOT}/examples/user.py:Desk", tool_parser="tags", generator="hf")


def played(environment, row, turn, most: int = 8) -> float:
    """The sum of rewards of one trajectory in which `turn`(environment) is what is said each time."""

    async def play():
        total, done = 0.0, False
        environment.reset(row, 0)
        for _ in range(most):
            _, reward, done, _ = await environment.step(turn(environment))
            total += reward
            if done:
                break
        return total + (environment.score() or 0.0)

    return asyncio.run(play())


def desk():
    return adapters.environment_maker(DESK)()


@pytest.mark.parametrize("example", ["shop", "user", "instructions", "school_math", "programs"])
def test_held_out_rows_are_new(example):
    rows = load_function(f"{ROOT}/examples/{example}.py:rows")
    key = lambda row: str([value for name, value in sorted(row.items())])  # noqa: E731
    trained, held_out = ({key(row) for row in rows(split, 0)} for split in ("train", "test"))
    assert 50 < len(held_out) < len(trained)
    assert not held_out & (trained | {key(row) for row in rows("train", 42)})  # a warm start may have another seed
    assert rows("test", 0) == rows("test", 0) != rows("test", 1)
    with pytest.raises(ValueError, match="'train' and 'test'"):
        rows("validation", 0)


# ---- shop -----------------------------------------------------------------------------------------------------------


def test_who_knows_the_shop():
    rows = shop.rows("train", 0)
    assert all(played(shop.Shop(), row, shop.next_action, 8) == 1 for row in rows)
    chance = random.Random(0)
    lost = [played(shop.Shop(), row, lambda shop: chance.choice(shop.actions())) for row in rows]
    assert sum(lost) / len(lost) < 0.2


def said(*actions: str, row: int = 0):
    """(the shop after these actions, what each of them gave)"""
    at = shop.Shop()
    at.reset(ROW, 0)
    return at, [asyncio.run(at.step(action)) for action in actions]


ROW = next(row for row in shop.rows("train", 0) if shop.CATALOGUE[row["target"]]["kind"] == "lamp")
RIGHT = ["its place", f"click[{ROW['color']}]", f"click[{ROW['size']}]"]


@pytest.mark.parametrize("left_out", [set(), {1}, {2}, {1, 2}])
def test_part_of_the_wishes(left_out):
    clicks = [click for number, click in enumerate(RIGHT) if number not in left_out]
    at, _ = said("search[lamp]")
    while shop.CATALOGUE[ROW["target"]] not in at.shown():
        asyncio.run(at.step("click[next]"))
    clicks[0] = shop.next_action(at)
    *_, last = [asyncio.run(at.step(click)) for click in [*clicks, "click[buy]"]]
    assert last[1:3] == (1 - len(left_out) / 4, True) and at.metrics()["success"] == (not left_out)


def test_another_kind_of_thing_earns_nothing():
    at, answers = said("search[chair]", "click[1]", "click[buy]")
    assert answers[-1][1:3] == (0.0, True) and at.metrics()["points"] == 0


def test_pages_and_states():
    at, answers = said("search[lamp]", "click[next]", "click[prev]")
    assert "next" in answers[0][0][0]["content"] and "prev" in answers[1][0][0]["content"]
    again, _ = said("search[lamp]")
    assert at.state() == again.state() != said("search[lamp]", "click[next]")[0].state()
    first, other = (said("search[lamp]", "click[1]", f"click[{c}]")[0] for c in ("small", "large"))
    assert first.state() != other.state() and len({first.state(), other.state()}) == 2


@pytest.mark.slow
@given(
    st.lists(
        st.one_of(st.text(), st.sampled_from("search[lamp] click[1] click[2] click[buy] click[next] click[]".split()))
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_said_in_the_shop(turns):
    at = shop.Shop()
    at.reset(ROW, 0)
    for turn in turns:
        _, reward, done, info = asyncio.run(at.step(turn))
        hash(at.state())
        assert -0.1 <= reward <= 1 and info["valid"] in (0, 1)
        if done:
            break


def test_a_long_turn_in_the_shop():
    for turn in ("search[" * 50_000, "click[" + "x" * 200_000 + "]", "[" * 200_000):
        assert said(turn)[1][0][1] == -0.1


# ---- user -----------------------------------------------------------------------------------------------------------


def test_who_keeps_the_rules():
    rows = user.rows("train", 0)[:200]
    assert all(played(desk(), row, lambda at, row=row: user.next_turn(row, at.inner), 7) == 1 for row in rows[:40])
    kinds = {(row["orders"][row["wish"]["order"]]["status"], row["wish"]["color"] is None) for row in rows}
    assert kinds == set(itertools.product(("pending", "shipped"), (True, False)))
    assert {len(row["facts"]) for row in rows} == {1, 2} and any("still pending" in row["facts"][-1] for row in rows)


def test_who_does_not():
    rows, chance = user.rows("train", 0)[:200], random.Random(0)
    turns = ["<cancel></cancel>", "<transfer></transfer>", "<say>Hm</say>", "<change>red</change>", "Goodbye."]
    turns += [f"<find>{number}</find>" for number in range(10, 100, 9)]
    assert sum(played(desk(), row, lambda at: chance.choice(turns)) for row in rows[:40]) < 3
    assert sum(played(desk(), row, lambda at: "Goodbye.") for row in rows[:5]) == 0


def test_a_shipped_order_is_left_alone():
    """What the customer asks for, and even a change back afterwards and a transfer of another one, earns nothing."""
    row = next(r for r in user.rows() if r["orders"][r["wish"]["order"]]["status"] == "shipped" and r["wish"]["color"])
    number = row["wish"]["order"]
    asked = iter([f"<find>{number}</find>", f"<change>{row['wish']['color']}</change>", "Goodbye."])
    assert played(desk(), row, lambda at: next(asked)) == 0
    other = next(n for n in row["orders"] if n != number)
    wrong = iter([f"<find>{other}</find>", "<transfer></transfer>", "Goodbye."])
    assert played(desk(), row, lambda at: next(wrong)) == 0


def test_a_row_is_not_changed():
    row = user.rows()[0]
    before = str(row)
    played(desk(), row, lambda at: user.next_turn(row, at.inner))
    assert str(row) == before


@given(st.lists(st.text(alphabet="<>/finsaychgetrl0123456789 {}[]\"'", max_size=60)))
@settings(max_examples=15, deadline=None)
def test_whatever_is_said_at_the_desk(turns):
    at, row = desk(), user.rows()[0]
    at.reset(row, 0)
    for turn in [*turns, "<find>1e9</find>", "<change>" + "9" * 10_000 + "</change>", "<say></say>"]:
        asyncio.run(at.step(turn))
    assert at.score() == 0 and set(PARSERS) >= {"hermes", "xml", "tags"}


# ---- sums -----------------------------------------------------------------------------------------------------------


def test_digits_count_from_the_last_one():
    said = ["46", "It is 146.", "6", "4", "1 and 56", "none"]
    assert sums.digits(said, ["46"] * 6) == pytest.approx([1, 2 / 3, 1 / 2, 0, 1 / 2, 0])
    assert sums.digits([[{"role": "assistant", "content": "105"}]], ["115"]) == pytest.approx([2 / 3])


# ---- programs -------------------------------------------------------------------------------------------------------


def test_programs_print_their_answers(capsys):
    kinds = set()
    for row in programs.rows("test", 0):
        exec(row["program"])
        assert capsys.readouterr().out.strip() == row["answer"]
        kinds.add(row["prompt"][0]["content"].split()[1])
        call = programs.demonstrate(row, None, [[{"content": f"{row['answer']}\n"}]])
        assert call == f"The answer is {row['answer']}."
    assert len(kinds) == 3


# ---- instructions ---------------------------------------------------------------------------------------------------


def test_instructions_can_be_followed():
    """Of every pair of checks there is a text that follows both: none contradicts another."""
    texts = ["* one word\n" * n + "P.S. <<a title>> " + " ".join(followed.WORDS) for n in range(5)]
    texts += [text.lower() for text in texts] + [f'"{text.lower()}"' for text in texts]
    texts += [f'"{text}"' for text in texts] + [f'" {b}p.s. <<a>> {w}"' for w in followed.WORDS for b in BULLETS]
    texts += [f"{b}p.s. <<a>> {w}" for w in followed.WORDS for b in BULLETS]
    for row in followed.rows("train", 0)[:300]:
        columns = {name: [row[name]] * len(texts) for name in ("instruction_id_list", "kwargs")}
        assert max(score["reward"] for score in instructions(texts, **columns)) == 1, row
    assert instructions([""], **{name: [row[name]] for name in columns})[0]["reward"] == 0


BULLETS = ["\n" + "* a\n" * n for n in range(5)]


# ---- school math ----------------------------------------------------------------------------------------------------

PUBLISHED = {
    "gsm8k": ({"question", "answer"}, "answer"),
    "math": ({"problem", "level", "type", "solution"}, "solution"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_published(tmp_path, name):
    """Parquet files of the published columns, read as a hub id is; what they give as the solution is right."""
    columns, solution = PUBLISHED[name]
    for split in ("train", "test"):
        rows = getattr(school_math, name)(split, 0)
        assert all(set(row) == columns for row in rows)
        datasets.Dataset.from_list(rows[:40]).to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    rows = load_rows(str(tmp_path), split="test", format_row=school_math.format_row)
    assert len(rows) == 40 and all(columns | {"prompt", "answer"} == set(row) for row in rows)
    wanted = [row["answer"] for row in rows]
    assert math_equal([row[solution] for row in rows], wanted) == [1.0] * 40
    assert sum(math_equal(["\\boxed{1} #### 1"] * 40, wanted)) < 4
    assert school_math.format_row(rows[0]) == rows[0]


@pytest.mark.parametrize(
    ("solution", "inside"),
    [
        ("so $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\boxed{3}, no: \\boxed{4}", "4"),
        ("\\boxed{}", ""),
        ("\\boxed{{{", None),
        ("\\boxed 5", None),
        ("5", None),
    ],
)
def test_what_is_boxed(solution, inside):
    assert school_math.boxed(solution) == inside
    row = {"problem": "?", "solution": solution}
    assert school_math.format_row(row)["answer"] == inside
    assert school_math.format_row(row | {"answer": "7"})["answer"] == "7"  # MATH-500
