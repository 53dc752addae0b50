"""What stands out in a run is said in words; of a healthy one nothing is said."""

import pytest
from made_runs import make_run

from looking.runs import Run
from runfiles import advice
from runfiles.reading import Curves

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("steps", [3, 60, 1000])
def test_of_a_healthy_run_nothing_is_said(tmp_path, steps):
    run = Run("run", make_run(tmp_path / "run", steps=steps, files=0))
    assert advice.notes(run.curves(), run.config()) == []


# What real trainings had in their metrics, step by step: (settings, metrics, titles of what is said).
TRAININGS = {
    "pays for words": (
        {},
        {
            "reward": [0.65, 0.86, 0.94, 0.99, 1.0, 1.02, 1.01, 1.0, 1.0, 1.0, 1.0],
            "rewards/last_number/mean": [0.03, 0.03, 0.03, 0, 0, 0.02, 0.02, 0, 0, 0, 0],
            "rewards/thorough/mean": [0.62, 0.83, 0.91, 0.99, 1, 1, 1, 1, 1, 1, 1],
            "completions/clipped_ratio": [0.3, 0.53, 0.73, 0.95, 1, 1, 1, 1, 1, 1, 1],
        },
        {"Rewards pull apart", "Cut off"},
    ),
    "length is rewarded, and held-out rows do not follow": (
        {},
        {
            "completions/mean_length": [100 + 10 * n for n in range(20)], "reward": [0.2 + 0.03 * n for n in range(20)],
            "eval/mean@4": [0.3, 0.3] * 10,
        },
        {"Reward by length"},
    ),
    "the policy stops exploring, and learning with it": (
        {},
        {"entropy": [2.718 ** (-n / 3) for n in range(20)], "reward": [0.3, 0.31] * 10},
        {"Entropy collapse"},
    ),
    "one domain earns nothing": (
        {"domains": [{"name": "sums"}, {"name": "code"}]},
        {"sums/reward": [0.1 + 0.04 * n for n in range(20)], "code/reward": [0.0] * 20},
        {"A domain is left behind"},
    ),
    "weights never arrive": (
        {},
        {
            "policy_lag": [0] * 15,
            "sampling/logprob_diff_mean": [0.04, 0.12, 0.26, 0.44, 0.7, 0.8, 0.9, 1, 1.2, 1.1, 1.2, 1.3, 1.2, 1.1, 1.1],
        },
        {"Trainer against generator"},
    ),
    "every completion is cut off, and none of those is learned from": (
        {"mask_truncated": True},
        {
            "reward": [0.3, 0.4] * 6, "frac_reward_zero_std": [0.25] * 12, "grad_norm": [0.7] * 4 + [0] * 8,
            "completions/clipped_ratio": [0.9] * 4 + [1] * 8,
        },
        {"Nothing is learned", "Cut off"},
    ),
    "nothing: entropy may fall while the reward grows": (
        {},
        {
            "reward": [0.09, 0.31, 0.68, 0.41, 0.46, 0.5, 0.68, 0.8, 0.85, 0.78, 0.88, 0.89, 0.71, 0.83, 0.85, 0.86],
            "entropy": [2, 0.94, 0.35, 0.28, 0.28, 0.2, 0.12, 0.1, 0.12, 0.14, 0.14, 0.14, 0.18, 0.19, 0.2, 0.2],
        },
        set(),
    ),
    "nothing: a teacher alone, and rewards that are only looked at": (
        {"distill_coef": 1.0},
        {"distill/asked": [1] * 12, "frac_reward_zero_std": [1] * 12, "reward": [0] * 12},
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TRAININGS)
def test_trainings_as_they_were(what):
    config, series, expected = TRAININGS[what]
    steps = range(1, 1 + len(next(iter(series.values()))))
    lines = [{"step": n} | {name: float(values[n - 1]) for name, values in series.items()} for n in steps]
    assert {note["title"] for note in advice.notes(Curves(lines), config)} == expected


def test_silent_groups_are_too_easy_or_too_hard():
    for reward, words in ((0.98, "too easy"), (0.02, "too hard"), (0.5, "score alike")):
        lines = [{"step": n, "reward": reward, "frac_reward_zero_std": 0.1 if n < 40 else 0.75} for n in range(1, 61)]
        (note,) = advice.notes(Curves(lines), {})
        assert words in note["text"]
