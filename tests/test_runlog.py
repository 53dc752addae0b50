"""The run folder: what is written, what a resumed run keeps, and the report on whatever there is."""

import base64
import contextlib
import errno
import io
import json
import math
import os
import re
import secrets
import socket
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from runlog.report import plot_panel, write_report

import train_grpo
import utils
from batch import collate
from config import ConfigError, TrainConfig
from inputs.trajectory import Trajectory, empty_trajectory
from runlog import advice, report, rollout_metrics, samples
from runlog.curves import Curves
from runlog.log import (
    RunLog,
    claim_run,
    close_all,
    completion_rows,
    evaluation_rows,
    kept_name,
    name_run,
    progress_text,
)
from runlog.reading import phases, read_metrics
from runlog.trackers import Tracker


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
    metrics = {"reward": step / 4, "num_tokens": 100 * step, "time/step": 2.0, "time/update": 1.5}
    log.step(step, metrics)
    log.completions(step, [{"prompt": "p", "completion": "c", "reward": step / 4}])


def without_times(lines):
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def test_lines_are_plain_json(make_log):
    log = make_log()
    log.step(1, {"reward": torch.tensor(0.5), "kl": math.nan, "grad_norm": math.inf, "n": 3})
    log.eval(1, {"eval/mean@4": 0.25})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = log.metrics_path.read_text(encoding="utf-8").splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in text)
    assert without_times([first]) == [{"step": 1, "reward": 0.5, "kl": None, "grad_norm": None, "n": 3}]
    assert without_times([second]) == [{"step": 1, "eval/mean@4": 0.25}]


def held_out(completion: str, reward: float, image: bytes | None, number: int = 0) -> Trajectory:
    info = {"completion": completion, "rewards": {"marked": reward}, "row_number": number}
    images = [image] if image else []
    return Trajectory({"prompt": "Where?"}, 0, [1], [2], [1], [0.0], [reward], images=images, info=info)


def test_an_evaluation_keeps_pictures(make_log):
    """Of the first held-out rows, drawn over by a reward function that can; before and after stand in the report."""

    def marked(completions, **columns): ...

    def draw(image, completion, row):
        image.putpixel((0, 0), (255, 0, 0) if completion == "left" else (0, 0, 255))
        return image

    png = io.BytesIO()
    Image.new("RGB", (1000, 500), "gray").save(png, "PNG")
    log = make_log()
    first = [held_out("left", 0.0, png.getvalue()), held_out("none", 0.0, None, 1)]
    log.eval(0, {"eval/mean@4": 0.0}, evaluation_rows(first, {}, log.cfg))
    marked.picture = draw
    last = [held_out("none", 0.5, None, 1), held_out("right", 1.0, png.getvalue())]  # as several ranks bring them
    log.eval(3, {"eval/mean@4": 1.0}, evaluation_rows(last, {"marked": marked}, log.cfg))
    log.written()
    tables = [pyarrow.parquet.read_table(path).to_pylist() for path in sorted(log.dir.glob("evaluations/*"))]
    assert [row["completion"] for row in tables[1]] == ["right", "none"]
    assert [row["rewards/marked"] for row in tables[1]] == [1.0, 0.5]
    assert [row["token_ids"] for row in tables[1]] == [[2], [2]]
    plain, drawn = (Image.open(io.BytesIO(table[0]["picture"])) for table in tables)
    assert plain.size == drawn.size == (320, 160) and tables[0][1]["picture"] is None
    assert plain.getpixel((0, 0)) != drawn.getpixel((0, 0)) and plain.getpixel((9, 9)) == drawn.getpixel((9, 9))
    page = write_report(log.dir).read_text(encoding="utf-8")
    assert "after step 0" in page and "after step 3" in page and page.count('class="seen"') == 2
    many = [held_out("more", 0.0, png.getvalue(), number) for number in range(100)]
    log.eval(4, {"eval/mean@4": 1.0}, evaluation_rows(many, {}, log.cfg))
    log.close()
    kept = pyarrow.parquet.read_table(log.dir / "evaluations" / "step_000004.parquet").to_pylist()
    assert len(kept) == 64 and [bool(row["picture"]) for row in kept] == [True] * 8 + [False] * 56
    make_log(resume_step=3, resume=True)
    assert sorted(path.stem for path in log.dir.glob("evaluations/*")) == ["step_000000", "step_000003"]


def test_text_is_no_metric(make_log):
    with pytest.raises(TypeError, match="'note'"):
        make_log().step(1, {"note": "text"})


def state(log) -> dict:
    return json.loads((log.dir / "state.json").read_text(encoding="utf-8"))


def test_state_json_follows_the_run(make_log):
    """Whole at any moment, whatever else is written; closed by itself it is finished, else it says why."""
    log = make_log()
    first = state(log)
    assert (first["state"], first["step"], first["num_steps"], first["pid"]) == ("running", 0, 4, os.getpid())
    log_step(log, 2)
    assert (
        state(log)["step"] == 2
        and state(log)["updated"] > first["updated"]
        and state(log)["started"] == first["started"]
    )
    log.close()
    assert state(log) | {"state": "finished", "why": "", "step": 2} == state(log)
    log = make_log(resume_step=2, resume=True, server_token=(secret := secrets.token_hex(8)))
    assert (state(log)["state"], state(log)["step"]) == ("running", 2)
    close_all(ValueError(f"the first line with {secret}\nand the second"))
    assert (state(log)["state"], state(log)["why"]) == ("failed", "ValueError: the first line with ***")
    assert not list(log.dir.glob("*.partial"))


def test_completions_that_cannot_be_written_end_the_run(make_log):
    """At the next step or at the end, whichever comes first; nothing half-written stays under its name."""
    log = make_log()
    (log.dir / "completions").write_text("a file where the folder should be", encoding="utf-8")
    log.completions(1, [{"prompt": "p", "completion": "c"}])
    with pytest.raises(OSError):
        log.close()
    assert state(log)["state"] == "failed" and "completions" in state(log)["why"]
    assert (log.dir / "metrics.jsonl").exists() and log.lock.closed


def test_a_disk_that_does_not_answer_is_named(make_log):
    log = make_log(dist_timeout=0.3)
    (log.dir / "completions").mkdir()
    os.mkfifo(slow := log.dir / "completions" / "step_000001.partial")  # who opens it for writing waits for a reader
    log.completions(1, [{"prompt": "p", "completion": "c"}])
    with pytest.raises(TimeoutError, match="step_000001.parquet could not be written in --dist_timeout=0.3 s"):
        log.written()
    with open(slow, "rb") as reader:
        reader.read()


def test_completions_that_are_given_up_are_told_once_a_minute(make_log, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = make_log()
    with monkeypatch.context() as patched:
        patched.setattr("runlog.log.write_table", full)
        for step in range(1, 13):
            log.completions(step, [{"prompt": "p", "completion": "c"}])
            futures.wait([future for *_, future in log.under_way])
    log.completions(13, [{"prompt": "p", "completion": "c"}])
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "given up" in line]
    assert "step_000001.parquet" in said
    assert len(log.warnings.said) == 2


def test_resuming_equals_never_stopping(make_log):
    """Killed after step 3 in the middle of a line, resumed from the checkpoint of step 2."""
    log = make_log()
    log.eval(0, {"eval/mean@4": 0.0})
    for step in (1, 2, 3):
        log_step(log, step)
    log.close()
    complete = without_times(read_metrics(log.dir))
    with open(log.metrics_path, "a", encoding="utf-8") as file:
        file.write('{"step": 4, "rew')

    resumed = make_log(resume_step=2, resume=True)
    assert without_times(read_metrics(log.dir)) == [line for line in complete if line["step"] <= 2]
    resumed.written()
    assert [path.name for path in sorted(log.dir.glob("completions/*"))] == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]
    log_step(resumed, 3)
    assert without_times(read_metrics(log.dir)) == complete
    assert read_metrics(log.dir)[-1]["time/tokens_per_second"] == 50  # 100 new tokens in 2 s, not 300
    assert len((log.dir / "command.txt").read_text(encoding="utf-8").splitlines()) == 2


def test_an_evaluation_of_a_resumed_run_drops_nothing(make_log):
    log = make_log()
    for step in (1, 2, 3, 4):
        log_step(log, step)
    log.close()
    lines, files = read_metrics(log.dir), sorted(log.dir.glob("completions/*"))
    make_log(resume_step=2, resume=True, eval_only=True).close()
    assert read_metrics(log.dir) == lines and sorted(log.dir.glob("completions/*")) == files


def test_a_resumed_run_keeps_what_stays_byte_by_byte(make_log, monkeypatch):
    """Also behind an evaluation of an older checkpoint, whose line comes after later steps'."""
    monkeypatch.setattr("runlog.report.write_report", lambda *_: None)
    log = make_log()
    for step in (1, 2, 3, 4):
        log_step(log, step)
    log.close()
    log = make_log(resume_step=2, resume=True, eval_only=True)
    log.eval(2, {"eval/mean@4": 0.5})
    log.close()
    lines, file = log.metrics_path.read_bytes().splitlines(True), log.metrics_path.stat()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 2]
    make_log(resume_step=4, resume=True).close()
    assert log.metrics_path.read_bytes().splitlines(True) == lines
    same = log.metrics_path.stat()
    assert (same.st_ino, same.st_mtime_ns) == (file.st_ino, file.st_mtime_ns)
    with open(log.metrics_path, "ab") as torn:
        torn.write(b'{"step": 4, "rew')
    make_log(resume_step=3, resume=True).close()
    assert log.metrics_path.read_bytes().splitlines(True) == [*lines[:3], lines[4]]
    os.link(log.metrics_path, log.dir / "copy")  # as `cp -al` makes one of a run, to go on from in two ways
    make_log(resume_step=2, resume=True).close()
    assert (log.dir / "copy").read_bytes() == b"".join([*lines[:3], lines[4]])
    assert log.metrics_path.read_bytes().splitlines(True) == [*lines[:2], lines[4]]
    log.metrics_path.write_bytes(b"".join(lines[:2]).removesuffix(b"\n"))  # as some editors leave it
    log = make_log(resume_step=2, resume=True)
    log_step(log, 3)
    assert [line["step"] for line in read_metrics(log.dir)] == [1, 2, 3]
    assert read_metrics(log.dir)[-1]["time/tokens_per_second"] == 50


def test_long_runs_are_resumed_and_reported_line_by_line(make_log, monkeypatch):
    monkeypatch.setattr("runlog.report.write_report", lambda *_: None)
    log, values = make_log(), {f"own/{n}": 1 / 3 for n in range(40)}
    text = "".join(json.dumps({"step": n, "num_tokens": 9 * n} | values) + "\n" for n in range(1, 3001))

    def peak(act) -> float:
        """MB."""
        tracemalloc.start()
        act()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most / 1e6

    log.metrics_path.write_text(text, encoding="utf-8")  # in dicts it takes 22 MB
    assert peak(lambda: log._keep_until(2990)) < 0.5
    assert read_metrics(log.dir)[-1]["step"] == 2990
    assert peak(lambda: report.curves_of(log.dir)) < 7  # of which 2 are the curves


def test_tokens_per_second_of_a_last_line_that_stands_for_fewer_steps(make_log):
    log = make_log(log_steps=3)
    for step in (3, 4):
        log_step(log, step)
    log.close()
    assert [line["time/tokens_per_second"] for line in read_metrics(log.dir)] == [50, 50]
    resumed = make_log(resume_step=3, resume=True, log_steps=3)
    log_step(resumed, 4)
    assert [line["time/tokens_per_second"] for line in read_metrics(log.dir)] == [50, 50]


def test_a_torn_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)


def test_a_second_run_does_not_overwrite_the_first(make_log):
    log = make_log()
    log.step(1, {"reward": 0.0})
    log.close()
    with pytest.raises(ConfigError, match="no checkpoint to continue from, so move it away"):
        make_log()
    (log.dir / "checkpoints" / "step_1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--resume"):
        make_log()


def test_a_folder_in_which_nothing_happened_is_free(make_log):
    make_log().close()
    make_log().step(1, {"reward": 0.0})


def test_runs_of_the_same_second_have_names_of_their_own():
    names = {name_run(TrainConfig()) for _ in range(3)}
    assert len(names) == 3 and name_run(TrainConfig(run_name="mine")) == "mine"


def test_the_folder_describes_the_run_without_its_secret(make_log, monkeypatch):
    secret = secrets.token_hex(8)  # not a literal: this file is in git.diff while it is being edited
    monkeypatch.setattr(sys, "argv", ["train.py", "--server_token", secret])
    log = make_log(server_token=secret, report_to=["tensorboard"])
    log_step(log, 1)
    log.close()
    assert json.loads((log.dir / "config.json").read_text(encoding="utf-8"))["max_steps"] == 4
    assert "--server_token ***" in (log.dir / "command.txt").read_text(encoding="utf-8")
    assert "torch" in (log.dir / "environment.txt").read_text(encoding="utf-8")
    assert list(log.dir.glob("tensorboard/events*"))
    files = [path for path in log.dir.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_completions_keep_every_row_and_reward(make_log):
    log = make_log()
    chat = [{"role": "user", "content": "2 + 2?"}]
    rows = [
        {"prompt": chat, "completion": "4", "rewards": {"exact": 1.0, "format": None}, "finish_reason": "stop"},
        {"prompt": "plain", "completion": "é\n5", "rewards": {"exact": 0.0}, "finish_reason": "length"},
    ]
    log.completions(12, rows)
    log.written()
    back = pyarrow.parquet.read_table(log.dir / "completions" / "step_000012.parquet").to_pylist()
    assert json.loads(back[0]["prompt"]) == chat and back[1]["prompt"] == "plain"
    assert [row["completion"] for row in back] == ["4", "é\n5"]
    assert [row["rewards/exact"] for row in back] == [1.0, 0.0]
    assert [row["rewards/format"] for row in back] == [None, None]


def test_samples_are_printed_now_and_then(make_log, capsys):
    log = make_log(print_samples_every=2)
    row = {"prompt": [{"role": "user", "content": "2 + [b]2?"}], "completion": "x" * 5000, "rewards": {"exact": 1.0}}
    for step in (1, 2, 3):
        log.sample(step, [row | {"reward": 1.0, "finish_reason": "length"}])
    printed = capsys.readouterr().out
    assert printed.count("a sample of step") == 2 and "step 2 " not in printed
    assert "user: 2 + [b]2?" in printed and "(3500 more characters)" in printed and "exact 1" in printed


def test_of_logged_steps_that_skip_the_samples_steps_the_next_one_is_printed(make_log, capsys):
    """As with --log_steps 10, and again behind a checkpoint."""
    row = {"prompt": "p", "completion": "c", "reward": 1.0}

    def printed(log, steps) -> list[int]:
        for step in steps:
            log.step(step, {"reward": 1.0, "num_tokens": step, "time/step": 1.0}, [row])
        log.close()
        return [int(step) for step in re.findall(r"a sample of step (\d+)", capsys.readouterr().out)]

    assert printed(make_log(print_samples_every=10), (10, 14, 20, 25, 38)) == [10, 14, 25, 38]
    assert printed(make_log(14, print_samples_every=10, resume=True), (16, 20, 25)) == [25]


def test_a_fault_of_the_report_costs_a_finished_run_nothing_else(make_log, capsys, monkeypatch):
    log = make_log()
    log_step(log, 1)
    monkeypatch.setattr("runlog.log.notes_of", lambda *_: [][-1])
    log.close()
    assert state(log)["state"] == "finished" and log.lock.closed
    assert "report.html could not be made (IndexError: list index out of range)" in capsys.readouterr().err


def test_a_rank_whose_trajectories_all_failed_keeps_no_completion():
    """Its stand-in is none: neither a row of the step's completions nor a 0 among the means."""
    lost = empty_trajectory({"prompt": "?"}, TrainConfig())
    assert completion_rows([lost], [0.0], [0.0], collate([lost], 0, torch.device("cpu"))) == []
    metrics = rollout_metrics.rollout_metrics([lost])
    assert metrics["completions/count"] == 0
    assert not [name for name in metrics if name.startswith(("reward/", "frac_", "completions/m")) or name == "reward"]


def test_the_length_of_held_out_completions_is_what_was_sampled():
    """As that of the trained ones: what tools have answered is not."""
    info = {"rewards": {}, "reward_components": [0.0]}
    t = Trajectory({"prompt": "?"}, 0, [1], [5, 6, 7], [1, 0, 0], [0.0] * 3, [0.0] * 3, info=info)
    metrics = rollout_metrics.eval_metrics([[t]], TrainConfig())
    assert metrics["mean_length"] == 1 and "unrewarded" not in metrics
    without = replace(t, info=info | {"unrewarded": 1})  # a judge that did not answer: the 0 is no measurement
    assert rollout_metrics.eval_metrics([[t, without]], TrainConfig())["unrewarded"] == 1


def test_a_line_of_progress_names_the_number_that_a_run_is_about():
    """With a teacher the distance from it; groups whose rewards are alike are no fault where it is learned from."""
    line = {"step": 1, "reward": 0.0, "frac_reward_zero_std": 1.0}
    taught = line | {"distill/asked": 1.0, "distill/reverse_kl": 3.2649}
    assert "from teacher 3.265" in progress_text(taught, 3) and "silent" not in progress_text(taught, 3)
    assert "silent groups 100%" in progress_text(taught, 3, teaches=False)
    assert "silent groups 100%" in progress_text(line, 3) and "teacher" not in progress_text(line, 3)


def test_a_line_of_two_hundred_domains_is_still_a_line():
    line = {"step": 1, "reward": 0.5, "grad_norm": 1.0} | {f"d{n}/reward": n / 200 for n in range(200)}
    text = progress_text(line, 3)
    assert "d0 0" in text and "d11 0.055  and 188 domains more  grad norm 1" in text and len(text) < 300


def test_phases_add_up_to_the_step():
    line = {"step": 3, "time/update": 3.0, "time/generate": 5.0, "time/mine": 1.0, "time/step": 10.0, "time/unix": 1e9}
    assert phases(line) == {"generate": 5.0, "update": 3.0, "mine": 1.0, "other": 1.0}
    text = progress_text(line | {"reward": 0.25, "kl": None}, 30)
    assert "step 3/30" in text and "reward 0.25" in text and "kl n/a" in text and "generate 50%" in text


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 0, "eval/mean@4": 0.5}],
        [{"step": 1, "reward": None, "reward_std": None, "kl": None}],
        [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75, "reward_std": 0.1, "odd/<key>": -1}],
        [{"step": step, "reward": 0.5, "time/step": 1.0} for step in range(1, 5001)],
        [{"step": 1, "time/": 1.0, "time/__": 1.0, "kl": 0.1, "kl/_": 0.1}],
    ],
    ids=["only an evaluation", "no finite number", "ragged", "long", "nothing in a name"],
)
@pytest.mark.filterwarnings("error")
def test_a_report_of_whatever_is_there(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and len(page) < 2_000_000
    assert "http://" not in page and "https://" not in page and "<key>" not in page


def test_the_report_shows_before_and_after(make_log):
    log = make_log()
    log.eval(0, {"eval/mean@4": 0.04})
    for step in (1, 2):
        log.step(step, {"reward": step / 4, "time/step": 1.0, "time/update": 0.5})
        log.completions(step, [{"prompt": "<b>", "completion": f"answer {step}", "reward": 1.0}])
    log.eval(2, {"eval/mean@4": 0.91})
    log.close()
    page = (log.dir / "report.html").read_text(encoding="utf-8")
    assert "0.04 → 0.91" in page and "answer 1" in page and "answer 2" in page
    assert "&lt;b&gt;" in page and '<td class="t"><b>' not in page
    done = subprocess.run(
        [sys.executable, "-m", "runlog", str(log.dir)], capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0 and "report.html" in done.stdout, done.stderr


def test_a_report_opens_the_first_and_the_last_whole_files_and_no_others(make_log, monkeypatch):
    """A disk that was full has left halves; an opening may take milliseconds, and there is a file for each step."""
    log, opened, real = make_log(), [], samples.opened
    monkeypatch.setattr(samples, "opened", lambda path: opened.append(path.stem) or real(path))
    for step in range(1, 41):
        log.step(step, {"reward": step / 40})
        row = {"prompt": "p", "completion": f"answer {step}.", "reward": 1.0}
        log.completions(step, [row | ({} if step in (2, 39) else {"token_ids": np.arange(3)})])
    log.written()
    for step in (1, 40):
        (log.dir / "completions" / f"step_{step:06d}.parquet").write_bytes(b"PAR1")
    (log.dir / "vocabulary.parquet").touch()
    log.close()
    page = (log.dir / "report.html").read_text(encoding="utf-8")
    assert "answer 2." in page and "answer 39." in page and "Step 3, completion 0" in page and "Step 38," in page
    assert {*opened} == {f"step_{step:06d}" for step in (1, 2, 3, 38, 39, 40)}
    (log.dir / "vocabulary.parquet").unlink()
    (log.dir / "config.json").write_text('{"log_tokens_every": 0}', encoding="utf-8")
    assert report.token_views(log.dir, report.config_of(log.dir)) == ("", "")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), ValueError()])
def test_after_ctrl_c_trackers_come_before_the_report(make_log, error, monkeypatch):
    """Which can be made later; all of it has a few seconds."""
    monkeypatch.setattr(report, "plot_reward", lambda curves: "")  # for which matplotlib is loaded
    log, seen = make_log(), []
    log_step(log, 1)
    log.trackers = [Tracker(None, None, lambda given: seen.append((given, (log.dir / "report.html").exists())))] * 2
    log.close() if error is None else close_all(error)
    page = log.dir / "report.html"
    assert seen == [(None, False) if isinstance(error, KeyboardInterrupt) else (page, True)] * 2 and page.exists()


def test_a_report_of_steps_that_are_logged_now_and_then():
    """With --log_steps 10 each line stands for ten steps; counts of the others are not known."""
    lines = [{"step": step, "reward": -1.0, "time/step": 3.0, "rollout/failed": 2} for step in (10, 20)]
    shown = report.tiles(Curves(lines))
    assert "best -1.00, 20 steps" in shown and "60 s" in shown and "by 2 logged ones" in shown
    assert "logged" not in report.tiles(Curves([line | {"step": n} for n, line in enumerate(lines, 1)]))
    (note,) = advice.failures(Curves(lines), {"log_steps": 10})
    assert "in the last 2 logged steps, of 4 in all logged ones." in note["text"]
    lines = [{"step": 10 * n, "value/explained_variance": 0.0} for n in range(1, 17)]
    (note,) = advice.failures(Curves(lines), {"critic_iterations": 2})
    assert "after 320 updates" in note["text"]


def test_the_same_question_stands_in_both_columns(make_log):
    """In the first evaluation all completions of the first row had failed."""
    log = make_log()
    for step, numbers in ((0, (1, 2)), (4, (0, 1, 2))):
        log.eval(step, {"eval/reward": 0.0}, [{**held_out_row(n), "completion": f"{n} after {step}"} for n in numbers])
    log.close()
    found = re.findall(r"(\d) after (\d)", report.before_and_after(log.dir))
    assert found == [("1", "0"), ("1", "4"), ("2", "0"), ("2", "4")]
    assert report.side_by_side([[{"reward": 1}], [{"reward": 2}, {}]]) == [[{"reward": 1}, {"reward": 2}]]


def held_out_row(number: int) -> dict:
    return {"prompt": f"question {number}", "reward": 0.0, "row_number": number}


def test_a_point_of_many_steps_for_which_it_does_not_hold():
    """It held at the first 14 steps; the last point stands for 86."""
    assert advice.since(np.array([*range(1, 15), 100.0]), np.array([True] * 14 + [False])) is None


def test_small_numbers_and_ratios_near_1_are_written_at_their_axis(tmp_path):
    """Not as 1e-7 + 1 above it, through the legend; and rounding is not drawn as if it were a curve."""
    lines = [{"step": n, "sampling/ratio_mean": 1 + 1e-7 * (-1) ** n, "sampling/ess": 1.0} for n in (1, 2, 3)]
    curves = Curves([line | {"sampling/logprob_diff_mean": 4e-6 / line["step"]} for line in lines])
    for keys, wanted in (("ratio_mean ess", {"1.0004", "0.9996"}), ("logprob_diff_mean", {"4e-06"})):
        page = plot_panel(curves, {f"sampling/{key}": key for key in keys.split()})
        drawn = base64.b64decode(re.search(r"base64,([^\"]+)", page)[1]).decode()
        texts = {text.strip() for text in re.findall(r"<!--(.*?)-->", drawn)}  # what the paths of letters spell
        assert wanted <= texts and not any("+1" in text or text == "1e-6" for text in texts), texts


def test_a_damaged_folder_has_a_report_or_a_reason(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_id": "m', encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n', encoding="utf-8")
    report.main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rew\n{"step": 2, "reward": 0.5}\n', encoding="utf-8")
    with pytest.raises(SystemExit, match="report: .*line 1 is no line of metrics.*Remove the line"):
        report.main([str(tmp_path)])


def test_no_report_of_nothing(tmp_path):
    assert write_report(tmp_path) is None


HOSTILE = "# no heading <script>alert(1)</script>\n\x1b[2J" + "long " * 1000


def sampled(log, step):
    turns = [{"text": "first", "observation": ["an answer"], "calls": [], "reward": 0.0}, {"text": "last"}]
    turns[1] |= {"observation": [], "calls": [], "reward": 1.0}
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "completion": HOSTILE, "reward": 1.0, "advantage": 0.5}
    rows = [row | {"length": np.int32(3), "finish_reason": "stop", "rewards/exact": None}, row | {"turns": turns}]
    rows[1] |= {"rewards/late": 0.5, "verdict": "short", "mixed": 7, "token_ids": np.arange(3)}
    rows[0] |= {"mixed": "none", "judged": ["a", 1]}
    log.step(step, {"reward": step / 4}, rows)


def test_wandb_offline_keeps_the_run(make_log, monkeypatch):
    """Metrics, settings, samples as a table, the report as an artefact; a resumed run is the same run."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = make_log(report_to=["wandb"], print_samples_every=1)
    sampled(log, 1)
    log.close()
    log = make_log(resume_step=1, resume=True, report_to=["wandb"])
    log_step(log, 2)
    log.close()
    runs = sorted(log.dir.glob("wandb/offline-run-*/*.wandb"))
    name = (log.dir / "wandb_id.txt").read_text(encoding="utf-8")
    assert len(runs) == 2 and all(name in run.name for run in runs)
    recorded = runs[0].read_bytes()
    assert b"prompts_per_step" in recorded and f"report-{name}".encode() in recorded
    (table,) = log.dir.glob("wandb/offline-run-*/files/media/table/*.table.json")
    table = json.loads(table.read_text(encoding="utf-8"))
    assert table["columns"][:4] == ["step", "prompt", "completion", "reward"] and len(table["data"]) == 2
    assert table["data"][0][:4] == [1, "user: 2 + 2?", table["data"][0][2], 1.0] and "\x1b" not in table["data"][0][2]
    assert table["data"][1][2] == "first\nan answer\nlast" and "more characters" in table["data"][0][2]
    # What reward functions gave to log_extra, on any of the rows.
    assert table["columns"][7:] == ["rewards/exact", "rewards/late", "mixed", "judged", "verdict"]
    assert table["data"][0][7:] == [None, None, "none", '["a", 1]', None]
    assert table["data"][1][7:] == [None, 0.5, "7", None, "short"]


def test_tensorboard_gets_samples_as_text_that_is_no_markup(make_log):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = make_log(report_to=["tensorboard"], print_samples_every=2)
    for step in (1, 2, 3):
        sampled(log, step)
    log.close()
    events = EventAccumulator(str(log.dir / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("reward")] == [0.25, 0.5, 0.75]
    texts = events.Tensors("completion 0/text_summary")
    assert [text.step for text in texts] == [1, 3]
    (text,) = texts[0].tensor_proto.string_val
    assert all(line.startswith("    ") for line in text.decode().split("\n")) and b"\x1b" not in text
    assert b"    mixed: none" in text


def test_a_missing_trackio_is_named_with_what_to_install(make_log, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    listed = (Path(__file__).parent.parent / "requirements-optional.txt").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="trackio is not installed; pip install --no-deps trackio==") as refused:
        make_log(report_to=["trackio"])
    assert str(refused.value).partition("; ")[2] in listed


def test_trackio_offline_keeps_the_run(make_log, monkeypatch, tmp_path):
    pytest.importorskip("trackio")  # no package of requirements-optional.txt: see there
    import trackio.utils

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    log = make_log(report_to=["trackio"], print_samples_every=1)
    sampled(log, 1)
    log.close()
    log = make_log(resume_step=1, resume=True, report_to=["trackio"])
    log_step(log, 2)
    log.close()
    (file,) = tmp_path.glob("trackio/grpo.db")
    with sqlite3.connect(file) as base:
        written = [json.loads(values) for (values,) in base.execute("select metrics from metrics order by id")]
        settings = [json.loads(values) for (values,) in base.execute("select config from configs")][-1]
        assert len(base.execute("select distinct run_id from metrics").fetchall()) == 1  # of one run, resumed
    assert written[0]["reward"] == 0.25 and written[1]["completions"]["_value"][1]["completion"].startswith("first")
    assert settings["prompts_per_step"] == 32


def test_wandb_without_login_is_an_early_error(tmp_path):
    code = f"""
from config import TrainConfig
from rollouts import Trajectory
from runlog.log import RunLog
RunLog(TrainConfig(run_name="run", output_dir={str(tmp_path)!r}, report_to=["wandb"]))
"""
    hidden = ("WANDB_API_KEY", "WANDB_MODE")
    env = {key: value for key, value in os.environ.items() if key not in hidden} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, encoding="utf-8"
    )
    assert done.returncode != 0 and "WANDB_MODE=offline" in done.stderr, done.stderr


# ---- a disk that is full --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB; fill(whether) takes what is left of it, or gives it back."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no mounts allowed here")

    def fill(full: bool) -> None:
        (place / "filler").unlink(missing_ok=True)
        with contextlib.suppress(OSError), open(place / "filler", "wb", buffering=0) as file:
            while full:
                file.write(bytes(1000))

    yield place, fill
    subprocess.run(["umount", "-l", str(place)], check=True)


def many(step: int) -> dict:
    return {"reward": step / 100, "num_tokens": 100 * step, "time/step": 1.0} | {f"own/{n}": 1 / 3 for n in range(40)}


def told(log) -> dict:
    return json.loads((log.dir / "state.json").read_text(encoding="utf-8"))


def test_a_full_disk_costs_no_line_and_no_completion(small_disk, capsys):
    place, fill = small_disk
    log = RunLog(TrainConfig(run_name="run", output_dir=str(place), max_steps=12))
    for step in range(1, 13):
        if step in (3, 9):
            fill(step == 3)
        log.step(step, many(step), [{"prompt": "p", "completion": "c" * 3000, "reward": 1.0}] if step in (5, 6) else [])
        time.sleep(0.05)  # the table is written beside
        lines = log.metrics_path.read_bytes()
        assert lines.endswith(b"\n") and len(read_metrics(log.dir)) <= step
        assert told(log)["step"] == step  # also while there is no room for another file
    said = capsys.readouterr().err
    assert str(log.metrics_path) in said and "Free some space" in said and "Training goes on" in said
    assert "step_000005.parquet" in said and said.count("\n") < 10
    log.close()
    assert [line["step"] for line in read_metrics(log.dir)] == list(range(1, 13)) and told(log)["state"] == "finished"
    assert len(list(log.dir.glob("completions/*.parquet"))) == 2 and not list(log.dir.rglob("*.partial"))
    assert (log.dir / "report.html").exists()


def test_a_disk_that_stays_full_is_an_error_that_names_file_and_remedy(small_disk, capsys):
    place, fill = small_disk
    log = RunLog(TrainConfig(run_name="run", output_dir=str(place), max_steps=60))
    log.step(1, many(1))
    fill(True)
    for step in range(2, 20):
        log.step(step, many(step))
    for act in (log.written, log.close):  # before a checkpoint, and at the end
        with pytest.raises(
            OSError, match=r"lines of .*run/metrics.jsonl could not be written \(No space left"
        ) as raised:
            act()
        assert "Free some space" in str(raised.value) and "--resume" in str(raised.value)
    assert told(log)["state"] == "failed" and "metrics.jsonl" in told(log)["why"]
    assert "python -m runlog" in capsys.readouterr().err and not (log.dir / "report.html").exists()
    steps = [line["step"] for line in read_metrics(log.dir)]
    assert steps == list(range(1, len(steps) + 1)) and not list(log.dir.rglob("*.partial"))
    with pytest.raises(ConfigError, match="could not be written .*--output_dir"):
        RunLog(TrainConfig(run_name="other", output_dir=str(place)))


def test_a_limit_on_file_sizes_tears_no_line(tmp_path):
    """RLIMIT_FSIZE: the part of a line that fits is written, the rest is not."""
    code = f"""
import resource, signal, sys
from pathlib import Path
from runlog.disk import Lines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
lines = Lines(Path({str(tmp_path / "lines")!r}))
errors = [lines.add("x" * 299) for _ in range(5)]
assert [bool(error) for error in errors] == [False] * 3 + [True] * 2, errors
assert Path(lines.path).read_text(encoding="utf-8") == ("x" * 299 + "\\n") * 3
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
assert lines.add("last") is None and not lines.waiting
assert Path(lines.path).read_text(encoding="utf-8") == ("x" * 299 + "\\n") * 5 + "last\\n"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr


# ---- what models and data sets put into it --------------------------------------------------------------------------

ODD = st.text(st.one_of(st.characters(), st.sampled_from("\ud83d\ude00\x00\x1b\x9b\r\u202e$_<&\n"))).map(str)
HUGE = st.booleans().map(lambda _: 10**5000)  # such a number has no text
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | ODD
    | st.binary()
    | st.builds(object)
    | st.booleans().map(lambda _: 10**5000),
    lambda inner: st.lists(inner) | st.dictionaries(ODD | st.integers() | st.tuples(st.integers(), ODD), inner),
    max_leaves=8,
)
OBSERVATION = st.none() | st.lists(st.fixed_dictionaries({"content": ANYTHING, "role": ODD}), max_size=2)
CALL = st.fixed_dictionaries(
    {"name": ODD, "seconds": st.floats(0, 9), "failed": st.booleans()},
    optional={"written": ODD, "arguments": ANYTHING, "result": ANYTHING, "cached": st.booleans()},
)
TURN = st.fixed_dictionaries(
    {"text": ODD, "reward": st.floats(), "observation": OBSERVATION}
    | {"info": st.fixed_dictionaries({"calls": st.lists(CALL, max_size=2)})}
)
PROMPT = ODD | st.lists(st.fixed_dictionaries({"role": ODD, "content": ANYTHING}), max_size=2) | ANYTHING


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(PROMPT, ODD, st.floats(), st.lists(TURN, max_size=2), ODD), min_size=1, max_size=3), ODD)
def test_whatever_was_sampled_can_be_stored_and_shown(tmp_path_factory, capsys, sampled, name):
    """completion_rows -> parquet -> terminal -> report, with names of rewards and metrics as odd as the texts."""
    trajectories = []
    for prompt, completion, reward, turns, finish in sampled:
        info = {"completion": completion, "rewards": {name: reward}, "row_number": 0}
        info |= {"turns": turns} if turns else {}
        made = Trajectory({"prompt": prompt}, 0, [1], [2], [1], [0.0], [0.0], finish_reason=finish, info=info)
        trajectories.append(made)
    rows = completion_rows(trajectories, [reward for _, _, reward, _, _ in sampled], [None] * len(sampled))
    log = RunLog(TrainConfig(run_name="run", output_dir=str(tmp_path_factory.mktemp("odd"))))
    log.step(1, {f"rewards/{name}": 1e308, f"tools/{name}/seconds": 10**400, f"time/{name}": 1.0}, rows)
    log.eval(1, {f"eval/rewards/{name}/mean": 0.5, "eval/mean@4": -1e308}, evaluation_rows(trajectories, {}, log.cfg))
    log.close()
    back = pyarrow.parquet.read_table(log.dir / "completions" / "step_000001.parquet").to_pylist()
    assert len(back) == len(rows)
    for row, (_, completion, *_) in zip(back, sampled, strict=True):
        assert row["completion"] == completion.encode("utf-8", "backslashreplace").decode()
    page = (log.dir / "report.html").read_text(encoding="utf-8")
    shown = capsys.readouterr().out + page
    assert "report.html" in shown and not set(shown) & {chr(c) for c in (0, 7, 8, 0x1B, 0x9B)}


def test_a_completion_of_a_megabyte_is_kept_whole_and_shown_short(make_log, capsys):
    log, text = make_log(), "\ud83d" + "long \x1b[2J" * 100_000
    log.step(1, {"reward": 1.0}, [{"prompt": "[" * 5000, "completion": text, "reward": 1.0}])
    log.written()
    (row,) = pyarrow.parquet.read_table(log.dir / "completions" / "step_000001.parquet").to_pylist()
    assert row["completion"] == "\\ud83d" + text[1:] and row["prompt"] == "[" * 5000
    log.close()
    assert len((log.dir / "report.html").read_text(encoding="utf-8")) < 200_000
    assert "\x1b[2J" not in capsys.readouterr().out


def test_what_turns_the_direction_of_text_is_spelled_out_on_the_terminal(make_log, capsys):
    """After U+202E a terminal shows "gnorw" for what reads right; all such characters are invisible."""
    turning = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    text, log = f"right {turning}gnorw", make_log()
    log.step(1, {"reward": 1.0}, [{"prompt": "\u05d0 \u202e?", "completion": text, "reward": 1.0, "answer": text}])
    utils.print_failure(RuntimeError(f"reward of {text}"), log.cfg)
    shown = "".join(capsys.readouterr())
    assert not set(shown) & set(turning) and "gnorw" in shown and r"\u202e" in shown and "\u05d0" in shown


def test_a_loop_around_a_run_knows_what_another_try_would_not_change(make_log, tmp_path):
    cfg = make_log().cfg
    with pytest.raises(ConfigError, match="in use") as busy:
        claim_run(replace(cfg, resume=True))
    with pytest.raises(ConfigError) as lora:
        train_grpo.load_policy(TrainConfig(model_id="models/tiny", use_peft=True, lora_targets=["no"]), None)
    with pytest.raises(ConfigError, match="unterminated character set"):
        train_grpo.load_policy(TrainConfig(model_id="models/tiny", use_peft=True, lora_targets=[".*[qv_proj"]), None)
    assert "--lora_targets no: " in str(lora.value) and "linear layers: ['down_proj'" in str(lora.value)
    errors = lora.value, busy.value, RuntimeError("of a reward"), ConfigError("--reward_funcs nope")
    assert [utils.print_failure(error, cfg) for error in errors] == [2, 1, 1, 2]


def test_a_diff_that_is_not_utf_8_is_kept(make_log, tmp_path, monkeypatch):
    here = tmp_path / "repository"
    here.mkdir()
    git = ["git", "-C", str(here), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        (here / "own.py").write_bytes(b"# coding: latin-1\n")
        subprocess.run([*git, *command], check=True)
    (here / "own.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    monkeypatch.setattr(sys, "argv", [str(here / "own.py")])
    assert b"\xe9" in (make_log().dir / "git.diff").read_bytes()


def test_columns_of_several_types_become_text(make_log):
    log = make_log()
    log.completions(1, [{"a": 1, "b": {("x", 1): object}, (1, 2): "c"}, {"a": "one", "b": [b"\xff"], (1, 2): None}])
    log.written()
    one, two = pyarrow.parquet.read_table(log.dir / "completions" / "step_000001.parquet").to_pylist()
    assert (one["a"], two["a"]) == ("1", "one") and one["(1, 2)"] == "c"
    assert json.loads(one["b"]) == {"('x', 1)": "<class 'object'>"} and json.loads(two["b"]) == ["b'\\xff'"]


# ---- one run, one folder --------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_names_the_process(make_log, tmp_path):
    log = make_log()
    log.step(1, {"reward": 0.0})
    before = {path.name: path.read_bytes() for path in log.dir.iterdir() if path.is_file()}
    for more in ({}, {"resume": True}):
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on {socket.gethostname()} since 20"):
            make_log(resume_step=1 if more else None, **more)
    assert before == {path.name: path.read_bytes() for path in log.dir.iterdir() if path.is_file()}
    log.close()
    make_log(resume_step=1, resume=True)


def test_the_lock_ends_with_the_process_and_not_with_its_children(tmp_path):
    code = f"""
import os, time
from config import TrainConfig
from runlog.log import RunLog
log = RunLog(TrainConfig(run_name="run", output_dir={str(tmp_path)!r}))
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout.readline() == "ready\n"
        (child,) = psutil.Process(process.pid).children()
        try:
            with pytest.raises(ConfigError, match=f"in use by process {process.pid} on"):
                RunLog(TrainConfig(run_name="run", output_dir=str(tmp_path)))
            process.kill()
            process.wait()
            RunLog(TrainConfig(run_name="run", output_dir=str(tmp_path))).close()
        finally:
            process.kill()
            child.kill()


def test_copies_of_files_replace_neither_each_other_nor_the_runs_own(make_log, monkeypatch, tmp_path):
    (tmp_path / "here/a").mkdir(parents=True)
    (tmp_path / "here/b").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    wanted = {f"code/{name}": name for name in ("a/r.py", "b/r.py", "metrics.jsonl", "config.json")}
    wanted |= {f"code_elsewhere{tmp_path}/r.py": "../r.py"}
    for name in wanted.values():
        Path(name).write_text(f"{{}}  # {name}", encoding="utf-8")
    own = [{"name": "x", "judge_template": "config.json", "reward_funcs": ["../r.py:f"], "dataset_id": "seeds:9"}]
    own += [{"name": "y", "judge_template": "metrics.jsonl", "reward_funcs": ["a/r.py:f", "b/r.py:g"]}]
    log = make_log(domains=own, dataset_id="seeds:9")
    log_step(log, 1)
    log.close()
    assert {name: (log.dir / name).read_text(encoding="utf-8") for name in wanted} == {
        k: f"{{}}  # {v}" for k, v in wanted.items()
    }
    assert [line["step"] for line in read_metrics(log.dir)] == [1]
    assert json.loads((log.dir / "config.json").read_text(encoding="utf-8"))["dataset_id"] == "seeds:9"


def test_secrets_of_tool_servers_are_nowhere_in_the_folder(make_log, monkeypatch, tmp_path):
    """Nor in what wandb records of the command."""
    hidden = [secrets.token_hex(8) for _ in range(8)] + ["pass\\word"]
    header, variable, argument, query, token, password, remote, short, quoted = hidden
    servers = {
        "a": {"url": f"https://me:{password}@host/mcp?key={query}", "headers": {"Authorization": f"Bearer {header}"}},
        "b": {"command": "serve", "args": ["--api-key", argument, "--port", "80"], "env": {"ANY": variable}},
        "c": {
            "command": "npx",
            "args": ["mcp-remote", "--header", f"Authorization: Bearer {remote}", f"x-token:{short}"],
        },
        "d": {"command": "serve", "env": {"DB_PASSWORD": quoted}},
    }
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["train.py", "--server_token", token, f"--judge_url=http://u:{password}@j/v1"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MY_API_KEY", variable)
    settings = dict(mcp_config=str(tmp_path / "mcp.json"), judge_url=f"http://u:{password}@j/v1")
    log = make_log(server_token=token, report_to=["wandb", "tensorboard"], **settings)
    log_step(log, 1)
    log.close()
    kept = json.loads((log.dir / kept_name(f"{tmp_path}/mcp.json")).read_text(encoding="utf-8"))["mcpServers"]
    assert kept["b"]["args"][2:] == ["--port", "80"] and kept["b"]["env"] == {"ANY": "***"}
    files = [path for path in log.dir.rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix == ".wandb"]
    words = [*hidden, json.dumps(quoted)[1:-1]]  # as a JSON file spells it
    found = [(path.name, words.index(word)) for path in files for word in words if word.encode() in path.read_bytes()]
    assert not found
