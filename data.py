"""Rows: where they come from, what makes one valid, and which are left out because their prompts are too long.

A row is a dict. `prompt` is its only required column: a non-empty string or a list of chat messages. `answer`, `image`
and `images` are the other standard names. Every column is kept and handed to the reward functions by keyword.

    load_rows("openai/gsm8k", config="main", split="train")       hub id, or a folder that `datasets` can load
    load_rows("rows.jsonl")                                       .jsonl .json .csv .parquet: these have no splits
    load_rows("reasoning_gym:chain_sum?min_terms=2&size=500")     a reasoning-gym task and its parameters
    load_rows("examples/sums.py:rows", split="test", seed=42)     a function, called as rows(split=..., seed=...)
    load_rows("recipes/gsm8k.py:rows?source=my.jsonl")            ... and source="my.jsonl"
    load_rows("seeds:2000")                                       a seed a row, for environments that make the prompts

Mistakes raise ConfigError: what was given, what is allowed, what to do.
"""

import ast
import contextlib
import csv
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import re
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import psutil

import domains
from cli import ConfigError, known_name, shorten
from inputs import on_disk
from inputs.parts import PartError, parts_of
from inputs.pictures import opened
from plugins import function_path, load_function, require, with_arguments

# `datasets`, pyarrow and reasoning_gym are imported where such rows are read: workers import this file, too.

NO_PROMPT = [{"role": "user", "content": ""}]  # of rows whose environment makes the prompt
FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet")
GYM_SPLITS = ("train", "test", "validation")
# Reward functions get these from us; most of them from TRL's trainer, too.
PROMPT_RULE = "`prompt` must be a non-empty string or a list of chat messages [{'role': 'user', 'content': '...'}]"
MAX_DEPTH = 100  # lists in lists, of a row: what handles rows recurses, and Python ends at 1,000 calls
SURROGATE = re.compile("[\ud800-\udfff]")
MOST_ROWS = 2_000_000  # of a function that does not say how many it has
LEAST_MEMORY = 0.05  # of the machine's that reading rows leaves free
MEMORY_SECONDS, _looked = 0.1, 0.0  # between two looks at it; when the last one was
PROGRESS_SECONDS = 5.0  # between two lines about something that takes long
REMEDY = "Build or rename columns in format_row (train script) or a function of yours: --dataset_id file.py:function"


# ---- loading --------------------------------------------------------------------------------------------------------


def load_rows(
    dataset_id: str,
    config: str | None = None,
    split: str = "train",
    seed: int = 0,
    format_row: Callable[[dict], dict] | None = None,
    own_prompts: bool = True,
    lines: bool = False,
):
    """All rows of a data set, checked: a list of dicts, or (hub, parquet) a `datasets.Dataset`, which indexes to dicts
    and decodes images only when a row is taken. Files have no splits: held-out rows need a file of their own.

    `format_row` makes a row from each one read, before the check (and a list of them all, images opened); one that
    gives back the row as it is leaves a `datasets.Dataset` what it is. Without `own_prompts` a row may lack `prompt`:
    it is an empty one, for an environment to complete. With `lines` the rows of a large .jsonl file may stay there
    (`on_disk.Lines`).
    """
    is_gym, is_function = dataset_id.startswith("reasoning_gym:"), names_function(dataset_id)
    if config is not None and (is_gym or is_function or names_file(dataset_id)):
        raise ConfigError(f"--dataset_config={config}: only hub data sets have configurations; {dataset_id} has none.")
    if dataset_id.startswith("seeds:"):
        rows = load_seeds(dataset_id, split, seed)
    elif is_gym:
        rows = load_gym(dataset_id.removeprefix("reasoning_gym:"), split, seed)
    elif is_function:
        rows = load_from_function(dataset_id, split, seed)
    elif names_file(dataset_id):
        rows = load_file(dataset_id, lines and own_prompts and changes_nothing(format_row))
    else:
        rows = load_hub(dataset_id, config, split)
    if not isinstance(rows, (list, on_disk.Lines)) and nested(rows) and rows.format["type"] is None:
        rows = rows.with_transform(without_nulls_of_others)
    if not own_prompts:
        whole = each_a_dict(opened(rows), dataset_id)
        rows = [row if "prompt" in row else row | {"prompt": NO_PROMPT} for row in whole]
    if isinstance(rows, on_disk.Lines) and not stays_on_disk(rows):
        rows = [*rows]
    if format_row is not None and not (changes_nothing(format_row) and stays_on_disk(rows)):
        rows = [*formatted(format_row, with_progress(opened(rows), f"{dataset_id}: format_row", len(rows)), dataset_id)]
    check_rows(rows, dataset_id)
    return rows


def changes_nothing(format_row: Callable) -> bool:
    """Whether it is `return row`, as the script's is until somebody edits it."""
    code = getattr(format_row, "__code__", None)
    return code is not None and code.co_code == (lambda row: row).__code__.co_code


def stays_on_disk(rows) -> bool:
    """Whether these are rows that are read when they are taken: a `datasets.Dataset`, and none with images, as those
    are opened and looked at, nor one that makes its rows by a function (`with_transform`)."""
    if isinstance(rows, list) or {"image", "images"} & {*rows.column_names}:
        return False
    made = isinstance(rows, on_disk.Lines) or rows.format["format_kwargs"].get("transform")
    return made in (True, None, without_nulls_of_others)


def nested(rows) -> bool:
    """Whether a column of a `datasets.Dataset` holds dicts."""
    return "struct<" in str(rows.features.arrow_schema)


def without_nulls(value):
    """Without the keys that are None in dicts, as Arrow gives each dict the keys of all others. A message's `content`
    stays: templates ask whether it is None."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or (k == "content" and "role" in value)}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def without_nulls_of_others(rows: dict[str, list]) -> dict[str, list]:
    """`without_nulls` of each column."""
    return {name: without_nulls(values) for name, values in rows.items()}


def many_on_disk(rows) -> bool:
    return not isinstance(rows, list) and len(rows) >= on_disk.MANY


def remembered(rows, what: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """make(): a number for each row. Of many rows on disk, which know by a fingerprint what they are, the next start
    finds what was made. what: all that the numbers depend on beside the rows.  [rows]"""
    return on_disk.kept(f"{rows._fingerprint} {what}", len(rows), make) if many_on_disk(rows) else make()


def each_of(rows, find: Callable[[int, int], np.ndarray], told: str) -> np.ndarray:
    """What `find` says of each row, given the first place and the one behind the last; of many rows on disk several
    processes ask it. told: what is done, for those who wait.  [rows]"""
    if not many_on_disk(rows):
        return find(0, len(rows))
    starts = range(0, len(rows), on_disk.CHUNK)
    found = on_disk.by_processes(lambda start: find(start, min(start + on_disk.CHUNK, len(rows))), starts)
    return np.concatenate([*with_progress(found, told, len(starts))])


def columns_of(rows) -> set[str] | None:
    """Those that every row has; None where there are no rows."""
    if isinstance(rows, on_disk.Lines):
        return rows.in_every_row
    if not isinstance(rows, list):
        return {*rows.column_names}
    return functools.reduce(lambda known, row: known & row.keys(), rows[1:], {*rows[0]}) if rows else None


def each_a_dict(rows: Iterable, name: str) -> Iterator[dict]:
    for number, row in enumerate(rows):
        check_dict(row, f"{name}, row {number}")
        yield row


def formatted(format_row: Callable[[dict], dict], rows: Iterable[dict], name: str) -> Iterator[dict]:
    """Each row as `format_row` makes it; what that raises says where."""
    for number, row in enumerate(each_a_dict(rows, name)):
        try:
            yield format_row(row)
        except Exception as error:
            error.add_note(f"Raised by format_row at row {number} of {name}, whose columns are {', '.join(row)}.")
            raise


def load_seeds(spec: str, split: str, seed: int) -> list[dict]:
    """`seeds:2000`: so many rows of no prompt but a seed each, other ones in every split."""
    known_name(f"split of {spec}", split, GYM_SPLITS)
    count = spec.removeprefix("seeds:")
    if not count.isdecimal() or not 0 < int(count) <= 2**28:
        raise ConfigError(f"--dataset_id={spec}: give a number of rows behind the colon, such as seeds:2000.")
    first = gym_seed(seed, split)
    return collected(({"prompt": NO_PROMPT, "seed": first + n} for n in range(int(count))), spec)


def load_hub(dataset_id: str, config: str | None, split: str):
    import datasets

    first = dataset_id.partition("/")[0]
    if not Path(dataset_id).exists() and (
        first in ("", ".", "..", "~") or (Path(first).is_dir() and "/" in dataset_id)
    ):
        raise ConfigError(f"{dataset_id}: no such file or folder (looked in {Path.cwd()}).")
    try:
        if not any((Path(dataset_id) / name).exists() for name in ("dataset_dict.json", "state.json")):
            return datasets.load_dataset(dataset_id, config, split=split)
        saved = datasets.load_from_disk(dataset_id)
        splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    except (OSError, ValueError) as error:  # unknown name, hub out of reach, unknown configuration or split
        raise ConfigError(
            f"--dataset_id={dataset_id} (configuration {config}, split {split}) cannot be loaded: {error}\n"
            f"Allowed: a hub id with --dataset_config and --dataset_split, a {'/'.join(FILE_TYPES)} file, "
            "reasoning_gym:TASK?parameter=value, or path/to/file.py:function."
        ) from error
    known_name(f"split of {dataset_id}", split, splits)
    return splits[split]


def with_progress(items: Iterable, what: str, total: int, done: Callable[[], int] | None = None) -> Iterator:
    """The items. Every PROGRESS_SECONDS rank 0 says how far it is; of what takes less, nothing.

    done: how much of `total` there is behind us; without it, the number of items.
    """
    last = time.monotonic()
    for number, item in enumerate(items):
        check_memory(number, what)
        if time.monotonic() - last > PROGRESS_SECONDS and os.environ.get("RANK", "0") == "0":
            last = time.monotonic()
            print(f"{what}, {(done() if done else number) / total:.0%}", flush=True)
        yield item


def collected(items: Iterable, what: str, most: float = math.inf) -> list:
    """All items; how many there are is told meanwhile. ConfigError if there are over `most`, or if they fill the
    memory."""
    rows = []
    with told(what, rows):
        for item in items:
            if len(rows) >= most:
                raise ConfigError(
                    f"--dataset_id={what} gave {most:,} rows and goes on. All rows are read before the first step: end "
                    "it, as by itertools.islice(rows, N), or return a list, which may be longer."
                )
            check_memory(len(rows), what)
            rows.append(item)
    return rows


@contextlib.contextmanager
def told(what: str, rows: list):
    """While the block under it runs, rank 0 says every PROGRESS_SECONDS how many rows there are, before the first one,
    too."""
    start, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(PROGRESS_SECONDS):
            print(f"{what}: {len(rows):,} rows after {time.monotonic() - start:.1f} s", flush=True)

    if os.environ.get("RANK", "0") == "0":
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def check_memory(number: int, what: str) -> None:
    """`look_at_memory`, of rows that are read one at a time."""
    if number % 64 == 63:
        look_at_memory(number, what)


def look_at_memory(number: int, what: str) -> None:
    """ConfigError if the memory is nearly full, which the system would end the process for without a word. Looked at
    every MEMORY_SECONDS."""
    global _looked
    if time.monotonic() - _looked >= MEMORY_SECONDS:
        left, total = memory_left()
        _looked = time.monotonic()
        if left < LEAST_MEMORY * total:
            raise ConfigError(
                f"{what}: after {number} rows only {left / 1e9:.1f} of {total / 1e9:.1f} GB of memory are left. Rows "
                "are kept in memory: give fewer or smaller ones, or more memory."
            )


def memory_left() -> tuple[int, int]:
    """(free, all) bytes of memory of this machine, or of its container where that may have less."""
    machine = psutil.virtual_memory()
    try:
        most, used = (
            int(Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current")
        )
        cached = re.search(
            r"^inactive_file (\d+)", Path("/sys/fs/cgroup/memory.stat").read_text(encoding="utf-8"), re.M
        )
    except (OSError, ValueError):  # none, or `max`: no limit
        return machine.available, machine.total
    free = min(machine.available, most - used + int(cached[1] if cached else 0))
    return free, min(machine.total, most)


def load_file(path: str, lines: bool = False):
    """A .json file is a list of rows, a .jsonl file one row a line; .csv values are strings. lines: see `load_rows`."""
    file = Path(path).expanduser()
    if not file.is_file():
        odd = "a folder, pipe or device, not a file; give a file" if file.exists() else "no such file"
        raise ConfigError(f"{path}: {odd} (looked in {Path.cwd()}).")
    readers = {".parquet": read_parquet, ".csv": read_csv, ".json": read_json, ".jsonl": read_jsonl}
    suffix = file.suffix.lower()
    try:
        if lines and suffix == ".jsonl" and (rows := lines_of(file)) is not None:
            return rows
        return readers[suffix](file)
    except ConfigError as error:
        raise ConfigError(f"{path}{error}") from None
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: not valid {suffix[1:]}: {error}") from error


def read_parquet(file: Path):
    import datasets
    import pyarrow.parquet

    # Not load_dataset: it would copy the file into a cache. Image columns that `datasets` wrote still decode.
    parts, count = [], 0
    with pyarrow.parquet.ParquetFile(file) as opened:
        check_once(opened.schema_arrow.names, "")
        for part in opened.iter_batches(20_000):  # how large it is unpacked nothing says beforehand
            parts.append(part)
            count += len(part)
            look_at_memory(count, "")
        table = pyarrow.Table.from_batches(parts, opened.schema_arrow)
    table.validate(full=True)  # that text is UTF-8; reading a row would fail in the middle of the run
    return datasets.Dataset(table, fingerprint=on_disk.fingerprint(file, on_disk.stamp(file.stat())))


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a text file, ends included. ConfigError (", line N: ...") where one is not UTF-8."""
    # -sig: some programs put a byte-order mark first. surrogateescape: a byte that is no UTF-8 shows as a surrogate.
    with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as opened:
        size = max(file.stat().st_size, 1)
        lines = with_progress(opened, f"reading {file} ({size / 1e6:.0f} MB)", size, opened.buffer.tell)
        for number, line in enumerate(lines, 1):
            check_utf8(line, f", line {number}")
            yield line


def check_utf8(line: str, place: str) -> None:
    if not line.isascii() and (bad := SURROGATE.search(line)):
        byte = f"{ord(bad[0]) - 0xDC00:#x} {where_in(line, bad.start())}"
        raise ConfigError(f"{place}: not UTF-8: byte {byte}. Save the file as UTF-8.")


def where_in(text: str, position: int) -> str:
    return f"after {text[max(position - 30, 0) : position]!r}" if position else "at the beginning"


class Unfit(ValueError):
    """JSON as Python's parser takes it, but with another meaning than it may seem to have."""


def once(pairs: list[tuple]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise Unfit(f"key {twice!r:.200} stands there twice; keep one")
    return row


def no_number(name: str):
    raise Unfit(f"{name} is no JSON; write null for a value that is not known")


def decimal(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise Unfit(f"{text:.50} is too large for a number; write it as a text")
    return number


STRICT = dict(object_pairs_hook=once, parse_constant=no_number, parse_float=decimal)
DECODER = json.JSONDecoder(**STRICT)


def parse_json(text: str, place: str):
    """The value. ConfigError beginning with `place`, ", line N" of a file of lines; "" of a whole file."""
    kind = "jsonl" if place else "json"
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = place or f", line {error.lineno}"
        raise ConfigError(f"{place}: not valid {kind}: {error.msg} at character {error.colno}") from None
    except RecursionError:
        deep = re.search(rf"([\[{{][^][{{}}]*){{{MAX_DEPTH}}}", text)  # where so many are opened and none is closed
        place = place or (f", line {text.count(chr(10), 0, deep.end()) + 1}" if deep else "")
        raise ConfigError(f"{place}: lists in lists deeper than {MAX_DEPTH} levels; flatten them") from None
    except Unfit as error:
        raise ConfigError(f"{place or f', line {line_of_unfit(text)}'}: {error}") from None
    except ValueError as error:  # a number of more than 4,300 digits
        raise ConfigError(f"{place}: not valid {kind}: {error}") from None


def line_of_unfit(text: str) -> int:
    """The line on which the innermost object begins that is Unfit. Slow: the parser in C does not say."""
    decoder, begins = json.JSONDecoder(**STRICT), [0]

    def parse_object(rest, *more):
        try:
            return json.decoder.JSONObject(rest, *more)
        except Unfit:
            begins.insert(-1, rest[1])  # the innermost one is the first to come by
            raise

    decoder.parse_object = parse_object
    decoder.scan_once = json.scanner.py_make_scanner(decoder)
    try:
        decoder.decode(text)
    except Unfit:
        pass
    return text.count("\n", 0, begins[0]) + 1


def read_json(file: Path):
    rows = parse_json("".join(read_lines(file)), "")
    if not isinstance(rows, list):
        kind = type(rows).__name__
        raise ConfigError(f": is {shorten(rows)}, a {kind}; a .json file is a list of rows, [{{...}}, ...].")
    for index, row in enumerate(rows):
        if fault := content_fault(row):
            raise ConfigError(f", row {index}: {fault}")
    return rows


def read_jsonl(file: Path) -> list:
    rows = []
    for number, line in enumerate(read_lines(file), 1):
        if line.strip():
            rows.append(parse_line(line, f", line {number}"))
    return rows


def parse_line(line: str, place: str):
    row = parse_json(line.rstrip("\r\n"), place)
    suspect = "\\u" in line or line.count("[") + line.count("{") > MAX_DEPTH  # looking at each takes its time
    if suspect and (fault := content_fault(row)):
        raise ConfigError(f"{place}: {fault}")
    return row


def lines_of(file: Path) -> on_disk.Lines | None:
    """The rows of a large file, checked; they stay there. None of a small one, or where that does not do."""

    def checked(line: bytes, place: str = "", index: int = 0) -> dict:
        text = line.decode("utf-8", "surrogateescape")
        check_utf8(text, place)
        row = parse_line(text, place or ", line")
        check_row(row, f", row {index}", looked_into=True)
        return row

    mark = on_disk.stamp(file.stat())
    if mark[0] < on_disk.LARGE:
        return None
    made_by = (check_row, on_disk.form_of, parts_of, on_disk.row_hash)
    what = f"lines of {on_disk.fingerprint(file, mark)}, by {[code_of(f) for f in made_by]}"
    told = f"reading {file} ({mark[0] / 1e6:.0f} MB)"
    changed = ConfigError(": was changed while it was read. Start again when nothing writes to it.")

    def look() -> np.ndarray:
        found = on_disk.looked_at(file, checked, lambda parts, n: with_progress(parts, told, n))
        if on_disk.stamp(file.stat()) != mark:  # then it is not what is kept under its old mark
            raise changed
        return found

    try:
        looks = on_disk.kept(what, None, look)
    except on_disk.Unsound as error:
        number, index, line = error.args
        checked(line, f", line {number}", index)
        raise
    if len(looks) < on_disk.MANY:
        return None
    rows = on_disk.Lines(file, lambda line: json.loads(line.decode().strip()), looks)
    if rows.stamp != mark:
        raise changed
    return rows


def read_csv(file: Path) -> list[dict]:
    csv.field_size_limit(2**31 - 1)  # of the module; 131,072 characters otherwise
    reader = csv.DictReader(read_lines(file), strict=True)  # else a quote that is not closed takes all that follows
    names = reader.fieldnames or []
    check_once(names, ", line 1")
    rows = []
    for row in reader:
        if None in row or None in row.values():
            count = len(names) + len(row.get(None, ())) - sum(value is None for value in row.values())
            raise ConfigError(
                f", line {reader.line_num}: {count} fields, but the first line names {len(names)}. A field with a "
                "comma or a line break wants double quotes around it."
            )
        rows.append(row)
    return rows


def check_once(names: list[str], place: str) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{place}: column {twice[0]!r} stands there twice; give each a name of its own.")


def content_fault(value) -> str | None:
    """What is wrong with a row or prompt, however it is nested: half a surrogate pair in a text, which no tokenizer and
    no file takes, or lists in lists without end. None if nothing is."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = []
        for item in level:
            if isinstance(item, str):
                if not item.isascii() and (half := SURROGATE.search(item)):
                    place = where_in(item, half.start())
                    return f"text with half a surrogate pair, {half[0]!a}, {place}: an emoji cut in two? Mend the text"
            elif isinstance(item, dict):
                inside += [*item, *item.values()]
            elif isinstance(item, (list, tuple)):
                inside += item
        if not inside:
            return None
        level = inside
    return f"lists in lists deeper than {MAX_DEPTH} levels; flatten them"


def names_function(dataset_id: str) -> bool:
    return function_path(dataset_id.partition("?")[0]) is not None


def names_file(dataset_id: str) -> bool:
    return not names_function(dataset_id) and Path(dataset_id).suffix.lower() in FILE_TYPES


def load_from_function(spec: str, split: str, seed: int):
    name, arguments = with_arguments(spec)
    function = load_function(name)
    if taken := [key for key in ("split", "seed") if key in arguments]:
        raise ConfigError(f"--dataset_id={spec}: {taken[0]} is given by --dataset_split, --eval_split and --seed.")
    signature = inspect.signature(function)
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        for key in arguments:
            known_name(f"argument of --dataset_id {name}", key, signature.parameters)
    try:
        signature.bind(split=split, seed=seed, **arguments)
    except TypeError as error:
        raise ConfigError(f"--dataset_id={spec} is called as f(split=..., seed=...), but: {error}.") from error
    with told(spec, []):
        rows = function(split=split, seed=seed, **arguments)
    if isinstance(rows, (str, bytes, dict)) or not isinstance(rows, Iterable):
        raise ConfigError(f"--dataset_id={spec} returned a {type(rows).__name__}; return an iterable of dicts.")
    # A datasets.Dataset stays one, so that images are decoded row by row; who returns one has imported the package.
    is_dataset = "datasets" in sys.modules and isinstance(rows, sys.modules["datasets"].Dataset)
    if is_dataset:
        return rows
    most = math.inf if isinstance(rows, Sized) else MOST_ROWS  # what it has read may come from Arrow, too
    return collected((without_nulls_of_others(r) if isinstance(r, dict) else r for r in rows), spec, most)


# ---- reasoning-gym --------------------------------------------------------------------------------------------------


def load_gym(task: str, split: str, seed: int) -> list[dict]:
    """`prompt` is the task's question; its own keys (question, answer, metadata) stay, and `reasoning_gym_task` tells
    the reward function reasoning_gym which scorer to use. Parameter `size` sets the number of rows, `seed` overrides.
    """
    require("reasoning_gym", f"--dataset_id=reasoning_gym:{task}")
    import reasoning_gym

    known_name("split of a reasoning-gym task", split, GYM_SPLITS)
    name, parameters = parse_gym(task)
    parameters["seed"] = gym_seed(parameters.get("seed", seed), split)
    try:
        items = collected(reasoning_gym.create_dataset(name, **parameters), f"reasoning_gym:{task}")
    except ConfigError:  # of ours
        raise
    except (AssertionError, TypeError, ValueError) as error:  # the task's own checks
        raise ConfigError(f"--dataset_id=reasoning_gym:{task}: {name} refuses these parameters: {error}") from error
    return [{"prompt": item["question"], **item, "reasoning_gym_task": task} for item in items]


def gym_seed(seed: int, split: str) -> int:
    """Seed of a split's item 0. Item i is drawn from seed + i, so data sets of neighbouring seeds would be the same
    rows shifted: seeds are spread over [0, 2^29), and splits lie 2^29 apart (numpy allows up to 2^32).
    """
    return seed * 7_368_787 % 2**29 + GYM_SPLITS.index(split) * 2**29


def parse_gym(task: str) -> tuple[str, dict]:
    """`chain_sum?min_terms=2&allow_negation=true` -> ("chain_sum", {"min_terms": 2, "allow_negation": True})."""
    from reasoning_gym.factory import DATASETS

    name, _, query = task.partition("?")
    known_name("reasoning-gym task", name, [known for known in DATASETS if known != "composite"])
    fields, parameters = {f.name: f for f in dataclasses.fields(DATASETS[name][1])}, {}
    for pair in filter(None, query.split("&")):
        key, _, text = pair.partition("=")
        known_name(f"parameter of reasoning_gym:{name}", key, fields)
        parameters[key] = gym_value(name, fields[key], unquote(text))
    return name, parameters


def gym_value(task: str, field: dataclasses.Field, text: str):
    """`text` as a python literal, which must have the type of the parameter's default (a default of None: any)."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    default = 0 if field.name == "seed" else default
    try:
        value = ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, (list, tuple)) and isinstance(value, (list, tuple)):
        return type(default)(value)
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if default is not None and default is not dataclasses.MISSING and type(value) is not type(default):
        raise ConfigError(
            f"reasoning_gym:{task}: {field.name}={text} is a {type(value).__name__}, not a {type(default).__name__}; "
            f"the default is {default!r}."
        )
    return value


# ---- checking -------------------------------------------------------------------------------------------------------


def check_rows(rows, name: str) -> None:
    """ConfigError naming data set, row and fault for the first row that no prompt can be made of."""
    if isinstance(rows, on_disk.Lines):
        return  # lines_of has looked at each
    if not isinstance(rows, list):  # a datasets.Dataset: look at one column, the others may be images to decode
        check_columns(rows.column_names, name)
        if len(rows) == 0:
            raise ConfigError(f"{name}: has no rows.")
        prompts, told = rows.select_columns(["prompt"]), f"{name}: looking at the rows"

        def check(first: int, last: int) -> np.ndarray:
            """1 for each row."""
            for index in first + np.flatnonzero(~on_disk.Prompts(rows, first, last).sound()):
                check_row(prompts[int(index)], f"{name}, row {index}")
            return np.ones(last - first, np.uint8)

        what = f"are right, by {code_of(check_row)} {code_of(on_disk.form_of)}"
        remembered(rows, what, lambda: each_of(rows, check, told))
    else:
        check_each(rows, name)


def code_of(function: Callable) -> str:
    """Changes with the file that a function stands in."""
    return hashlib.sha256(Path(function.__code__.co_filename).read_bytes()).hexdigest()


def check_each(rows, name: str) -> None:
    if len(rows) == 0:
        raise ConfigError(f"{name}: has no rows.")
    for index, row in enumerate(with_progress(rows, f"{name}: looking at the rows", len(rows))):
        check_row(row, f"{name}, row {index}")


def check_dict(row, where: str) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: is a {type(row).__name__}, {shorten(row)}; a row must be a dict. {REMEDY}")


def check_row(row, where: str, looked_into: bool = False) -> None:
    """looked_into: `parse_line` has been through the row's texts."""
    check_dict(row, where)
    check_columns(row, where)
    if fault := prompt_fault(row["prompt"]) or (None if looked_into else content_fault(row["prompt"])):
        raise ConfigError(f"{where}: {fault}. {PROMPT_RULE}.")


def check_columns(columns, where: str) -> None:
    if "prompt" not in columns:
        raise ConfigError(f"{where}: no column `prompt`, only {', '.join(map(str, columns))}. {PROMPT_RULE}. {REMEDY}")


def prompt_fault(prompt) -> str | None:
    """What is wrong with a prompt, but for what `content_fault` finds in its texts; or None."""
    if isinstance(prompt, str):
        return None if prompt.strip() else "`prompt` is an empty string"
    if not isinstance(prompt, list) or not prompt:
        return f"`prompt` is a {type(prompt).__name__}, {shorten(prompt)}"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"message {number} of `prompt` is a {type(message).__name__}, {shorten(message)}"
        if not isinstance(message.get("role"), str) or not message["role"]:
            return f"message {number} of `prompt` has no `role`: {shorten(message)}"
        # content is text or a list of parts; an assistant that only calls tools has none
        if not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            return f"message {number} of `prompt` has no `content`: {shorten(message)}"
        try:
            parts_of(message.get("content"))
        except PartError as error:
            return f"message {number} of `prompt`: {error}"
    return None


def filter_overlong(rows, lengths: Sequence[int], max_prompt_length: int) -> tuple:
    """(rows of at most `max_prompt_length` prompt tokens, how many were dropped: the caller says so). ConfigError if
    no row is left."""
    kept = [index for index, length in enumerate(lengths) if length <= max_prompt_length]
    dropped = len(lengths) - len(kept)
    if not kept:
        raise ConfigError(
            f"--max_prompt_length={max_prompt_length}: all {dropped} prompts are longer; the shortest has "
            f"{min(lengths)} tokens, the longest {max(lengths)} or more. Raise the limit."
        )
    if dropped == 0:
        return rows, 0
    return ([rows[index] for index in kept] if isinstance(rows, list) else rows.select(kept)), dropped


def check_step_size(num_rows: int, prompts_per_step: int, world_size: int) -> None:
    """ConfigError unless a step's distinct prompts can be shared out among the ranks."""
    if prompts_per_step < 1 or prompts_per_step % world_size:
        low = prompts_per_step // world_size * world_size
        legal = f"{low} or {low + world_size}" if low > 0 else str(world_size)
        raise ConfigError(f"--prompts_per_step={prompts_per_step} is not divisible by {world_size} ranks; use {legal}.")
    if num_rows < prompts_per_step:
        most = num_rows // world_size * world_size
        legal = f"--prompts_per_step={most} or less" if most else f"at most {num_rows} ranks"
        raise ConfigError(
            f"--prompts_per_step={prompts_per_step}: the prompts of a step are distinct, and the data set has only "
            f"{num_rows} rows; use {legal}, or more data."
        )


class Epochs:
    """Rows by place: each once an epoch, in an order that (seed, epoch) gives, one epoch behind the other without a
    gap. Where a step takes the end of one and the beginning of the next, rows that it already holds move further back
    in the new one."""

    def __init__(self, num_rows: int, prompts_per_step: int, seed: int):
        self.num_rows, self.prompts_per_step, self.seed = num_rows, prompts_per_step, seed
        self._orders: dict[int, np.ndarray] = {}  # the last epochs; a cache, never state

    def step(self, step: int) -> np.ndarray:
        """Rows of a step on all ranks, [prompts_per_step]."""
        return self.take(step * self.prompts_per_step, self.prompts_per_step)

    def extra(self, random: np.random.Generator, step: int, place: int, count: int) -> np.ndarray:
        """`count` random rows. step, place: of whom they take the places, which matters to Draw."""
        return random.choice(self.num_rows, count, replace=count > self.num_rows)

    def take(self, start: int, count: int) -> np.ndarray:
        """`count` rows from place `start` of all epochs in a row."""
        epoch, place = divmod(start, self.num_rows)
        rows = self.order(epoch)[place : place + count]
        if len(rows) < count:
            rows = np.concatenate([rows, self.take((epoch + 1) * self.num_rows, count - len(rows))])
        return rows

    def order(self, epoch: int) -> np.ndarray:
        """Row order of an epoch, [num_rows]. Where a step straddles two epochs the second depends on the first, and so
        on back to one that began together with a step: that is at most prompts_per_step epochs to replay.
        """
        first = epoch
        while first not in self._orders and self.begun(first):
            first -= 1
        for e in range(first, epoch + 1):
            if e not in self._orders:
                self._orders[e] = self._shuffle(e, self._orders.get(e - 1))
            self._orders = {key: order for key, order in self._orders.items() if abs(key - e) <= 1}
        return self._orders[epoch]

    def begun(self, epoch: int) -> int:
        """Rows that the epoch before gave to the step that straddles the two."""
        return epoch * self.num_rows % self.prompts_per_step

    def _shuffle(self, epoch: int, previous: np.ndarray | None) -> np.ndarray:
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        if begun := self.begun(epoch):
            head = self.prompts_per_step - begun  # rows that step still needs
            held = np.isin(order, previous[-begun:])
            clash = np.flatnonzero(held[:head])
            # num_rows >= prompts_per_step, so behind the head there are always enough rows to swap with.
            spare = head + np.flatnonzero(~held[head:])[: len(clash)]
            order[clash], order[spare] = order[spare], order[clash]
        return order


def epochs_of(name: str, count: int, per_step: int, seed: int) -> Epochs:
    """Of a domain's rows; "" is the whole of a run without domains."""
    if not name:
        return Epochs(count, per_step, seed)
    half = min(per_step, count // 2)
    epochs = Epochs(count, max(2 * half, 1), zlib.crc32(f"{seed} {name}".encode()))
    # A step that takes the end of one epoch and the beginning of the next should not have a row twice. Steps take more
    # and less of a domain, so how many it takes of each is not known beforehand: the first `half` rows of any epoch are
    # none of the last `half` of the one before.
    epochs.begun = lambda epoch: half if epoch else 0
    return epochs


class Draw:
    """In place of Epochs where a run has domains: `mixture` says whose turn each prompt of a step is, and each
    domain has epochs of its own rows, which lie together, and is as far in them as its turns have gone."""

    def __init__(self, mixture: domains.Mixture, rows: list[dict], cfg):
        self.mixture, self.parts, first = mixture, [], 0
        for name, count in domains.sizes(rows, cfg).items():
            self.parts.append((first, epochs_of(name, count, cfg.prompts_per_step, cfg.seed)))
            first += count

    def step(self, step: int) -> np.ndarray:
        drawn = self.mixture.drawn(step)
        return self._rows(self.mixture.turns(step), lambda number, part, count: part.take(drawn[number], count))

    def extra(self, random: np.random.Generator, step: int, place: int, count: int) -> np.ndarray:
        """The first is of the domain of the step's row in this place, and so on."""
        turns = self.mixture.turns(step)
        turns = [turns[(place + n) % len(turns)] for n in range(count)]
        return self._rows(turns, lambda number, part, count: part.extra(random, step, place, count))

    def _rows(self, turns: list[int], of_part: Callable) -> np.ndarray:
        turns = np.array(turns)
        rows = np.empty_like(turns)
        for number, (first, part) in enumerate(self.parts):
            rows[turns == number] = first + of_part(number, part, int((turns == number).sum()))
        return rows


def sources(cfg) -> dict[str, tuple]:
    """What a config reads, "train" and "eval": (data set, configuration, split, whether rows bring their prompts)."""
    found = {} if cfg.eval_only else {"train": (cfg.dataset_id, cfg.dataset_split)}
    if (cfg.eval_only or cfg.eval_steps) and cfg.eval_split is not None:
        found["eval"] = (cfg.eval_dataset_id or cfg.dataset_id, cfg.eval_split)
    return {use: (name, cfg.dataset_config, split, not cfg.env) for use, (name, split) in found.items()}


def load_data(
    cfg, format_row: Callable[[dict], dict], measure: Callable, whole=None, read: dict | None = None
) -> tuple[list[dict], list[dict]]:
    """Training rows and held-out rows (empty without evaluation), over-long prompts left out and counted.

    measure: (rows, name) -> tokens of each row's prompt; it also refuses rows that cannot be played.
    Of a domain's config, its rows; then whole: the run's config, and read: a dict that keeps what was read, since
    domains may share a data set.
    """
    found, read = {"train": [], "eval": []}, {} if read is None else read
    if "eval" in sources(cfg) and not cfg.eval_dataset_id and names_file(cfg.dataset_id):
        without = ", or give this domain `eval_split: none`" * bool(cfg.domain)
        name = f"name the held-out rows' file with {'' if cfg.domain else '--'}eval_dataset_id"
        raise ConfigError(f"{cfg.dataset_id} has no splits: {name}{without}.")
    for use, source in sources(cfg).items():
        (dataset_id, config, split, own_prompts), where = source, f"{source[0]} [{source[2]}]"
        if source not in read:
            read[source] = load_rows(dataset_id, config, split, cfg.seed, format_row, own_prompts, lines=not cfg.domain)
        same = (dataclasses.replace(own, eval_split=own.eval_split or split) for own in (whole or cfg).by_domain())
        sharing = [own.domain for own in same if sources(own).get(use, ())[:3] == source[:3]]
        loaded = domains.rows_of(read[source], cfg, where, sharing)
        if use == "eval" or cfg.env:  # held-out rows are few, and an environment's get a seed
            loaded = loaded if isinstance(loaded, list) else [*opened(loaded)]
        if cfg.env:  # rows may have equal prompts, or be one object, and should not all be the same game
            named = f"{cfg.seed} {dataset_id} {split}"
            loaded = [
                row if row.get("seed") is not None else row | {"seed": zlib.crc32(f"{named} {number}".encode())}
                for number, row in enumerate(loaded)
            ]
        kept, dropped = filter_overlong(loaded, measure(loaded, where), cfg.max_prompt_length)
        found[use] = kept
        if os.environ.get("RANK", "0") == "0":
            name = f"{cfg.domain}: " if cfg.domain else ""
            print(f"{name}{where}: {len(kept)} rows" + (f", {dropped} over-long left out" if dropped else ""))
    return found["train"], found["eval"]
