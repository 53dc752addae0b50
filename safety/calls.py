"""Calls of other people's code - rewards, tools, environments - that cannot hold up the sampling.

A plain function runs in a daemon thread, an async one on one event loop kept for all of them, so that a client they
share stays usable from step to step. None is waited for longer than its limit; within it, and where the function ran,
what it returns is made plain data by one of the readers below. Nothing can end a thread: one that is late goes on, and
if too many do, the run ends. A function of a file with `function.own_process = True` (or a number: at most so many)
runs in a process of its own, which is killed when it is late. Code that holds the GIL stops all other threads: then
`faulthandler` ends the process and shows where every thread stands. docs/limits.md says it in user's terms.
"""

import asyncio
import builtins
import contextlib
import contextvars
import faulthandler
import functools
import inspect
import logging
import math
import multiprocessing
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from config import function_path, load_function, shorten

ROOT = Path(__file__).resolve().parent.parent

MARGIN = 10.0  # seconds beyond its limit after which a call that lets nothing else run ends the process
MAX_GIVEN_UP = 64  # calls that still run GIVEN_UP_SECONDS after they were given up end the run: each may take a core
GIVEN_UP_SECONDS = 60.0
FIRST_WARNING = 4  # calls that ran out of time and still run
ITEM_TIMEOUT = 5.0  # seconds a scorer may take for one completion
START_TIMEOUT = 60.0  # seconds a process may take to import its library, or the function's file
WORKER_MEMORY = 4 * 2**30  # bytes a scorer's process may have: 10**10**10 must not take the machine down

AT_END: list[Callable[[], None]] = []  # what to call before the process ends: it ends without atexit's help
NEW_THREADS: list[Callable[[], None]] = []  # what a thread does first: torch's current GPU is each thread's own

logger = logging.getLogger(__name__)


# ---- calls within a time --------------------------------------------------------------------------------------------


class TooManyGivenUp(RuntimeError):
    """Calls that ran out of time pile up: they never end."""


@dataclass(eq=False)
class Call:
    name: str
    seconds: float
    deadline: float  # of time.monotonic()
    given_up: float | None = None  # when it ran out of time
    awaited: Future | None = None  # of an async function, on the loop of all of them


RUNNING: set[Call] = set()
_current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


async def run_limited(function: Callable, kwargs: dict, seconds: float, read: Callable | None = None) -> tuple | None:
    """(result, None) or (None, what it raised); None if it did not end within `seconds`, and is given up.

    read: the reader that makes the result plain data, `plain` if not given. The function gets copies of the lists and
    dicts in `kwargs`. TooManyGivenUp if too many calls never end.
    """
    read = read or plain
    while isinstance(function, functools.partial) and not function.args:
        function, kwargs = function.func, function.keywords | kwargs
    if getattr(function, "own_process", False):
        return await run_in_process(function, kwargs, seconds, read)
    call = Call(name_of(function), seconds, time.monotonic() + seconds)
    shared_loop()  # made here, in one thread: calls that need it at the same moment would each make one
    if seconds == math.inf and inspect.iscoroutinefunction(function):  # ours: it limits what it calls itself, and must
        outcome = await settled(function(**copied(kwargs)), call, read)  # not stand behind that on a blocked loop
    else:
        outcome = await within(seconds, start_thread(run_function, function, kwargs, call, read))
    if outcome is None:
        give_up(call)
        await leave_blocked_loop(call)
    elif isinstance(outcome[1], TooManyGivenUp):  # of calls within this one: no fault of its own
        raise outcome[1]
    return outcome


def start_thread(function: Callable, *given) -> Future:
    """Call the function in a daemon thread, which an exit does not wait for (executors' threads would be joined)."""
    future: Future = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled, so the thread can always set it

    def work():
        try:
            for prepare in NEW_THREADS:
                prepare()
            future.set_result(function(*given))
        except BaseException as error:  # raised where the future is waited for
            future.set_exception(error)

    threading.Thread(target=work, name="call of others' code", daemon=True).start()
    return future


async def to_thread(function: Callable, *given, **named):
    """asyncio.to_thread, but in a thread of its own: that one has few, and an exit waits for them."""
    context = contextvars.copy_context()  # so that time_limit() holds there
    return await asyncio.wrap_future(start_thread(functools.partial(context.run, function, *given, **named)))


async def within(seconds: float, future: Future):
    """The future's result, or None after `seconds`. asyncio.wait_for would wait for a cancelled one to end."""
    waiting = asyncio.wrap_future(future)
    done, _ = await asyncio.wait({waiting}, timeout=None if seconds == math.inf else seconds)
    return waiting.result() if done else None


def run_function(function: Callable, kwargs: dict, call: Call, read: Callable) -> tuple:
    """In a thread of its own; of an async function it waits there for the loop of all of them."""
    RUNNING.add(call)
    _current.set(call)
    set_alarm()
    keep_setting_alarm()
    try:
        result = function(**copied(kwargs))
        if not inspect.isawaitable(result):
            return read(result), None
        call.awaited = asyncio.run_coroutine_threadsafe(settled(result, call, read), shared_loop())
        return call.awaited.result()
    except BaseException as error:  # sys.exit() in a function is an error of that function, too
        if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
            error.add_note(f"Write {call.name.split()[0]}.own_process = True below it, or take the signal out.")
        return None, error
    finally:
        RUNNING.discard(call)


async def settled(awaitable, call: Call, read: Callable) -> tuple:
    _current.set(call)
    try:
        return read(await awaitable), None
    except BaseException as error:  # one that it let through would end the shared loop
        return None, error


@functools.cache
def shared_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    start_thread(loop.run_forever)
    return loop


async def leave_blocked_loop(call: Call) -> None:
    """If the call blocks the loop of async functions, the next ones get another."""
    if call.awaited is not None:
        call.awaited.cancel()
        if not await within(1.0, asyncio.run_coroutine_threadsafe(asyncio.sleep(0, result=True), shared_loop())):
            shared_loop.cache_clear()


def set_alarm() -> None:
    """End the process if no Python code runs in it for as long as its calls may take, and MARGIN: one of them holds the
    GIL. The alarm's clock is in C; what sets it anew is a thread, which runs as long as others can."""
    now = time.monotonic()
    left = [call.deadline - now if call.given_up is None else GIVEN_UP_SECONDS for call in list(RUNNING)]
    left = [seconds for seconds in left if seconds < math.inf]
    if left:
        faulthandler.dump_traceback_later(max(0.0, *left) + MARGIN, exit=True, file=2)
    else:
        faulthandler.cancel_dump_traceback_later()


@functools.cache
def keep_setting_alarm() -> None:
    def beat():
        while True:
            time.sleep(0.5)
            set_alarm()

    threading.Thread(target=beat, name="GIL", daemon=True).start()


def give_up(call: Call) -> None:
    """Say which calls go on after their time, and end the run if they pile up."""
    call.given_up = time.monotonic()
    late = [other for other in list(RUNNING) if other.given_up is not None]
    stale = [other for other in late if time.monotonic() - other.given_up > GIVEN_UP_SECONDS]
    names = ", ".join(f"{name} x {number}" for name, number in Counter(other.name for other in late).most_common())
    said = (
        f"{len(late)} calls that ran out of time still run, and may take a core each: {names}. Give the function a "
        "limit of its own, or write NAME.own_process = True below it (docs/limits.md)."
    )
    if len(stale) >= MAX_GIVEN_UP:
        raise TooManyGivenUp(said)
    if len(late) >= FIRST_WARNING:
        warn_once(said, kind=f"late calls: 2 ** {len(late).bit_length()}")


def time_limit() -> float:
    """Seconds that the call of other people's code under way here may take in all; infinity outside of one."""
    call = _current.get()
    return call.seconds if call else math.inf


def copied(value):
    """Lists, dicts, tuples and sets anew, in any depth; what else they hold - images, tensors, objects - as it is."""
    kind = type(value)
    if kind is dict:
        return {key: copied(part) for key, part in value.items()}
    return kind(map(copied, value)) if kind in (list, tuple, set) else value


def name_of(function: Callable) -> str:
    """Such as "right (my_rewards.py:12)"."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name


# ---- what a call returned, as plain data ----------------------------------------------------------------------------

LARGEST = 1e18  # of a reward: its square has to fit a float32, for standard deviations
RETURN_RULE = "return a list with one number, None (does not apply) or {component: number} a completion"


class UnusableResult(TypeError):
    """The function returned what cannot be used; the text begins with "returned". index: of the completion at fault."""

    def __init__(self, fault: str, index: int | None = None):
        super().__init__(fault)
        self.index = index


def unread(value):
    """Of what goes from one function of a user to another."""
    return value


def number(value) -> float | None:
    """A number of any kind, tensors and numpy scalars too; text is none."""
    if isinstance(value, (str, bytes)):
        raise TypeError("text is not a number")
    return None if value is None else float(value)


def reward_values(values) -> list:
    """Of a reward: floats, Nones and {component: float, None or, of "turns", list}, one a completion."""

    def one(index: int, value):
        try:
            if not isinstance(value, Mapping):
                return number(value)
            return {
                str(name): part and [*map(number, part)] if name == "turns" else number(part)
                for name, part in value.items()
            }
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises the last
            fault = f"returned {shorten(value)}, a {type(value).__name__}, for completion {index}: {error}"
            raise UnusableResult(f"{fault}; {RETURN_RULE}", index) from None

    ordered = isinstance(values, Sequence) or getattr(values, "ndim", 0) > 0  # or an array
    if not ordered or isinstance(values, str):
        raise UnusableResult(f"returned {shorten(values)}, a {type(values).__name__}; {RETURN_RULE}")
    return [one(index, value) for index, value in enumerate(values)]


def plain(value):
    """Of a tool or an environment: lists, tuples and dicts of texts and numbers; a number of numpy or torch becomes one
    of python's own; images, arrays, tensors, sets and paths stay; anything else is its text."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, KEYS) else str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(plain, value))
    if getattr(value, "shape", None) == ():
        return value.item()
    foreign = type(value).__module__.partition(".")[0] in ("numpy", "torch", "PIL")
    return value if foreign or isinstance(value, KEPT) else str(value)


KEYS = str | int | float | tuple
KEPT = None | str | bytes | bytearray | int | float | set | frozenset | Path


def step(outcome):
    """Of an environment's step(): (plain messages, a float, a bool, plain info). The caller names what is no such."""
    if not isinstance(outcome, tuple) or len(outcome) != 4:
        return plain(outcome)
    messages, reward, done, info = outcome
    try:
        return plain(messages), finite(float(number(reward))), bool(done), plain(info)
    except (TypeError, ValueError) as error:
        raise UnusableResult(f"returned the reward {shorten(reward)}: {error}") from None


def state(value):
    """Of an environment's state(): text, numbers, tuples and frozensets of them. Of other objects neither
    text nor identity need tell whether they are equal."""
    if isinstance(value, tuple | frozenset):
        return (tuple if isinstance(value, tuple) else frozenset)(map(state, value))
    value = value.item() if getattr(value, "shape", None) == () else value
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    raise UnusableResult(
        f"returned a state with {shorten(value)}, a {type(value).__name__}, in it; give plain data instead, such as a "
        "tuple of what tells one state from another"
    )


def finite(value: float) -> float:
    """A reward that can be trained on."""
    if not abs(value) <= LARGEST:
        raise ValueError(f"a reward must be finite, and from -{LARGEST:g} to {LARGEST:g}")
    return value


# ---- processes of their own -----------------------------------------------------------------------------------------


class WorkerPool:
    """`size` processes for one task, started when first needed and killed when they overrun, with what they started.

    task: "path/to/file.py:function", or the name of a scorer in scoring/scorers.py. A process is this file without
    torch. It ends by itself when the trainer is gone: it reads the end of its pipe, or its own limit is over.
    """

    def __init__(self, task: str, size: int | None = None, item_timeout: float = ITEM_TIMEOUT):
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.size = size or max(2, min(8, (os.cpu_count() or 1) // local_ranks))
        self.task, self.item_timeout = task, item_timeout
        self.started: list[subprocess.Popen] = []
        self.slots: queue.SimpleQueue = queue.SimpleQueue()  # idle workers; None is one not started yet
        for _ in range(self.size):
            self.slots.put(None)

    def map(self, requests: list[tuple | None]) -> list[float | dict | None]:
        """A scorer's answer to each request, None for None. Safe to call from several threads."""
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(lambda request: request and self.score(request), requests))

    def score(self, request: tuple) -> float | dict | None:
        outcome = self.ask(request, {}, unread)
        if outcome is None or isinstance(outcome[1], EOFError):  # it was late, or died of it
            return {"reward": 0.0, "timeout": 1.0}
        if outcome[1] is not None:  # text that the scorer did not foresee
            warn_once(f"{self.task} scorer: {outcome[1]!r} on {shorten(request[0])}", kind=f"{self.task} scorer")
            return {"reward": 0.0, "scorer_error": 1.0}
        return outcome[0]

    def ask(self, args: tuple, kwargs: dict, read: Callable) -> tuple | None:
        """(what the function returned, None) or (None, what it raised), from a process, once one is free; None if it
        took too long; EOFError as an error where it ended the process. RuntimeError if a process does not start."""
        worker = self.slots.get()
        try:
            if worker is None or worker[0].poll() is not None:  # not started yet, or died while idle
                worker = None
                worker = self.start()
            process, pipe = worker
            try:
                pipe.send((args, kwargs, read))
                if pipe.poll(self.item_timeout):
                    return pipe.recv()
                outcome = None
            except (EOFError, ConnectionError):
                outcome = None, EOFError(f"the process ended, with status {process.wait()}")
            worker = None
            kill(process)
            return outcome
        finally:
            self.slots.put(worker)

    def start(self) -> tuple[subprocess.Popen, Connection]:
        here, there = multiprocessing.Pipe()
        start = f"import sys; sys.path[0] = {str(ROOT)!r}; from safety.calls import worker_main; worker_main()"
        command = [sys.executable, "-c", start, self.task, str(there.fileno()), str(self.item_timeout)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # one thread: they are many
        # A session of its own: Ctrl-C reaches it as the end of its pipe. What libraries print goes to stderr.
        how = dict(stdin=subprocess.DEVNULL, stdout=2, pass_fds=[there.fileno()], start_new_session=True)
        process = subprocess.Popen(command, env=environment, **how)
        there.close()
        self.started = [*(other for other in self.started if other.poll() is None), process]
        with contextlib.suppress(EOFError):
            if here.poll(START_TIMEOUT) and here.recv() == "ready":
                return process, here
        kill(process)
        raise RuntimeError(f"the process for {self.task!r} did not start; its own message is above")

    def close(self) -> None:
        """End all processes, at work or not."""
        for process in self.started:
            kill(process)


def kill(process: subprocess.Popen) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def worker_main() -> None:
    task, pipe, item_timeout = sys.argv[1], Connection(int(sys.argv[2])), float(sys.argv[3])
    if function_path(task):
        function = load_function(task)
    else:
        function = load_function(f"{ROOT / 'scoring' / 'scorers.py'}:{task}_scorer")()
        if sys.platform == "linux":  # elsewhere the limit is refused
            resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY, WORKER_MEMORY))
    pipe.send("ready")
    while True:
        try:
            args, kwargs, read = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(item_timeout + 2, exit=True)  # if the trainer is no longer there to do it
        try:
            result = function(*args, **kwargs)
            result = asyncio.run(finished(result)) if inspect.isawaitable(result) else result
            answer = pickle.dumps((read(result), None))
        except BaseException as error:  # sys.exit() in a function is an error of that function, too
            answer = pickle.dumps((None, sendable_error(error)))
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)


async def finished(awaitable):
    return await awaitable


def sendable_error(error: BaseException) -> BaseException:
    """Itself if it is python's own or ours; else one of the same name and text. Its traceback is a note."""
    if type(error) not in (UnusableResult, vars(builtins).get(type(error).__name__)):
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    error.add_note(f"In its own process:\n{''.join(traceback.format_tb(error.__traceback__))}")
    return error


_pools: dict[tuple, WorkerPool] = {}


async def run_in_process(function: Callable, kwargs: dict, seconds: float, read: Callable) -> tuple | None:
    """As run_limited; waiting for one of the processes does not count, nor does starting one."""
    module = sys.modules.get(function.__module__)
    path, name = getattr(module, "__file__", None), function.__name__
    if path is None or vars(module).get(name) is not function:
        fault = f"{name_of(function)}: only a function that stands in a file under its name can have own_process"
        return None, ValueError(fault)
    sent, parameters = {}, inspect.signature(function).parameters
    for argument, value in kwargs.items():
        try:
            pickle.dumps(value)
            sent[argument] = value
        except Exception as error:  # pickling runs code of whatever class it meets
            if argument in parameters:  # else it is one of many that ** takes
                fault = f"{name} has own_process, but its argument {argument!r} cannot be sent to a process ({error})"
                return None, TypeError(f"{fault}; leave it out of the function's arguments")
    spec = f"{os.path.abspath(path)}:{name}"
    if (spec, seconds) not in _pools:
        wanted = function.own_process
        _pools[spec, seconds] = pool = WorkerPool(spec, None if wanted is True else wanted, seconds)
        AT_END.append(pool.close)
    try:
        return await asyncio.wrap_future(start_thread(_pools[spec, seconds].ask, (), sent, read))
    except RuntimeError as error:  # a process that does not start
        return None, error


# ---- what is said ---------------------------------------------------------------------------------------------------

_WARNED: set[str] = set()


def warn_once(message: str, kind: str | None = None) -> None:
    """Log a warning the first time it is given; of a `kind`, whose texts quote now this and now that, the first one."""
    if (key := kind or message) not in _WARNED:
        _WARNED.add(key)
        logger.warning(message)


@functools.cache
def say_once(message: str) -> None:
    """Print, on rank 0, what is no reason to worry."""
    if os.environ.get("RANK", "0") == "0":
        print(message)


def leave(status: int, message: str = "") -> NoReturn:
    """End the process at once: threads of others' code would hold up an exit."""
    if message:
        print(f"\n{message}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a file on a disk that is full
            stream.flush()
    os._exit(status)
