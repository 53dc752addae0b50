"""Makes values of models, tools and data sets safe for files, tables, pages and terminals: lone surrogates, control
characters, columns of mixed types. Also writes files so that readers never see half of one."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

# Only functions that make columns import numpy and pyarrow: look.py --help needs neither.

# Characters that control a terminal or the direction of text, so that it would show another text.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def storable(text: str) -> str:
    """The text in a form that UTF-8 can encode: lone surrogates, from tokenizers and JSON, become \\udXXX."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def visible(text: str) -> str:
    """Storable text with control characters escaped, except tab and newline: a terminal would obey them."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), storable(text))


def text_of(value) -> str:
    """storable(str(value))"""
    return storable(str(value))


def column(values: list):
    """A column of a table. If its values have no common type, or none that a file can hold, they become text."""
    import numpy
    import pyarrow

    try:
        arrays = any(isinstance(value, numpy.ndarray) for value in values)
        array = pyarrow.array(values, from_pandas=arrays)  # in arrays nan stands for unknown
        if not isinstance(array.type, (pyarrow.StructType, pyarrow.ExtensionType)):
            return array
    except (pyarrow.ArrowException, OverflowError, ValueError, TypeError):
        pass
    return pyarrow.array([None if value is None else text_of(value) for value in values], pyarrow.string())


def flat(row: dict) -> dict:
    """The row with nested values as JSON text, and storable texts."""
    fields = {}
    for key, value in row.items():
        nested = isinstance(value, (list, tuple, dict))
        value = json.dumps(value, ensure_ascii=False, default=text_of) if nested else value
        fields[text_of(key)] = storable(value) if isinstance(value, str) else value
    return fields


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to within this context, whose end moves the file to `path`. Others may read `path` meanwhile."""
    yield (partial := path.with_suffix(".partial"))
    os.replace(partial, path)


def write_table(path: Path, rows: list[dict]) -> None:
    """Write the rows to a parquet file."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    rows = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))  # rows may differ in their reward names
    table = pyarrow.table({name: column([row.get(name) for row in rows]) for name in names})
    with replacing(path) as partial:
        pyarrow.parquet.write_table(table, partial, compression="zstd")
