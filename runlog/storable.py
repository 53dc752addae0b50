"""Text that files, tables, pages and terminals can take, whatever a model, a tool or a data set put into it: half a
surrogate pair, control characters, odd keys, nesting without end."""

import re

# numpy and pyarrow are imported where columns are made: look.py --help needs neither.

# What a terminal obeys, and what turns the direction of text: something else is shown than is there.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def storable(text: str) -> str:
    """The text as UTF-8 can hold it: half a surrogate pair, which tokenizers and JSON may give, as \\udXXX."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def visible(text: str) -> str:
    """Storable text whose control characters are spelled out, all but tab and newline: a terminal would obey them."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), storable(text))


def text_of(value) -> str:
    """str(value), storable, whatever it is."""
    try:
        return storable(str(value))
    except Exception:  # others' __str__, or a whole number of more than 4,300 digits
        return f"<{type(value).__name__}>"


def jsonable(value, depth: int = 50):
    """The value as JSON can hold it: keys as text, unknown things as text, what is nested deeper than `depth` cut."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, (dict, list, tuple)) and depth == 0:
        return "..."
    if isinstance(value, dict):
        return {text_of(key): jsonable(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner, depth - 1) for inner in value]
    return text_of(value)


def column(values: list):
    """A column of a table. Where its values have no type in common, or none that a file has, they are text."""
    import numpy
    import pyarrow

    try:
        arrays = any(isinstance(value, numpy.ndarray) for value in values)
        made = pyarrow.array(values, from_pandas=arrays)  # in arrays, nan is what is not known
        if not isinstance(made.type, (pyarrow.StructType, pyarrow.ExtensionType)):
            return made
    except (pyarrow.ArrowException, OverflowError, ValueError, TypeError):
        pass
    return pyarrow.array([None if value is None else text_of(value) for value in values], pyarrow.string())
