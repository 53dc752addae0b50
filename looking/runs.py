"""Run folders, read while somebody writes, resumes or deletes them. Nothing is changed in them, nothing raises for a
file that is torn, half written or gone: what can be read is shown, and what cannot is said.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import socket
import threading
import time
from pathlib import Path

import numpy as np

from runlog.curves import Curves

MARKS = ("metrics.jsonl", "state.json", "config.json")  # one of them makes a folder a run
REMEMBERED = 60  # runs whose curves stay in memory, of 2 to 3 MB each with 2,000 steps
DEPTH = 4  # of run folders below the given one
STALLED = 900.0  # seconds after which a run of another machine that says nothing is not called running


class Gone(LookupError):
    """There is no such run, or not any more."""


class Growing:
    """New whole lines of a file, each time it is asked."""

    def __init__(self, path: Path):
        self.path, self.offset, self.inode = path, 0, None

    def news(self) -> tuple[bool, bytes]:
        """(whether it is another file than before, so that everything comes again; its new lines)."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                anew = status.st_ino != self.inode or status.st_size < self.offset
                if anew:
                    self.offset, self.inode = 0, status.st_ino
                file.seek(self.offset)
                block = file.read()
        except OSError:
            anew, self.offset, self.inode, block = self.inode is not None, 0, None, b""
        block = block[: block.rfind(b"\n") + 1]  # a line without its end is still being written, or torn
        self.offset += len(block)
        return anew, block


def parsed(line: bytes) -> dict | None:
    """A line of metrics, or None."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # also of broken UTF-8
        return None
    ok = isinstance(found, dict) and isinstance(found.get("step"), (int, float)) and abs(found["step"]) < 1e12
    return found if ok else None


def read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def stamp(path: Path) -> tuple | None:
    """Changes with the file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Summary:
    """What the table says of a run: from its first line, its last and its evaluations; no other line is parsed."""

    def __init__(self, path: Path):
        self.file = Growing(path)
        self.clear()

    def clear(self) -> None:
        self.first, self.last, self.held_out, self.metric = None, {}, {}, None

    def update(self) -> None:
        anew, block = self.file.news()
        if anew:
            self.clear()
        if not block:
            return
        self.first = self.first or parsed(block[: block.find(b"\n")])
        found = -1
        while (found := block.find(b'"eval/', found + 1)) >= 0:
            end = block.find(b"\n", found)
            line = parsed(block[block.rfind(b"\n", 0, found) + 1 : end]) or {}
            self.metric = self.metric or next((name for name in line if re.fullmatch(r"eval/mean@\d+", name)), None)
            name = self.metric if self.metric in line else "eval/reward"
            if isinstance(line.get(name), (int, float)):
                self.metric = name
                self.held_out[line["step"]] = line[name]
            found = end
        for line in reversed(block[-65536:].split(b"\n")):
            if b'"eval/' not in line and (step := parsed(line)):
                self.last = step
                break


class Run:
    """A run folder. Methods may be called from several threads."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.lock = threading.RLock()
        self.summarized = Summary(path / "metrics.jsonl")
        self.metrics_file, self.curves_read, self.unreadable = Growing(path / "metrics.jsonl"), Curves(), 0
        self.settings: tuple = (None, {})
        self.lock_seen: tuple = (None, False)

    def config(self) -> dict:
        mark = stamp(self.path / "config.json")
        if mark != self.settings[0]:
            self.settings = mark, read_json(self.path / "config.json")
        return self.settings[1]

    def curves(self) -> Curves:
        """All metrics so far."""
        with self.lock:
            anew, block = self.metrics_file.news()
            if anew:
                self.curves_read, self.unreadable = Curves(), 0
            elif block:
                self.curves_read = self.curves_read.copy()  # another thread may be reading what it got
            lines = [parsed(line) for line in block.split(b"\n") if line.strip()]
            self.unreadable += lines.count(None)
            self.curves_read.add(line for line in lines if line is not None)
            return self.curves_read

    def forget(self) -> None:
        """Free the memory of its curves; they are read again when somebody asks."""
        with self.lock:
            self.metrics_file, self.curves_read = Growing(self.path / "metrics.jsonl"), Curves()

    def file(self, *names: str) -> Path:
        """A file of the run; Gone if there is none, or if a link leads out of the folder."""
        path = self.path.joinpath(*names)
        if not path.is_file() or not path.resolve().is_relative_to(self.path):
            raise Gone(f"{self.name} has no {'/'.join(names)}, or not any more.")
        return path

    def version(self) -> tuple:
        """Changes when there is something new."""
        names = ("metrics.jsonl", "state.json", "config.json", "lock", "completions", "evaluations")
        return tuple(stamp(self.path / name) for name in names)

    def held(self) -> bool:
        """Whether a process has the run: its lock is taken.

        Trying takes the lock for an instant. One that was found free is not tried again until its file changes, as it
        does when a process takes it: a trainer that is about to start meets nobody here.
        """
        path = self.path / "lock"
        mark = stamp(path)
        if mark is None or (self.lock_seen[0] == mark and not self.lock_seen[1]):
            return False
        try:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
        except OSError:  # a file system without locks, or no right to open it
            held = False
        self.lock_seen = mark, held
        return held

    def state(self) -> tuple[str, str]:
        """(running, finished, failed, interrupted, killed, silent or ended; why, in words)."""
        told = read_json(self.path / "state.json")
        state, why = told.get("state"), str(told.get("why") or "")
        if state in ("finished", "failed", "interrupted"):
            return state, why
        if state == "running":
            if told.get("host") in (None, socket.gethostname()):
                if self.held():
                    return "running", ""
                return "killed", f"its process ({told.get('pid')}) is gone and could not say why"
            quiet = time.time() - (told.get("updated") or 0)
            if quiet < STALLED:
                return "running", f"on {told['host']}"
            return "silent", f"on {told['host']}; nothing new for {quiet / 60:.0f} min"
        if self.held():
            return "running", ""
        with self.lock:
            self.summarized.update()
        if not self.summarized.last and not self.summarized.held_out:
            return "ended", "before its first step"
        last, steps = self.summarized.last.get("step", 0), self.config().get("max_steps")
        if isinstance(steps, (int, float)) and last >= steps:
            return "finished", ""
        return "ended", f"at step {last:g}" + (f" of {steps}" if steps else "")

    def summary(self) -> dict:
        """A line of the table."""
        with self.lock:
            self.summarized.update()
            first, last, held_out = self.summarized.first or {}, self.summarized.last, self.summarized.held_out
            config, (state, why) = self.config(), self.state()
        told = read_json(self.path / "state.json")
        begun = (first.get("time/unix") or 0) - (first.get("time/step") or 0)  # of a resumed run, too
        until = last.get("time/unix") or told.get("updated")
        steps = max(held_out) if held_out else None
        return {
            "name": self.name,
            "state": state,
            "why": why[:2000],
            "step": last.get("step", max(held_out, default=0)),
            "steps": told.get("num_steps") or config.get("max_steps"),
            "task": task(config),
            "algorithm": algorithm(config),
            "model": Path(str(config.get("model_id") or "")).name,
            "metric": (self.summarized.metric or "").removeprefix("eval/"),
            "first": held_out[min(held_out)] if held_out else None,
            "last": held_out[steps] if held_out else None,
            "best": max(held_out.values(), default=None),
            "reward": last.get("reward"),
            "seconds": max(0.0, until - begun) if until and begun else None,
            "tokens_per_second": last.get("time/tokens_per_second"),
            "updated": round(until) if until else None,
        }


def task(config: dict) -> str:
    listed = config.get("domains")
    named = [part.get("name") if isinstance(part, dict) else part for part in listed or () if listed]
    return ", ".join(str(part) for part in named or (config.get("dataset_id"), config.get("env")) if part)


def algorithm(config: dict) -> str:
    parts = [config.get("advantage"), config.get("policy_loss")]
    name = " / ".join(str(part) for part in parts if part)
    return f"{config['preset']} ({name})" if config.get("preset") else name


class Runs:
    """The run folders below `root`, or `root` itself if it is one."""

    def __init__(self, root: Path):
        self.root = Path(root).resolve()
        self.known: dict[str, Run] = {}
        self.recent: list[Run] = []
        self.lock = threading.Lock()

    def all(self) -> list[Run]:
        """Looks again; runs that are still there keep what was read of them."""
        found = dict(self.paths())
        with self.lock:
            self.known = {name: self.known.get(name) or Run(name, path) for name, path in found.items()}
            return list(self.known.values())

    def paths(self):
        if any((self.root / mark).is_file() for mark in MARKS):
            yield self.root.name, self.root
            return
        level = [self.root]
        for _ in range(DEPTH):
            below = []
            for folder in level:
                try:
                    inside = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
                except OSError:
                    continue
                for entry in inside:
                    if any(os.path.isfile(os.path.join(entry.path, mark)) for mark in MARKS):
                        yield os.path.relpath(entry.path, self.root), Path(entry.path)
                    elif not entry.name.startswith("."):
                        below.append(entry.path)
            level = below

    def get(self, name: str) -> Run:
        """The run of that name; Gone if it is none of `all`: a name is looked up, never joined to a path."""
        if name not in self.known:
            self.all()
        run = self.known.get(name)
        if run is None or not run.path.is_dir():
            raise Gone(f"There is no run {name!r} in {self.root}, or not any more.")
        with self.lock:
            self.recent = [*(one for one in self.recent if one is not run), run]
            forgotten, self.recent = self.recent[:-REMEMBERED], self.recent[-REMEMBERED:]
        for one in forgotten:
            one.forget()
        return run


def digest(*parts) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "replace")).hexdigest()[:16]


def plain(value):
    """The value as JSON has it: no nan, no infinity, six digits."""
    if isinstance(value, np.ndarray):
        with np.errstate(all="ignore"):
            scale = 10.0 ** (5 - np.floor(np.log10(np.abs(value))))
            rounded = np.where(np.isfinite(scale) & (scale > 0), np.rint(value * scale) / scale, value)
        rounded = np.where(np.rint(value) == value, value, rounded)
        return rounded.tolist() if np.isfinite(rounded).all() else [plain(one) for one in rounded.tolist()]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value
