"""Text that files, tables, pages and terminals can take, whatever a model, a tool or a data set put into it: half a
surrogate pair, control characters, values of no type in common. Files that are whole at any time."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

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


def flat(row: dict) -> dict:
    """Nested values as JSON text; texts as a file can hold them."""
    found = {}
    for key, value in row.items():
        nested = isinstance(value, (list, tuple, dict))
        value = json.dumps(value, ensure_ascii=False, default=text_of) if nested else value
        found[text_of(key)] = storable(value) if isinstance(value, str) else value
    return found


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; what was written is at `path` behind the block. Others read meanwhile."""
    yield (partial := path.with_suffix(".partial"))
    os.replace(partial, path)


def write_table(path: Path, rows: list[dict]) -> None:
    """The rows as a parquet file."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    rows = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))  # rows may differ in their reward names
    table = pyarrow.table({name: column([row.get(name) for row in rows]) for name in names})
    with whole(path) as partial:
        pyarrow.parquet.write_table(table, partial, compression="zstd")
