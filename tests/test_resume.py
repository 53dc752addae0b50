"""A run that is killed and resumed equals one that never stopped: metrics and weights, bit for bit."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet
import pytest
from live import EVEN, SMALL, running, trainer

import utils
from config import ConfigError

SEED = 20  # of the steps at which runs are killed
STEPS = 6
FLAGS = f"{SMALL} --max_steps {STEPS} --save_steps 2 --eval_steps 3 --eval_generations 1 --beta 0.04 "
FLAGS += "--num_iterations 2 --num_minibatches 2 --lr_schedule cosine --warmup_ratio 0.2 --weight_decay 0.1"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "even.py").write_text(EVEN)
    (folder / "held_out.jsonl").write_text('{"prompt": "1 + 1 ="}\n{"prompt": "Count to three:"}\n')
    rewards = ["--reward_funcs", f"{folder}/even.py:even", "length"]
    return [*FLAGS.split(), *rewards, "--eval_dataset_id", str(folder / "held_out.jsonl"), "--eval_split", "train"]


def timeless(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"grad_norm"') if path.exists() else 0


def half_written(run: Path) -> list[Path]:
    return list(run.glob("checkpoints/incomplete_step_*"))


def assert_same_run(run: Path, reference: Path):
    assert timeless(run) == timeless(reference)
    last = f"checkpoints/step_{STEPS}"
    assert (run / last / "model.safetensors").read_bytes() == (reference / last / "model.safetensors").read_bytes()
    for path in sorted((reference / last / "trainer" / "state").glob("*.distcp")):  # trained weights and Adam's state
        assert (run / last / "trainer" / "state" / path.name).read_bytes() == path.read_bytes()
    for path in sorted(reference.glob("completions/*.parquet")):
        assert pyarrow.parquet.read_table(run / "completions" / path.name).equals(pyarrow.parquet.read_table(path))


GRPO, PPO = "train_grpo.py", "train_ppo.py"
ADAPTIVE = "--kl_target 0.01 --kl_horizon 100 --ref_sync_steps 2 --entropy_target 5 --entropy_coef_step 0.01 "
ADAPTIVE += "--reward_mean running --reward_std running"
CASES = {
    "1 rank": (GRPO, 1, ""),
    "1 rank, adaptive PPO": (PPO, 1, f"--critic_learning_rate 1e-3 {ADAPTIVE}"),
    "2 ranks, LoRA": (GRPO, 2, "--use_peft"),
    "2 ranks, fsdp2": (GRPO, 2, "--strategy fsdp2"),
}


@pytest.fixture(scope="module")
def outcomes(flags, tmp_path_factory):
    """Case -> future of `kill_and_resume`. Two at a time: one leaves cores idle while it starts or ends."""
    with ThreadPoolExecutor(2) as pool:
        folders = {case: tmp_path_factory.mktemp("run") for case in CASES}
        yield {case: pool.submit(kill_and_resume, flags, folders[case], *CASES[case]) for case in CASES}


def kill_and_resume(flags: list[str], folder: Path, script: str, ranks: int, more: str) -> tuple[Path, Path]:
    """The folders of a run that was killed and resumed, and of the same run left alone."""
    step = random.Random(f"{SEED} {ranks} {more}").randrange(3, STEPS)  # after the first checkpoint
    args, how = [*flags, *more.split(), "--output_dir", str(folder)], dict(ranks=ranks, script=script)
    whole, broken = folder / "whole", folder / "broken"
    with running(trainer(folder / "whole.log", *args, "--run_name", "whole", **how)) as one:
        with running(trainer(folder / "broken.log", *args, "--run_name", "broken", **how)) as two:
            two.until(lambda: steps_done(broken) >= step)
            two.kill()
        assert one.end() == 0, one.text
    if ranks == 1 and script == GRPO:  # and once more, while a checkpoint is being written
        with running(trainer(folder / "save.log", *args, "--run_name", "broken", "--resume")) as run:
            run.until(lambda: half_written(broken))
            run.kill()
        newest = max(int(path.name.split("_")[2]) for path in half_written(broken))
        assert utils.last_step(broken) < newest
    with running(trainer(folder / "resumed.log", *args, "--run_name", "broken", "--resume", **how)) as run:
        assert run.end() == 0, run.text
    return broken, whole


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_equals_uninterrupted(outcomes, case):
    broken, whole = outcomes[case].result()
    assert len({line["grad_norm"] for line in timeless(whole) if "grad_norm" in line}) == STEPS  # it learns
    assert_same_run(broken, whole)


def test_only_complete_checkpoints_are_seen(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        utils.last_step(tmp_path)
    for name in ("step_2", "step_10", "incomplete_step_12", "step_14.old", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert utils.last_step(tmp_path) == 10


def test_a_resume_that_does_not_fit_says_so(outcomes, flags):
    """torch's error for it is no Exception; it must not end the run without a word."""
    _, whole = outcomes["1 rank"].result()
    args = [*flags, "--output_dir", str(whole.parent), "--run_name", "whole", "--resume", "--use_peft"]
    with running(trainer(whole.parent / "misfit.log", *args)) as run:
        assert run.end() == 1
    assert "step_6 does not fit this run, or is damaged" in run.text and "use_peft False -> True" in run.text
