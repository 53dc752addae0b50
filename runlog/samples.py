"""Completions of a step, read back: lists of them, one with its turns, one token by token.

Texts come out whatever the bytes: what is no UTF-8 is spelled \\xNN. Files of older runs lack columns, and keep turns
as JSON text.
"""

import codecs
import contextlib
import json
import math
import os
import re
import stat
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from runlog.curves import is_number
from runlog.reading import is_own, readable_prompt

KINDS = ("completions", "evaluations")
NAMES = re.compile(r"(?<![^/])step_(\d+)\.parquet(?![^/])")  # among names with a slash between them
TOKEN_COLUMNS = ("trained", "advantage", "weight", "logprob", "entropy", "sampler_logprob", "teacher_logprob")
TOKEN_COLUMNS += ("version",)

PREVIEW = 160  # characters of a completion in a list


class Unreadable(ValueError):
    """A file that is half written, damaged or gone."""


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def numbers_in(folder: Path) -> list[str]:
    """The numbers in the names of its files, by step; others may have put files of their own beside them."""
    with contextlib.suppress(OSError):
        return sorted(NAMES.findall("/".join(os.listdir(folder))), key=int)
    return []


def steps_in(folder: Path) -> list[range]:
    """The steps that it has files of, in few words: a long run's hundred thousand are one range."""
    steps, place, found = sorted({*map(int, numbers_in(folder))}), 0, []
    while place < len(steps):
        first = end = steps[place]
        gap = steps[place + 1] - first if place + 1 < len(steps) else 1
        while place < len(steps) and steps[place] == end:
            place, end = place + 1, end + gap
        found.append(range(first, end, gap))
    return found


def name_of(step: int) -> str:
    return f"step_{step:06d}.parquet"


def step_files(folder: Path) -> list[Path]:
    return [folder / f"step_{number}.parquet" for number in numbers_in(folder)]


def first_and_last(folder: Path, having: str | None = None) -> list[Path]:
    """Those of step_files that can be opened (a full disk leaves halves) and have that column: none, one or two.

    No others are opened: a long run has a hundred thousand, and each may take some milliseconds.
    """

    def fits(path: Path) -> bool:
        try:
            names = columns(path)
        except Unreadable:
            return False
        return having is None or having in names

    files = step_files(folder)
    first = [*islice(filter(fits, files), 1)]
    return first + [path for path in islice(filter(fits, reversed(files)), len(first)) if path not in first]


def opened(path: Path) -> pq.ParquetFile:
    """A file of completions. Raises Unreadable."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a FIFO waits for its writer
            raise OSError("no regular file")
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise Unreadable(f"{path.parent.name}/{path.name} is gone, or was never written.") from None
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> Unreadable:
    return Unreadable(f"{path.parent.name}/{path.name} cannot be read; is it half written? ({str(error)[:300]})")


def table_of(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Its columns, those of `columns` that it has. Raises Unreadable."""
    file = opened(path)
    names = file.schema_arrow.names if columns is None else [n for n in file.schema_arrow.names if n in columns]
    try:
        return file.read(names)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from None


def decoded(data: bytes | None, cut: bool = False) -> str | None:
    """Text of UTF-8, broken or not; of one that was `cut` without the half character at its end."""
    if data is None:
        return None
    return codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(data, not cut)


def texts(column: pa.ChunkedArray, limit: int | None = None) -> list[str | None]:
    """A column of strings, each up to `limit` characters: pyarrow's own conversion fails on broken UTF-8."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return [None if value is None else str(value)[:limit] for value in column.to_pylist()]
    column = column.cast(pa.large_binary())
    if limit is None:
        return [decoded(value) for value in column.to_pylist()]
    pieces = pc.binary_slice(column, 0, 4 * limit).to_pylist()
    return [None if piece is None else decoded(piece, cut=True)[:limit] for piece in pieces]


def groups(table: pa.Table) -> list[int]:
    """The group of each row: its column, or rows of the same prompt that lie together."""
    if "group" in table.column_names:
        return [-1 if value is None else value for value in table["group"].to_pylist()]
    numbers, number, before = [], -1, None
    for prompt in texts(table["prompt"]):
        number += prompt != before or number < 0
        numbers.append(number)
        before = prompt
    return numbers


def listing(path: Path) -> dict:
    """All completions of a step in short, by column: lists of one value a row; `prompts` by group."""
    have = opened(path).schema_arrow.names
    wanted = ["prompt", "completion", "reward", "advantage", "finish_reason", "row_number", "origin", "group", "domain"]
    scores = [name for name in have if name.startswith("rewards/")]
    table = table_of(path, [*wanted, "policy_version", "length", *scores])
    numbers = groups(table)
    first = {number: row for row, number in reversed(list(enumerate(numbers)))}
    order = sorted(first)
    prompts = texts(table["prompt"].take(pa.array([first[number] for number in order])), 20_000) if order else []
    shown = [readable_prompt(prompt or "")[:400] for prompt in prompts]
    found = {"group": numbers, "prompts": dict(zip(order, shown, strict=True))}
    found["text"] = texts(table["completion"], PREVIEW) if "completion" in have else [""] * len(numbers)
    for name in ("reward", "advantage", "finish_reason", "row_number", "origin", "domain", "policy_version", "length"):
        if name in table.column_names:
            found[name] = _values(table[name])
    found["rewards"] = {name.removeprefix("rewards/"): _values(table[name]) for name in scores}
    found["tokens"] = "token_ids" in have
    found["pictures"] = "picture" in have
    return found


def _values(column: pa.ChunkedArray) -> list:
    kind = column.type
    return texts(column, 200) if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)) else column.to_pylist()


def search(path: Path, text: str) -> list[int]:
    """Rows in whose completion, turns or prompt the text stands, in upper or lower case."""
    table = table_of(path, ["prompt", "completion", "turns"])
    forms = [text]  # and as it stands in JSON, as messages and turns do, and in JSON within: arguments of calls
    for _ in range(2):
        forms.append(json.dumps(forms[-1], ensure_ascii=False)[1:-1])
    found: set[int] = set()
    for name in table.column_names:
        for wanted in {text} if name == "completion" else {*forms}:
            for chunk, start in _chunks(table[name]):
                parents = np.arange(start, start + len(chunk))
                found.update(_parents_of(chunk, parents, wanted))
    return sorted(found)


def _chunks(column: pa.ChunkedArray):
    start = 0
    for chunk in column.chunks:
        yield chunk, start
        start += len(chunk)


def _parents_of(values: pa.Array, parents: np.ndarray, text: str):
    """Those of `parents`, one a value, whose value has the text in it, however deep in lists and structs."""
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = parents[pc.list_parent_indices(values).to_numpy(zero_copy_only=False)]
        yield from _parents_of(values.flatten(), inner, text)
    elif pa.types.is_struct(kind):
        for field in values.flatten():
            yield from _parents_of(field, parents, text)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        wanted = text.encode("utf-8", "replace").decode()  # half a surrogate pair stands in no file
        hits = pc.match_substring(values, wanted, ignore_case=True)
        yield from parents[pc.fill_null(hits, False).to_numpy(zero_copy_only=False)].tolist()


def count(path: Path) -> int:
    return opened(path).metadata.num_rows


def columns(path: Path) -> list[str]:
    return opened(path).schema_arrow.names


def first_rows(path: Path, number: int) -> list[dict]:
    """Whole rows but for their tokens; of several domains, as many of each."""
    places = list(range(count(path)))
    if "domain" in columns(path):
        of: dict[str, list[int]] = {}
        for place, domain in enumerate(table_of(path, ["domain"])["domain"].to_pylist()):
            of.setdefault(domain, []).append(place)
        places = [place for mine in of.values() for place in mine[: max(1, number // len(of))]]
    names = [
        name for name in columns(path) if name not in ("token_ids", "prompt_ids") and not name.startswith("tokens/")
    ]
    return rows(path, places[:number], names)


def telling(path: Path) -> list[tuple[int, dict]]:
    """(row number, row) of the best and the worst completion of the group in which rewards differ most."""
    table = table_of(path, ["prompt", "group", "reward"])
    members: dict[int, list[tuple[float, int]]] = {}
    for place, (number, reward) in enumerate(zip(groups(table), table["reward"].to_pylist(), strict=True)):
        members.setdefault(number, []).append((reward if is_number(reward) else 0.0, place))
    widest = max(members.values(), key=lambda pairs: max(pairs)[0] - min(pairs)[0], default=[])
    places = list(dict.fromkeys([max(widest)[1], min(widest)[1]])) if widest else []
    return list(zip(places, rows(path, places), strict=True))


def cut(row: dict, limit: int) -> dict:
    """The row with the first `limit` tokens of its prompt and of its completion."""
    long = ("token_ids", "prompt_ids")
    listed = {n: v[:limit] for n, v in row.items() if v is not None and (n in long or n.startswith("tokens/"))}
    return row | listed


def rows(path: Path, numbers: list[int], columns: list[str] | None = None) -> list[dict]:
    """Whole rows, as Python values. Reads only their part of the file, where it has several. Raises Unreadable."""
    file, found, start = opened(path), {}, 0
    names = [n for n in file.schema_arrow.names if columns is None or n in columns]
    try:
        for part in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(part).num_rows
            inside = [number for number in numbers if start <= number < start + size]
            if inside:
                table = file.read_row_group(part, names).take(pa.array([number - start for number in inside]))
                found |= dict(zip(inside, _pythonic(table), strict=True))
            start += size
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from None
    missing = [number for number in numbers if number not in found]
    if missing:
        raise Unreadable(f"{path.parent.name}/{path.name} has {start} rows; there is no row {missing[0]}.")
    return [found[number] for number in numbers]


def _pythonic(table: pa.Table) -> list[dict]:
    """Rows of a small table; per-token columns stay numpy arrays."""
    columns = {}
    for name in table.column_names:
        column = table[name]
        if name == "picture":
            columns[name] = column.to_pylist()
        elif name in ("token_ids", "prompt_ids") or name.startswith("tokens/"):
            columns[name] = [None if v.values is None else v.values.to_numpy(zero_copy_only=False) for v in column]
        else:
            columns[name] = [_clean(value) for value in _bytes(column).to_pylist()]
    return [{name: values[n] for name, values in columns.items()} for n in range(table.num_rows)]


def _bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """With binary in place of strings, also inside lists and structs: pyarrow's to_pylist fails on broken UTF-8."""

    def without_text(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return pa.large_binary()
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return pa.large_list(without_text(kind.value_type))
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(field.name, without_text(field.type)) for field in kind])
        return kind

    kind = without_text(column.type)
    return column if kind == column.type else column.cast(kind)


def _clean(value):
    if isinstance(value, bytes):
        return decoded(value)
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items()}
    return value


def turns(row: dict) -> list[dict]:
    """Turns of a row: text, observation (texts), calls (name, and what else is known of them), reward, start, end
    (token offsets, or None), state."""
    found = row.get("turns")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            found = None
    made = []
    for turn in found if isinstance(found, (list, tuple)) else ():
        if not isinstance(turn, dict):
            continue
        observation, calls = turn.get("observation") or [], turn.get("calls") or []
        made.append(
            {
                "text": str(turn.get("text") or ""),
                "observation": [
                    str(part) for part in (observation if isinstance(observation, list) else [observation])
                ],
                "calls": [call if isinstance(call, dict) else {"name": str(call)} for call in calls],
                "reward": turn.get("reward"),
                "start": turn.get("start"),
                "end": turn.get("end"),
                "state": turn.get("state"),
            }
        )
    return made


def one(path: Path, number: int, limit: int = 2_000_000) -> dict:
    """A trajectory without its tokens: texts up to `limit` characters each."""
    return described(rows(path, [number], _without_tokens(path))[0], limit)


def several(path: Path, numbers: list[int], limit: int) -> list[dict]:
    return [described(row, limit) for row in rows(path, numbers, _without_tokens(path))]


def _without_tokens(path: Path) -> list[str]:
    heavy = ("token_ids", "prompt_ids", "picture")
    return [n for n in opened(path).schema_arrow.names if n not in heavy and not n.startswith("tokens/")]


def described(row: dict, limit: int) -> dict:
    """What a reader wants to know of a row, under names that do not depend on the run's age."""
    rest = {name: value for name, value in row.items() if is_own(name)}
    made = {"prompt": readable_prompt(str(row.get("prompt") or "")), "completion": str(row.get("completion") or "")}
    made |= {"turns": turns(row), "rewards": {n[8:]: v for n, v in row.items() if n.startswith("rewards/")}}
    for name in ("reward", "advantage", "finish_reason", "row_number", "origin", "domain", "policy_version", "length"):
        made[name] = row.get(name)
    made["other"] = {name: str(value) for name, value in rest.items() if value is not None}
    return _shortened(made, limit)


def _shortened(value, limit: int):
    if isinstance(value, str) and len(value) > limit:
        return value[:limit] + f" … ({len(value) - limit} more characters)"
    if isinstance(value, list):
        return [_shortened(inner, limit) for inner in value]
    if isinstance(value, dict):
        return {key: _shortened(inner, limit) for key, inner in value.items()}
    return value


def image(path: Path, number: int) -> bytes | None:
    """The PNG that a held-out row was kept with."""
    data = rows(path, [number], ["picture"])[0].get("picture")
    return data if isinstance(data, bytes) and data.startswith(b"\x89PNG\r\n\x1a\n") else None


# ---- tokens ---------------------------------------------------------------------------------------------------------


class Vocabulary:
    """vocabulary.parquet: the bytes of each token id. Without the file, ids are shown as numbers."""

    def __init__(self, path: Path):
        try:
            table = pq.read_table(path, columns=["id", "piece", "special"])
            ids = table["id"].to_numpy()
            order = np.argsort(ids, kind="stable")
            self.ids = ids[order]
            self.pieces = table["piece"].combine_chunks().cast(pa.large_binary()).take(pa.array(order))
            self.special = table["special"].to_numpy(zero_copy_only=False)[order]
        except (OSError, pa.ArrowException, KeyError):
            self.ids, self.pieces, self.special = np.array([], int), [], []

    def of(self, token: int) -> tuple[bytes | None, bool]:
        """(its bytes, or None; whether it is a special token)."""
        place = int(np.searchsorted(self.ids, token))
        if place == len(self.ids) or self.ids[place] != token:
            return None, False
        return self.pieces[place].as_py(), bool(self.special[place])


@lru_cache(8)
def _vocabulary(path: Path, mark: tuple) -> Vocabulary:
    return Vocabulary(path)


def vocabulary(run_dir: Path) -> Vocabulary:
    path = Path(run_dir) / "vocabulary.parquet"
    try:
        status = path.stat()
    except OSError:
        return Vocabulary(path)
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"{path.name} is no regular file.")
    return _vocabulary(path, (status.st_mtime_ns, status.st_size))


def spelled(ids: np.ndarray, known: Vocabulary) -> dict:
    """Ids with what each shows: {"ids", "text", "special": places, "bytes": {place: hex}}.

    A character of several tokens stands in its last one; the tokens before it have the text "" and their bytes.
    """
    pieces = {int(token): known.of(int(token)) for token in np.unique(ids)}
    shown, special, parts, half = [], [], {}, b""  # half: the beginning of a character
    for place, token in enumerate(ids.tolist()):
        piece, is_special = pieces[token]
        text, rest = (None, b"") if piece is None or is_special else whole_characters(half + piece)
        if text is None and half:  # not completed: its bytes belong to the token before
            shown[-1] += half.decode("utf-8", "backslashreplace")
        if text is None:
            text, rest = whole_characters(piece, broken=True) if piece is not None else (f"#{token}", b"")
        elif half or rest:
            parts[place] = piece.hex(" ")
        shown.append(text)
        half = rest
        if is_special:
            special.append(place)
    if half:
        shown[-1] += half.decode("utf-8", "backslashreplace")
    return {"ids": ids.tolist(), "text": shown, "special": special, "bytes": parts}


def whole_characters(data: bytes, broken: bool = False) -> tuple[str | None, bytes]:
    """(text, bytes at the end that may begin another character). Of what is no UTF-8 None, or \\xNN if `broken`."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace" if broken else "strict")
    try:
        return decoder.decode(data), decoder.getstate()[0]
    except UnicodeDecodeError:
        return None, b""


def token_view(row: dict, known: Vocabulary) -> dict | None:
    """Every token of a row with its numbers, for the page and the report: {"prompt": spelled, "completion": spelled,
    "columns": {name: one value a token, None where there is none}, "turns": [(start, end), ...]}; None without ids."""
    if row.get("token_ids") is None:
        return None
    ids, prompt = row["token_ids"], row.get("prompt_ids")
    columns = {}
    for name in TOKEN_COLUMNS:
        values = row.get(f"tokens/{name}")
        if values is not None and len(values) == len(ids):
            columns[name] = [_digits(value) for value in values.tolist()]
    spans = [(turn["start"], turn["end"]) for turn in turns(row)]
    spans = [span for span in spans if all(isinstance(place, int) for place in span)]
    empty = np.array([], np.int32)
    return {
        "prompt": spelled(empty if prompt is None else prompt, known),
        "completion": spelled(ids, known),
        "columns": columns,
        "turns": spans,
    }


def _digits(value):
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def scales(path: Path) -> dict[str, float]:
    """Of each quantity of the step's tokens the size that .98 of them stay below, in the token view's names."""
    return _scales(path, path.stat().st_mtime_ns)


@lru_cache(16)
def _scales(path: Path, mark: int) -> dict[str, float]:
    table = table_of(path, [f"tokens/{name}" for name in TOKEN_COLUMNS])
    known = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        known[name.removeprefix("tokens/")] = column.flatten().to_numpy(zero_copy_only=False)
    sized = {"advantage", "weight", "logprob", "entropy", "teacher_logprob"}
    sizes = {name: values for name, values in known.items() if name in sized}
    sampler = known.get("sampler_logprob", ())
    for name, of in {"difference": "logprob", "gap": "teacher_logprob"}.items():
        if of in known and len(known[of]) == len(sampler):
            sizes[name] = known[of].astype(float) - sampler
    found = {}
    for name, values in sizes.items():
        values = np.abs(values.astype(float))
        values = values[np.isfinite(values)]
        if len(values):
            found[name] = float(np.quantile(values, 0.98))
    return found


def tokens(path: Path, number: int, known: Vocabulary) -> dict | None:
    names = ["prompt_ids", "token_ids", "turns", *(f"tokens/{name}" for name in TOKEN_COLUMNS)]
    return token_view(rows(path, [number], names)[0], known)


# ---- one row over time ----------------------------------------------------------------------------------------------


def of_prompt(path: Path, prompt: str, limit: int) -> list[dict]:
    """The completions of a prompt in a file, described, with their `row`."""
    column = table_of(path, ["prompt"])["prompt"]
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return []
    hits = pc.equal(column.cast(pa.large_binary()), prompt.encode("utf-8", "surrogatepass"))
    numbers = np.flatnonzero(pc.fill_null(hits, False).to_numpy(zero_copy_only=False)).tolist()[:16]
    return [found | {"row": n} for n, found in zip(numbers, several(path, numbers, limit), strict=True)]


def prompt_of(path: Path, number: int) -> str:
    """As stored: what `of_prompt` compares with."""
    column = table_of(path, ["prompt"])["prompt"]
    if not 0 <= number < len(column):
        raise Unreadable(f"{path.parent.name}/{path.name} has {len(column)} rows; there is no row {number}.")
    return texts(column.slice(number, 1))[0] or ""
