"""Processes that run users' code for the page: one that has imported a train script, and forks of it.

A session is a fork. It begins without anything of the user's but the script, so files that were edited are read anew;
it is ended by SIGKILL, with all that it started, when an answer takes too long, when it crashes, when nobody has asked
for a while, and with the page. bench.py is the other end.
"""

import array
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from cli import ConfigError
from looking.output import Tail

ROOT = Path(__file__).resolve().parent.parent
IMPORTING = 180.0  # seconds that a script may take to be imported: torch comes along
# Seconds that an answer may take: rows may be many, a model may have to be loaded, tools to be started.
SECONDS = {"form": 60.0, "check": 60.0, "rows": 300.0, "row": 60.0, "score": 300.0, "tools": 120.0, "call": 120.0}
SECONDS |= {"play": 300.0, "say": 120.0, "fit": 300.0}
MOST, IDLE = 8, 1200.0  # sessions at a time; seconds without a question after which one may be ended
TRAINS = re.compile(r"\bparse_args\(TrainConfig\b")


class Failed(RuntimeError):
    """An action that gave no answer, or none that can be used. `said`: what its process printed."""

    def __init__(self, message: str, said: str = ""):
        super().__init__(message)
        self.said = said


def scripts(folder: Path) -> list[str]:
    """Train scripts of the folder itself: train_grpo.py, what builds on it, and copies."""
    found = []
    for path in sorted(folder.glob("*.py")):
        with contextlib.suppress(OSError):
            inside = path.resolve().parent == folder and path.is_file()
            if inside and TRAINS.search(path.read_text(encoding="utf-8", errors="replace")):
                found.append(path.name)
    return sorted(found, key=lambda name: (name != "train_grpo.py", name))


class Bench:
    """A process that has imported a script. It runs nothing else of the user's: `fork` gives a session."""

    def __init__(self, folder: Path, script: str):
        self.script, self.tail = script, Tail()
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        how = dict(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONPATH=path, PYTHONUNBUFFERED="1")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "looking.bench", script, str(theirs.fileno())],
                **dict(cwd=folder, env=os.environ | how, pass_fds=[theirs.fileno()], start_new_session=True),
                **dict(stdin=subprocess.DEVNULL, stdout=self.tail.writer, stderr=self.tail.writer),
            )
        os.close(self.tail.writer)
        self.control = ours
        ours.settimeout(IMPORTING)
        try:
            ready = ours.recv(1 << 20)
        except TimeoutError:
            ready = b""
        if not ready:
            self.end()
            self.tail.thread.join(2)
            said = self.tail.since(0)[0]
            last = said.strip().rpartition("\n")[2] or f"it did not end within {IMPORTING:g} s"
            raise Failed(f"{script} cannot be imported: {last}", said)
        self.imported = json.loads(ready)["files"]
        self.stamps = self._stamps()

    def _stamps(self) -> list:
        return [(name, os.stat(name).st_mtime_ns) for name in self.imported if os.path.exists(name)]

    def stale(self) -> bool:
        return self.process.poll() is not None or self.stamps != self._stamps()

    def fork(self) -> tuple[socket.socket, Tail]:
        ours, theirs = socket.socketpair()
        tail = Tail()
        with theirs:
            fds = array.array("i", [theirs.fileno(), tail.writer])
            self.control.sendmsg([b"fork"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        os.close(tail.writer)
        return ours, tail

    def end(self) -> None:
        self.control.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Session:
    """A fork that answers questions, one at a time."""

    def __init__(self, bench: Bench):
        self.bench, self.used, self.lock = bench, time.monotonic(), threading.Lock()
        self.channel, self.tail = bench.fork()
        self.lines = self.channel.makefile("rb")
        self.channel.settimeout(60)
        self.pid = int(self.lines.readline() or b"0")  # its process group's, too
        self.told, self.over = 0, False
        if not self.pid:
            raise Failed(f"{bench.script}: no process could be started.", self.tail.since(0)[0])

    def ask(self, action: str, given: dict) -> dict:
        seconds = SECONDS[action]
        try:
            self.channel.settimeout(seconds)
            self.channel.sendall(json.dumps({"action": action, "given": given}).encode() + b"\n")
            line = self.lines.readline()
        except TimeoutError:
            self.end()
            fault = f"no answer within {seconds:g} s: its process was ended"
        except (OSError, ValueError):
            line, fault = b"", "its process has ended"
        else:
            fault = "" if line.endswith(b"\n") else "its process has ended"
        self.used = time.monotonic()
        if fault:
            self.over = True
            self.tail.thread.join(1)
            said = self.tail.since(self.told)[0]
            raise Failed(f"{action}: {fault}.{last_words(said)}", said)
        answer = json.loads(line)
        time.sleep(0.02)  # what it printed is a moment behind
        said, self.told = self.tail.since(self.told)
        if "raised" in answer:
            raise Failed(answer["raised"], answer.get("traceback") or said)
        return answer["value"] | {"said": said}

    def end(self) -> None:
        self.over = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pid > 1:
                os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
            self.channel.close()


def last_words(said: str) -> str:
    last = said.strip().rpartition("\n")[2]
    return f" Its last words: {last[:300]}" if last else ""


class Sessions:
    """The sessions of the page's tabs, by the ids that these made up, and a bench a script."""

    def __init__(self, folder: Path):
        self.folder, self.lock = folder, threading.Lock()
        self.benches: dict[str, Bench] = {}
        self.known: dict[str, Session] = {}
        self.importing: dict[str, threading.Lock] = {}

    def bench(self, script: str) -> Bench:
        """One that has imported the script as it is now."""
        with self.lock:
            alone = self.importing.setdefault(script, threading.Lock())
        with alone:
            bench = self.benches.get(script)
            if bench is None or bench.stale():
                if bench is not None:
                    self._end_those(lambda session: session.bench is bench)
                    self.benches.pop(script).end()
                bench = self.benches[script] = Bench(self.folder, script)
            return bench

    def ask(self, name: str, script: str, action: str, given: dict) -> dict:
        """The answer of the tab's session, which begins with its first question, and anew after it was ended."""
        if action not in SECONDS:
            raise ConfigError(f"{action!r:.40} is nothing that can be asked; known are {', '.join(SECONDS)}.")
        bench = self.bench(script)
        with self.lock:
            session = self.known.get(name)
            fresh = session is None or session.over or session.bench is not bench
        if fresh:
            self.close(name)
            made = Session(bench)
            with self.lock:
                session = self.known.setdefault(name, made)
            if session is not made:
                made.end()
            self._make_room(session)
        if not session.lock.acquire(timeout=SECONDS[action]):
            raise Failed(f"{action}: the question before is not answered yet.")
        try:
            return session.ask(action, given)
        finally:
            session.lock.release()

    def _make_room(self, but: Session) -> None:
        now = time.monotonic()
        with self.lock:
            oldest = sorted(self.known.values(), key=lambda session: session.used)[: max(len(self.known) - MOST, 0)]
        self._end_those(lambda session: session is not but and (session in oldest or now - session.used > IDLE))

    def _end_those(self, which) -> None:
        with self.lock:
            ended = {name: session for name, session in self.known.items() if which(session)}
            self.known = {name: session for name, session in self.known.items() if name not in ended}
        for session in ended.values():
            session.end()

    def close(self, name: str) -> dict:
        """End what a tab had under way."""
        with self.lock:
            session = self.known.pop(name, None)
        if session is not None:
            session.end()
        return {"closed": session is not None}

    def end(self) -> None:
        self._end_those(lambda session: True)
        for bench in self.benches.values():
            bench.end()
        self.benches = {}
