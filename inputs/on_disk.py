"""Rows of large files that stay there: lines of a .jsonl file that are parsed when they are taken, several processes
that look at rows, and a folder that keeps what they found for the next start.
"""

import codecs
import contextlib
import copy
import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

from cli import ConfigError
from safety.orphans import end_with

MANY = 50_000  # rows from which on what was found out about each is kept
LARGE = 32 << 20  # bytes of a .jsonl file from which on its rows stay there
PART = 8 << 20  # bytes of it that a process looks at at a time
CHUNK = 20_000  # rows, of other files
MOST_PROCESSES = 16  # a container may have fewer cores than it sees
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "grpo_rows")
LOCK_SECONDS = 1800  # after which a process looks by itself: the one that holds the lock may be stopped
KEPT_BYTES, KEPT_DAYS = 4 << 30, 30  # of what is kept: the newest, by when it was last used

# ---- several processes ----------------------------------------------------------------------------------------------

_function: Callable | None = None  # of the processes that are forked next


def by_processes(function: Callable, jobs: Sequence) -> Iterator:
    """function(job) of each, in their order, by one process a core. They are forks: they know what this process knows,
    and start at once. What one of them raises is raised here."""
    global _function
    count = min(len(os.sched_getaffinity(0)), len(jobs), MOST_PROCESSES)
    if count < 2 or multiprocessing.current_process().daemon:
        yield from map(function, jobs)
        return
    _function = function
    context, us = multiprocessing.get_context("fork"), os.getpid()
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(us,)) as pool:
        waiting, rest = [], iter(jobs)
        try:
            for job in rest:
                waiting.append(pool.submit(_call, job))
                if len(waiting) > 2 * count:  # no more than that is held in memory
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what the trainer does at one is nothing for us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not come along


def _call(job):
    return _function(job)


# ---- what was found out ---------------------------------------------------------------------------------------------


def kept(what: str, count: int | None, make: Callable[[], np.ndarray]) -> np.ndarray:
    """make(), an array of `count` rows, if that is known; a later start finds it under `what`, which says all that it
    depends on. Where several processes ask for the same, as ranks do, one makes it and the others wait."""
    path = KEPT / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.npy"
    if (found := _read(path, count)) is not None:
        return found
    with contextlib.ExitStack() as stack:
        partial = None
        with contextlib.suppress(OSError):  # a disk that is full or read only, or a file system without locks
            KEPT.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.with_suffix(".partial").open("ab"))
            partial = file if alone(file) else None
        if (found := _read(path, count)) is not None:
            return found
        made = make()
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.truncate(0)
                np.save(partial, made)
                partial.flush()
                path.with_suffix(".partial").replace(path)
                tidy()
        return made


def alone(file: IO) -> bool:
    """Wait until no other process has its lock, which rank 0 says; False after LOCK_SECONDS."""
    end, told = time.monotonic() + LOCK_SECONDS, os.environ.get("RANK", "0") != "0"
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if not told:
            print(
                f"Another process looks at the same rows, and is waited for, at most {LOCK_SECONDS:g} s; it holds "
                f"{file.name}.",
                flush=True,
            )
        told = True
        time.sleep(0.2)
    return False


def _read(path: Path, count: int | None) -> np.ndarray | None:
    with contextlib.suppress(OSError, ValueError, EOFError):  # there is none, or it is damaged
        if len(found := np.load(path)) == count or count is None:
            os.utime(path)
            return found
    return None


def tidy() -> None:
    """Of what is kept, the last KEPT_BYTES that were used, and nothing that was not used for KEPT_DAYS."""
    found = []
    for path in KEPT.iterdir():
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    used, oldest = 0, time.time() - 86400 * KEPT_DAYS
    for last, size, path in sorted(found, reverse=True):
        used += size
        if used > KEPT_BYTES or last < oldest:
            path.unlink(missing_ok=True)


# ---- lines ----------------------------------------------------------------------------------------------------------


class Lines(Sequence):
    """Rows of a .jsonl file, each read and parsed when it is taken: another dict each time. What a reader asks of a
    `datasets.Dataset` is here under the same names; that library's own reader would copy the file into a cache, and
    give every row the columns of all others.

    parse: the row of a line. index: a table with an entry (LOOK) for each row of the file, made once and kept.
    chosen: which of these rows this object stands for; None is all.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], dict], index: np.ndarray):
        self.path, self.parse, self.index, self.chosen = path, parse, index, None
        self.file = path.open("rb", buffering=0)
        self.stamp = stamp(os.fstat(self.file.fileno()))
        self.ends = np.append(index["start"][1:], self.stamp[0])
        self._fingerprint = fingerprint(path, self.stamp)
        _, first = np.unique(index["kind"], return_index=True)
        self.forms = [form_of(self.row(int(number))) for number in first]  # by kind
        names = [set(keys) for keys, _ in self.forms]
        self.column_names = list(dict.fromkeys(key for keys, _ in self.forms for key in keys))
        self.in_every_row = set.intersection(*names)

    def row(self, number: int) -> dict:
        """By its number in the file."""
        return self.parse(self.read(int(self.index["start"][number]), int(self.ends[number])))

    def read(self, start: int, end: int) -> bytes:
        if stamp(os.fstat(self.file.fileno())) != self.stamp:
            raise RuntimeError(f"{self.path} has been changed while rows were read from it; restore it, and resume.")
        return os.pread(self.file.fileno(), end - start, start)

    def __len__(self) -> int:
        return len(self.index) if self.chosen is None else len(self.chosen)

    def __getitem__(self, key):
        if isinstance(key, slice):
            numbers = np.arange(len(self))[key] if self.chosen is None else self.chosen[key]
            if not len(numbers) or np.ptp(numbers) > 2 * len(numbers):
                return [self.row(int(number)) for number in numbers]
            starts, ends = self.index["start"][numbers], self.ends[numbers]  # near each other: all read at once
            begin = int(starts.min())
            block = self.read(begin, int(ends.max()))
            return [self.parse(block[a:b]) for a, b in zip(starts - begin, ends - begin, strict=True)]
        place = range(len(self))[key]
        return self.row(place if self.chosen is None else int(self.chosen[place]))

    def __iter__(self) -> Iterator[dict]:
        return (row for first in range(0, len(self), 100) for row in self[first : first + 100])

    def select(self, places) -> "Lines":
        places = np.asarray(places, np.int64)
        found = copy.copy(self)  # with the file that is open: there may be another one at its path by now
        found.chosen = places if self.chosen is None else self.chosen[places]
        found._fingerprint = hashlib.sha256(self._fingerprint.encode() + places.tobytes()).hexdigest()[:16]
        return found

    def mine(self, name: str) -> np.ndarray:
        """What `index` says of each row."""
        return self.index[name] if self.chosen is None else self.index[name][self.chosen]

    def holding(self, texts: list[str], first: int, last: int) -> np.ndarray:
        """Whether a row may hold one of the texts: true where that has to be looked at, as JSON can spell any letter
        otherwise.  [rows]"""
        if any(json.dumps(text, ensure_ascii=False) != f'"{text}"' for text in texts):
            return np.ones(last - first, bool)
        found = re.compile(b"|".join([rb"\\[u/]", *(re.escape(text.encode()) for text in texts)])).search
        starts, ends = self.mine("start")[first:last], self.ends
        ends = (ends if self.chosen is None else ends[self.chosen])[first:last]
        begin = int(starts.min())
        block = self.read(begin, int(ends.max()))
        return np.array([found(block, a, b) is not None for a, b in zip(starts - begin, ends - begin, strict=True)])


# Byte of the file; form; bytes of the texts; row_hash: to read and parse the lines once more for it would take as long.
LOOK = np.dtype([("start", "<i8"), ("kind", "<i4"), ("size", "<i4"), ("hash", "<u8")])


def stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def fingerprint(path: Path, mark: tuple[int, int]) -> str:
    """The same file has the same at the next start. Its inode's time, too: what copies files may set the other."""
    text = f"{path.resolve()} {mark[0]} {mark[1]} {path.stat().st_ctime_ns}".encode()
    return hashlib.sha256(text).hexdigest()[:16]


def form_of(row: dict) -> tuple[tuple, tuple | None]:
    """(the row's keys; the roles of its prompt's messages, () of a text, None where they hold more than texts)."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return tuple(row), ()
    plain = all(m.keys() <= {"role", "content"} and isinstance(m["content"], str) for m in prompt)
    return tuple(row), tuple(m["role"] for m in prompt) if plain else None


def size_of(prompt) -> int:
    """UTF-8 bytes of its texts; of messages that hold more, 0."""
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    return min(sum(len(text.encode()) for text in texts), 2**31 - 1) if all(isinstance(t, str) for t in texts) else 0


def _other(value) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else type(value).__name__


ENCODER = json.JSONEncoder(default=_other, skipkeys=True)


def row_hash(row: dict) -> int:
    """64 bits of a row's texts, numbers and bytes; of anything else, such as a decoded image, the type alone."""
    try:
        text = ENCODER.encode(row)
    except (ValueError, RecursionError):  # it holds itself, or a number of more than 4,300 digits
        text = repr(row.get("prompt"))
    return _hash(text)


class Unsound(Exception):
    """A line with a fault: (its number from 1, that of its row, the line)."""


def looked_at(path: Path, parse: Callable[[bytes], dict], progress: Callable) -> np.ndarray:
    """LOOK of each line that is not blank; of none where lines end otherwise than with a newline.

    parse: the row of a line, or ConfigError; Unsound names the first such line. progress: wraps the parts, of so many.
    """
    size = path.stat().st_size

    def part(start: int) -> tuple:
        """Of the lines that begin in a part of the file: how many they are, LOOK of each row, the forms that its kinds
        number, and where a line begins that is unsound, if there is one."""
        count, looks, forms = 0, [], {}
        with path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # of the part before, but for its last byte
            elif file.read(3) != codecs.BOM_UTF8:
                file.seek(0)
            place, unsound = file.tell(), None
            while place < min(start + PART, size):
                line = file.readline()
                if b"\r" in line[:-2]:
                    return None
                if line.strip():
                    try:
                        row = parse(line)
                    except ConfigError:
                        unsound = place
                        break
                    kind = forms.setdefault(form_of(row), len(forms))
                    looks.append((place, kind, size_of(row["prompt"]), row_hash(row)))
                count, place = count + 1, place + len(line)
        return count, np.array(looks, LOOK), [*forms], unsound

    looks, lines, rows, known = [np.zeros(0, LOOK)], 0, 0, {}
    jobs = range(0, size, PART)
    for found in progress(by_processes(part, jobs), len(jobs)):
        if found is None:
            return looks[0]
        count, these, forms, unsound = found
        these["kind"] = np.array([known.setdefault(form, len(known)) for form in forms], int)[these["kind"]]
        looks.append(these)
        lines, rows = lines + count, rows + len(these)
        if unsound is not None:
            with path.open("rb") as file:
                file.seek(unsound)
                raise Unsound(lines + 1, rows, file.readline())
    return np.concatenate(looks)


def rows_between(rows, first: int, last: int) -> list[dict]:
    """Rows of a list, of Lines or of a `datasets.Dataset`, of which one at a time takes twice as long."""
    found = rows[first:last]
    if isinstance(found, list):
        return found
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


# ---- a column of prompts, as pyarrow has it -------------------------------------------------------------------------

NOT_BLANK = r"[^\p{Z}\x00-\x20\x{85}]"


class Prompts:
    """Column `prompt` of rows of a `datasets.Dataset`, looked at without a Python object for each row. Texts in it are
    whole: pyarrow holds UTF-8."""

    def __init__(self, rows, first: int, last: int):
        import pyarrow
        import pyarrow.compute

        self.compute, types = pyarrow.compute, pyarrow.types
        column = rows.select_columns(["prompt"]).with_format("arrow")[first:last]["prompt"]
        column = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
        self.count, self.names, self.texts = last - first, {}, None
        is_text = lambda kind: types.is_string(kind) or types.is_large_string(kind)  # noqa: E731
        if is_text(column.type):
            self.texts = [column]
        elif (types.is_list(column.type) or types.is_large_list(column.type)) and types.is_struct(
            column.type.value_type
        ):
            messages, inner = column.flatten(), column.type.value_type
            self.names = {inner.field(n).name: n for n in range(inner.num_fields)}
            parts = messages.flatten()
            if {"role", "content"} <= {*self.names}:
                self.texts = [parts[self.names[name]] for name in ("content", "role")]
                self.texts = self.texts if all(is_text(text.type) for text in self.texts) else None
            self.lengths = np.asarray(self.compute.list_value_length(column).fill_null(0), np.int64)
            self.ends = np.cumsum(self.lengths)
            self.whole = np.asarray(messages.is_valid())

    def of_rows(self, values: np.ndarray) -> np.ndarray:
        """Sums over the messages of each row."""
        sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return sums[self.ends] - sums[self.ends - self.lengths]

    def sound(self) -> np.ndarray:
        """Whether a row has no fault: false where that has to be looked at.  [rows]"""
        if self.texts is None:
            return np.zeros(self.count, bool)
        valid = np.asarray(self.texts[0].is_valid())
        if not self.names:
            return valid & np.asarray(self.compute.match_substring_regex(self.texts[0], NOT_BLANK).fill_null(False))
        named = np.asarray(self.compute.binary_length(self.texts[1]).fill_null(0)) > 0
        return (self.lengths > 0) & (self.of_rows(~(self.whole & valid & named)) == 0)

    def forms(self) -> np.ndarray:
        """FORM of each row.  [rows]"""
        found = np.zeros(self.count, FORM)
        if self.texts is None or {*self.names} not in (set(), {"role", "content"}):
            return found
        sizes = np.asarray(self.compute.binary_length(self.texts[0]).fill_null(0), np.int64)
        if self.names:
            found["size"] = np.minimum(self.of_rows(sizes), 2**31 - 1)
            roles = self.texts[1].dictionary_encode()
            hashes = np.array([_hash(str(role)) for role in roles.dictionary.to_pylist()] or [0], np.uint64)
            hashes = hashes[np.asarray(roles.indices.fill_null(0))]
            place = np.arange(len(hashes)) - np.repeat(self.ends - self.lengths, self.lengths)
            with np.errstate(over="ignore"):  # a sum that knows the order
                mixed = hashes * (2 * place.astype(np.uint64) + np.uint64(1))
                sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
                found["form"] = (sums[self.ends] - sums[self.ends - self.lengths]) | np.uint64(1)
        else:
            found["size"], found["form"] = np.minimum(sizes, 2**31 - 1), 2
        found["form"][~self.sound()] = 0
        return found

    def holding(self, pattern: str) -> np.ndarray:
        """Whether a text in the row may fit: true where that has to be looked at.  [rows]"""
        if self.texts is None or {*self.names} not in (set(), {"role", "content"}):
            return np.ones(self.count, bool)
        found = [np.asarray(self.compute.match_substring_regex(t, pattern).fill_null(False)) for t in self.texts]
        return self.of_rows(np.logical_or(*found)) > 0 if self.names else found[0]


FORM = np.dtype([("form", "<u8"), ("size", "<i4")])  # equal roles, equal form; 0: more than texts. Bytes of the texts


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
