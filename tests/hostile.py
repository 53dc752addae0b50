"""Rewards, tools and an environment that misbehave: taken by test_limits.py as tests/hostile.py:NAME."""

import contextlib
import ctypes
import os
import re
import signal
import threading
import time
from pathlib import Path

WORKERS = []  # own_process: grows in a worker only


def backtrack():
    """Takes longer than anyone waits, in C code that never lets go of the GIL."""
    re.match(r"(a+)+$", "a" * 60 + "b")


# ---- rewards --------------------------------------------------------------------------------------------------------


def stuck(completions, **_):
    backtrack()
    return [0.0] * len(completions)


def stuck_on_rank_1(completions, **_):
    if os.environ.get("RANK") == "1":
        backtrack()
    return [float(len(completions[0]))] * len(completions)


def stuck_alone(completions, **_):
    return stuck(completions)


stuck_alone.own_process = True


def holds_for_a_while(completions, **_):
    """14 s with the GIL held, without using the processor: within its limit, as a model that loads."""
    ctypes.PyDLL(None).sleep(14)
    return [float(len(text)) for text in completions]


def leaves(completions, **_):
    os._exit(0)


def leaves_by_c(completions, **_):
    ctypes.CDLL(None)._exit(0)


def busy(completions, **_):
    while True:
        time.sleep(0.01)


def waits(completions, **_):
    Path(os.environ["REACHED"]).touch()
    time.sleep(3600)


def waits_on_rank_1(completions, **_):
    if os.environ.get("RANK") == "1":
        waits(completions)
    return [float(len(text)) for text in completions]


def stuck_at_once(completions, **_):
    Path(os.environ["REACHED"]).touch()
    backtrack()


# ---- tools ----------------------------------------------------------------------------------------------------------


def stuck_tool(text: str) -> str:
    """Looks for a text.

    Args:
        text: the text
    """
    backtrack()
    return text


@contextlib.contextmanager
def alarm(seconds):
    """A time limit as scripts for the main thread set it."""

    def ring(number, frame):
        raise TimeoutError(f"took over {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def lookup(name: str, wait: float = 0.0) -> list:
    """Looks a name up in a table.

    Args:
        name: the name
        wait: seconds that it takes
    """
    with alarm(1):
        time.sleep(wait)
        return [name, os.getpid()]


def swallows(completions, **_):
    """A reward that catches what its time limit raises, and so scored a constant."""
    try:
        with alarm(5):
            return [float(len(text)) for text in completions]
    except Exception:
        return [0.0] * len(completions)


def alone(text: str, then: str = "") -> dict:
    """Does what `then` says, in a process of its own.

    Args:
        text: the text
        then: what to do
    """
    WORKERS.append(text)
    if then == "stuck":
        backtrack()
    if then == "raise":
        raise KeyError("no such column")
    if then == "leave":
        os._exit(0)
    main = threading.current_thread() is threading.main_thread()
    return {"text": text, "pid": os.getpid(), "main": main, "calls": len(WORKERS)}


alone.own_process = 2


# ---- an environment -------------------------------------------------------------------------------------------------


class StuckGame:
    def reset(self, row, seed):
        backtrack()

    def step(self, text):
        return "Again.", 0.0, False, {}


# ---- processes that a function starts -------------------------------------------------------------------------------


def family(how: str, at: str, then: str = "") -> str:
    """Starts processes that live for a minute, and writes their numbers to a file.

    Args:
        how: multiprocessing, session, orphan or fork
        at: the file
        then: wait, leave or exec
    """
    import multiprocessing
    import subprocess
    import sys

    minute = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    if how == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        pids = [child.pid]
    elif how == "session":
        pids = [subprocess.Popen(minute, start_new_session=True).pid]
    elif how == "orphan":  # its parent ends at once, and it has a session of its own
        code = f"import subprocess; print(subprocess.Popen({minute!r}, start_new_session=True, stdout=2).pid)"
        pids = [int(subprocess.check_output([sys.executable, "-c", code]))]
    else:
        pids = [os.fork()]
        if not pids[0]:
            return "the child comes back out of the function, too"
    Path(at).write_text(" ".join(map(str, pids)), encoding="utf-8")
    if then == "wait":
        time.sleep(100)
    if then == "leave":
        os._exit(3)
    if then == "exec":
        os.execv("/bin/true", ["true"])
    return "done"


family.own_process = 1


def executes(completions, **_):
    os.execv("/bin/true", ["true"])


def executes_by_posix(completions, **_):
    import posix

    posix.execv("/bin/true", ["true"])
