"""Spider and BIRD, or questions and queries of your own. `sql`, the reward, runs the completion's query on sqlite:
nothing but reading, within limits, its rows compared with the right ones.

    ...text_to_sql.py:rows?databases=spider/database                                      # xlangai/spider, from the hub
    ...text_to_sql.py:rows?databases=bird/train_databases&source=bird/train.json          # BIRD's own file
    ...text_to_sql.py:rows?databases=mine&source=mine.csv                                 # question, query, db_id

Columns: `question`; `query` (Spider) or `SQL` (BIRD); `db_id`, the database databases/ID/ID.sqlite, or ID.sqlite; BIRD
has `evidence`, a hint. On the hub there are Spider's questions alone: its databases come with its authors' download.
"""

import sqlite3
import time
from functools import cache, lru_cache
from pathlib import Path
from urllib.parse import quote

from published import published

from config import ConfigError
from scoring.text import answer_part, completion_text, fenced_blocks

ASK = "The database, in sqlite:\n\n{tables}\n\n{question}\n{hint}Answer with one query for sqlite, in a block ```sql."
SECONDS, MOST_ROWS = 5.0, 100_000  # of a query
MOST_MEMORY = 512 << 20  # of sqlite in this process
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def rows(split: str = "train", seed: int = 42, databases: str = "database", source: str | None = None) -> list[dict]:
    found = []
    for number, row in enumerate(published("xlangai/spider", split, source, test="validation")):
        query = row.get("query") or row.get("SQL")
        if not (query and row.get("question") and row.get("db_id")):
            needed = "columns `question`, `query` (or `SQL`) and `db_id` are needed"
            raise ConfigError(f"text_to_sql, row {number}: {needed}: {row}")
        path = database(databases, row["db_id"])
        hint = f"Hint: {row['evidence']}\n" if row.get("evidence") else ""
        text = ASK.format(tables=schema(path), question=row["question"], hint=hint)
        kept = {"difficulty": row.get("difficulty"), "db_id": row["db_id"], "query": query, "database": path}
        found.append({"prompt": [{"role": "user", "content": text}]} | kept)
    return found


@cache
def database(folder: str, name: str) -> str:
    places = [Path(folder, name, f"{name}.sqlite"), Path(folder, f"{name}.sqlite")]
    for place in places:
        if place.is_file():
            return str(place.resolve())
    raise ConfigError(f"databases={folder}: there is no {places[0]}, and no {places[1].name}, which a row asks about.")


# ---- the reward ------------------------------------------------------------------------------------------------------


class QueryError(RuntimeError):
    """A query that sqlite refuses, that may not be run, or that takes too much: with the reason."""


def sql(completions, query, database) -> list[dict | None]:
    """1 if the completion's query gives the rows of the column `query`, as BIRD counts them: as a set, in any order.
    The query is the last fenced block of the answer, or the whole answer. Logged: whether it runs (`runs`).

    A right query that has no rows is matched by any that has none: leave such rows of the data out.
    """
    scores = []
    for completion, right, path in zip(completions, query, database, strict=True):
        if right is None:
            scores.append(None)
            continue
        try:
            wanted = right_rows(path, right)
        except QueryError as error:
            raise ValueError(f"the row's own query cannot be run on {path}: {error}. {right!r:.500}") from None
        try:
            given = rows_of(path, written(completion_text(completion)))
        except QueryError:
            scores.append({"reward": 0.0, "runs": 0.0})
            continue
        scores.append({"reward": float(given == wanted), "runs": 1.0})
    return scores


sql.per_trajectory = True
sql.own_process = True  # some single calls of sqlite's functions can take minutes, and only a process can be ended


def written(text: str) -> str:
    """The query that an answer gives."""
    text = answer_part(text)
    return (fenced_blocks(text, "sql", "sqlite", "sqlite3") or [text])[-1].strip()


@lru_cache(maxsize=256)
def right_rows(path: str, query: str) -> frozenset:
    return rows_of(path, query)


def rows_of(path: str, query: str) -> frozenset:
    """The distinct rows that one SELECT gives. QueryError if it does not."""
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise QueryError(f"{path} cannot be opened: {error}") from None
    try:
        connection.text_factory = lambda text: text.decode("utf-8", "replace")  # not all of BIRD's is UTF-8
        connection.execute(f"PRAGMA hard_heap_limit = {MOST_MEMORY}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.set_authorizer(allowed)  # mode=ro alone would let ATTACH and VACUUM INTO write other files
        deadline = time.monotonic() + SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 1000)
        cursor = connection.execute(query)
        if cursor.description is None:
            raise QueryError("it is no query")
        found = cursor.fetchmany(MOST_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:  # ValueError: a null character in it
        late = f"it takes over {SECONDS:g} s" if "interrupted" in str(error) else str(error) or type(error).__name__
        raise QueryError(late) from None
    finally:
        connection.close()
    if len(found) > MOST_ROWS:
        raise QueryError(f"it gives over {MOST_ROWS:,} rows")
    return frozenset(found)


def allowed(action: int, first: str | None, second: str | None, *where) -> int:
    """sqlite asks this of everything that a query does while it is compiled."""
    fine = action in ALLOWED and second != "load_extension"
    return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY


@cache
def schema(path: str) -> str:
    """The CREATE statements of a database's tables and views."""
    found = rows_of(path, "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type IN ('table', 'view')")
    return "\n".join(f"{text};" for name, text in sorted(found) if not name.startswith("sqlite_"))
