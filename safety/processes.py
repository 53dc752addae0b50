"""Runs other people's functions in processes that are killed, with everything they started, when they are late.

`function.own_process = True` asks for it (a number: at most that many processes). The scorers in scoring/ run like
this, too, as their libraries may never finish on a model's text. A process ends by itself when the trainer is gone: at
the end of its pipe, or at its own time limit.
"""

import asyncio
import builtins
import contextlib
import faulthandler
import inspect
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from config import function_path, load_function, shorten
from safety.results import AT_END, UnusableResult, as_it_is, name_of, warn_once

ROOT = Path(__file__).resolve().parent.parent
ITEM_TIMEOUT = 5.0  # seconds a scorer may take for one completion
START_TIMEOUT = 60.0  # seconds a process may take to import its library, or the function's file
WORKER_MEMORY = 4 * 2**30  # bytes a scorer's process may use: 10**10**10 must not bring the machine down


class WorkerPool:
    """`size` threads, each with a process for one task. The process is started when first needed, and again after it
    was killed.

    task: "path/to/file.py:function", or the name of a scorer in scoring/scorers.py.
    """

    def __init__(self, task: str, size: int | None = None, seconds: float = ITEM_TIMEOUT):
        size = size or max(2, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        self.task, self.seconds, self.threads, self.local = task, seconds, ThreadPoolExecutor(size), threading.local()
        self.started: list[subprocess.Popen] = []

    def map(self, requests: list[tuple | None]) -> list[float | dict | None]:
        """A scorer's result for each request, None for None. Safe to call from several threads."""
        calls = [request and self.ask(request, {}, as_it_is) for request in requests]
        return [call and self.score_of(request, call) for request, call in zip(requests, calls, strict=True)]

    def score_of(self, request: tuple, call: Future) -> float | dict | None:
        outcome = call.result()
        if outcome is None or isinstance(outcome[1], EOFError):  # it was late, or the process died
            return {"reward": 0.0, "timeout": 1.0}
        if outcome[1] is not None:  # text that the scorer cannot handle
            warn_once(f"{self.task} scorer: {outcome[1]!r} on {shorten(request[0])}", kind=f"{self.task} scorer")
            return {"reward": 0.0, "scorer_error": 1.0}
        return outcome[0]

    def ask(self, args: tuple, kwargs: dict, read: Callable) -> Future:
        """A future of (result, None) or (None, error), from the first process that is free; of None if it took too
        long. An EOFError as the error means that the function ended the process. RuntimeError if a process does not
        start."""
        return self.threads.submit(self.run_one, args, kwargs, read)

    def run_one(self, args: tuple, kwargs: dict, read: Callable) -> tuple | None:
        worker = getattr(self.local, "worker", None)
        if worker is None or worker[0].poll() is not None:  # not started yet, or killed
            self.local.worker = worker = self.start()
        process, pipe = worker
        try:
            pipe.send((args, kwargs, read))
            if pipe.poll(self.seconds):
                return pipe.recv()
            outcome = None
        except (EOFError, ConnectionError):
            outcome = None, EOFError(f"the process ended, with status {process.wait()}")
        kill(process)
        return outcome

    def start(self) -> tuple[subprocess.Popen, Connection]:
        near_end, far_end = multiprocessing.Pipe()
        code = f"import sys; sys.path[0] = {str(ROOT)!r}; from safety.processes import worker_main; worker_main()"
        command = [sys.executable, "-c", code, self.task, str(far_end.fileno()), str(self.seconds)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # one thread per process
        # In a new session, Ctrl-C reaches the process only as the end of its pipe. Output of libraries goes to stderr.
        options = dict(stdin=subprocess.DEVNULL, stdout=2, pass_fds=[far_end.fileno()], start_new_session=True)
        process = subprocess.Popen(command, env=environment, **options)
        far_end.close()
        self.started = [*(other for other in self.started if other.poll() is None), process]
        with contextlib.suppress(EOFError):
            if near_end.poll(START_TIMEOUT) and near_end.recv() == "ready":
                return process, near_end
        kill(process)
        raise RuntimeError(f"the process for {self.task!r} did not start; its message is above")

    def close(self) -> None:
        """Kill all processes, whether at work or not."""
        for process in self.started:
            kill(process)


def kill(process: subprocess.Popen) -> None:
    """Kill the process and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def worker_main() -> None:
    task, pipe, seconds = sys.argv[1], Connection(int(sys.argv[2])), float(sys.argv[3])
    if function_path(task):
        function = load_function(task)
    else:
        function = load_function(f"{ROOT / 'scoring' / 'scorers.py'}:{task}_scorer")()
        if sys.platform == "linux":  # other systems refuse the limit
            resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY, WORKER_MEMORY))
    pipe.send("ready")
    while True:
        try:
            args, kwargs, read = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(seconds + 2, exit=True)  # in case the trainer is gone and cannot kill it
        try:
            result = function(*args, **kwargs)
            result = asyncio.run(result) if inspect.iscoroutine(result) else result
            answer = pickle.dumps((read(result), None))
        except BaseException as error:  # sys.exit() in a function also counts as its error
            answer = pickle.dumps((None, sendable_error(error)))
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)


def sendable_error(error: BaseException) -> BaseException:
    """The error itself if it is Python's or ours, else a RuntimeError that quotes its name and text. The traceback
    becomes a note."""
    if type(error) not in (UnusableResult, vars(builtins).get(type(error).__name__)):
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    error.add_note(f"In its own process:\n{''.join(traceback.format_tb(error.__traceback__))}")
    return error


_pools: dict[tuple, WorkerPool] = {}


async def run_in_process(function: Callable, kwargs: dict, seconds: float, read: Callable) -> tuple | None:
    """Like run_limited; the time to start a process, or to wait for a free one, does not count."""
    module = sys.modules.get(function.__module__)
    path, name = getattr(module, "__file__", None), function.__name__
    if path is None or vars(module).get(name) is not function:
        fault = f"{name_of(function)}: only a function that a file defines under its own name can have own_process"
        return None, ValueError(fault)
    arguments, parameters = {}, inspect.signature(function).parameters
    for key, value in kwargs.items():
        try:
            pickle.dumps(value)
            arguments[key] = value
        except Exception as error:  # pickling runs code of the value's class
            if key in parameters:  # otherwise ** would take it, among many others
                fault = f"{name} has own_process, but its argument {key!r} cannot be sent to a process ({error})"
                return None, TypeError(f"{fault}; leave it out of the function's arguments")
    spec = f"{os.path.abspath(path)}:{name}"
    if (spec, seconds) not in _pools:
        size = function.own_process
        _pools[spec, seconds] = pool = WorkerPool(spec, None if size is True else size, seconds)
        AT_END.append(pool.close)
    try:
        return await asyncio.wrap_future(_pools[spec, seconds].ask((), arguments, read))
    except RuntimeError as error:  # a process that does not start
        return None, error
