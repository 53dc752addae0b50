"""A run that is killed and resumed equals one that never stopped: metrics and weights, bit for bit."""

import json
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from live import ROOT, SMALL, running, trainer
from tiers import by_default

from config import ConfigError
from saving import checkpoints
from train_grpo import Trajectory

STEPS = 6
FLAGS = f"{SMALL} --max_steps {STEPS} --save_steps 2 --eval_steps 3 --eval_generations 1 --beta 0.04 "
FLAGS += "--num_iterations 2 --num_minibatches 2 --lr_schedule cosine --warmup_steps 0.2 --weight_decay 0.1"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "held_out.jsonl").write_text('{"prompt": "1 + 1 ="}\n{"prompt": "Count to three:"}\n', encoding="utf-8")
    rewards = ["--reward_funcs", "tests/even.py:even", "length"]
    return [*FLAGS.split(), *rewards, "--eval_dataset_id", str(folder / "held_out.jsonl"), "--eval_split", "train"]


def timeless(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count('"grad_norm"') if path.exists() else 0


def half_written(run: Path) -> list[Path]:
    return list(run.glob("checkpoints/incomplete_step_*/trainer/state"))


def assert_same_run(run: Path, reference: Path):
    assert timeless(run) == timeless(reference)
    last = f"checkpoints/step_{STEPS}"
    assert (run / last / "model.safetensors").read_bytes() == (reference / last / "model.safetensors").read_bytes()
    for path in sorted((reference / last / "trainer" / "state").glob("*.distcp")):  # trained weights and Adam's state
        assert (run / last / "trainer" / "state" / path.name).read_bytes() == path.read_bytes()
    for path in sorted(reference.glob("completions/*.parquet")):
        assert pyarrow.parquet.read_table(run / "completions" / path.name).equals(pyarrow.parquet.read_table(path))


GRPO, PPO = "train_grpo.py", "train_ppo.py"
ADAPTIVE = "--kl_target 0.01 --ref_sync_steps 2 --entropy_target 5 "
ADAPTIVE += "--reward_mean running --reward_std running"
CASES = {
    "adaptive PPO": (PPO, 1, f"--critic_learning_rate 1e-3 {ADAPTIVE}"),
    "2 ranks, LoRA, dynamic sampling": (GRPO, 2, "--use_peft --dynamic_sampling"),
    "2 ranks, fsdp": (GRPO, 2, "--strategy fsdp"),
    "2 ranks, fsdp2": (GRPO, 2, "--strategy fsdp2"),
}


def ended(log: Path, *args: str, **how) -> None:
    with running(trainer(log, *args, **how)) as run:
        assert run.end() == 0, run.text


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> Path:
    """The run folder of six steps on one rank that nothing disturbed."""
    folder = tmp_path_factory.mktemp("run")
    ended(folder / "whole.log", *flags, "--output_dir", str(folder), "--run_name", "whole")
    assert len({line["grad_norm"] for line in timeless(folder / "whole") if "grad_norm" in line}) == STEPS  # it learns
    return folder / "whole"


def test_killed_and_resumed_equals_uninterrupted(flags, whole):
    """kill -9 in a step, and once more while a checkpoint is being written."""
    folder = whole.parent
    broken, args = folder / "broken", [*flags, "--output_dir", str(folder), "--run_name", "broken"]
    with running(trainer(folder / "broken.log", *args)) as run:
        run.until(lambda: steps_done(broken) >= 3 and checkpoints.steps_saved(broken))
        run.kill()
    with running(trainer(folder / "save.log", *args, "--resume")) as run:
        run.until(lambda: half_written(broken))
        run.kill()
    newest = max(int(path.parts[-3].split("_")[2]) for path in half_written(broken))
    assert checkpoints.last_step(broken) < newest
    ended(folder / "resumed.log", *args, "--resume")
    assert_same_run(broken, whole)


@pytest.mark.parametrize("case", by_default([case for case in CASES if case != "2 ranks, fsdp"], CASES))
def test_every_kind_of_run_resumes_bit_for_bit(flags, case, tmp_path):
    """A copy of a run without its last checkpoint is what a run leaves that was killed after step 5."""
    script, ranks, more = CASES[case]
    args, how = [*flags, *more.split(), "--output_dir", str(tmp_path)], dict(ranks=ranks, script=script)
    ended(tmp_path / "whole.log", *args, "--run_name", "whole", **how)
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / f"step_{STEPS}")
    ended(tmp_path / "resumed.log", *args, "--run_name", "broken", "--resume", **how)
    assert_same_run(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.slow
def test_a_loop_that_starts_it_again_ends_as_if_nothing_had_been(flags, whole):
    """The loop of docs/runs.md, and signals at random times: while a run loads, samples, learns or saves."""
    draw, folder = random.Random(0), whole.parent
    args = [*flags, "--output_dir", str(folder), "--run_name", "chaos", "--resume"]
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        with running(trainer(folder / "chaos.log", *args)) as run:
            time.sleep(draw.uniform(2, 12))
            if run.members[0].poll() is None:
                os.kill(run.members[0].pid, number)
            if number in (signal.SIGTERM, signal.SIGINT):
                run.end()
    ended(folder / "chaos.log", *args)
    assert_same_run(folder / "chaos", whole)


@pytest.fixture(scope="module")
def short(flags, tmp_path_factory):
    """A run of four steps with its two checkpoints, its flags, and copies to damage."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{n} + 1 ="}}\n' for n in range(40)), encoding="utf-8")
    shutil.copy(ROOT / "tests" / "even.py", folder)
    args = f"{SMALL} --dataset_id {folder}/rows.jsonl --reward_funcs {folder}/even.py:even --save_steps 2"
    whole = [*args.split(), "--output_dir", str(folder)]
    with running(trainer(folder / "log", *whole, "--run_name", "whole", "--max_steps", "4")) as run:
        assert run.end() == 0, run.text
    return SimpleNamespace(folder=folder, args=whole)


@pytest.fixture
def broken(short, request):
    """resume(*flags) -> status, text, and whether the run folder stayed as it was: of a copy, in `broken.run`."""
    name = request.node.name.replace("[", "-").strip("]")
    run = short.folder / name
    shutil.copytree(short.folder / "whole", run)

    def contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}

    def resume(*more: str, ranks: int = 1):
        before = contents()
        args = [*short.args, "--run_name", name, "--resume", "--max_steps", "6", *more]
        with running(trainer(short.folder / f"{name}.log", *args, ranks=ranks)) as process:
            status = process.end()
            return SimpleNamespace(status=status, text=process.text, unchanged=contents() == before)

    return SimpleNamespace(run=run, step=run / "checkpoints" / "step_4", folder=short.folder, resume=resume)


def test_a_write_that_fails_ends_the_run(short):
    """A disk that takes 4 MiB a file."""
    name, flags = "small_disk", ["--run_name", "small_disk", "--max_steps", "60", "--save_steps", "1"]
    with running(trainer(short.folder / f"{name}.log", *short.args, *flags)) as run:
        resource.prlimit(run.members[0].pid, resource.RLIMIT_FSIZE, (2**22, 2**22))
        assert run.end() == 1, run.text
    assert "step_1 could not be written; those before it are as they were" in run.text, run.text
    assert not list((short.folder / name / "checkpoints").glob("*step*"))


def test_a_second_trainer_is_refused(broken):
    """Of the same name, resumed or not, while the first one runs; the first goes on."""
    args = [*SMALL.split(), "--output_dir", str(broken.folder), "--run_name", "busy", "--max_steps", "200"]
    with running(trainer(broken.folder / "busy.log", *args, "--save_steps", "1")) as first:
        first.until(lambda: (broken.folder / "busy" / "checkpoints" / "step_1").exists())
        for more in ([], ["--resume"]):
            with running(trainer(broken.folder / "second.log", *args, *more)) as second:
                assert second.end() == 1
            assert f"in use by process {first.members[0].pid} on" in second.text, second.text
        done = steps_done(broken.folder / "busy")
        first.until(lambda: steps_done(broken.folder / "busy") > done)
    steps = [line["step"] for line in timeless(broken.folder / "busy")]
    assert steps == list(range(1, len(steps) + 1))


def test_what_differs_is_said(broken):
    """A row is replaced, and a reward is edited."""
    rows = (broken.folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    other = broken.folder / "other.jsonl"
    other.write_text("\n".join([*rows[:39], '{"prompt": "new"}']), encoding="utf-8")
    with open(broken.folder / "even.py", "a", encoding="utf-8") as file:
        file.write("# edited\n")
    changed = ["--dataset_id", str(other), "--learning_rate", "2e-3", "--seed", "7"]
    end = broken.resume(*changed, ranks=2)
    assert end.status == 0, end.text
    assert "learning_rate 0.001 -> 0.002" in end.text and "seed 42 -> 7" in end.text, end.text
    assert "the rows changed" in end.text and "even.py changed" in end.text and "ranks 1 -> 2" in end.text, end.text
    assert "max_steps" not in end.text, end.text
    shutil.copy(ROOT / "tests" / "even.py", broken.folder)


def test_a_checkpoint_of_an_older_format_is_refused_in_a_line(tmp_path):
    (tmp_path / "checkpoints/step_1/trainer").mkdir(parents=True)
    (tmp_path / "checkpoints/step_1/trainer/state.json").write_text('{"step": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"an older version wrote \S+step_1\."):
        checkpoints.read_state(tmp_path, 1)


def test_only_complete_checkpoints_are_seen(tmp_path):
    assert checkpoints.last_step(tmp_path) == 0
    for name in ("step_2", "step_10", "incomplete_step_12", "step_14.old", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoints.last_step(tmp_path) == 10


def test_a_resume_that_does_not_fit_says_so(whole, flags):
    """torch's error for it is no Exception; it must not end the run without a word."""
    args = [*flags, "--output_dir", str(whole.parent), "--run_name", "whole", "--resume", "--use_peft"]
    with running(trainer(whole.parent / "misfit.log", *args)) as run:
        assert run.end() == 2
    assert "step_6 does not fit this run, or is damaged" in run.text and "use_peft False -> True" in run.text


def test_memory_comes_back_and_what_no_checkpoint_can_keep_is_said_at_once(tmp_path):
    """Experts that tokens went through, an environment's states, a mean; as they were."""
    info = {"states": [frozenset({(1, 2)}), Path("b"), b""], "routed_experts": np.full((3, 2, 1), -1, np.int16)}
    memory = {"t": Trajectory({"prompt": "a"}, 3, [1], [2, 3, 4], [1] * 3, [-0.5] * 3, [1.0] * 3, info=info)}
    memory |= {"mean": np.mean([1, 2]), "solved": np.bool_(True), "none": np.zeros(0)}
    (tmp_path / "trainer").mkdir()
    torch.save(checkpoints.rank_state(memory), tmp_path / "trainer/rank_0.pt")
    checkpoints.load_rank_state(tmp_path, back := {})
    assert repr(back) == repr(memory) and type(back["mean"]) is np.float64
    with pytest.raises(ValueError, match="what a checkpoint cannot keep"):
        checkpoints.memory_bytes({"f": lambda: 0})
