"""Other people's results as plain data; messages printed once; what has to end with the run."""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

AT_END: list[Callable[[], None]] = []  # called before the process ends, which skips atexit

logger = logging.getLogger(__name__)


# ---- results as plain data ------------------------------------------------------------------------------------------


class UnusableResult(TypeError):
    """A function returned something unusable; the text begins with "returned". index: of the completion at fault."""

    def __init__(self, fault: str, index: int | None = None):
        super().__init__(fault)
        self.index = index


def as_it_is(value):
    """The value as it is, for values that pass from one function of a user to another."""
    return value


KEYS = str | int | float | tuple
KEPT = None | str | bytes | bytearray | int | float | set | frozenset | Path


def plain(value):
    """A result of a tool or an environment as plain data: lists, tuples and dicts of texts and numbers. Numbers of
    numpy and torch become Python's; images, arrays, tensors, sets and paths stay; anything else becomes its text."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, KEYS) else str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(plain, value))
    if getattr(value, "shape", None) == ():
        return value.item()
    foreign = type(value).__module__.partition(".")[0] in ("numpy", "torch", "PIL")
    return value if foreign or isinstance(value, KEPT) else str(value)


def deep_copy(value):
    """A deep copy of lists, dicts, tuples and sets; other values in them - images, tensors, objects - are shared."""
    kind = type(value)
    if kind is dict:
        return {key: deep_copy(part) for key, part in value.items()}
    return kind(map(deep_copy, value)) if kind in (list, tuple, set) else value


# ---- messages -------------------------------------------------------------------------------------------------------

_WARNED: set[str] = set()


def warn_once(message: str, kind: str | None = None) -> None:
    """Log a warning only the first time; of one `kind`, whose texts may differ in what they quote, only the first
    text."""
    if (key := kind or message) not in _WARNED:
        _WARNED.add(key)
        logger.warning(message)


@functools.cache
def say_once(message: str) -> None:
    """Print a harmless message once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(message)


def name_of(function: Callable) -> str:
    """Name and place of a function, such as "right (my_rewards.py:12)"."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name
