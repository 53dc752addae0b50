"""What others' code gives back, as plain data; what is said of it once; what has to end with the run."""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

AT_END: list[Callable[[], None]] = []  # what to call before the process ends: it ends without atexit's help

logger = logging.getLogger(__name__)


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


def copied(value):
    """Lists, dicts, tuples and sets anew, in any depth; what else they hold - images, tensors, objects - as it is."""
    kind = type(value)
    if kind is dict:
        return {key: copied(part) for key, part in value.items()}
    return kind(map(copied, value)) if kind in (list, tuple, set) else value


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


def name_of(function: Callable) -> str:
    """Such as "right (my_rewards.py:12)"."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name
