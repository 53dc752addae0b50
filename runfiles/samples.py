"""Reads the completions of a step: as a list, one with its turns, or one token by token."""

import codecs
import contextlib
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from runfiles.reading import is_own, readable_prompt

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
    """Files of completions, by step; other files in the folder are ignored."""
    return sorted((path for path in folder.glob("step_*.parquet") if path.stem[5:].isdecimal()), key=step_of)


def first_and_last(folder: Path, having: str) -> list[Path]:
    """The first and the last file with the column `having`: none, one or two. Raises Unreadable."""
    files = step_files(folder)
    first, last = (next((f for f in paths if having in columns_of(f)), None) for paths in (files, files[::-1]))
    return list(dict.fromkeys(path for path in (first, last) if path))


# ---- rows -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: Path):
    try:
        yield
    except FileNotFoundError:
        raise Unreadable(f"{path.parent.name}/{path.name} is gone, or was never written.") from None
    except (OSError, pa.ArrowException) as error:
        fault = f"{path.parent.name}/{path.name} cannot be read; is it half written?"
        raise Unreadable(f"{fault} ({str(error)[:300]})") from None


def parquet_file(path: Path) -> pq.ParquetFile:
    """A file of completions. Raises Unreadable."""
    with reading(path):
        return pq.ParquetFile(path)


def columns_of(path: Path) -> list[str]:
    return parquet_file(path).schema_arrow.names


def table_of(path: Path, columns: list[str]) -> pa.Table:
    """The columns, as far as the file has them. Raises Unreadable."""
    file = parquet_file(path)
    with reading(path):
        return file.read([name for name in file.schema_arrow.names if name in columns])


def rows(path: Path, numbers: list[int], columns: list[str]) -> list[dict]:
    """Rows, as Python values; per-token columns stay numpy arrays. Raises Unreadable."""
    table = table_of(path, columns)
    if missing := [number for number in numbers if number >= len(table)]:
        name = f"{path.parent.name}/{path.name}"
        raise Unreadable(f"{name} has {len(table)} rows; there is no row {missing[0]}.")
    table, cols = table.take(pa.array(numbers, pa.int64())), {}
    for name in table.column_names:
        if name in ("token_ids", "prompt_ids") or name.startswith("tokens/"):
            cols[name] = [None if v.values is None else v.values.to_numpy(zero_copy_only=False) for v in table[name]]
        else:
            cols[name] = table[name].to_pylist()
    return [{name: values[n] for name, values in cols.items()} for n in range(len(numbers))]


def groups(table: pa.Table) -> list[int]:
    """The group of each row, from its column; in an evaluation each row is a group of its own."""
    return table["group"].to_pylist() if "group" in table.column_names else list(range(len(table)))


def listing(path: Path) -> dict:
    """A short list of a step's completions, by column: lists with one value per row."""
    names = columns_of(path)
    scores = [name for name in names if name.startswith("rewards/")]
    table = table_of(path, ["completion", "group", *SHORT, *scores])
    columns = {name: table[name].to_pylist() for name in SHORT if name in table.column_names}
    rewards = {name.removeprefix("rewards/"): table[name].to_pylist() for name in scores}
    texts = [text[:PREVIEW] for text in table["completion"].to_pylist()]
    return columns | {"group": groups(table), "text": texts, "rewards": rewards}


def search(path: Path, text: str) -> list[int]:
    """Numbers of the rows whose completion, turns or prompt contain the text, in upper or lower case."""
    table = table_of(path, ["prompt", "completion", "turns"])
    needles = {text.lower(), json.dumps(text, ensure_ascii=False)[1:-1].lower()}  # also in its JSON form
    texts = [" ".join(map(str, row.values())).lower() for row in table.to_pylist()]
    return [number for number, text_of_row in enumerate(texts) if any(word in text_of_row for word in needles)]


def best_and_worst(path: Path) -> list[int]:
    """Row numbers of the best and the worst completion of the group in which rewards differ most."""
    table = table_of(path, ["prompt", "group", "reward"])
    members: dict[int, list[tuple[float, int]]] = {}
    for place, (number, reward) in enumerate(zip(groups(table), table["reward"].to_pylist(), strict=True)):
        members.setdefault(number, []).append((reward or 0.0, place))
    widest = max(members.values(), key=lambda pairs: max(pairs)[0] - min(pairs)[0], default=[])
    return list(dict.fromkeys([max(widest)[1], min(widest)[1]])) if widest else []


def turns(row: dict) -> list[dict]:
    """Turns of a row: text, observation (texts), calls, reward, start, end (token offsets, or None), state."""
    listed = row.get("turns") or []
    listed = json.loads(listed) if isinstance(listed, str) else listed
    names = ("text", "observation", "calls", "reward", "start", "end", "state")
    return [{name: turn.get(name) for name in names} | {"calls": turn.get("calls") or []} for turn in listed]


def readable_rows(path: Path, numbers: list[int]) -> list[dict]:
    """Rows for readers, without their tokens."""
    heavy = ("token_ids", "prompt_ids", "picture")
    light = [name for name in columns_of(path) if name not in heavy and not name.startswith("tokens/")]
    entries = []
    for row in rows(path, numbers, light):
        out = {"prompt": readable_prompt(row["prompt"]), "completion": row.get("completion") or "", "turns": turns(row)}
        out |= {"rewards": {name[8:]: value for name, value in row.items() if name.startswith("rewards/")}}
        out |= {name: row.get(name) for name in SHORT}
        out["other"] = {name: str(value) for name, value in row.items() if is_own(name) and value is not None}
        entries.append(out)
    return entries


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


def token_texts(ids: np.ndarray, vocabulary_table: dict) -> dict:
    """Ids and their texts: {"ids", "text", "special": places, "bytes": {place: hex}}.

    If several tokens make up a character, the last of them has the character; the others have the text "" and their
    bytes. Bytes that are not UTF-8 become \\xNN.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    texts, special, parts = [], [], {}
    for place, token in enumerate(ids.tolist()):
        piece, is_special = vocabulary_table.get(token, (f"#{token}".encode(), False))
        if is_special:
            special.append(place)
            texts[-1:] = [text + decoder.decode(b"", final=True) for text in texts[-1:]]
        half = decoder.getstate()[0]  # the beginning of a character
        texts.append(decoder.decode(piece))
        if half or decoder.getstate()[0]:
            parts[place] = piece.hex(" ")
    texts[-1:] = [text + decoder.decode(b"", final=True) for text in texts[-1:]]
    return {"ids": ids.tolist(), "text": texts, "special": special, "bytes": parts}


def tokens(path: Path, number: int, vocabulary_table: dict, limit: int | None = None) -> dict | None:
    """The tokens of a row, or the first `limit`, with their numbers: {"prompt" and "completion": as `token_texts`,
    "columns": {name: one value per token, nan for none}, "turns": [(start, end), ...]}; None without ids."""
    names = ["prompt_ids", "token_ids", "turns", *(f"tokens/{name}" for name in TOKEN_COLUMNS)]
    (row,) = rows(path, [number], names)
    if row.get("token_ids") is None:
        return None
    columns = {name: row.get(f"tokens/{name}") for name in TOKEN_COLUMNS}
    columns = {name: values[:limit].tolist() for name, values in columns.items() if values is not None}
    spans = [(turn["start"], turn["end"]) for turn in turns(row) if turn["start"] is not None]
    prompt, completion = [token_texts(row[name][:limit], vocabulary_table) for name in ("prompt_ids", "token_ids")]
    return {"prompt": prompt, "completion": completion, "columns": columns, "turns": spans}
