"""Calls of other people's code - rewards, tools, environments - that cannot hold up the sampling.

    outcome = await run_limited(function, {"completions": [...]}, seconds=30)    # (result, None), (None, error) or None

A plain function runs in a daemon thread, an async one on one event loop that all of them share, so that a client they
share stays usable from step to step. No call is waited for longer than its limit. Within that time, and where the
function ran, a reader turns its result into plain data.

A thread cannot be ended: a late one goes on, and if too many do, the run ends. Code that holds the GIL stops all other
threads; then `faulthandler` ends the process and prints where every thread is. A function with
`function.own_process = True` runs in a process instead: safety/processes.py. docs/limits.md explains all this to users.
"""

import asyncio
import faulthandler
import functools
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from safety.results import deep_copy, name_of, plain, warn_once

MARGIN = 10.0  # seconds beyond its limit after which a call that blocks all threads ends the process
MAX_GIVEN_UP = 64  # the run ends if so many calls run on for GIVEN_UP_SECONDS: each may take a core
GIVEN_UP_SECONDS = 60.0
FIRST_WARNING = 4  # number of late calls, still running, from which on there is a warning

NEW_THREADS: list[Callable[[], None]] = []  # what a new thread does first, as torch's current GPU is set per thread


# ---- calls with a time limit -----------------------------------------------------------------------------------------


class TooManyGivenUp(RuntimeError):
    """Too many calls ran out of time and never end."""


@dataclass(eq=False)
class Call:
    function: Callable
    deadline: float  # by time.monotonic()
    given_up: float | None = None  # time at which it was given up
    awaited: Future | None = None  # of an async function, on the shared loop


RUNNING: set[Call] = set()


async def run_limited(function: Callable, kwargs: dict, seconds: float, read: Callable | None = None) -> tuple | None:
    """(result, None) or (None, the error it raised); None if it did not end within `seconds` and was given up.

    read: turns the result into plain data; by default `plain`. The function gets copies of the lists and dicts in
    `kwargs`. TooManyGivenUp if too many calls never end.
    """
    read, seconds = read or plain, min(seconds, 1e6)  # faulthandler accepts no infinite time
    while isinstance(function, functools.partial) and not function.args:
        function, kwargs = function.func, function.keywords | kwargs
    if getattr(function, "own_process", False):
        from safety import processes  # here: few functions need one

        return await processes.run_in_process(function, kwargs, seconds, read)
    call, ended, loop = Call(function, time.monotonic() + seconds), Future(), shared_loop()

    async def settled(awaitable) -> tuple:
        try:
            return read(await awaitable), None
        except BaseException as error:  # an error let through would end the loop
            return None, error

    def work() -> None:
        RUNNING.add(call)
        faulthandler.dump_traceback_later(seconds + MARGIN, exit=True, file=2)  # until `watch` renews it
        try:
            for prepare in NEW_THREADS:
                prepare()
            result = function(**deep_copy(kwargs))
            if inspect.isawaitable(result):
                call.awaited = asyncio.run_coroutine_threadsafe(settled(result), loop)
                outcome = call.awaited.result()
            else:
                outcome = read(result), None
        except BaseException as error:  # sys.exit() in a function also counts as its error
            if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
                error.add_note(f"Write {name_of(function).split()[0]}.own_process = True below it.")
            outcome = None, error
        RUNNING.discard(call)
        ended.set_result(outcome)

    threading.Thread(target=work, name="call of others' code", daemon=True).start()
    waiting = asyncio.wrap_future(ended)
    await asyncio.wait({waiting}, timeout=seconds)  # wait_for would wait until a cancelled call ends
    if waiting.done():
        return waiting.result()
    give_up(call)
    if call.awaited is not None:
        call.awaited.cancel()
        answers = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        if not (await asyncio.wait({answers}, timeout=1.0))[0]:  # something blocks the loop: later calls get a new one
            shared_loop.cache_clear()
    return None


@functools.cache
def shared_loop() -> asyncio.AbstractEventLoop:
    """The event loop of async functions. Also starts, once, the thread that watches the GIL."""
    loop = asyncio.new_event_loop()
    for prepare in NEW_THREADS:
        loop.call_soon(prepare)
    threading.Thread(target=loop.run_forever, name="async calls", daemon=True).start()
    if not any(thread.name == "GIL" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="GIL", daemon=True).start()
    return loop


def watch() -> None:
    """Ends the process if no Python code could run in it for as long as its calls may take, plus MARGIN: then one of
    them holds the GIL. The alarm's clock is in C; this thread renews it as long as threads can run."""
    while True:
        time.sleep(0.5)
        now = time.monotonic()
        seconds_left = [call.deadline - now if call.given_up is None else GIVEN_UP_SECONDS for call in list(RUNNING)]
        if seconds_left:
            faulthandler.dump_traceback_later(max(0.0, *seconds_left) + MARGIN, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()


def give_up(call: Call) -> None:
    """Reports which calls go on after their time; TooManyGivenUp if there are too many."""
    call.given_up = time.monotonic()
    late = [running for running in list(RUNNING) if running.given_up is not None]
    stale = [running for running in late if time.monotonic() - running.given_up > GIVEN_UP_SECONDS]
    names = Counter(name_of(running.function) for running in late).most_common()
    running = ", ".join(f"{name} x {number}" for name, number in names)
    remedy = "Give the function a limit of its own, or write NAME.own_process = True below it (docs/limits.md)."
    message = f"calls that ran out of time are still running, and may take a core each: {running}. {remedy}"
    if len(stale) >= MAX_GIVEN_UP:
        raise TooManyGivenUp(message)
    if len(late) >= FIRST_WARNING:
        warn_once(message, kind=f"late calls: 2 ** {len(late).bit_length()}")
