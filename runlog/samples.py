"""Completions of a step, read back: lists of them, one with its turns, one token by token."""

import codecs
import contextlib
import json
import math
import os
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from runlog.reading import is_own, readable_prompt

KINDS = ("completions", "evaluations")
TOKEN_COLUMNS = ("trained", "advantage", "weight", "logprob", "entropy", "sampler_logprob", "teacher_logprob")
TOKEN_COLUMNS += ("version",)
PREVIEW = 160  # characters of a completion in a list
SHORT = ("reward", "advantage", "finish_reason", "row_number", "origin", "domain", "policy_version", "length")


class Unreadable(ValueError):
    """A file that is half written, damaged or gone."""


# ---- files of a folder ----------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    return f"step_{step:06d}.parquet"


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def step_files(folder: Path) -> list[Path]:
    """By step; others may have put files of their own beside them."""
    found = []
    with contextlib.suppress(OSError):
        found = [name for name in os.listdir(folder) if re.fullmatch(r"step_\d+\.parquet", name)]
    return sorted((folder / name for name in found), key=step_of)


def steps_in(folder: Path) -> list[range]:
    """The steps that it has files of, in few words: a long run's hundred thousand are one range."""
    steps, place, found = list(dict.fromkeys(map(step_of, step_files(folder)))), 0, []
    while place < len(steps):
        first = end = steps[place]
        gap = steps[place + 1] - first if place + 1 < len(steps) else 1
        while place < len(steps) and steps[place] == end:
            place, end = place + 1, end + gap
        found.append(range(first, end, gap))
    return found


def first_and_last(folder: Path, having: str) -> list[Path]:
    """The first and the last file that can be opened and have that column: none, one or two."""

    def fits(path: Path) -> bool:
        try:
            return having in opened(path).schema_arrow.names
        except Unreadable:
            return False

    files = step_files(folder)
    first, last = (next(filter(fits, paths), None) for paths in (files, reversed(files)))
    return list(dict.fromkeys(path for path in (first, last) if path))


# ---- rows -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: Path):
    try:
        yield
    except FileNotFoundError:
        raise Unreadable(f"{path.parent.name}/{path.name} is gone, or was never written.") from None
    except (OSError, pa.ArrowException) as error:
        what = f"{path.parent.name}/{path.name} cannot be read; is it half written?"
        raise Unreadable(f"{what} ({str(error)[:300]})") from None


def opened(path: Path) -> pq.ParquetFile:
    """A file of completions. Raises Unreadable."""
    with reading(path):
        return pq.ParquetFile(path)


def table_of(path: Path, columns: list[str]) -> pa.Table:
    """Those of the columns that it has. Raises Unreadable."""
    file = opened(path)
    with reading(path):
        return file.read([name for name in file.schema_arrow.names if name in columns])


def count(path: Path) -> int:
    return opened(path).metadata.num_rows


def rows(path: Path, numbers: list[int], columns: list[str]) -> list[dict]:
    """Rows, as Python values; per-token columns stay numpy arrays. Raises Unreadable."""
    table = table_of(path, columns)
    if missing := [number for number in numbers if number >= len(table)]:
        name = f"{path.parent.name}/{path.name}"
        raise Unreadable(f"{name} has {len(table)} rows; there is no row {missing[0]}.")
    table, found = table.take(pa.array(numbers, pa.int64())), {}
    for name in table.column_names:
        if name in ("token_ids", "prompt_ids") or name.startswith("tokens/"):
            found[name] = [None if v.values is None else v.values.to_numpy(zero_copy_only=False) for v in table[name]]
        else:
            found[name] = table[name].to_pylist()
    return [{name: values[n] for name, values in found.items()} for n in range(len(numbers))]


def light_columns(path: Path) -> list[str]:
    """All but tokens and pictures."""
    heavy = ("token_ids", "prompt_ids", "picture")
    return [n for n in opened(path).schema_arrow.names if n not in heavy and not n.startswith("tokens/")]


def groups(table: pa.Table) -> list[int]:
    """The group of each row: its column; rows of an evaluation that have the same prompt and lie together."""
    if "group" in table.column_names:
        return table["group"].to_pylist()
    numbers, before = [], None
    for prompt in table["prompt"].to_pylist():
        numbers.append((numbers[-1] if numbers else -1) + (prompt != before or not numbers))
        before = prompt
    return numbers


def listing(path: Path) -> dict:
    """All completions of a step in short, by column: lists of one value a row; `prompts` by group."""
    have = opened(path).schema_arrow.names
    scores = [name for name in have if name.startswith("rewards/")]
    table = table_of(path, ["prompt", "completion", "group", *SHORT, *scores])
    numbers, prompts = groups(table), table["prompt"].to_pylist()
    first = {number: prompts[row] for row, number in reversed(list(enumerate(numbers)))}
    found = {name: table[name].to_pylist() for name in SHORT if name in table.column_names}
    return found | {
        "group": numbers,
        "prompts": {number: readable_prompt(first[number][:20_000])[:400] for number in sorted(first)},
        "text": [text[:PREVIEW] for text in table["completion"].to_pylist()],
        "rewards": {name.removeprefix("rewards/"): table[name].to_pylist() for name in scores},
        "tokens": "token_ids" in have,
        "pictures": "picture" in have,
    }


def search(path: Path, text: str) -> list[int]:
    """Rows in whose completion, turns or prompt the text stands, in upper or lower case."""
    forms = [text]  # and as it stands in JSON, as messages and turns do, and in JSON within: arguments of calls
    for _ in range(2):
        forms.append(json.dumps(forms[-1], ensure_ascii=False)[1:-1])
    found: set[int] = set()
    table = table_of(path, ["prompt", "completion", "turns"])
    for name in table.column_names:
        values = table[name].to_pylist()
        if name == "turns":
            values = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        for wanted in {text} if name == "completion" else {*forms}:
            hits = pc.match_substring(pa.array(values, pa.string()), wanted, ignore_case=True)
            found.update(np.flatnonzero(pc.fill_null(hits, False)).tolist())
    return sorted(found)


def telling(path: Path) -> list[int]:
    """Row numbers of the best and the worst completion of the group in which rewards differ most."""
    table = table_of(path, ["prompt", "group", "reward"])
    members: dict[int, list[tuple[float, int]]] = {}
    for place, (number, reward) in enumerate(zip(groups(table), table["reward"].to_pylist(), strict=True)):
        members.setdefault(number, []).append((reward or 0.0, place))
    widest = max(members.values(), key=lambda pairs: max(pairs)[0] - min(pairs)[0], default=[])
    return list(dict.fromkeys([max(widest)[1], min(widest)[1]])) if widest else []


def turns(row: dict) -> list[dict]:
    """Turns of a row: text, observation (texts), calls, reward, start, end (token offsets, or None), state."""
    found = row.get("turns") or []
    found = json.loads(found) if isinstance(found, str) else found
    names = ("text", "observation", "calls", "reward", "start", "end", "state")
    return [{name: turn.get(name) for name in names} | {"calls": turn.get("calls") or []} for turn in found]


def described(path: Path, numbers: list[int], limit: int = 2_000_000) -> list[dict]:
    """What a reader wants to know of rows, but for their tokens; texts up to `limit` characters each."""
    made = []
    for row in rows(path, numbers, light_columns(path)):
        one = {"prompt": readable_prompt(row["prompt"]), "completion": row.get("completion") or "", "turns": turns(row)}
        one |= {"rewards": {name[8:]: value for name, value in row.items() if name.startswith("rewards/")}}
        one |= {name: row.get(name) for name in SHORT}
        one["other"] = {name: str(value) for name, value in row.items() if is_own(name) and value is not None}
        made.append(shortened(one, limit))
    return made


def shortened(value, limit: int):
    if isinstance(value, str) and len(value) > limit:
        return value[:limit] + f" … ({len(value) - limit} more characters)"
    if isinstance(value, list):
        return [shortened(inner, limit) for inner in value]
    if isinstance(value, dict):
        return {key: shortened(inner, limit) for key, inner in value.items()}
    return value


def image(path: Path, number: int) -> bytes | None:
    """The PNG that a held-out row was kept with."""
    return rows(path, [number], ["picture"])[0].get("picture")


def prompt_of(path: Path, number: int) -> str:
    return rows(path, [number], ["prompt"])[0]["prompt"]


def of_prompt(path: Path, prompt: str, limit: int) -> list[dict]:
    """The completions of a prompt in a file, described, with their `row`."""
    prompts = table_of(path, ["prompt"])["prompt"].to_pylist()
    numbers = [number for number, one in enumerate(prompts) if one == prompt][:16]
    return [found | {"row": n} for n, found in zip(numbers, described(path, numbers, limit), strict=True)]


# ---- tokens ---------------------------------------------------------------------------------------------------------


@lru_cache(8)
def _vocabulary(path: Path, mark: tuple) -> dict[int, tuple[bytes, bool]]:
    table = pq.read_table(path, columns=["id", "piece", "special"])
    pieces = zip(table["piece"].to_pylist(), table["special"].to_pylist(), strict=True)
    return dict(zip(table["id"].to_pylist(), pieces, strict=True))


def vocabulary(run_dir: Path) -> dict[int, tuple[bytes, bool]]:
    """vocabulary.parquet: {token id: (its bytes, whether it is a special token)}; empty without the file."""
    path = Path(run_dir) / "vocabulary.parquet"
    try:
        status = path.stat()
        return _vocabulary(path, (status.st_mtime_ns, status.st_size))
    except (OSError, pa.ArrowException, KeyError):
        return {}


def spelled(ids: np.ndarray, known: dict) -> dict:
    """Ids with what each shows: {"ids", "text", "special": places, "bytes": {place: hex}}.

    A character of several tokens stands in its last one; the tokens before it have the text "" and their bytes.
    """
    shown, special, parts, half = [], [], {}, b""  # half: the beginning of a character
    for place, token in enumerate(ids.tolist()):
        piece, is_special = known.get(token, (None, False))
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


def tokens(path: Path, number: int, known: dict, limit: int | None = None) -> dict | None:
    """Every token of a row, or the first `limit`, with its numbers: {"prompt": spelled, "completion": spelled,
    "columns": {name: one value a token, None where there is none}, "turns": [(start, end), ...]}; None without ids."""
    names = ["prompt_ids", "token_ids", "turns", *(f"tokens/{name}" for name in TOKEN_COLUMNS)]
    (row,) = rows(path, [number], names)
    if row.get("token_ids") is None:
        return None
    columns = {name: row.get(f"tokens/{name}") for name in TOKEN_COLUMNS}
    columns = {
        name: [digits(v) for v in values[:limit].tolist()] for name, values in columns.items() if values is not None
    }
    spans = [(turn["start"], turn["end"]) for turn in turns(row) if turn["start"] is not None]
    found = {
        "prompt": spelled(row["prompt_ids"][:limit], known),
        "completion": spelled(row["token_ids"][:limit], known),
    }
    return found | {"columns": columns, "turns": spans}


def digits(value):
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


@lru_cache(16)
def _scales(path: Path, mark: int) -> dict[str, float]:
    table = table_of(path, [f"tokens/{name}" for name in TOKEN_COLUMNS])
    known = {}
    for name in table.column_names:
        values = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        known[name.removeprefix("tokens/")] = values.astype(float)
    sizes = {n: known[n] for n in ("advantage", "weight", "logprob", "entropy", "teacher_logprob") if n in known}
    for name, of in {"difference": "logprob", "gap": "teacher_logprob"}.items():
        if of in known and "sampler_logprob" in known:
            sizes[name] = known[of] - known["sampler_logprob"]
    sizes = {name: np.abs(values[np.isfinite(values)]) for name, values in sizes.items()}
    return {name: float(np.quantile(values, 0.98)) for name, values in sizes.items() if len(values)}


def scales(path: Path) -> dict[str, float]:
    """Of each quantity of the step's tokens the size that .98 of them stay below, in the token view's names."""
    return _scales(path, path.stat().st_mtime_ns)
