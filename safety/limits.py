"""Calls of other people's code - rewards, tools, environments - that cannot hold up the sampling, however they behave.

A plain function runs in a daemon thread, an async one on one event loop kept for all of them, so that a client they
share stays usable from step to step. Neither is waited for longer than its limit, and each gets copies of its own of
what it is given. What it returns is made plain data within the same limit (values.py). A function of a file that has
`function.own_process = True` (or a number: at most so many) runs in the main thread of a process of its own, which is
killed when it is late, with all that it started. Code that holds the GIL stops all of that; then watchdog.py ends the
process. docs/limits.md has all of it in user's terms.
"""

import asyncio
import atexit
import concurrent.futures
import contextvars
import faulthandler
import functools
import inspect
import itertools
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from safety import orphans, watchdog
from safety.values import plain, plain_error
from safety.watchdog import MARGIN  # noqa: F401 - part of what is promised: a call ends within its limit and this
from safety.workers import WorkerPool

AT_END: list[Callable[[], None]] = []  # what to call before the process ends: it ends without atexit's help
LAST_WORDS: list[Callable[[str], None]] = []  # what a signal's message goes to before it ends the process, and
LAST_SECONDS = 1.0  # how long they may take
NEW_THREADS: list[Callable[[], None]] = []  # what a thread does first: torch's current GPU is each thread's own
MAX_GIVEN_UP = 64  # calls that still run GIVEN_UP_SECONDS after they were given up end the run: each may take a core
GIVEN_UP_SECONDS = 60.0

logger = logging.getLogger(__name__)


_loop_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []  # none, or the one that async functions run on


class TooManyGivenUp(RuntimeError):
    """Calls that ran out of time pile up: they never end."""


@dataclass(eq=False)
class Running:
    """A call of other people's code."""

    name: str
    seconds: float
    number: int = 0  # of what runs now: the function, or the coroutine that it returned
    given_up: float | None = None  # time.monotonic() when it ran out of time
    returned: float = 0.0  # and when the function returned, or what it returned has been awaited
    signals: set[int] = field(default_factory=set)  # that it wanted to handle
    rollout: bool = False  # it waits for other calls, for up to an hour


# ---- calls ----------------------------------------------------------------------------------------------------------


def on_loop(coroutine) -> tuple[asyncio.AbstractEventLoop, concurrent.futures.Future]:
    """Run it on the event loop of async functions, which has a daemon thread: one that blocks it cannot hold up the
    sampling. The loop, and the coroutine's future."""
    with _loop_lock:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=prepared, args=(run_loop, _loops[0]), name="async calls", daemon=True).start()
        return _loops[0], asyncio.run_coroutine_threadsafe(coroutine, _loops[0])


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def leave_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Take a new one from now on. This one ends once nothing runs there: it keeps a thread and three descriptors."""

    async def end() -> None:
        await asyncio.sleep(1)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(1)
        # A client that calls share would take what is open here for usable on the next loop.
        for transport in list(getattr(loop, "_transports", {}).values()):
            transport.abort()
        loop.call_soon(loop.stop)

    with _loop_lock:
        if loop in _loops:
            _loops.remove(loop)
            asyncio.run_coroutine_threadsafe(end(), loop)


async def run_limited(function: Callable, kwargs: dict, seconds: float, read: Callable = plain) -> tuple | None:
    """(result, None) or (None, what it raised); None if it did not end within `seconds`, and is given up.

    read: what of values.py makes the result plain data, where the function runs and within the same time. The error's
    text is plain, too. The function gets copies of the lists and dicts in `kwargs`. TooManyGivenUp if too many calls
    never end.
    """
    while isinstance(function, functools.partial) and not function.args:
        function, kwargs = function.func, function.keywords | kwargs
    if getattr(function, "own_process", False):
        return await run_in_process(function, kwargs, seconds, read)
    call, deadline = Running(name_of(function), seconds), time.monotonic() + seconds
    outcome = await result_within(start_thread(run_function, function, kwargs, call, read), seconds)
    if outcome is not None and type(outcome[0]) is Awaited:
        awaitable = outcome[0].awaitable
        if seconds == math.inf:  # ours: it limits what it calls, and must not stand behind that on a blocked loop
            outcome = await asyncio.create_task(settle(awaitable, call))
        else:
            deadline += time.monotonic() - call.returned  # this loop is late, as --generator hf samples on it
            outcome = await on_shared_loop(awaitable, call, deadline)
        if outcome is not None:  # read in a thread: the loops are everybody's
            reading = start_thread(read_outcome, outcome, call, read)
            outcome = await result_within(reading, deadline - call.returned)
    if outcome is None:
        give_up(call)
    elif isinstance(outcome[1], TooManyGivenUp):  # of calls within this one: no fault of its own
        raise outcome[1]
    elif call.signals and (outcome[1] is not None or call.signals & ALARMS):
        return await run_where_signals_work(function, kwargs, call, outcome, read)
    return outcome


def start_thread(function: Callable, *given) -> concurrent.futures.Future:
    """Call the function in a daemon thread, which an exit does not wait for (executors' threads would be joined)."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled, so the thread can always set it

    def work():
        try:
            future.set_result(prepared(function, *given))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="call of others' code", daemon=True).start()
    return future


async def to_thread(function: Callable, *given, **named):
    """asyncio.to_thread, but in a thread of its own: that one has few, and an exit waits for them."""
    within = contextvars.copy_context()  # so that time_limit() holds there
    return await asyncio.wrap_future(start_thread(functools.partial(within.run, function, *given, **named)))


def prepared(function: Callable, *given):
    """What the function returns in a new thread."""
    for prepare in NEW_THREADS:
        prepare()
    return function(*given)


@dataclass(eq=False)
class Awaited:
    """What a function returned, where that has to be awaited."""

    awaitable: object


def run_function(function: Callable, kwargs: dict, call: Running, read: Callable) -> tuple:
    with noted(call):
        try:
            result = function(**copied(kwargs))
            return Awaited(result) if inspect.isawaitable(result) else read(result), None
        except BaseException as error:  # sys.exit() in a function is an error of that function, too
            return None, plain_error(error)
        finally:
            call.returned = time.monotonic()


def read_outcome(outcome: tuple, call: Running, read: Callable) -> tuple:
    """Of an async function."""
    result, error = outcome
    with noted(call):
        try:
            return (read(result), None) if error is None else (None, plain_error(error))
        except BaseException as unreadable:
            return None, plain_error(unreadable)


async def on_shared_loop(awaitable, call: Running, deadline: float) -> tuple | None:
    """The awaitable's outcome. A function that blocks the loop is left alone with it, and with what has begun there;
    what has only waited for its turn, for a third of its time, goes to a new loop."""
    waits = True
    while waits and (left := deadline - time.monotonic()) > 0:
        outcome: concurrent.futures.Future = concurrent.futures.Future()
        loop, task = on_loop(answer(awaitable, call, outcome))
        waiting = asyncio.wrap_future(outcome)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=min(left, call.seconds / 3))
            if not done and not (waits := outcome.cancel()):  # it has begun
                done, _ = await asyncio.wait({waiting}, timeout=max(deadline - time.monotonic(), 0))
            if done:
                return waiting.result()
        finally:
            waiting.cancel()
            task.cancel()
        if loop in _loops and (waits or not await is_free(loop)):
            leave_loop(loop)
    return None


async def is_free(loop: asyncio.AbstractEventLoop) -> bool:
    return await result_within(asyncio.run_coroutine_threadsafe(asyncio.sleep(0, result=True), loop), 1.0) or False


async def answer(awaitable, call: Running, outcome: concurrent.futures.Future) -> None:
    """Not by the task's own future: that is set a turn of the loop later, which may never come."""
    if outcome.set_running_or_notify_cancel():  # else it has gone to another loop
        outcome.set_result(await settle(awaitable, call))


async def settle(awaitable, call: Running) -> tuple:
    with noted(call):
        try:
            return await awaitable, None
        except BaseException as error:  # as in run_function; and one it lets through would end the shared loop
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise  # nobody waits for it any more; else it is one that the function has let through
            return None, error
        finally:
            call.returned = time.monotonic()


async def result_within(future: concurrent.futures.Future, seconds: float):
    """The future's result, or None after `seconds`. asyncio.wait_for would wait for a cancelled one to end."""
    waiting = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({waiting}, timeout=max(seconds, 0))
        return waiting.result() if done else None
    finally:
        waiting.cancel()


PLAIN = {str, int, float, bool, bytes, type(None)}


def copied(value):
    """Lists, dicts, tuples and sets anew, in any depth; what else they hold - images, tensors, objects - as it is."""
    kind = type(value)
    if kind is list:
        return list(value) if PLAIN.issuperset(map(type, value)) else [copied(part) for part in value]
    if kind is dict:
        return {key: copied(part) for key, part in value.items()}
    if kind is tuple:
        return tuple([copied(part) for part in value])
    return set(value) if kind is set else value


def name_of(function: Callable) -> str:
    """Such as "right (my_rewards.py:12)"."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
    return f"{name[-200:]} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name[-200:]


# ---- calls that do not end ------------------------------------------------------------------------------------------

RUNNING: dict[int, Running] = {}
_numbers = itertools.count()
_current: contextvars.ContextVar[Running | None] = contextvars.ContextVar("call", default=None)
_warn_at = 4


@contextmanager
def noted(call: Running) -> Iterator[None]:
    """Keep the watchdog informed that the call runs here, in this thread."""
    call.number = next(_numbers)
    RUNNING[call.number] = call
    _current.set(call)
    remember_defaults(call)
    thread = threading.get_native_id(), threading.get_ident()
    tell("begin", call.number, call.name, call.seconds, *thread, call.rollout)
    try:
        yield
    finally:
        tell("end", call.number)
        del RUNNING[call.number]
        restore_defaults()


_default_dtype = None  # torch's, before others' code ran
_together: set[str] = set()  # the calls since none ran last, any of which may have set another


def others_run(but: Running | None = None) -> bool:
    """Whether calls run that are waited for; rollouts, one of which may always run, do not count."""
    waited_for = (call for call in list(RUNNING.values()) if call.given_up is None and not call.rollout)
    return any(call is not but for call in waited_for)


def remember_defaults(call: Running) -> None:
    global _default_dtype
    if not others_run(call):
        _together.clear()
    _together.add(call.name)
    if _default_dtype is None and "torch" in sys.modules:
        _default_dtype = sys.modules["torch"].get_default_dtype()


def restore_defaults() -> None:
    """What is set for the whole process would change what is trained with. Not while other calls run: one of them may
    have set it for a moment, and needs it."""
    torch = sys.modules.get("torch")
    if others_run():
        return
    if torch and _default_dtype is not None and (now := torch.get_default_dtype()) is not _default_dtype:
        torch.set_default_dtype(_default_dtype)
        who = next(iter(_together)) if len(_together) == 1 else "A reward, tool or environment"
        warn_once(f"{who} left torch.set_default_dtype({now}), which holds for training, too: put back.")


def time_limit() -> float:
    """Seconds that the call of other people's code under way here may take in all; infinity outside of one."""
    call = _current.get()
    return call.seconds if call else math.inf


def give_up(call: Running) -> None:
    """Nothing can end a thread: count those that go on, say who they are, and end the run if they pile up."""
    global _warn_at
    call.given_up = time.monotonic()
    tell("given up", call.number)
    since = [(other.given_up, other.name) for other in list(RUNNING.values()) if other.given_up is not None]
    names = [name for _, name in since]
    stale = [name for start, name in since if time.monotonic() - start > GIVEN_UP_SECONDS]
    advice = "Give the function a limit of its own, or write NAME.own_process = True below it (docs/limits.md)."
    if len(stale) >= MAX_GIVEN_UP:
        raise TooManyGivenUp(
            f"{len(stale)} calls still run {GIVEN_UP_SECONDS:g} s after they were given up, and may take a core each: "
            f"{counted(stale)}. {advice}"
        )
    if len(names) >= _warn_at:
        _warn_at = 2 * len(names)
        logger.warning("%d calls that ran out of time still run: %s. %s", len(names), counted(names), advice)


def counted(names: list[str]) -> str:
    return ", ".join(f"{name} x {number}" for name, number in Counter(names).most_common())


# ---- processes of their own -----------------------------------------------------------------------------------------

ALARMS = {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
_pools: dict[tuple, WorkerPool] = {}
_set_handler = signal.signal


def set_handler(number, handler):
    """signal.signal, which fails in threads: a call that wants it is known by that, even if it hides the error."""
    if call := _current.get():
        call.signals.add(number)
    return _set_handler(number, handler)


signal.signal = set_handler


async def run_in_process(function: Callable, kwargs: dict, seconds: float, read: Callable) -> tuple | None:
    """As run_limited; waiting for one of the processes does not count, nor does starting one."""
    spec = file_and_name(function)
    if spec is None:
        fault = f"{name_of(function)}: only a function that stands in a file under its name can have own_process"
        return None, ValueError(fault)
    if (spec, seconds) not in _pools:
        wanted = function.own_process
        _pools[spec, seconds] = pool = WorkerPool(spec, None if wanted is True else wanted, seconds)
        AT_END.append(pool.close)
    try:
        return await asyncio.wrap_future(start_thread(_pools[spec, seconds].call, function, kwargs, read))
    except (TypeError, RuntimeError) as error:  # an argument that cannot be sent, or a process that does not start
        return None, error


async def run_where_signals_work(
    function: Callable, kwargs: dict, call: Running, outcome: tuple, read: Callable
) -> tuple | None:
    """Again, in a process, which it stays in from now on; if it cannot, its outcome, with the cause said."""
    why = f"{call.name} uses `signal`, which works in the main thread of a process only, and here it runs in a thread"
    if file_and_name(function) is None:
        remedy = "It is no function of a file, which could run in a process of its own (own_process): take the signal"
        fault = f"{why}. {remedy} out; its time is limited anyway (docs/limits.md)."
        warn_once(fault)
        return outcome if outcome[1] is None else (None, RuntimeError(fault))
    name = function.__name__
    warn_once(f"{why}: it gets a process of its own. Write {name}.own_process = True below it, or take the signal out.")
    function.own_process = True
    return await run_in_process(function, kwargs, call.seconds, read)


def file_and_name(function: Callable) -> str | None:
    """ "path/to/file.py:function" for what a process can take from there, else None."""
    module, name = sys.modules.get(getattr(function, "__module__", None)), getattr(function, "__name__", "")
    path = getattr(module, "__file__", None)
    return f"{os.path.abspath(path)}:{name}" if path and vars(module).get(name) is function else None


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


# ---- the watchdog ---------------------------------------------------------------------------------------------------

_messages: int | None = None  # the watchdog's pipe, once there is one
_owner = 0  # the process it watches
_exit = os._exit


def watch_process(terminated: str) -> None:
    """Start the watchdog of this process, which must have come through its imports. Called once, by the main thread.

    From here on Ctrl-C ends the process within END_SECONDS, a second one at once, and SIGTERM at once, saying
    `terminated`: wherever the main thread waits, as in a collective. os._exit is refused: see `refuse_exit`.
    """
    global _messages, _owner
    reader, _messages = os.pipe()
    traces, write_traces = os.pipe()
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    os.set_blocking(reader, False)
    os.set_blocking(_messages, False)
    rank = os.environ.get("RANK")
    label = f"[rank {rank}] " if rank else ""
    passed = [reader, inbox.fileno(), outbox.fileno(), traces]
    command = [sys.executable, "-I", "-S", watchdog.__file__, str(os.getpid()), *map(str, passed), label]
    # A session of its own: the terminal's Ctrl-C is for the trainer.
    subprocess.Popen(command, pass_fds=passed, start_new_session=True, stdin=subprocess.DEVNULL)
    os.close(reader)
    os.close(traces)
    faulthandler.enable(all_threads=False)  # a crash in C says where it was
    faulthandler.register(watchdog.TRACE_SIGNAL, file=write_traces, all_threads=True)
    # C code writes a signal's number to `outbox`; Python's own handlers wait for the main thread.
    _set_handler(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget_signals)
    threading.Thread(target=attend, args=(inbox, outbox, label, terminated), name="signals", daemon=True).start()
    _owner, os._exit = os.getpid(), refuse_exit
    sys.addaudithook(refuse_exec)
    atexit.register(tell, "bye")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # kill -9 leaves torchrun no time to end its ranks: the system sends them SIGTERM. Its parent is, to the system,
        # the thread that started this process; torchrun's waits for it.
        orphans.end_with(os.getppid())


def attend(inbox: socket.socket, outbox: socket.socket, label: str, terminated: str) -> None:
    """In a thread: empty the inbox, which tells the watchdog that Python runs, and act on the signals in it."""
    interrupted, poll = None, select.poll()  # when Ctrl-C came; the main thread gets it as KeyboardInterrupt
    poll.register(inbox, select.POLLIN)
    while True:
        wait = None if interrupted is None else max(0.0, interrupted + watchdog.END_SECONDS - time.monotonic()) * 1000
        if not poll.poll(wait):
            leave(130, f"{label}interrupted; what was to be closed did not end within {watchdog.END_SECONDS:g} s.")
        received = inbox.recv(64)
        if signal.SIGTERM in received:
            leave(128 + signal.SIGTERM, f"{label}stopped by SIGTERM. {terminated}")
        if signal.SIGINT in received and interrupted is None:
            interrupted = time.monotonic()
            tell("ending")
        elif signal.SIGINT in received and time.monotonic() - interrupted > watchdog.TWICE_SECONDS:
            leave(130, f"{label}interrupted twice; nothing was closed.")


def forget_signals() -> None:
    """In forked children, which share the inbox."""
    signal.set_wakeup_fd(-1)
    _set_handler(signal.SIGTERM, signal.SIG_DFL)


def tell(*message) -> None:
    """Send the watchdog a message. If it is gone, or its pipe is full, there is nothing better to do than to go on."""
    if _messages is not None and os.getpid() == _owner:
        try:
            os.write(_messages, json.dumps(message).encode() + b"\n")
        except (BlockingIOError, BrokenPipeError):
            pass


def leave(status: int, message: str = "") -> NoReturn:
    """End the process at once."""
    if message:
        farewell = threading.Thread(target=lambda: [each(message) for each in LAST_WORDS], daemon=True)
        farewell.start()
        farewell.join(LAST_SECONDS)  # not longer: a file system may hang
        shown = watchdog.WHOLE_TERMINAL if sys.stderr.isatty() else ""
        print(f"{shown}\n{message}", file=sys.stderr, flush=True)
    tell("bye")
    _exit(status)


def refuse_exit(status: int) -> None:
    """os._exit, which would end a run without a word, perhaps as if it had gone well. C code still can."""
    if os.getpid() != _owner:  # a forked child
        _exit(status)
    raise RuntimeError(f"os._exit({status}) would end the whole run without a word: return or raise instead")


def refuse_exec(event: str, about: tuple) -> None:
    """An audit hook against os.exec*: this process would be another program, and its status be taken for the run's."""
    if event == "os.exec" and os.getpid() == _owner:
        raise RuntimeError(f"os.exec of {about[0]!r} would end the whole run without a word: use subprocess instead")
