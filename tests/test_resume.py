"""A run that is killed and resumed equals one that never stopped: metrics and weights, bit for bit."""

import json
import os
import pickle
import random
import re
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
import torch.distributed.checkpoint
from live import EVEN, SMALL, running, trainer

from config import ConfigError
from runlog import checkpoints
from train_grpo import PromptSampler, Trajectory

STEPS = 6
FLAGS = f"{SMALL} --max_steps {STEPS} --save_steps 2 --eval_steps 3 --eval_generations 1 --beta 0.04 "
FLAGS += "--num_iterations 2 --num_minibatches 2 --lr_schedule cosine --warmup_steps 0.2 --weight_decay 0.1"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "even.py").write_text(EVEN, encoding="utf-8")
    (folder / "held_out.jsonl").write_text('{"prompt": "1 + 1 ="}\n{"prompt": "Count to three:"}\n', encoding="utf-8")
    rewards = ["--reward_funcs", f"{folder}/even.py:even", "length"]
    return [*FLAGS.split(), *rewards, "--eval_dataset_id", str(folder / "held_out.jsonl"), "--eval_split", "train"]


def timeless(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count('"grad_norm"') if path.exists() else 0


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
ADAPTIVE = "--kl_target 0.01 --ref_sync_steps 2 --entropy_target 5 "
ADAPTIVE += "--reward_mean running --reward_std running"
CASES = {
    "adaptive PPO": (PPO, 1, f"--critic_learning_rate 1e-3 {ADAPTIVE}"),
    "2 ranks, LoRA": (GRPO, 2, "--use_peft"),
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
    newest = max(int(path.name.split("_")[2]) for path in half_written(broken))
    assert checkpoints.last_step(broken) < newest
    ended(folder / "resumed.log", *args, "--resume")
    assert_same_run(broken, whole)


@pytest.mark.parametrize("case", CASES)
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
    args = [*flags, "--output_dir", str(folder), "--run_name", "chaos", "--resume", "--keep_going"]
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
    (folder / "even.py").write_text(EVEN, encoding="utf-8")
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


class Command:
    """A pickle of it runs a command when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_checkpoint_runs_no_commands(broken, tmp_path):
    """Nor do checksums help: who can write the pickle can write them."""
    (broken.step / "SHA256SUMS").unlink()
    marker = tmp_path / "ran"
    for file in ("trainer/rng_0.pt", "trainer/state/.metadata"):
        path = broken.step / file
        sound = path.read_bytes()
        torch.save({"torch": Command(marker)}, path) if "rng" in file else path.write_bytes(
            pickle.dumps(Command(marker))
        )
        end = broken.resume()
        assert end.status == 2 and not marker.exists() and "checkpoint of step 2" in end.text, end.text
        path.write_bytes(sound)
    state = {"policy": {"value": Command(marker)}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "state")
    with pytest.raises(BaseException, match="Weights only load failed"):  # torch's is no Exception
        torch.distributed.checkpoint.load(state, **checkpoints._reader_and_planner(tmp_path / "state"))
    assert not marker.exists()


def test_a_write_that_fails_beside_training_ends_the_run(short):
    """A disk that takes 4 MiB a file."""
    name, flags = "small_disk", ["--run_name", "small_disk", "--max_steps", "60", "--save_steps", "1"]
    with running(trainer(short.folder / f"{name}.log", *short.args, *flags)) as run:
        resource.prlimit(run.members[0].pid, resource.RLIMIT_FSIZE, (2**22, 2**22))
        assert run.end() == 1, run.text
    assert re.search("step_1 could not be written; those before it.*File too large", run.text, re.S), run.text
    assert not list((short.folder / name / "checkpoints").glob("*step*"))


def test_a_second_trainer_is_refused(broken):
    """Of the same name, resumed or not, while the first one runs; the first goes on."""
    args = [*EVEN_ARGS, "--output_dir", str(broken.folder), "--run_name", "busy", "--max_steps", "200"]
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


EVEN_ARGS = f"{SMALL} --reward_funcs length".split()


def test_what_differs_is_said_with_what_follows(broken):
    """16 of 40 rows are done. Of them 6 are replaced, so that the order is another one, and a reward is edited."""
    rows = (broken.folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    other = broken.folder / "other.jsonl"
    other.write_text("\n".join([*rows[:38], *(f'{{"prompt": "new {n}"}}' for n in range(6))]), encoding="utf-8")
    rewards = broken.folder / "other" / "even.py"
    rewards.parent.mkdir()
    rewards.write_text(EVEN + "# edited\n", encoding="utf-8")
    changed = ["--dataset_id", str(other), "--learning_rate", "2e-3", "--lr_schedule", "linear", "--seed", "7"]
    strict = broken.resume(*changed, "--strict_resume")
    assert strict.status == 2 and strict.unchanged and "--strict_resume:" in strict.text, strict.text
    end = broken.resume(*changed, ranks=2)
    assert end.status == 0, end.text
    for text in (strict.text, end.text):
        assert "learning_rate 0.001 -> 0.002" in text and "lr_schedule constant -> linear" in text, text
        assert "max_steps 4 -> 6: the learning rate goes from" in text and "seed 42 -> 7" in text, text
        found = re.search(r"6 rows are new and 2 gone: of this pass over them, (\d+) skipped, (\d+) repeated", text)
        assert found, text
    assert "ranks 1 -> 2" in end.text and "ranks" not in strict.text
    assert [int(n) for n in found.groups()] == expected_order(rows, other.read_text(encoding="utf-8").splitlines())


def expected_order(old: list[str], new: list[str]) -> list[int]:
    """Rows that no step of the pass takes, and rows that two steps take, counted one by one."""
    before, after = (PromptSampler(len(rows), 4, seed) for rows, seed in ((old, 42), (new, 7)))
    taken = {old[i] for step in range(4) for i in before.next(step)}
    left = {new[i] for step in range(4, len(new) // 4) for i in after.next(step)}
    return [len(set(new) - taken - left), len(taken & left)]


def test_only_complete_checkpoints_are_seen(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        checkpoints.last_step(tmp_path)
    for name in ("step_2", "step_10", "incomplete_step_12", "step_14.old", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoints.last_step(tmp_path) == 10


def test_a_resume_that_does_not_fit_says_so(whole, flags):
    """torch's error for it is no Exception; it must not end the run without a word."""
    args = [*flags, "--output_dir", str(whole.parent), "--run_name", "whole", "--resume", "--use_peft"]
    with running(trainer(whole.parent / "misfit.log", *args)) as run:
        assert run.end() == 2
    assert "step_6 does not fit this run, or is damaged" in run.text and "use_peft False -> True" in run.text


def test_memory_keeps_what_trajectories_and_numpy_bring_along(tmp_path):
    """Experts that tokens went through, an environment's states, a mean; as they were."""
    states = [frozenset({(1, 2)}), Path("b"), b""]
    info = {"states": states, "routed_experts": np.full((3, 2, 1), -1, np.int16)}
    memory = {"t": Trajectory({"prompt": "a"}, 3, [1], [2, 3, 4], [1] * 3, [-0.5] * 3, [1.0] * 3, info=info)}
    memory |= {"mean": np.mean([1, 2]), "row": np.argmax([1, 2]), "solved": np.bool_(True), "none": np.zeros(0)}
    module = torch.nn.Linear(1, 1)
    modules = {"policy": (module, None)}
    (tmp_path / "checkpoints/step_1/trainer").mkdir(parents=True)
    torch.distributed.checkpoint.save(checkpoints._train_state(modules), checkpoint_id=trainer_of(tmp_path) / "state")
    (trainer_of(tmp_path) / "memory_0.pt").write_bytes(checkpoints._kept(memory))
    (trainer_of(tmp_path) / "state.json").write_text('{"step": 1}', encoding="utf-8")
    checkpoints.load_checkpoint(tmp_path, 1, modules, back := {})
    assert repr(back) == repr(memory) and type(back["mean"]) is np.float64


def trainer_of(run_dir: Path) -> Path:
    return checkpoints.folder_of(run_dir, 1) / "trainer"
