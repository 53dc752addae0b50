"""Run folders, read while somebody writes, resumes or deletes them; nothing is changed in them. A file that is torn,
half written or gone is nobody's mistake: what can be read is shown.
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
RECENT = 20  # lines by whose seconds the rest of a run is estimated
STALLED = 900.0  # seconds after which a run of another machine that says nothing is not called running


class Gone(LookupError):
    """There is no such run or file, or not any more."""


def read_json(path: Path) -> dict:
    """What the file says; {} if it is gone or torn."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def stamp(path: Path) -> tuple | None:
    """Changes with the file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Run:
    """A run folder. Methods may be called from several threads."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.kept: tuple = (), None  # what was read of metrics.jsonl, behind the state of the file

    def config(self) -> dict:
        return read_json(self.path / "config.json")

    def lines(self) -> tuple[Curves, list[dict], int]:
        """Its curves, the lines of its first and last steps, and how many steps a point of a curve stands for."""
        mark = stamp(self.path / "metrics.jsonl")
        if mark != self.kept[0]:
            lines, stride = some_lines(self.path)
            steps = [line for line in lines if not is_evaluation(line)]
            self.kept = mark, (Curves(lines), steps[:1] + steps[-RECENT:], stride)
        return self.kept[1]

    def curves(self) -> Curves:
        return self.lines()[0]

    def file(self, *names: str) -> Path:
        """The path of one of the run's files; Gone if there is none."""
        path = self.path.joinpath(*names)
        if not path.is_file():
            raise Gone(f"{self.name} has no {'/'.join(names)}, or not any more.")
        return path

    def held(self) -> bool | None:
        """Whether a process has the run: its lock is taken. None where that cannot be told."""
        try:
            with open(self.path / "lock", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:  # no file, or a file system without locks
            return None

    def state(self) -> tuple[str, str]:
        """(running, finished, failed, interrupted, killed, silent or ended; why, in words)."""
        told = read_json(self.path / "state.json")
        state, host, held = told.get("state", "ended"), told.get("host"), self.held()
        if state != "running":
            return state, str(told.get("why") or "")
        if host == socket.gethostname() and held is not None:
            gone = f"its process ({told.get('pid')}) is gone and could not say why"
            return ("running", "") if held else ("killed", gone)
        quiet = time.time() - (told.get("updated") or 0)
        return ("running", f"on {host}") if quiet < STALLED else ("silent", f"on {host}, for {quiet / 60:.0f} min")

    def summary(self) -> dict:
        """A line of the table."""
        (curves, ends, _), config, told = self.lines(), self.config(), read_json(self.path / "state.json")
        state, why = self.state()
        first, last = (ends[0], ends[-1]) if ends else ({}, {})
        metric = next(iter(curves.matching([*SOLVED, "eval/reward"])), "")
        evaluated, held_out = (values.tolist() for values in curves.all(metric))
        paces = [line["time/step"] for line in ends[1:] if is_number(line.get("time/step"))]
        # Without the first step's seconds: then it began. A resumed run keeps its first line.
        begun = (first.get("time/unix") or 0) - (first.get("time/step") or 0)
        until = last.get("time/unix") or told.get("updated")
        domains = [part["name"] for part in config.get("domains") or ()]
        algorithm = " / ".join(str(config[part]) for part in ("advantage", "policy_loss") if config.get(part))
        return {
            "name": self.name,
            "state": state,
            "why": why[:2000],
            "step": last.get("step", max(evaluated, default=0)),
            "steps": told.get("num_steps") or config.get("max_steps"),
            "task": ", ".join(domains or [str(config[n]) for n in ("dataset_id", "env") if config.get(n)]),
            "algorithm": algorithm,
            "model": Path(str(config.get("model_id") or "")).name,
            "metric": metric.removeprefix("eval/"),
            "first": held_out[0] if held_out else None,
            "last": held_out[-1] if held_out else None,
            "reward": last.get("reward"),
            "seconds": max(0.0, until - begun) if until and begun else None,
            "pace": median(paces) if paces else None,  # seconds of a step
            "tokens_per_second": last.get("time/tokens_per_second"),
            "updated": round(until) if until else None,
        }


class Runs:
    """The run folders below `root`, or `root` itself if it is one."""

    def __init__(self, root: Path):
        self.root = Path(root).resolve()
        self.known: dict[str, Run] = {}

    def all(self) -> list[Run]:
        """Looks again; runs that are still there keep what was read of them."""
        found = {}
        for folder, below, files in os.walk(self.root):
            if MARKS & {*files}:
                below.clear()  # no run is in another one
                name = self.root.name if folder == str(self.root) else os.path.relpath(folder, self.root)
                found[name] = self.known.get(name) or Run(name, Path(folder))
        self.known = found
        return list(found.values())

    def get(self, name: str) -> Run:
        """The run of that name; Gone if it is none of `all`: a name is looked up, never joined to a path."""
        if name not in self.known:
            self.all()
        run = self.known.get(name)
        if run is None or not run.path.is_dir():
            raise Gone(f"There is no run {name!r} in {self.root}, or not any more.")
        return run


def plain(value):
    """The value as JSON has it: no nan, no infinity, six digits."""
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value.tolist()]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value
