"""Ranks that have different things: what is computed is that of one rank with all of it."""

import json
from dataclasses import replace

import pytest
from live import running, trainer

from algorithms.checks import with_numbers
from config import TrainConfig
from inputs.trajectory import Trajectory, empty_trajectory


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, list[dict]]:
    """By number of ranks what each of them has."""
    results = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
        with running(trainer(folder / "log", str(folder), ranks=ranks, script="tests/uneven_worker.py")) as worker:
            assert worker.end(100) == 0, worker.text
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        results[ranks] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return results


def flat(values: list) -> list[float]:
    return [number for row in values for number in row]


@pytest.mark.parametrize("name", ["place", "gigpo"])
def test_a_domain_that_a_rank_lacks(name, found):
    """A longer completion stands in for it; and whether others on the rank have states does not matter."""
    (alone,), two = found[1], found[2]
    assert flat(two[0][name] + two[1][name]) == pytest.approx(flat(alone[name]), abs=1e-6)


def test_a_rank_all_of_whose_trajectories_failed_counts_for_nothing(found):
    (alone,), (first, second) = found[1], found[2]
    for name, advantages in alone["lost"].items():
        assert flat(first["lost"][name]) == pytest.approx(flat(advantages), abs=1e-6), name
        assert second["lost"][name] == [[]]
    for key in ("metrics", "moments"):
        assert first[key] == second[key] == alone[key]
    assert alone["metrics"] == {"reward": 10.5, "completions/count": 4, "completions/min_length": 1}
    assert alone["moments"] == {"": [4, 42, 442]}


def test_a_rank_of_demonstrations_alone(found):
    """It has the fields that another rank has: no rank makes other collective calls."""
    first, second = found[2]
    assert flat(second["remax"]) == [1.0] * 4 and first["remax"][0] == pytest.approx([0.5, 0.5])
    assert "compares each reward function's values, and a trajectory has none" in second["gdpo"]


def test_a_demonstration_takes_the_place_of_the_placeholder():
    placeholder, demonstration = empty_trajectory({}, TrainConfig()), Trajectory({}, 0, [1], [2], [1], [0.0], [1.0])
    assert with_numbers([placeholder, demonstration]) == ([demonstration], {})
    assert with_numbers(([placeholder], {"seen": 1})) == ([placeholder], {"seen": 1})


def test_a_remembered_completion_in_the_group_of_another_prompt_is_told(caplog):
    """It keeps the group number of its own step: advantages compared it with answers to another prompt, in silence."""
    now, old = (
        Trajectory({}, 0, [0], [0], [1], [0.0], [1.0], info={"row_number": row, "origin": "replay"}) for row in (3, 8)
    )
    demonstration = Trajectory({}, 0, [0], [0], [1], [0.0], [1.0])  # of no row that is known
    with_numbers([now, demonstration, replace(old, group=1), replace(now)])
    assert not caplog.records
    assert with_numbers([now, old]) == ([now, old], {})
    assert "completions of rows 3 and 8 are in one group (0)" in caplog.text


def test_a_minibatch_without_rows_is_no_completion(found):
    """--loss_agg constant counts completions: 2 + 0 in the first minibatch, 2 + 2 in the second."""
    assert found[2][0]["counts"] == found[2][1]["counts"] == [2, 4]
