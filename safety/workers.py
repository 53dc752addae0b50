"""Processes that score text no one can vouch for, or run a function that wants a process of its own, within a limit.

math-verify's own limits are alarm signals, which work in a main thread only, and sympy can outlast any patience: so the
limit here is the life of the process. `WorkerPool` is the trainer's side, `worker_main` the other one. Its task is

a scorer     the name of one in scoring/scorers.py: one completion a request, within a memory limit,
             and answers in JSON, since what it reads is the model's. rewards.py uses these.
a function   "file.py:function", which the process takes from that file: any arguments and results that can be pickled.
             limits.py uses these, for functions with own_process.
"""

import asyncio
import base64
import builtins
import contextlib
import ctypes
import faulthandler
import inspect
import json
import os
import pickle
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from cli import shorten
from plugins import function_path, load_function
from safety.values import UnusableResult, named_error, plain, plain_error, summary

ROOT = Path(__file__).resolve().parent.parent

ITEM_TIMEOUT = 5.0  # seconds one completion may take
START_TIMEOUT = 60.0  # seconds a process may take to import its library, or the function's file
KEEPER_TIMEOUT = 5.0  # seconds in which a process and all that it started are ended
PR_SET_CHILD_SUBREAPER = 36  # prctl
WORKER_MEMORY = 4 * 2**30  # bytes a process may have: 10**10**10 must not take the machine down


class WorkerPool:
    """`size` processes for one task, started when first needed and replaced when they overrun.

    Requests go in pickled, answers come back as lines. A worker runs this file without torch. Between it and the
    trainer stands a keeper, a process that ends it with all that it has started when it is late, when it ends, and when
    the trainer is gone, however it went.
    """

    def __init__(self, task: str, size: int | None = None, item_timeout: float = ITEM_TIMEOUT):
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.size = size or max(2, min(8, (os.cpu_count() or 1) // local_ranks))
        self.task, self.item_timeout = task, item_timeout
        self.started: list[subprocess.Popen] = []  # those that may still run
        self.slots: queue.SimpleQueue = queue.SimpleQueue()  # idle workers; None is one not started yet
        for _ in range(self.size):
            self.slots.put(None)

    def map(self, requests: list[tuple | None]) -> list[float | dict | None]:
        """One answer a request, None for None. Safe to call from several threads."""
        answers: list = [None] * len(requests)
        waiting: queue.SimpleQueue = queue.SimpleQueue()
        errors: list[BaseException] = []
        for index, request in enumerate(requests):
            if request:
                waiting.put(index)

        def work():
            try:
                while not errors:
                    index = waiting.get_nowait()
                    answers[index] = self.run(requests[index])
            except queue.Empty:
                return
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.size, waiting.qsize()))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return answers

    def run(self, request: tuple) -> float | dict | None:
        """A scorer's answer."""
        try:
            line = self.ask(request)
        except EOFError:  # it died of it
            line = None
        return {"reward": 0.0, "timeout": 1.0} if line is None else json.loads(line)["value"]

    def call(self, function: Callable, kwargs: dict, read: Callable = plain) -> tuple | None:
        """(what the function returned, None) or (None, what it raised), from its process; None if it took too long.

        function: this pool's, for its signature. read: of values.py, as in limits.run_limited. TypeError if one of its
        arguments cannot be sent; RuntimeError if the process does not start.
        """
        request = sendable(function, kwargs), read
        try:
            line = self.ask(request)
        except EOFError as error:
            return None, RuntimeError(f"{function.__name__} ended the process it ran in ({error})")
        if line is None:
            return None
        result, error = pickle.loads(base64.b64decode(line))
        return result, named_error(*error) if isinstance(error, tuple) else error

    def ask(self, request) -> bytes | None:
        """A worker's answer, once one is free; None if it took too long, EOFError if it died of it."""
        worker = self.slots.get()
        try:
            if worker is None or worker.poll() is not None:  # not started yet, or died while idle
                worker = None
                worker = self.start()
            try:
                write_all(worker.stdin.fileno(), pickle.dumps(request), self.item_timeout)
                line = read_line(worker.stdout.fileno(), self.item_timeout)
            except (BrokenPipeError, EOFError):
                ended, worker = worker, None
                raise EOFError(f"status {stop(ended, 1.0)}") from None
            except TimeoutError:  # it reads nothing: what an earlier call left behind stops it
                line = None
            if line is None:
                ended, worker = worker, None
                stop(ended)
            return line
        finally:
            self.slots.put(worker)

    def start(self) -> subprocess.Popen:
        start = f"import sys; sys.path[0] = {str(ROOT)!r}; from safety.workers import main; main()"
        command = [sys.executable, "-c", start, self.task, str(self.item_timeout)]
        # One thread each: they are many. A session of their own: Ctrl-C reaches them as the end of their input.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        worker = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        os.set_blocking(worker.stdin.fileno(), False)
        self.started = [*(other for other in self.started if other.returncode is None), worker]
        try:
            ready = read_line(worker.stdout.fileno(), START_TIMEOUT)
        except EOFError:
            ready = None
        if ready is None:
            stop(worker)
            raise RuntimeError(f"the process for {self.task!r} did not start; its own message is above")
        return worker

    def close(self) -> None:
        """End all processes, at work or not, and what they started."""
        for worker in self.started:
            worker.terminate()


def sendable(function: Callable, kwargs: dict) -> dict[str, bytes]:
    """Each argument pickled. One that cannot be is left out where the function takes it in its ** only."""
    sent = {}
    for name, value in kwargs.items():
        try:
            sent[name] = pickle.dumps(value)
        except Exception as error:  # pickling runs code of whatever class it meets
            if name in inspect.signature(function).parameters:
                fault = f"{function.__name__} has own_process, but its argument {name!r} cannot be sent to a process"
                raise TypeError(f"{fault} ({error}); leave it out of the function's arguments") from None
    return sent


def stop(worker: subprocess.Popen, seconds: float = 0.0) -> int:
    """End a process and all that it started, if it has not ended in `seconds`; its status."""
    try:
        worker.wait(seconds)
    except subprocess.TimeoutExpired:
        worker.terminate()  # its keeper ends the others first
        try:
            worker.wait(KEEPER_TIMEOUT)
        except subprocess.TimeoutExpired:  # stopped, or starved
            for process in [*below(worker.pid), worker.pid]:
                kill(process)
            worker.wait(KEEPER_TIMEOUT)
    worker.stdin.close()
    worker.stdout.close()  # not to its end: a process that got away may hold the other one
    return worker.returncode


def write_all(descriptor: int, data: bytes, seconds: float) -> None:
    """Into a pipe that does not block; TimeoutError after `seconds`."""
    poll, left, deadline = select.poll(), memoryview(data), time.monotonic() + seconds
    poll.register(descriptor, select.POLLOUT)
    while left:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        with contextlib.suppress(BlockingIOError):  # there is less room than the rest takes
            left = left[os.write(descriptor, left[:65536]) :]


def read_line(descriptor: int, seconds: float) -> bytes | None:
    """A line from a pipe; None after `seconds`, EOFError at its end. poll, since select stops at descriptor 1,023."""
    poll, parts, deadline = select.poll(), [b""], time.monotonic() + seconds
    poll.register(descriptor, select.POLLIN)
    while not parts[-1].endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        received = os.read(descriptor, 65536)
        if not received:
            raise EOFError
        parts.append(received)
    return b"".join(parts)


# ---- the keeper: between the trainer and the process that works ------------------------------------------------------


def keep(worker: int) -> int:
    """Wait until the worker ends, the trainer asks for it (SIGTERM) or is gone (nobody holds the other end of our
    input); then end all that the worker has started, whatever group or session it is in. Its status, as a shell's."""
    ends, asked = os.pipe()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    os.set_blocking(asked, False)
    signal.set_wakeup_fd(asked, warn_on_full_buffer=False)
    poll, status = select.poll(), 128 + signal.SIGKILL
    poll.register(0, 0)  # tells when the other end closes, and no more: what comes there is the worker's
    poll.register(ends, select.POLLIN)
    over = False
    while not over:
        for descriptor, _ in poll.poll(1000):  # a child may have ended before SIGCHLD was asked for
            over |= descriptor == 0 or signal.SIGTERM in os.read(ends, 65536)
        for process, code in reaped():
            if process == worker:
                over, status = True, os.waitstatus_to_exitcode(code)
    deadline = time.monotonic() + KEEPER_TIMEOUT
    while (left := stopped_below(os.getpid())) and time.monotonic() < deadline:
        for process in left:
            kill(process)
        time.sleep(0.01)
        for process, code in reaped():
            status = os.waitstatus_to_exitcode(code) if process == worker else status
    return status if status >= 0 else 128 - status


def reaped() -> list[tuple[int, int]]:
    """Children that have ended: (process, its status as of waitpid)."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    return found


def below(process: int) -> list[int]:
    """All processes below one, where the system tells (Linux)."""
    found, waiting = [], [process]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                children = list(map(int, task.read_text(encoding="utf-8").split()))
                found, waiting = found + children, waiting + children
    return found


def stopped_below(process: int) -> list[int]:
    """The same, stopped, so that they start no others."""
    known: dict[int, None] = {}
    while new := [other for other in below(process) if other not in known]:
        for other in new:
            kill(other, signal.SIGSTOP)
            known[other] = None
    return list(known)


def kill(process: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


# ---- the process that works -----------------------------------------------------------------------------------------


def worker_main(task: str, item_timeout: float) -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    nothing = open(os.devnull, encoding="utf-8")
    os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what libraries print goes to stderr, not among the answers
    function = load_function(task) if function_path(task) else None
    if function is None and sys.platform == "linux":  # elsewhere the limit is refused
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY, WORKER_MEMORY))
    scorer = load_function(f"{ROOT / 'scoring' / 'scorers.py'}:{task}_scorer")() if function is None else None
    print("ready", file=answers)
    here = os.getpid()
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        # Ends this process even if the trainer is no longer there to do it, and whatever holds the GIL.
        faulthandler.dump_traceback_later(item_timeout + 2, exit=True, file=nothing)
        answer = called(function, *request) if function else scored(scorer, request, task)
        if os.getpid() != here:  # a child that the function forked, and that came back out of it
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        print(answer, file=answers)


def scored(scorer: Callable, request: tuple, task: str) -> str:
    try:
        value = scorer(*request)
    except Exception as error:  # of a scorer given text it did not foresee: seen as a component, and on stderr
        print(f"{task} scorer raised {error!r} on {shorten(request[0])}", file=sys.stderr)
        value = {"reward": 0.0, "scorer_error": 1.0}
    return json.dumps({"value": value})


def called(function: Callable, sent: dict[str, bytes], read: Callable) -> str:
    """(result, None) or (None, error), pickled: the result as plain data, the error as itself if it is python's own,
    else by name and text. Its traceback is a note."""
    try:
        result = function(**{name: pickle.loads(value) for name, value in sent.items()})
        if inspect.isawaitable(result):
            result = asyncio.run(finished(result))
        answer = pickle.dumps((read(result), None))
    except BaseException as error:  # sys.exit() in a function is an error of that function, too
        error, where = plain_error(error), f"In its own process:\n{traceback.format_exc()}"
        if type(error) in (UnusableResult, vars(builtins).get(type(error).__name__)):
            error.add_note(where)
            answer = pickle.dumps((None, error))
        else:
            answer = pickle.dumps((None, (type(error).__name__, summary(error), where)))
    return base64.b64encode(answer).decode()


async def finished(awaitable):
    return await awaitable


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what loses its parent becomes the keeper's
    if worker := os.fork():
        os._exit(keep(worker))
    os.setsid()
    with contextlib.suppress(BrokenPipeError):  # the trainer ended while this process worked for it
        worker_main(sys.argv[1], float(sys.argv[2]))
