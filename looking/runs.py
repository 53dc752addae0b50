"""Run folders, read while somebody writes, resumes or deletes them. Nothing is changed in them, nothing raises for a
file that is torn, half written or gone: what can be read is shown, and what cannot is said. What is no regular file, or
lies outside of the run folder behind a link, is not opened: `Unreadable`. Such a run is the only one that suffers.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import BinaryIO

import numpy as np
import psutil

from runlog.curves import Curves, is_number
from runlog.samples import Unreadable, Vocabulary, steps_in, vocabulary
from safety.storable import text_of

METRICS = "metrics.jsonl"
MARKS = (METRICS, "state.json", "config.json")  # one of them makes a folder a run
REMEMBERED = 60  # runs whose curves stay in memory, of 2 MB each with 2,000 steps and at most 6
KEPT = 4096  # points of a metric that stay in memory; of longer runs some stand for several steps
BLOCK = 4 << 20  # bytes of metrics that are read at a time
TAIL = 256  # bytes before what is new by which a file is known again
DEPTH = 4  # of run folders below the given one
MAX_JSON = 16 << 20  # bytes of config.json and state.json
RECENT = 20  # steps by whose seconds the rest of a run is estimated
SETTLED = 2.0  # seconds after which what is new in a folder changes its time: some file systems' clocks are coarse
STALLED = 900.0  # seconds after which a run of another machine that says nothing is not called running


class Gone(LookupError):
    """There is no such run, or not any more."""


def opened(folder: Path, *names: str) -> BinaryIO:
    """A file of the run folder, to be read.

    FileNotFoundError if there is none; Unreadable if it is no regular file (to open a FIFO waits for its writer, and a
    device has no end), or if a link leads out of the folder: what is behind it was not handed over.
    """
    path, name = folder.joinpath(*names), "/".join(names)
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder):
            raise Unreadable(f"{name} is a link that leads out of the run folder, and is not followed.")
        if not stat.S_ISREG(real.stat().st_mode):
            raise Unreadable(f"{name} is no regular file.")
        return os.fdopen(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(name) from None
    except (OSError, RuntimeError) as error:  # no right to read it, a disk that fails; links in a circle
        raise Unreadable(f"{name} cannot be read ({getattr(error, 'strerror', None) or error}).") from None


class Growing:
    """New whole lines of a run's metrics.jsonl, some BLOCK at a time. Raises Unreadable.

    Whether a resumed run has written the file anew is seen by the last bytes that were read of it, too: the file system
    may give the inode of the file before last to the next one, which may be longer than what was read.
    """

    def __init__(self, folder: Path):
        self.folder, self.offset, self.inode, self.tail = folder, 0, None, b""

    def news(self) -> tuple[bool, bytes]:
        """(whether it is another file than before, so that everything comes again; its next lines, none at the end)."""
        try:
            with opened(self.folder, METRICS) as file:
                status = os.fstat(file.fileno())
                file.seek(self.offset - len(self.tail))
                anew = status.st_ino != self.inode or file.read(len(self.tail)) != self.tail
                if anew:
                    self.offset, self.inode, self.tail = 0, status.st_ino, b""
                file.seek(self.offset)
                block = file.read(BLOCK) + file.readline()
        except FileNotFoundError:
            anew, self.offset, self.inode, self.tail, block = self.inode is not None, 0, None, b"", b""
        block = block[: block.rfind(b"\n") + 1]  # a line without its end is still being written, or torn
        self.offset += len(block)
        self.tail = (self.tail + block)[-TAIL:]
        return anew, block


def parsed(line: bytes) -> dict | None:
    """A line of metrics, or None."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # also of broken UTF-8
        return None
    ok = isinstance(found, dict) and isinstance(found.get("step"), (int, float)) and abs(found["step"]) < 1e12
    return found if ok else None


def read_json(folder: Path, name: str) -> dict:
    """What the file says; {} if it is gone or torn. Raises Unreadable."""
    try:
        with opened(folder, name) as file:
            text = file.read(MAX_JSON)
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def number(found: dict, key: str, file: str) -> float | int | None:
    """found[key], None if it is not there or not finite. Unreadable if it is something else than a number."""
    value = found.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise Unreadable(f"{file}: {key} is {repr(value)[:60]}, which is no number.")
    return value if value is None or math.isfinite(value) else None


def stamp(path: Path) -> tuple | None:
    """Changes with the file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def backwards(block: bytes) -> Iterator[bytes]:
    """Its lines, the last one first."""
    end = len(block)
    while end > 0:
        start = block.rfind(b"\n", 0, end - 1) + 1
        yield block[start:end]
        end = start


class Summary:
    """What the table says of a run: from its first line, its last ones and its evaluations; no other line is parsed."""

    def __init__(self, folder: Path):
        self.file = Growing(folder)
        self.clear()

    def clear(self) -> None:
        self.first, self.last, self.held_out, self.metric = None, {}, {}, None
        self.paces: deque = deque(maxlen=RECENT)  # seconds of each of the last steps

    def update(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        anew, block = self.file.news()
        if anew:
            self.clear()
        if not block:
            return False
        self.first = self.first or parsed(block[: block.find(b"\n")])
        found = -1
        while (found := block.find(b'"eval/', found + 1)) >= 0:
            end = block.find(b"\n", found)
            line = parsed(block[block.rfind(b"\n", 0, found) + 1 : end]) or {}
            self.metric = self.metric or next((name for name in line if re.fullmatch(r"eval/mean@\w+", name)), None)
            name = self.metric if self.metric in line else "eval/reward"
            if isinstance(line.get(name), (int, float)):
                self.metric = name
                self.held_out[line["step"]] = line[name]
            found = end
        steps = (step for line in backwards(block) if b'"eval/' not in line and (step := parsed(line)))
        if found := list(islice(steps, RECENT)):
            self.last = found[0]
            self.paces.extend(step.get("time/step") for step in reversed(found))
        return True


def unreadable(error: Exception) -> tuple[str, str]:
    """A run's state, and why."""
    said = str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
    return "unreadable", text_of(said)[:300]


class Run:
    """A run folder. Methods may be called from several threads."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.lock = threading.RLock()
        self.summarized = Summary(path)
        self.metrics_file, self.curves_read, self.unreadable = Growing(path), Curves(most=KEPT), 0
        self.settings: tuple = ((), {})  # what was read of config.json, and of which state of it
        self.listed: dict[str, tuple] = {}  # kind: (which state of its folder, steps)
        self.lock_seen: tuple = (None, False)
        self.noted: tuple[tuple | None, dict] = (None, {})  # of which state of it, and what stands out there

    def config(self) -> dict:
        mark = stamp(self.path / "config.json")
        if mark != self.settings[0]:
            found = read_json(self.path, "config.json")
            if not isinstance(found.get("domains"), (list, type(None))):
                raise Unreadable(f"config.json: domains is {repr(found['domains'])[:60]}, which is no list.")
            self.settings = mark, found
        return self.settings[1]

    def curves(self) -> Curves:
        """All metrics so far."""
        with self.lock:
            anew, block = self.metrics_file.news()
            if block:
                self.curves_read = self.curves_read.copy()  # another thread may be reading what it got
            while anew or block:
                if anew:
                    self.curves_read, self.unreadable = Curves(most=KEPT), 0
                lines = [parsed(line) for line in block.split(b"\n") if line.strip()]
                self.unreadable += lines.count(None)
                self.curves_read.add(line for line in lines if line is not None)
                anew, block = self.metrics_file.news()
            return self.curves_read

    def forget(self) -> None:
        """Free the memory of its curves; they are read again when somebody asks."""
        with self.lock:
            self.metrics_file, self.curves_read = Growing(self.path), Curves(most=KEPT)

    def file(self, *names: str) -> Path:
        """The path of one of the run's files; Gone if there is none that may be opened."""
        try:
            opened(self.path, *names).close()
        except FileNotFoundError:
            raise Gone(f"{self.name} has no {'/'.join(names)}, or not any more.") from None
        except Unreadable as error:
            raise Gone(f"{self.name}: {error}") from None
        return self.path.joinpath(*names)

    def steps(self, kind: str) -> list[range]:
        """Of which it has a file of completions or evaluations, ascending; `file` says whether it may be opened."""
        folder = self.path / kind
        if not folder.resolve().is_relative_to(self.path):
            raise Unreadable(f"{kind} is a link that leads out of the run folder, and is not followed.")
        mark = stamp(folder)
        mark = mark and (*mark, time.time() - mark[0] / 1e9 > SETTLED)
        if kind not in self.listed or self.listed[kind][0] != mark:
            self.listed[kind] = mark, steps_in(folder)  # of a long run it takes a tenth of a second
        return self.listed[kind][1]

    def vocabulary(self) -> Vocabulary:
        """What its token ids say."""
        with contextlib.suppress(FileNotFoundError):  # of an older run
            opened(self.path, "vocabulary.parquet").close()
        return vocabulary(self.path)

    def version(self) -> tuple:
        """Changes when there is something new."""
        names = ("metrics.jsonl", "state.json", "config.json", "lock", "completions", "evaluations")
        return tuple(stamp(self.path / name) for name in names)

    def held(self) -> bool | None:
        """Whether a process has the run: its lock is taken. None where that cannot be told.

        Trying takes the lock for an instant. One that was found free is not tried again until its file changes, as it
        does when a process takes it: a trainer that is about to start meets nobody here.
        """
        mark = stamp(self.path / "lock")
        if mark is None or self.lock_seen == (mark, False):
            return False
        try:
            with opened(self.path, "lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
        except OSError:  # a file system without locks
            held = None
        self.lock_seen = mark, held
        return held

    def state(self) -> tuple[str, str]:
        """(running, finished, failed, interrupted, killed, silent, ended or unreadable; why, in words)."""
        try:
            return self._state()
        except Exception as error:
            return unreadable(error)

    def _state(self) -> tuple[str, str]:
        told = read_json(self.path, "state.json")
        state, why = told.get("state"), str(told.get("why") or "")
        updated = number(told, "updated", "state.json")
        if state in ("finished", "failed", "interrupted"):
            return state, why
        if state == "running":
            host = told.get("host") or socket.gethostname()
            if host == socket.gethostname():
                held = self.held()
                if held:
                    return "running", ""
                if held is False or not psutil.pid_exists(int(number(told, "pid", "state.json") or 0)):
                    return "killed", f"its process ({told.get('pid')}) is gone and could not say why"
            quiet = time.time() - (updated or 0)
            if quiet < STALLED:
                return "running", f"on {host}"
            return "silent", f"on {host}; nothing new for {quiet / 60:.0f} min"
        if self.held():
            return "running", ""
        with self.lock:
            self.summarized.update()
        if not self.summarized.last and not self.summarized.held_out:
            return "ended", "before its first step"
        last, steps = self.summarized.last.get("step", 0), number(self.config(), "max_steps", "config.json")
        if steps is not None and last >= steps:
            return "finished", ""
        return "ended", f"at step {last:g}" + (f" of {steps}" if steps else "")

    def summary(self) -> dict:
        """A line of the table. One run that cannot be read must not take the others' lines with it."""
        try:
            return self._summary()
        except Exception as error:
            state, why = unreadable(error)
            texts = dict.fromkeys(("task", "algorithm", "model", "metric"), "")
            numbers = "step steps first last best reward seconds pace tokens_per_second updated".split()
            return {"name": self.name, "state": state, "why": why} | texts | dict.fromkeys(numbers)

    def _summary(self) -> dict:
        with self.lock:
            self.summarized.update()
            first, last, held_out = self.summarized.first or {}, self.summarized.last, self.summarized.held_out
            paces = [seconds for seconds in self.summarized.paces if is_number(seconds)]
            config, (state, why) = self.config(), self.state()
        told = read_json(self.path, "state.json")
        # Without the first step's seconds: then it began. A resumed run keeps its first line.
        begun = (number(first, "time/unix", METRICS) or 0) - (number(first, "time/step", METRICS) or 0)
        until = number(last, "time/unix", METRICS) or number(told, "updated", "state.json")
        steps = max(held_out) if held_out else None
        return {
            "name": self.name,
            "state": state,
            "why": why[:2000],
            "step": last.get("step", max(held_out, default=0)),
            "steps": number(told, "num_steps", "state.json") or number(config, "max_steps", "config.json"),
            "task": task(config),
            "algorithm": algorithm(config),
            "model": Path(str(config.get("model_id") or "")).name,
            "metric": (self.summarized.metric or "").removeprefix("eval/"),
            "first": held_out[min(held_out)] if held_out else None,
            "last": held_out[steps] if held_out else None,
            "best": max(held_out.values(), default=None),
            "reward": number(last, "reward", METRICS),
            "seconds": max(0.0, until - begun) if until and begun else None,
            "pace": median(paces) if paces else None,  # seconds of a step
            "tokens_per_second": number(last, "time/tokens_per_second", METRICS),
            "updated": round(until) if until else None,
        }


def task(config: dict) -> str:
    listed = config.get("domains")
    named = [part.get("name") if isinstance(part, dict) else part for part in listed or ()]
    return ", ".join(str(part) for part in named or (config.get("dataset_id"), config.get("env")) if part)


def algorithm(config: dict) -> str:
    parts = [config.get("advantage"), config.get("policy_loss")]
    name = " / ".join(str(part) for part in parts if part)
    return f"{config['preset']} ({name})" if config.get("preset") else name


def is_run(folder: str | Path) -> bool:
    """Whether one of its marks is there, be it a FIFO or a link: it is shown, if only as unreadable."""
    marks = (os.path.join(folder, mark) for mark in MARKS)
    return any(os.path.lexists(mark) and not os.path.isdir(mark) for mark in marks)


class Runs:
    """The run folders below `root`, or `root` itself if it is one."""

    def __init__(self, root: Path):
        self.root = Path(root).resolve()
        self.known: dict[str, Run] = {}
        self.recent: list[Run] = []
        self.lock = threading.Lock()

    def all(self) -> list[Run]:
        """Looks again; runs that are still there keep what was read of them."""
        found: dict[str, Path] = {}
        for name, path in self.paths():
            name = os.fsencode(name).decode("utf-8", "backslashreplace")  # a folder's name may be any bytes
            while name in found:  # one is called \xff, and another one spells that out
                name += "'"
            found[name] = path
        with self.lock:
            self.known = {name: self.known.get(name) or Run(name, path) for name, path in found.items()}
            return list(self.known.values())

    def paths(self):
        if is_run(self.root):
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
                    if is_run(entry.path):
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
