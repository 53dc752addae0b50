"""docs/ideas.md: each idea, pasted into a copy of the script as the page says, trains and logs what it says."""

import json
import re
from pathlib import Path

import pandas
import pytest
from live import ROOT, SMALL, trained

PAGE = (ROOT / "docs" / "ideas.md").read_text(encoding="utf-8")
KNOB = "# A knob of your own:"


def section(title: str) -> str:
    found = re.search(rf"(?ms)^## {re.escape(title)}.*?$(.*?)(?=^## |\Z)", PAGE)
    assert found, title
    return found[1]


def paste(title: str, script: str) -> str:
    """The script with the blocks of a section: knobs below the comment about them, the rest above section 11."""
    lines = script.splitlines(keepends=True)
    for block in re.findall(r"(?s)```python\n(.*?)```", section(title)):
        first = "class TrainConfig" in block
        at = next(i for i, line in enumerate(lines) if line.startswith(KNOB if first else "# ==== 11"))
        lines[at + first : at + first] = ["\n", block, "\n\n"]
    return "".join(lines)


@pytest.fixture
def copy(tmp_path):
    """A copy of the script with the blocks of a section, in a folder of its own: other tests read this one."""

    def write(title: str) -> str:
        text = paste(title, (ROOT / "train_grpo.py").read_text(encoding="utf-8"))
        (tmp_path / "my_grpo.py").write_text(text, encoding="utf-8")
        return str(tmp_path / "my_grpo.py")

    return write


def train(folder: Path, script: str, flags: str, run: str = "run") -> list[dict]:
    """Lines of the steps of a run."""
    lines = trained(folder, f"{SMALL} --max_steps 3 {flags}", run, script=script, PYTHONPATH=str(ROOT))
    return [line for line in lines if "reward" in line]


# What makes rewards of 0 and 1, for ideas about right and wrong.
HARD = "def right(completion_ids, **_):\n"
HARD += "    return [float(sum(t % 2 == 0 for t in ids) > len(ids) / 2) for ids in completion_ids]\n"

IDEAS = [
    ("An advantage with a knob: pass@k", "--advantage passk --pass_k 2", "pass_at_k"),
    ("A loss whose bounds", "--policy_loss dynamic_clip --num_iterations 2", "clip_ratio/low_mean"),
    ("A loss with two knobs", "--policy_loss ce_gppo --num_iterations 2 --keep_low 0.75", "ce_gppo/kept_mean"),
    ("A loss with a number", "--policy_loss by_length --tokens_per_microbatch 60", "by_length/scale_max"),
    ("A loss with a running", "--policy_loss scaled --tokens_per_microbatch 60", "usual_size/before"),
    ("Advantages weighted by entropy", "--advantage entropy_weighted", "entropy_bonus"),
    ("Another optimizer", "--learning_rate 1e-4", "lr/embeddings"),
    ("A supervised term", "--sft_steps 2", "sft/right_mean"),
    ("A term over pairs", "--tokens_per_microbatch 60", "grad_norm"),
    ("A setting that changes", "--max_completion_length 6 --loss_agg constant", "completions/max_length"),
    ("A branch from a prefix", "--rollout endings --num_generations 4", "completions/mean_length"),
    ("A question asked again", "--rollout sure --max_completion_length 48", "completions/mean_length"),
]


CHEAP = ("passk", "scaled", "1e-4", "2")  # an advantage, a loss that remembers, an optimizer, a term of one's own


@pytest.mark.parametrize(
    "title, flags, metric",
    [
        pytest.param(*idea, id=(name := idea[1].split()[1]), marks=() if name in CHEAP else pytest.mark.slow)
        for idea in IDEAS
    ],
)
def test_idea(title, flags, metric, copy, tmp_path):
    (tmp_path / "right.py").write_text(HARD, encoding="utf-8")
    steps = train(tmp_path, copy(title), f"--reward_funcs {tmp_path}/right.py:right {flags}")
    assert len(steps) == 3 and metric in steps[0], sorted(steps[0])
    if metric == "sft/right_mean":
        assert metric in steps[1] and metric not in steps[2]
    if metric == "lr/embeddings":
        assert steps[0][metric] == pytest.approx(steps[0]["lr"] / 10)
    if metric == "pass_at_k":
        assert all(0 < step[metric] <= 1 for step in steps)
    if metric == "completions/max_length":
        assert [step[metric] for step in steps] == [4, 6, 6]


def without_times(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def test_what_is_remembered_is_restored(copy, tmp_path):
    """A resumed run replays the completions that the uninterrupted one does: bit for bit."""
    script = copy("A replay")
    (tmp_path / "right.py").write_text(HARD.replace("> len(ids) / 2", "> len(ids) * 0.7"), encoding="utf-8")
    flags = f"--reward_funcs {tmp_path}/right.py:right --dataset_id {tmp_path}/rows.jsonl --prompts_per_step 2 "
    flags += "--save_steps 1"
    rows = "".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(4))
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    whole = without_times(train(tmp_path, script, f"{flags} --max_steps 6", "whole"))
    train(tmp_path, script, f"{flags} --max_steps 3", "parts")
    parts = without_times(train(tmp_path, script, f"{flags} --max_steps 6 --resume", "parts"))
    assert parts == whole and sum(step.get("rollout/replay", 0) for step in whole) > 0
    marked = pandas.concat([pandas.read_parquet(file) for file in (tmp_path / "whole" / "completions").glob("*")])
    assert (marked.get("origin") == "replay").sum() == sum(step.get("rollout/replay", 0) for step in whole)


def test_ideas_without_code(tmp_path):
    """KL to a moving average; a push every so many steps, with the lag said, and always before an evaluation."""
    flags = "--push_steps 4 --max_steps 6 --eval_steps 5 --eval_generations 1 "
    steps = train(tmp_path, "train_grpo.py", flags + "--beta 0.01 --ref_sync_steps 1 --ref_sync_alpha 0.01")
    assert [step["policy_lag"] for step in steps] == [0, 1, 2, 3, 0, 0]
    assert steps[-1]["kl"] > 0


def test_a_reward_that_compares(tmp_path):
    (code,) = re.findall(r"(?s)```python\n(.*?)```", section("A reward that compares"))
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    steps = train(tmp_path, "train_grpo.py", f"--reward_funcs {tmp_path}/my_rewards.py:win_rate")
    assert steps[0]["reward"] == pytest.approx(0.5)
