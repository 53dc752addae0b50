"""What stands out in a run is said in words; of a healthy one nothing is said."""

import re

import pytest
from made_runs import FAULTS, make_run

from looking.runs import Runs
from runlog import advice, samples
from runlog.reading import Curves

pytestmark = pytest.mark.quick

NAMED = {
    "length": "Reward by length", "unmasked": "Observations are trained on", "stale": "A stale server",
    "entropy": "Entropy collapse", "domain": "Domain code",
}  # fmt: skip


def notes_of(folder) -> list[dict]:
    run = Runs(folder.parent).get(folder.name)
    last = samples.step_files(folder / "completions")[-1]
    return advice.of_curves(run.curves(), run.config()) + advice.of_completions(last, run.config())


@pytest.mark.parametrize("fault", FAULTS)
def test_what_went_wrong_is_named(tmp_path, fault):
    found = notes_of(make_run(tmp_path / "run", steps=60, rows=64, fault=fault))
    assert NAMED[fault] in {note["title"] for note in found if note["level"] == "bad"}
    others = set(NAMED.values()) - {NAMED[fault]}
    assert not others & {note["title"] for note in found}


@pytest.mark.parametrize("steps", [3, 60, 1000])
def test_of_a_healthy_run_nothing_is_said(tmp_path, steps):
    assert notes_of(make_run(tmp_path / "run", steps=steps, rows=64, files=1)) == []


# What real trainings had in their metrics, step by step: (settings, metrics, {title: words}, words that are not said).
TRAININGS = {
    "pays for words": (
        {"reward_funcs": ["last_number", "bad.py:thorough"], "max_completion_length": 64},
        {
            "reward": [0.65, 0.86, 0.94, 0.99, 1.0, 1.02, 1.01, 1.0, 1.0, 1.0, 1.0],
            "rewards/last_number/mean": [0.03, 0.03, 0.03, 0, 0, 0.02, 0.02, 0, 0, 0, 0],
            "rewards/thorough/mean": [0.62, 0.83, 0.91, 0.99, 1, 1, 1, 1, 1, 1, 1],
            "completions/mean_length": [36, 51, 57, 63, 64, 64, 64, 64, 64, 64, 64],
            "completions/clipped_ratio": [0.3, 0.53, 0.73, 0.95, 1, 1, 1, 1, 1, 1, 1],
            "frac_reward_zero_std": [0, 0.13, 0.13, 0.63, 1, 0.88, 0.75, 1, 1, 1, 1],
        },
        {"Rewards pull apart": "thorough rose from 0.62 to 1.00", "Cut off": "length"},
        "too easy",
    ),
    "weights never arrive": (
        {},
        {
            "policy_lag": [0] * 15,
            "sampling/logprob_diff_mean": [0.04, 0.12, 0.26, 0.44, 0.7, 0.8, 0.9, 1, 1.2, 1.1, 1.2, 1.3, 1.2, 1.1, 1.1],
        },
        {"Trainer against generator": "by more than .05 since step 2.*are old, although they say"},
        "From the start on",
    ),
    "ten times the learning rate": (
        {},
        {
            "lr": [0.003] * 15, "reward": [0.016] + [0] * 14,
            "entropy": [1.95, 0.82, 0.77, 0.61, 0.72, 0.78, 0.8, 0.83, 0.8, 0.89, 0.87, 0.85, 0.85, 1.1, 1.02],
        },
        {"One update too far": "from 1.9.* to 0.82 between two steps, before step 2"},
        "explores",
    ),
    "every completion is cut off, and none of those is learned from": (
        {"mask_truncated": True},
        {
            "reward": [0.3, 0.4] * 6, "frac_reward_zero_std": [0.25] * 12, "grad_norm": [0.7] * 4 + [0] * 8,
            "completions/clipped_ratio": [0.9] * 4 + [1] * 8,
        },
        {"Nothing is learned": "0 since step 5.*--mask_truncated"},
        "without signal",
    ),
    "nothing: entropy may fall while the reward grows": (
        {},
        {
            "reward": [0.09, 0.31, 0.68, 0.41, 0.46, 0.5, 0.68, 0.8, 0.85, 0.78, 0.88, 0.89, 0.71, 0.83, 0.85, 0.86],
            "entropy": [2, 0.94, 0.35, 0.28, 0.28, 0.2, 0.12, 0.1, 0.12, 0.14, 0.14, 0.14, 0.18, 0.19, 0.2, 0.2],
        },
        {},
        "collapse",
    ),
    "nothing: a teacher alone, and rewards that are only looked at": (
        {"reward_weights": [0.0], "distill_coef": 1.0},
        {"distill/asked": [1] * 12, "frac_reward_zero_std": [1] * 12, "reward": [0] * 12},
        {},
        "silent",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TRAININGS)
def test_trainings_as_they_were(what):
    config, series, expected, never = TRAININGS[what]
    steps = range(1, 1 + len(next(iter(series.values()))))
    lines = [{"step": n} | {name: float(values[n - 1]) for name, values in series.items()} for n in steps]
    notes = advice.of_curves(Curves(lines), config)
    said = {note["title"]: note["text"] for note in notes}
    for title, words in expected.items():
        assert re.search(words, said[title]), said
    assert expected or not [note for note in notes if note["level"] == "bad"]
    assert not any(never in text for text in said.values()), said


def test_silent_groups_are_too_easy_or_too_hard():
    for reward, words in ((0.98, "since step 40: too easy"), (0.02, "too hard"), (0.5, "score alike")):
        lines = [{"step": n, "reward": reward, "frac_reward_zero_std": 0.1 if n < 40 else 0.75} for n in range(1, 61)]
        (note,) = advice.of_curves(Curves(lines), {})
        assert words in note["text"]
