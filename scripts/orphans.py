"""What a script starts ends with it, however that one ends: Ctrl-C, SIGTERM, kill -9.

    subprocess.Popen(command, preexec_fn=ends_with_us())

Linux: the system itself sends SIGTERM when the parent is gone. vllm_server.py has --exit-with-parent, which looks for
itself, so that it also holds for launchers in other languages, and which does not wait for what does not end.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # prctl
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: little may be done between fork and exec


def ends_with_us() -> Callable[[], None]:
    """To be called in a child of the thread that calls this; the child ends when that thread does."""
    parent = os.getpid()
    return lambda: end_with(parent)


def end_with(parent: int) -> None:
    """This process gets SIGTERM when `parent`, which started it, ends; at once if it has ended by now."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
