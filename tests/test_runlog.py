"""The run folder: what is written, what a resumed run keeps, and the report on whatever there is."""

import io
import json
import math
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from PIL import Image

from config import PRESETS, ConfigError, TrainConfig, load_config
from inputs.trajectory import Trajectory
from looking.report import write_report
from network.secrets import learn
from runlog import rollout_metrics
from runlog.log import RunLog, close_all, completion_rows, describe, evaluation_rows, name_run

pytestmark = pytest.mark.quick


@pytest.fixture
def make_log(tmp_path):
    """RunLog(...) in tmp_path/run; every log made is closed at the end."""
    made = []

    def make(resume_step=None, **settings):
        cfg = TrainConfig(run_name="run", output_dir=str(tmp_path), max_steps=4, **settings)
        made.append(RunLog(cfg, resume_step))
        return made[-1]

    yield make
    for log in made:
        log.close()


def log_step(log, step):
    log.step(step, {"reward": step / 4, "num_tokens": 100 * step, "time/step": 2.0, "time/update": 1.5})
    log.completions(step, [{"prompt": "p", "completion": "c", "reward": step / 4}])


def without_times(lines):
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def table(log, step: int, folder: str = "completions") -> list[dict]:
    return pyarrow.parquet.read_table(log.dir / folder / f"step_{step:06d}.parquet").to_pylist()


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_lines_are_plain_json(make_log):
    log = make_log()
    log.step(1, {"reward": torch.tensor(0.5), "kl": math.nan, "grad_norm": math.inf, "n": 3})
    log.eval(1, {"eval/mean@4": 0.25})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = log.metrics_path.read_text(encoding="utf-8").splitlines()
    lines = [json.loads(line, parse_constant=refuse) for line in text]
    assert without_times(lines[:1]) == [{"step": 1, "reward": 0.5, "kl": None, "grad_norm": None, "n": 3}]
    assert without_times(lines[1:]) == [{"step": 1, "eval/mean@4": 0.25}]
    with pytest.raises(TypeError, match="'note'"):
        log.step(1, {"note": "text"})


def trajectory(group: int, reward: float, mask: list[int], finish: str = "stop", **info) -> Trajectory:
    known = {"rewards": {"right": reward, "form": math.nan if group else 0.5}, "row_number": group, "completion": "c"}
    known |= {"reward_timeouts": 0, "unrewarded": 0, "reward_without_token": 0}
    rewards = [0.0] * (len(mask) - 1) + [reward]
    return Trajectory(
        {"prompt": "?"}, group, [1, 2], [7] * len(mask), mask, [-1.0 * m for m in mask], rewards,
        finish_reason=finish, info=known | info,
    )  # fmt: skip


def test_a_steps_numbers_are_those_of_its_completions():
    """Two groups, counted by hand; what a tool wrote is no length."""
    rows = [trajectory(0, 1.0, [1, 1]), trajectory(0, 0.0, [1, 0, 0, 1, 1], "length")]
    rows += [trajectory(1, 0.25, [1]), trajectory(1, 0.25, [1, 0])]
    found = rollout_metrics.rollout_metrics(rows)
    assert found["reward"] == pytest.approx(1.5 / 4) and found["reward_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert found["frac_reward_zero_std"] == 0.5 and found["completions/clipped_ratio"] == 0.25
    lengths = [found[f"completions/{name}_length"] for name in ("mean", "min", "max")]
    assert lengths == [pytest.approx(7 / 4), 1, 3]
    assert found["rewards/right/mean"] == pytest.approx(1.5 / 4) and found["rewards/form/mean"] == 0.5
    assert (found["completions/count"], found["num_tokens"]) == (4, 4 * 2 + 2 + 5 + 1 + 2)


def test_an_evaluations_numbers_are_those_of_its_completions():
    cfg = TrainConfig(eval_generations=2, eval_solved=0.5)
    groups = [
        [trajectory(0, 1.0, [1]), trajectory(0, 0.2, [1, 0, 1])],
        [trajectory(1, 0.0, [1]), trajectory(1, 0.4, [1])],
    ]
    found = rollout_metrics.eval_metrics(groups, cfg)
    assert (found["mean@2"], found["pass@2"], found["reward"]) == (0.25, 0.5, pytest.approx(0.4))
    assert (found["mean_length"], found["rows"]) == (5 / 4, 2)


# ---- completions ----------------------------------------------------------------------------------------------------


def test_completions_keep_every_row_and_reward(make_log):
    log, chat = make_log(), [{"role": "user", "content": "2 + 2?"}]
    rows = [
        {"prompt": chat, "completion": "4", "rewards/exact": 1.0, "rewards/format": None, "finish_reason": "stop"},
        {"prompt": "plain", "completion": "é\n5", "rewards/exact": 0.0, "finish_reason": "length"},
    ]
    log.completions(12, rows)
    back = table(log, 12)
    assert json.loads(back[0]["prompt"]) == chat and back[1]["prompt"] == "plain"
    assert [row["completion"] for row in back] == ["4", "é\n5"]
    assert [row["rewards/exact"] for row in back] == [1.0, 0.0]
    assert [row["rewards/format"] for row in back] == [None, None]


def test_samples_are_printed_now_and_then(make_log, capsys):
    log = make_log(print_samples_every=2)
    row = {"prompt": [{"role": "user", "content": "2 + [b]2?"}], "completion": "x" * 5000, "rewards/exact": 1.0}
    for step in (1, 2, 3):
        log.sample(step, [row | {"reward": 1.0, "finish_reason": "length"}])
    printed = capsys.readouterr().out
    assert printed.count("a sample of step") == 2 and "step 2 " not in printed
    assert "user: 2 + [b]2?" in printed and "(3500 more characters)" in printed and "exact 1" in printed


@pytest.mark.parametrize(
    "text",
    ["\ud83d half an emoji", "\x1b[2J\x9b31m\x07\x00 codes of terminals", "<b>&<script>alert(1)</script>"],
    ids=["surrogate", "terminal", "markup"],
)
def test_whatever_was_sampled_can_be_stored_and_shown(make_log, capsys, text):
    """completion_rows -> parquet -> terminal -> report, with names of rewards and metrics as odd as the texts."""
    name, log = text[:40], make_log()
    info = {
        "completion": text,
        "rewards": {name: 1.0},
        "row_number": 0,
        "extra": {"mixed": 7 if text[0] == "<" else "t"},
    }
    made = [Trajectory({"prompt": text}, 0, [1], [2], [1], [0.0], [1.0], info=dict(info)) for _ in range(2)]
    rows = completion_rows(made, [1.0, 1.0], [None, None])
    log.step(1, {f"rewards/{name}": 1e308, f"time/{name}": 1.0}, rows)
    log.eval(1, {f"eval/rewards/{name}/mean": 0.5, "eval/mean@4": -1e308}, evaluation_rows(made, log.cfg))
    back = table(log, 1)
    assert [row["completion"] for row in back] == [text.encode("utf-8", "backslashreplace").decode()] * 2
    log.close()
    page = (log.dir / "report.html").read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert not set(shown + page) & set("\x00\x07\x1b\x9b")
    assert "<script>alert" not in page and len(page) < 3_000_000


def held_out(completion: str, reward: float, image: bytes | None, number: int = 0) -> Trajectory:
    info = {"completion": completion, "rewards": {"marked": reward}, "row_number": number}
    images = [image] if image else []
    return Trajectory({"prompt": "Where?"}, 0, [1], [2], [1], [0.0], [reward], images=images, info=info)


def test_an_evaluation_keeps_pictures(make_log):
    """Of the first held-out rows."""
    png, log = io.BytesIO(), make_log()
    Image.new("RGB", (1000, 500), "gray").save(png, "PNG")
    first = [held_out("none", 0.0, None, 1), held_out("left", 0.0, png.getvalue())]  # as several ranks bring them
    log.eval(0, {"eval/mean@4": 0.0}, evaluation_rows(first, log.cfg))
    last = [held_out("right", 1.0, png.getvalue()), held_out("more", 0.5, None, 2)]
    log.eval(3, {"eval/mean@4": 0.91}, evaluation_rows(last, log.cfg))
    before, after = table(log, 0, "evaluations"), table(log, 3, "evaluations")
    assert [row["completion"] for row in before] == ["left", "none"] and before[1]["picture"] is None
    assert [row["rewards/marked"] for row in after] == [1.0, 0.5] and after[0]["token_ids"] == [2]
    shown = [Image.open(io.BytesIO(rows[0]["picture"])) for rows in (before, after)]
    assert shown[0].size == shown[1].size == (320, 160) and shown[0].getpixel((9, 9)) == (128, 128, 128)


# ---- one run, one folder --------------------------------------------------------------------------------------------


def state(log) -> dict:
    return json.loads((log.dir / "state.json").read_text(encoding="utf-8"))


def test_state_json_follows_the_run(make_log):
    log = make_log()
    first = state(log)
    assert (first["state"], first["step"], first["num_steps"], first["pid"]) == ("running", 0, 4, os.getpid())
    log_step(log, 2)
    assert state(log)["step"] == 2 and state(log)["updated"] > first["updated"]
    log.close()
    assert (state(log)["state"], state(log)["why"], state(log)["step"]) == ("finished", "", 2)
    learn(secret := secrets.token_hex(8))  # as load_config does with those it reads
    log = make_log(resume_step=2, resume=True)
    assert (state(log)["state"], state(log)["step"]) == ("running", 2)
    close_all(ValueError(f"the first line with {secret}\nand the second"))
    assert (state(log)["state"], state(log)["why"]) == ("failed", "ValueError: the first line with ***")
    assert (log.dir / "report.html").exists() and not list(log.dir.glob("*.partial"))


def test_an_interrupted_run_says_how_it_goes_on(make_log, capsys):
    log = make_log(save_steps=2)
    close_all(KeyboardInterrupt())
    assert state(log)["state"] == "interrupted" and not (log.dir / "report.html").exists()
    assert f"--resume --run_name {log.dir.name}" in " ".join(capsys.readouterr().out.split())


def test_completions_that_cannot_be_written_end_the_run(make_log):
    log = make_log()
    (log.dir / "completions").write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(OSError):
        log.completions(1, [{"prompt": "p", "completion": "c"}])


def test_a_second_run_does_not_overwrite_the_first(make_log):
    make_log().close()  # nothing happened in it: the folder is free
    log = make_log()
    log.step(1, {"reward": 0.0})
    before = log.metrics_path.read_bytes()
    log.close()
    with pytest.raises(ConfigError, match="no checkpoint to continue from, so move it away"):
        make_log()
    (log.dir / "checkpoints" / "step_1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--resume"):
        make_log()
    assert log.metrics_path.read_bytes() == before
    assert len({name_run(TrainConfig()) for _ in range(3)}) == 3, "runs of the same second have names of their own"


def test_the_folder_says_what_was_run(make_log, monkeypatch, tmp_path):
    """Settings, command, versions, what was edited since the last commit, and your files under their paths."""
    here = tmp_path / "repository"
    (here / "a").mkdir(parents=True)
    for name in ("own.py", "a/r.py", "r.py"):
        (here / name).write_text(f"# {name}\ndef f(completions, **_): ...\n", encoding="utf-8")
    git = ["git", "-C", str(here), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (here / "own.py").write_text("# edited\n", encoding="utf-8")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", ["own.py", "--seed", "7"])
    log = make_log(reward_funcs=["a/r.py:f", "r.py:f"], seed=7)
    assert json.loads((log.dir / "config.json").read_text(encoding="utf-8"))["seed"] == 7
    assert "own.py --seed 7" in (log.dir / "command.txt").read_text(encoding="utf-8")
    assert f"torch {torch.__version__}" in (log.dir / "environment.txt").read_text(encoding="utf-8")
    assert "+# edited" in (log.dir / "git.diff").read_text(encoding="utf-8")
    for name in ("own.py", "a/r.py", "r.py"):
        assert (log.dir / "code" / name).read_text(encoding="utf-8") == Path(name).read_text(encoding="utf-8")


# ---- the report -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 0, "eval/mean@4": 0.5}],
        [{"step": 1, "reward": None, "kl": None}, {"step": 2, "reward": 0.5, "kl": None}],
        [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75, "odd/<key>": -1}],
    ],
    ids=["only an evaluation", "no finite number", "ragged"],
)
@pytest.mark.filterwarnings("error")
def test_a_report_of_whatever_is_there(tmp_path, lines):
    (tmp_path / "config.json").write_text('{"model_id": "m', encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and len(page) < 3_000_000 and "<key>" not in page


def test_the_settings_of_a_preset_are_shown_at_start(capsys):
    """All of them, with the values of the run: flags override some."""
    words = "--preset dapo --generator hf --epsilon_high 0.3 --max_steps 1 --tokens_per_microbatch 8"
    describe(load_config(argv=words.split()), torch.nn.Linear(2, 2), [8], 1)
    shown = capsys.readouterr().out
    for name, value in PRESETS["dapo"].items():
        assert ("epsilon_high 0.3 (not 0.28)" if name == "epsilon_high" else f"{name} {value}") in shown
