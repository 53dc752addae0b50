"""Calls of other people's code - rewards, tools, environments - that cannot hold up the sampling.

    outcome = await run_limited(function, {"completions": [...]}, seconds=30)    # (result, None), (None, error) or None

A plain function runs in a daemon thread, an async one on one event loop kept for all of them, so that a client they
share stays usable from step to step. None is waited for longer than its limit; within it, and where the function ran,
what it returns is made plain data by a reader. Nothing can end a thread: one that is late goes on, and if too many do,
the run ends. Code that holds the GIL stops all other threads: then `faulthandler` ends the process and shows where
every thread stands. A function with `function.own_process = True` runs elsewhere: safety/processes.py. docs/limits.md
says it in user's terms.
"""

import asyncio
import faulthandler
import functools
import importlib
import inspect
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

MARGIN = 10.0  # seconds beyond its limit after which a call that lets nothing else run ends the process
MAX_GIVEN_UP = 64  # calls that still run GIVEN_UP_SECONDS after they were given up end the run: each may take a core
GIVEN_UP_SECONDS = 60.0
FIRST_WARNING = 4  # calls that ran out of time and still run

AT_END: list[Callable[[], None]] = []  # what to call before the process ends: it ends without atexit's help
NEW_THREADS: list[Callable[[], None]] = []  # what a thread does first: torch's current GPU is each thread's own

logger = logging.getLogger(__name__)


# ---- calls within a time --------------------------------------------------------------------------------------------


class TooManyGivenUp(RuntimeError):
    """Calls that ran out of time pile up: they never end."""


@dataclass(eq=False)
class Call:
    function: Callable
    deadline: float  # of time.monotonic()
    given_up: float | None = None  # when it ran out of time
    awaited: Future | None = None  # of an async function, on the loop of all of them


RUNNING: set[Call] = set()


async def run_limited(function: Callable, kwargs: dict, seconds: float, read: Callable | None = None) -> tuple | None:
    """(result, None) or (None, what it raised); None if it did not end within `seconds`, and is given up.

    read: makes the result plain data; `plain` if not given. The function gets copies of the lists and dicts in
    `kwargs`. TooManyGivenUp if too many calls never end.
    """
    read, seconds = read or plain, min(seconds, 1e6)  # faulthandler's clock takes no infinity
    while isinstance(function, functools.partial) and not function.args:
        function, kwargs = function.func, function.keywords | kwargs
    if getattr(function, "own_process", False):
        processes = importlib.import_module("safety.processes")  # few functions ask for one; it builds on this file
        return await processes.run_in_process(function, kwargs, seconds, read)
    call, ended, loop = Call(function, time.monotonic() + seconds), Future(), shared_loop()

    async def settled(awaitable) -> tuple:
        try:
            return read(await awaitable), None
        except BaseException as error:  # one that it let through would end the loop
            return None, error

    def work() -> None:
        RUNNING.add(call)
        faulthandler.dump_traceback_later(seconds + MARGIN, exit=True, file=2)  # until `watch` sets it anew
        try:
            for prepare in NEW_THREADS:
                prepare()
            result = function(**copied(kwargs))
            if inspect.isawaitable(result):
                call.awaited = asyncio.run_coroutine_threadsafe(settled(result), loop)
                outcome = call.awaited.result()
            else:
                outcome = read(result), None
        except BaseException as error:  # sys.exit() in a function is an error of that function, too
            if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
                error.add_note(f"Write {name_of(function).split()[0]}.own_process = True below it.")
            outcome = None, error
        RUNNING.discard(call)
        ended.set_result(outcome)

    threading.Thread(target=work, name="call of others' code", daemon=True).start()
    waiting = asyncio.wrap_future(ended)
    await asyncio.wait({waiting}, timeout=seconds)  # wait_for would wait for a cancelled one to end
    if waiting.done():
        return waiting.result()
    give_up(call)
    if call.awaited is not None:
        call.awaited.cancel()
        answers = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        if not (await asyncio.wait({answers}, timeout=1.0))[0]:  # something blocks the loop: the next calls get another
            shared_loop.cache_clear()
    return None


@functools.cache
def shared_loop() -> asyncio.AbstractEventLoop:
    """The loop of async functions. With the first one begins the watch over the GIL."""
    loop = asyncio.new_event_loop()
    for prepare in NEW_THREADS:
        loop.call_soon(prepare)
    threading.Thread(target=loop.run_forever, name="async calls", daemon=True).start()
    if not any(thread.name == "GIL" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="GIL", daemon=True).start()
    return loop


def watch() -> None:
    """End the process if no Python code runs in it for as long as its calls may take, and MARGIN: one of them holds the
    GIL. The alarm's clock is in C; this thread, which sets it anew, runs as long as others can."""
    while True:
        time.sleep(0.5)
        now = time.monotonic()
        left = [call.deadline - now if call.given_up is None else GIVEN_UP_SECONDS for call in list(RUNNING)]
        if left:
            faulthandler.dump_traceback_later(max(0.0, *left) + MARGIN, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()


def give_up(call: Call) -> None:
    """Say which calls go on after their time, and end the run if they pile up."""
    call.given_up = time.monotonic()
    late = [other for other in list(RUNNING) if other.given_up is not None]
    stale = [other for other in late if time.monotonic() - other.given_up > GIVEN_UP_SECONDS]
    names = Counter(name_of(other.function) for other in late).most_common()
    said = (
        f"{len(late)} calls that ran out of time still run, and may take a core each: "
        f"{', '.join(f'{name} x {number}' for name, number in names)}. Give the function a limit of its own, or write "
        "NAME.own_process = True below it (docs/limits.md)."
    )
    if len(stale) >= MAX_GIVEN_UP:
        raise TooManyGivenUp(said)
    if len(late) >= FIRST_WARNING:
        warn_once(said, kind=f"late calls: 2 ** {len(late).bit_length()}")


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


class UnusableResult(TypeError):
    """The function returned what cannot be used; the text begins with "returned". index: of the completion at fault."""

    def __init__(self, fault: str, index: int | None = None):
        super().__init__(fault)
        self.index = index


def unread(value):
    """Of what goes from one function of a user to another."""
    return value


KEYS = str | int | float | tuple
KEPT = None | str | bytes | bytearray | int | float | set | frozenset | Path


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
