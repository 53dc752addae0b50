"""A run that is killed and resumed equals one that never stopped: metrics and weights, bit for bit."""

import contextlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import threading
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
import torch.distributed.checkpoint
from live import EVEN, SMALL, running, trainer
from safetensors.torch import load_file, save_file
from server_fixture import make_tiny
from transformers import AutoConfig, AutoModelForCausalLM

import utils
from config import ConfigError, TrainConfig
from inputs.processor import load_processor
from runlog import checkpoints, resume
from train_grpo import PromptSampler, Trajectory, load_hf_model, lr_at

SEED = 20  # of the steps at which runs are killed
STEPS = 6
FLAGS = f"{SMALL} --max_steps {STEPS} --save_steps 2 --eval_steps 3 --eval_generations 1 --beta 0.04 "
FLAGS += "--num_iterations 2 --num_minibatches 2 --lr_schedule cosine --warmup_ratio 0.2 --weight_decay 0.1"


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
            two.until(lambda: steps_done(broken) >= step and checkpoints.steps_saved(broken))
            two.kill()
        assert one.end() == 0, one.text
    if ranks == 1 and script == GRPO:  # and once more, while a checkpoint is being written
        with running(trainer(folder / "save.log", *args, "--run_name", "broken", "--resume")) as run:
            run.until(lambda: half_written(broken))
            run.kill()
        newest = max(int(path.name.split("_")[2]) for path in half_written(broken))
        assert checkpoints.last_step(broken) < newest
    with running(trainer(folder / "resumed.log", *args, "--run_name", "broken", "--resume", **how)) as run:
        assert run.end() == 0, run.text
    return broken, whole


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_equals_uninterrupted(outcomes, case):
    broken, whole = outcomes[case].result()
    assert len({line["grad_norm"] for line in timeless(whole) if "grad_norm" in line}) == STEPS  # it learns
    assert_same_run(broken, whole)


@pytest.mark.in_turn
def test_a_resumed_run_can_be_resumed(flags, tmp_path):
    """The state that a checkpoint gave back named its step, and the next checkpoint took that name over."""
    args = [*flags, "--output_dir", str(tmp_path), "--run_name", "run", "--save_steps", "1"]
    for step in (1, 2, 3):
        more = ["--max_steps", str(step), *["--resume"] * (step > 1)]
        with running(trainer(tmp_path / f"{step}.log", *args, *more)) as run:
            assert run.end() == 0, run.text
        assert checkpoints.read_state(tmp_path / "run", step)["step"] == step
    assert [line["step"] for line in timeless(tmp_path / "run") if "reward" in line] == [1, 2, 3]


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


def flip_a_bit(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 0x40
    path.write_bytes(data)


DAMAGED = {
    "a moment": lambda step: flip_a_bit(next((step / "trainer" / "state").glob("*.distcp"))),
    "a weight": lambda step: flip_a_bit(step / "model.safetensors"),
    "the state": lambda step: (step / "trainer" / "state.json").write_text('{"step": 4, "num_tok', encoding="utf-8"),
    "the index": lambda step: (step / "trainer" / "state" / ".metadata").write_bytes(b""),
    "a missing file": lambda step: (step / "trainer" / "rng_0.pt").unlink(),
    "the checksums": lambda step: flip_a_bit(step / "SHA256SUMS", 0.001),
}
FILES = dict(
    zip(DAMAGED, ("__0_0.distcp", "model.safetensors", "state.json", ".metadata", "rng_0.pt", ""), strict=True)
)


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_checkpoint_is_named_and_nothing_is_rewritten(broken, what):
    DAMAGED[what](broken.step)
    end = broken.resume()
    assert end.status == 2 and end.unchanged, end.text
    assert re.search(rf"{broken.step} is damaged: 1 of \d+ files .*{FILES[what]}.* checkpoint of step 2", end.text), (
        end.text
    )
    assert "Traceback" not in end.text


def test_a_loop_that_keeps_going_sets_damage_aside_and_begins_anew_where_nothing_is_left(broken):
    """With --keep_going, as a run is started that nobody watches: docs/runs.md has the loop."""
    flip_a_bit(broken.step / "model.safetensors")
    end = broken.resume("--keep_going")
    assert end.status == 0 and "step_4 is damaged" in end.text and "goes on from step 2" in end.text, end.text
    assert timeless(broken.run)[:4] == timeless(broken.folder / "whole")
    assert len([*broken.run.glob("checkpoints/damaged_step_4_*")]) == 1
    done = timeless(broken.run)
    shutil.rmtree(broken.run / "checkpoints")  # as of a run that was killed before its first checkpoint
    end = broken.resume("--keep_going")
    assert end.status == 0 and "begins anew" in end.text, end.text
    assert timeless(broken.run) == done  # each line once


def test_the_older_checkpoint_takes_over(broken):
    flip_a_bit(broken.step / "model.safetensors")
    broken.step.rename(broken.run / "checkpoints" / "damaged")
    end = broken.resume()
    assert end.status == 0, end.text
    assert timeless(broken.run)[:4] == timeless(broken.folder / "whole")


@pytest.mark.parametrize("file", ["state.json", ".metadata", "rng_0.pt", "__0_0.distcp"])
def test_without_checksums_damage_still_has_a_cause(broken, file):
    """As of checkpoints that older versions wrote."""
    (broken.step / "SHA256SUMS").unlink()
    path = next(broken.step.rglob(file))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    end = broken.resume()
    assert end.status == 2 and end.unchanged and "--resume: " in end.text and "step_2" not in end.text, end.text
    assert "checkpoint of step 2" in end.text and "Traceback (most recent call last):\n  File" not in end.text[:200]


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


def test_what_a_killed_run_left_is_in_nobodys_way(broken):
    folder = broken.run / "checkpoints"
    (folder / "incomplete_step_6").write_text("a file", encoding="utf-8")
    (folder / "incomplete_step_6_0000" / "trainer" / "state").mkdir(parents=True)
    (folder / "step_6").mkdir()  # emptied by hand
    (folder / "step_8.old").mkdir()
    end = broken.resume()
    assert end.status == 2 and "step_6/trainer/state.json is damaged" in end.text, end.text
    (folder / "step_6").rmdir()
    end = broken.resume()
    assert end.status == 0, end.text
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["step_4", "step_6", "step_8.old"]


def test_a_removal_that_is_killed_leaves_no_half_a_checkpoint(tmp_path, monkeypatch):
    """The old one goes file by file; kill -9 in the middle of it left a folder that looked like a checkpoint."""
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step_{step}" / "trainer").mkdir(parents=True)
    saver = checkpoints.Saver(tmp_path, keep=1)

    def killed(folder):
        (folder / "trainer").rmdir()
        raise SystemExit

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(checkpoints.shutil, "rmtree", killed)
        saver._remove(tmp_path / "checkpoints" / "step_1")
    assert checkpoints.steps_saved(tmp_path) == [2] and half_written(tmp_path)
    checkpoints.Saver(tmp_path, keep=1)  # that of a run which goes on, even if it saves nothing more
    assert not half_written(tmp_path)


def test_a_checkpoint_that_fails_takes_no_room(tmp_path, monkeypatch):
    """Nor does what a killed run left: where the disk was full, the next one needs it."""
    left = tmp_path / "checkpoints" / "incomplete_step_1_0000"
    left.mkdir(parents=True)

    def full(*_, **__):
        assert not left.exists()
        raise OSError("No space left on device")

    monkeypatch.setattr(torch.distributed.checkpoint, "save", full)
    module = torch.nn.Linear(1, 1)
    modules = {"policy": (module, torch.optim.SGD(module.parameters()))}
    with pytest.raises(RuntimeError, match="step_2 could not be written.*No space left"):
        checkpoints.save_checkpoint(tmp_path, 2, modules, module, [], None, {}, {}, 2)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_ctrl_c_that_torch_wraps_stays_one(monkeypatch, tmp_path):
    from torch.distributed.checkpoint.api import CheckpointException

    def save(*args, **options):
        raise CheckpointException("write", {0: (KeyboardInterrupt(), traceback.StackSummary())})

    monkeypatch.setattr(torch.distributed.checkpoint, "save", save)
    module = torch.nn.Linear(1, 1)
    modules = {"policy": (module, torch.optim.SGD(module.parameters()))}
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save_checkpoint(tmp_path, 2, modules, module, [], None, {}, {}, 2)


@pytest.mark.parametrize("last", [False, True])
def test_a_write_that_fails_beside_training_ends_the_run(short, last):
    """A disk that takes 4 MiB a file, behind training and at the end of the run."""
    name = f"small_disk_{last}"
    flags = ["--run_name", name, "--max_steps", "1" if last else "60", "--save_steps", "1"]
    with running(trainer(short.folder / f"{name}.log", *short.args, *flags)) as run:
        resource.prlimit(run.members[0].pid, resource.RLIMIT_FSIZE, (2**22, 2**22))
        assert run.end() == 1, run.text
    assert re.search("step_1 could not be written; those before it.*File too large", run.text, re.S), run.text
    assert not list((short.folder / name / "checkpoints").glob("*step*"))


def test_ctrl_c_drops_what_is_being_saved(short):
    """And the checkpoint before it stays."""
    args = [*short.args, "--run_name", "interrupted", "--max_steps", "200", "--save_steps", "1"]
    run_dir = short.folder / "interrupted"
    with running(trainer(short.folder / "interrupted.log", *args)) as run:
        run.until(lambda: checkpoints.steps_saved(run_dir) and half_written(run_dir))
        os.kill(run.members[0].pid, signal.SIGINT)
        assert run.end() == 130, run.text
    assert "and what was being saved, too" in run.text
    step = checkpoints.last_step(run_dir)
    assert checkpoints.read_state(run_dir, step)["step"] == step and checkpoints.check_sums(run_dir, step)


def test_weights_that_are_not_finite_are_not_saved(short):
    flags = [*short.args, "--run_name", "infinite", "--max_steps", "1", "--learning_rate", "1e38"]
    with running(trainer(short.folder / "infinite.log", *flags)) as run:
        assert run.end() == 1, run.text
    assert "made nan or infinity of" in run.text and "Lower --learning_rate (1e+38)" in run.text, run.text
    assert not list((short.folder / "infinite").glob("checkpoints/*"))


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


def test_a_checkpoint_of_an_older_version_goes_on(broken):
    """One from before there were checksums, the setting `compile`, and weights in the dtype of the server."""
    (broken.step / "SHA256SUMS").unlink()
    state = json.loads((broken.step / "trainer" / "state.json").read_text(encoding="utf-8"))
    del state["made_with"]["settings"]["compile"]
    (broken.step / "trainer" / "state.json").write_text(json.dumps(state), encoding="utf-8")
    weights = {name: tensor.double() for name, tensor in load_file(broken.step / "model.safetensors").items()}
    save_file(weights, broken.step / "model.safetensors")
    end = broken.resume()
    assert end.status == 0, end.text
    assert [line[:35] for line in re.findall(r"\n  \* (.*)", end.text)] == ["the checkpoint has no checksums (an"], (
        end.text
    )
    del state["made_with"]
    (broken.step / "trainer" / "state.json").write_text(json.dumps(state), encoding="utf-8")
    shutil.rmtree(broken.step.with_name("step_6"))
    end = broken.resume("--strict_resume")
    assert end.status == 2 and "does not say what it was made with" in end.text, end.text


EVEN_ARGS = f"{SMALL} --reward_funcs length".split()


def test_ranks_that_read_other_rows_do_not_begin(tmp_path):
    text = "import os\n\n\ndef rows(split, seed):\n    rows = [{'prompt': f'{n} + 1 ='} for n in range(40)]\n"
    texts = {"order": "    return rows[::-1] if os.environ['RANK'] == '1' else rows\n"}
    texts["count"] = "    return rows[: 40 - int(os.environ['RANK'])]\n"
    for name, last in texts.items():
        (tmp_path / f"{name}.py").write_text(text + last, encoding="utf-8")
        flags = [*EVEN_ARGS, "--dataset_id", f"{tmp_path}/{name}.py:rows", "--output_dir", str(tmp_path)]
        with running(trainer(tmp_path / f"{name}.log", *flags, "--max_steps", "1", ranks=2)) as run:
            assert run.end(60) == 2, run.text
        said = "or in another order" if name == "order" else "39 of them and not 40"
        assert f"rank 1: other rows than on rank 0, {said}" in run.text, run.text


def test_ranks_with_other_settings_or_code_do_not_begin(tmp_path, monkeypatch):
    """As two nodes can have, each with its own command line and copy of the files; paths may be a node's own."""
    for node, text in (("a", "1"), ("b", "2")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "my_rewards.py").write_text(f"def even(**_):\n    return {text}\n", encoding="utf-8")
    mine = TrainConfig(reward_funcs=[f"{tmp_path}/a/my_rewards.py:even"], learning_rate=1e-3)
    other = replace(mine, model_id="/other/place", server_urls=["http://other:8000"], output_dir="other.place")
    seen = []
    monkeypatch.setattr(utils, "gather_objects", lambda own: [own, *map(resume.same_on_all_nodes, seen)])
    for seen[:], said in (
        ([mine, other], None),
        ([mine, replace(other, learning_rate=1e-2)], "rank 2 .*learning_rate 0.01 and not 0.001"),
        ([replace(mine, save_steps=3)], "rank 1 .*save_steps 3 and not"),
        ([replace(mine, reward_funcs=[f"{tmp_path}/b/my_rewards.py:even"])], "rank 1 .*the file my_rewards.py"),
    ):
        with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
            resume.check_same_settings(mine)


def test_a_glance_at_many_rows_sees_another_order():
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(200_000)]
    shuffled = random.Random(0).sample(rows, len(rows))
    assert resume.glance(rows) == resume.glance([dict(row) for row in rows]) != resume.glance(shuffled)
    assert resume.glance([]) != resume.glance(rows[:1]) != resume.glance(rows[1:2])


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


@pytest.mark.parametrize("push_steps, differ", [(1, False), (3, True)])
def test_checkpoints_count_where_they_decide_when_weights_are_pushed(push_steps, differ):
    """A push belongs to each checkpoint, so with --push_steps above 1 others are pushes at other steps."""
    rows = [{"prompt": "1 + 1 ="}]
    before, after = (TrainConfig(push_steps=push_steps, save_steps=n) for n in (2, 5))
    made, now = (resume.fingerprint(cfg, rows, [], 1) for cfg in (before, after))
    lines = resume.differences({"made_with": made}, now, 2, after, lr_at)
    said = [f"save_steps 2 -> 5{resume.follows('save_steps', {}, 2, after, lr_at)}"] * differ
    assert lines == said and all("weights are pushed at other steps" in line for line in lines)


@pytest.mark.parametrize(
    "ranks, said", [(2, "memory_2.pt, memory_3.pt, which no rank reads"), (8, "ranks from 4 on begin")]
)
def test_memory_that_no_rank_or_not_every_rank_gets_is_said(ranks, said, tmp_path):
    """`memory` is each rank's own."""
    (tmp_path / "trainer").mkdir()
    assert resume.memory_differences(tmp_path, 4, ranks) == []  # nothing was kept
    for rank in (0, 2, 3):
        (tmp_path / f"trainer/memory_{rank}.pt").touch()
    assert resume.memory_differences(tmp_path, 4, 4) == []
    [line] = resume.memory_differences(tmp_path, 4, ranks)
    assert said in line


def expected_order(old: list[str], new: list[str]) -> list[int]:
    """Rows that no step of the pass takes, and rows that two steps take, counted one by one."""
    before, after = (PromptSampler(len(rows), 4, seed) for rows, seed in ((old, 42), (new, 7)))
    taken = {old[i] for step in range(4) for i in before.next(step)}
    left = {new[i] for step in range(4, len(new) // 4) for i in after.next(step)}
    return [len(set(new) - taken - left), len(taken & left)]


def test_an_edited_reward_file_is_said(broken):
    file = broken.folder / "even.py"
    sound = file.read_text(encoding="utf-8")
    try:
        file.write_text(sound + "\n# edited\n", encoding="utf-8")
        end = broken.resume("--strict_resume", "--max_steps", "4")
    finally:
        file.write_text(sound, encoding="utf-8")
    assert end.status == 2 and end.unchanged and f"{file} changed: rewards" in end.text, end.text
    end = broken.resume("--strict_resume")  # two steps more: at a constant learning rate no difference
    assert end.status == 0 and "with differences" not in end.text, end.text


def test_only_complete_checkpoints_are_seen(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        checkpoints.last_step(tmp_path)
    for name in ("step_2", "step_10", "incomplete_step_12", "step_14.old", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoints.last_step(tmp_path) == 10


def test_a_resume_that_does_not_fit_says_so(outcomes, flags):
    """torch's error for it is no Exception; it must not end the run without a word."""
    _, whole = outcomes["1 rank"].result()
    args = [*flags, "--output_dir", str(whole.parent), "--run_name", "whole", "--resume", "--use_peft"]
    with running(trainer(whole.parent / "misfit.log", *args)) as run:
        assert run.end() == 2
    assert "step_6 does not fit this run, or is damaged" in run.text and "use_peft False -> True" in run.text


@pytest.mark.parametrize(
    "file, said",
    [
        ("generation_config.json", {"temperature": 0.9, "top_p": 0.6}),  # without do_sample
        ("generation_config.json", {"pad_token_id": -1}),
        ("config.json", {"temperature": 0.7, "repetition_penalty": 1.1}),
        ("config.json", {"attention_dropout": 0.1, "use_cache": True}),
    ],
)
def test_a_checkpoint_says_what_the_models_own_files_say(file, said, tmp_path):
    """Also where transformers would refuse to save it, as with settings of generation that published models have."""
    given, end = tmp_path / "given", tmp_path / "end"
    shutil.copytree(make_tiny(), given)
    if file == "config.json":
        (given / "generation_config.json").unlink()
    own = json.loads((given / file).read_text(encoding="utf-8"))
    (given / file).write_text(json.dumps(own | said), encoding="utf-8")
    model, processor = load_hf_model(TrainConfig(model_id=str(given)), torch.float32), load_processor(str(given))
    end.mkdir()
    checkpoints.save_config(end, model, torch.float32)
    checkpoints.save_model(tmp_path / "whole", model, processor)
    for folder in (end, tmp_path / "whole"):
        again = AutoConfig.from_pretrained(folder)
        assert again.attention_dropout == said.get("attention_dropout", 0) and again.use_cache
        found = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        assert "use_cache" in said or said.items() <= found.items()
    assert model.config.attention_dropout == 0
    ids = torch.arange(1, 9)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(ids).logits, model(ids).logits)


def test_memory_is_tried_when_it_is_saved():
    """What could not be brought back is refused then, and not when the run is to go on. A trajectory's live environment
    stays out of it."""
    lock = threading.Lock()  # cannot be copied
    trajectory = Trajectory({"prompt": "a"}, 3, [1], [2], [1], [-0.5], [1.0], info={"object": lock, "completion": "b"})
    data = checkpoints._kept({"best": [trajectory], 7: torch.ones(2)})
    with torch.serialization.safe_globals([Trajectory]):
        back = torch.load(io.BytesIO(data), weights_only=True)
    assert back["best"][0] == replace(trajectory, info={"completion": "b"}) and trajectory.info["object"] is lock
    for fault, said in ((lock, "lock"), (deque([1]), "deque"), (np.array([None]), "numpy.dtype")):
        with pytest.raises(ValueError, match=f"`memory` of after_rollout .*{said}.* It may hold tensors"):
            checkpoints._kept({"mine": fault})


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


def test_memory_is_looked_at_in_the_first_step_that_fills_it(tmp_path):
    """What cannot be kept ends the run then, and not with the first checkpoint, perhaps the one after the last step; of
    free room on the disk nothing is said, as that is no cause."""
    saver = checkpoints.Saver(tmp_path, 2)
    memory: dict = {}
    saver.poll(memory)
    memory["mine"] = deque([1])
    with pytest.raises(ValueError, match="`memory` of after_rollout .*deque"):
        saver.poll(memory)
    module = torch.nn.Linear(1, 1)
    modules = {"policy": (module, torch.optim.SGD(module.parameters()))}
    with pytest.raises(RuntimeError, match="could not be written.*deque") as error:
        checkpoints.save_checkpoint(tmp_path, 2, modules, module, [], None, {}, memory, 2)
    assert "free" not in str(error.value)
