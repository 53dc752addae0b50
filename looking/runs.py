"""Reads run folders, which others may write, resume or delete meanwhile; and changes nothing in them. A broken,
incomplete or missing file is no error: the page shows what can be read.
"""

import fcntl
import json
import math
import os
import socket
import time
from pathlib import Path
from statistics import median

import numpy as np

from runfiles.reading import SOLVED, Curves, is_evaluation, is_number, some_lines

MARKS = {"metrics.jsonl", "state.json", "config.json"}  # one of them makes a folder a run
RECENT = 20  # last lines, whose seconds give the estimate of a run's remaining time
STALLED = 900.0  # seconds without an update after which a run of another machine no longer counts as running


class Gone(LookupError):
    """The run or file does not exist, or no longer does."""


def read_json(path: Path) -> dict:
    """The file's JSON object; {} if it is gone or incomplete."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def stamp(path: Path) -> tuple | None:
    """A value that changes with the file; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Run:
    """A run folder. Methods may be called from several threads."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.kept: tuple = (), None  # (stamp of metrics.jsonl, what was read of it)

    def config(self) -> dict:
        return read_json(self.path / "config.json")

    def lines(self) -> tuple[Curves, list[dict], int]:
        """(curves, the lines of the first and the last steps, how many steps a point of a curve stands for)"""
        mark = stamp(self.path / "metrics.jsonl")
        if mark != self.kept[0]:
            lines, stride = some_lines(self.path)
            steps = [line for line in lines if not is_evaluation(line)]
            self.kept = mark, (Curves(lines), steps[:1] + steps[-RECENT:], stride)
        return self.kept[1]

    def curves(self) -> Curves:
        return self.lines()[0]

    def held(self) -> bool | None:
        """Whether a process holds the run's lock; None if unknown."""
        try:
            with open(self.path / "lock", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:  # no file, or a file system without locks
            return None

    def state(self) -> tuple[str, str]:
        """(running, finished, failed, interrupted, killed, silent, unfinished or ended; why, in words)."""
        record, steps = read_json(self.path / "state.json"), self.config().get("max_steps")
        state, host, is_held = record.get("state", "ended"), record.get("host"), self.held()
        if not record and is_number(steps):  # train_minimal.py's, which says no more
            step = max((line["step"] for line in self.lines()[1]), default=0)
            return ("finished", "") if step >= steps else ("unfinished", f"at step {step} of {steps}")
        if state != "running":
            return state, str(record.get("why") or "")
        if host == socket.gethostname() and is_held is not None:
            gone = f"its process ({record.get('pid')}) is gone and could not say why"
            return ("running", "") if is_held else ("killed", gone)
        silence = time.time() - (record.get("updated") or 0)
        return ("running", f"on {host}") if silence < STALLED else ("silent", f"on {host}, for {silence / 60:.0f} min")

    def summary(self) -> dict:
        """The run's line in the table."""
        (curves, ends, _), config, record = self.lines(), self.config(), read_json(self.path / "state.json")
        state, why = self.state()
        first, last = (ends[0], ends[-1]) if ends else ({}, {})
        metric = next(iter(curves.names_like([*SOLVED, "eval/reward"])), "")
        evaluated, held_out = (values.tolist() for values in curves.all(metric))
        paces = [line["time/step"] for line in ends[1:] if is_number(line.get("time/step"))]
        # The first line is the end of the first step; a resumed run keeps that line.
        start = (first.get("time/unix") or 0) - (first.get("time/step") or 0)
        end = last.get("time/unix") or record.get("updated")
        domains = [part["name"] for part in config.get("domains") or ()]
        algorithm = " / ".join(str(config[part]) for part in ("advantage", "policy_loss") if config.get(part))
        return {
            "name": self.name,
            "state": state,
            "why": why[:2000],
            "step": last.get("step", max(evaluated, default=0)),
            "steps": record.get("num_steps") or config.get("max_steps"),
            "task": ", ".join(domains or [str(config[n]) for n in ("dataset_id", "env") if config.get(n)]),
            "algorithm": algorithm,
            "model": Path(str(config.get("model_id") or "")).name,
            "metric": metric.removeprefix("eval/"),
            "first": held_out[0] if held_out else None,
            "last": held_out[-1] if held_out else None,
            "reward": last.get("reward"),
            "seconds": max(0.0, end - start) if end and start else None,
            "pace": median(paces) if paces else None,  # seconds of a step
            "tokens_per_second": last.get("time/tokens_per_second"),
            "updated": round(end) if end else None,
        }


class Runs:
    """The run folders below `root`, or `root` itself if it is one."""

    def __init__(self, root: Path):
        self.root = Path(root).resolve()
        self.known: dict[str, Run] = {}

    def all(self) -> list[Run]:
        """Look for runs again; known runs keep what was read of them."""
        runs = {}
        for folder, subfolders, files in os.walk(self.root):
            if MARKS & {*files}:
                subfolders.clear()  # a run contains no other run
                name = self.root.name if folder == str(self.root) else os.path.relpath(folder, self.root)
                runs[name] = self.known.get(name) or Run(name, Path(folder))
        self.known = runs
        return list(runs.values())

    def get(self, name: str) -> Run:
        """The run of that name; Gone if `all` does not have it. A name is only looked up, never joined to a path."""
        if name not in self.known:
            self.all()
        run = self.known.get(name)
        if run is None or not run.path.is_dir():
            raise Gone(f"There is no run {name!r} in {self.root}, or not any more.")
        return run


def plain(value):
    """The value for JSON: without nan and infinity, numbers with six digits."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value
