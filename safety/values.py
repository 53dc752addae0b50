"""What other people's code returns, as plain data: lists, dicts, texts and numbers of python's own types.

A value's `__float__`, `__iter__`, `__str__` and the like are code of its class, and may take for ever as its function
may. So a value is read where the function ran and within the same time limit (limits.py, workers.py call one of the
functions here); whoever called it sees plain data only, of a limited size. There is one reader for each kind of call:

numbers     of a reward: a value for each completion
plain       of a tool, and of an environment's reset() and metrics()
step        of an environment's step():  (messages, reward, done, info)
number      of an environment's score()
state       of an environment's state()
unread      of what goes from one function of a user to another

UnusableResult names what cannot be read without a guess: a set, say, has no order.
"""

import math
import sys
import types
from collections.abc import Mapping, MappingView, Set, Sized
from itertools import islice
from pathlib import Path

from cli import shorten

MOST_VALUES = 1_000_000  # in a result, in all its depths; numbers of arrays and pixels of images do not count
MOST_CHARACTERS = 2**26  # of its texts together
MOST_PARTS = 1000  # components of one completion's reward
MOST_BYTES = 2**28  # of an array
DEEPEST = 200  # lists within lists; deeper ones are shown as "..."
LARGEST = 1e18  # of a reward: its square has to fit a float32, for standard deviations
LARGEST_LOGGED = 1e300  # of a number that is logged only: beyond it the sum of a few has no float
EXACT = (str, bytes, int, float)

RETURN_RULE = "return a list with one number, None (does not apply) or {component: number} a completion"


class UnusableResult(TypeError):
    """The function returned what cannot be used; the text begins with "returned". index: of the completion at fault."""

    def __init__(self, fault: str, index: int | None = None):
        super().__init__(fault)
        self.index = index


# ---- numbers --------------------------------------------------------------------------------------------------------


def numbers(values) -> list:
    """A reward's values: a list of floats, Nones and {component: float, None or, of "turns" and "spans", list}."""
    return [one_reward(index, value) for index, value in enumerate(in_order(values, f"; {RETURN_RULE}"))]


def in_order(values, rule: str) -> list:
    """The elements of what has a length and an order: lists, tuples, arrays, tensors, series, but no set or dict."""
    kind = type(values)

    def shown() -> str:
        return f"returned {shorten(values)}, a {kind.__name__}"

    if issubclass(kind, (Set, MappingView)):
        raise UnusableResult(f"{shown()}, which has no order of its own{rule}")
    usable = issubclass(kind, Sized) and hasattr(kind, "__getitem__") and not issubclass(kind, (str, bytes, Mapping))
    try:
        length = len(values) if usable else 0
    except TypeError:  # a tensor without dimensions
        usable = False
    if not usable:
        raise UnusableResult(f"{shown()}{rule}")
    if length > MOST_VALUES:
        raise UnusableResult(f"returned {length:,} values, a {kind.__name__}; allowed are {MOST_VALUES:,}{rule}")
    listed = list(islice(values, length + 1))  # its __iter__ may know no end
    if len(listed) != length:
        more = "more" if len(listed) > length else f"only {len(listed)}"
        raise UnusableResult(f"returned a {kind.__name__} of length {length} that gives {more} values{rule}")
    return listed


def one_reward(index: int, value):
    if type(value) is float or value is None:
        return value
    try:
        if not issubclass(type(value), Mapping):
            return as_float(value)
        parts = list(islice(value.items(), MOST_PARTS + 1))
        if len(parts) > MOST_PARTS:
            raise ValueError(f"over {MOST_PARTS:,} components")
        readers = {"turns": turns, "spans": plain}  # of spans rewards.py knows the form
        return {text(name, 1000): readers.get(name, as_float)(part) for name, part in parts}
    except Exception as error:  # of a class of somebody else's
        fault = f"returned {shorten(value)} for completion {index}: {summary(error)}; {RETURN_RULE}"
        raise UnusableResult(fault, index) from None


def turns(values) -> list[float] | None:
    return None if values is None else [as_float(value) for value in in_order(values, "; `turns` is a list of numbers")]


def as_float(value) -> float | None:
    """A number of any kind, tensors and numpy scalars too; text is none."""
    if value is None or type(value) is float:
        return value
    if issubclass(type(value), (str, bytes, bytearray)):
        raise TypeError("text is not a number")
    return float(value)


def finite(value: float) -> float:
    """A reward that can be trained on."""
    if not abs(value) <= LARGEST:
        raise ValueError(f"a reward must be finite, and from -{LARGEST:g} to {LARGEST:g}")
    return value


def loggable(value: float) -> bool:
    return abs(value) <= LARGEST_LOGGED


# ---- messages, results, states --------------------------------------------------------------------------------------


def plain(value):
    """The value with lists, tuples, sets, dicts, texts and numbers of python's own types, subclasses made to these.
    Images, arrays, tensors, and paths within lists and dicts stay; a single number of numpy or torch is a number; a
    bytearray or memoryview is bytes; anything else is its text."""
    return Plain().of(value)


def unread(value):
    return value


def number(value) -> float | None:
    return as_float(value)


def step(outcome):
    """step()'s four results: plain messages, a float, a bool, a plain dict. The caller names what is no such."""
    if not isinstance(outcome, tuple) or tuple.__len__(outcome) != 4:
        return plain(outcome)
    messages, reward, done, info = tuple.__iter__(outcome)
    try:
        reward = as_float(reward)
    except Exception as error:
        raise UnusableResult(f"returned the reward {shorten(reward)}: {summary(error)}") from None
    if reward is None or not math.isfinite(reward):
        raise UnusableResult(f"returned the reward {reward}; it must be a finite number")
    try:
        done = bool(done)
    except Exception as error:  # of an array, say
        raise UnusableResult(f"returned done {shorten(done)}: {summary(error)}") from None
    return plain(messages), reward, done, info_of(info)


def info_of(info):
    """A dict of any kind as a plain one."""
    if issubclass(type(info), Mapping) and not isinstance(info, dict):
        info = dict(islice(info.items(), MOST_VALUES))
    return plain(info)


def state(value):
    """Of plain, hashable data: of other objects neither the text nor the identity need tell whether they are equal."""
    try:
        hash(value)
        hash(found := State().of(value))
    except TypeError as error:
        if isinstance(error, UnusableResult):
            raise
        raise UnusableResult(f"returned {shorten(value)}; it must be hashable, such as a tuple") from None
    return found


class Plain:
    """One value on its way: what it has so far, and which lists and dicts it is in."""

    def __init__(self):
        self.values = self.characters = 0
        self.within: set[int] = set()

    def of(self, value):
        kind = type(value)
        self.values += 1
        if self.values > MOST_VALUES:
            raise UnusableResult(f"returned over {MOST_VALUES:,} values")
        if value is None or kind is bool:
            return value
        if issubclass(kind, EXACT):
            return self.counted(exact(value))
        if issubclass(kind, (list, tuple, dict, set, frozenset)):
            if id(value) in self.within or len(self.within) > DEEPEST:
                return "..." if issubclass(kind, dict) or len(self.within) > DEEPEST else ["..."]
            self.within.add(id(value))
            try:
                return self.inside(value)
            finally:
                self.within.discard(id(value))
        if is_array(value):
            return self.array(value)
        if kind is type(Path()):
            path = self.counted(text(value))
            return Path(path) if self.within else path  # in a part it may be a picture's
        if issubclass(kind, (bytearray, memoryview)):
            if (size := memoryview(value).nbytes) > MOST_CHARACTERS:
                raise UnusableResult(f"returned {size:,} bytes; allowed are {MOST_CHARACTERS:,}")
            return self.counted(memoryview(value).tobytes())
        return self.other(value)

    def other(self, value):
        return value if is_image(value) else self.counted(text(value))

    def counted(self, value):
        if isinstance(value, (str, bytes)):
            self.characters += len(value)
            if self.characters > MOST_CHARACTERS:
                raise UnusableResult(f"returned texts of over {MOST_CHARACTERS:,} characters")
        return value

    def inside(self, value):
        """By the methods of list, dict and so on, whatever a subclass makes of them."""
        if isinstance(value, dict):
            return {self.key(name): self.of(part) for name, part in list(dict.items(value))}
        base = next(base for base in (list, tuple, set, frozenset) if isinstance(value, base))
        parts = [self.of(part) for part in list(base.__iter__(value))]
        return base(parts) if base in (list, tuple) else base(map(hashable, parts))

    def key(self, name):
        return hashable(self.of(name))

    def array(self, value):
        if getattr(value.dtype, "hasobject", False):  # of numpy: it holds anything
            return self.of(value.tolist())
        if value.ndim == 0:
            item = value.item()
            return self.of(float(item) if type(item) is type(value) else item)  # of a long double it is one again
        if value.nbytes > MOST_BYTES:
            raise UnusableResult(f"returned an array of {value.nbytes:,} bytes; allowed are {MOST_BYTES:,}")
        return value


class State(Plain):
    def array(self, value):
        return super().array(value) if value.ndim == 0 else self.other(value)

    def other(self, value):
        remedy = "give plain data instead, such as a tuple of what tells one state from another"
        raise UnusableResult(f"returned a state with {shorten(value)}, a {type(value).__name__}, in it; {remedy}")


def hashable(value):
    """Of plain data all but lists, sets and dicts can be a key; these become text."""
    try:
        hash(value)
        return value
    except TypeError:
        return text(value)


def exact(value):
    """A text or number as one of python's own class: the bare value, whatever a subclass makes of it."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes.__getitem__(value, slice(None))
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def is_array(value) -> bool:
    """An array of numpy, or a tensor of torch, of their own class: its methods are theirs."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy and isinstance(value, (numpy.ndarray, numpy.generic)):
        return type(value).__module__.partition(".")[0] == "numpy"
    return bool(torch and type(value) in (torch.Tensor, torch.nn.Parameter))


def is_image(value) -> bool:
    image = sys.modules.get("PIL.Image")
    return bool(image and isinstance(value, image.Image) and type(value).__module__.startswith("PIL."))


def text(value, limit: int = MOST_CHARACTERS) -> str:
    """str(value), as far as it has one."""
    try:
        found = exact(str(value))
    except BaseException:  # others' __str__, sys.exit() in it too, or a whole number of more than 4,300 digits
        found = f"<{type(value).__name__}>"
    return found[:limit]


# ---- errors ---------------------------------------------------------------------------------------------------------


def plain_error(error: BaseException) -> BaseException:
    try:
        return with_plain_text(error)
    except BaseException:  # of the error's own class
        return named_error(type(error).__name__, "(its text cannot be shown)")


def with_plain_text(error: BaseException, depth: int = 8) -> BaseException:
    """An error whose text can be asked for without running anybody's code. Others' classes with a `__str__` of their
    own, or with objects in their arguments, give way to a class of the same name, with the same text and traceback."""
    for name in ("__cause__", "__context__"):
        before = getattr(error, name)
        if before is not None:
            setattr(error, name, with_plain_text(before, depth - 1) if depth else None)
    kind = type(error)
    methods = (kind.__str__, kind.__repr__)
    arguments = BaseException.__dict__["args"].__get__(error)
    if all(isinstance(m, types.WrapperDescriptorType) for m in methods) and all(
        argument is None or type(argument) in (*EXACT, bool) for argument in arguments
    ):
        return error
    return named_error(kind.__name__, summary(error), error)


def named_error(name: str, said: str, error: BaseException | str | None = None) -> Exception:
    """An error of a class made for it, with the traceback of `error`, or with a note."""
    made = type(name, (RuntimeError,), {"__module__": "builtins"})(said)
    if isinstance(error, BaseException):
        made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
        made.__traceback__ = error.__traceback__
        for note in getattr(error, "__notes__", None) or ():
            made.add_note(text(note, 10_000))
    elif error:
        made.add_note(error)
    return made


def summary(error: BaseException) -> str:
    return text(error, 2000)
