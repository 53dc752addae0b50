"""Spider and BIRD, or questions and queries of your own, for the reward `sql`: the completion's query is run on sqlite.

    ...text_to_sql.py:rows?databases=spider/database                                      # xlangai/spider, from the hub
    ...text_to_sql.py:rows?databases=bird/train_databases&source=bird/train.json          # BIRD's own file
    ...text_to_sql.py:rows?databases=mine&source=mine.csv                                 # question, query, db_id

Columns: `question`; `query` (Spider) or `SQL` (BIRD); `db_id`, the database databases/ID/ID.sqlite, or ID.sqlite; BIRD
has `evidence`, a hint. On the hub there are Spider's questions alone: its databases come with its authors' download.
"""

from functools import cache
from pathlib import Path

from published import published

from cli import ConfigError
from scoring.sql import schema

ASK = "The database, in sqlite:\n\n{tables}\n\n{question}\n{hint}Answer with one query for sqlite, in a block ```sql."
tables = cache(schema)


def rows(split: str = "train", seed: int = 42, databases: str = "database", source: str | None = None) -> list[dict]:
    found = []
    for number, row in enumerate(published("xlangai/spider", split, source, test="validation")):
        query = row.get("query") or row.get("SQL")
        if not (query and row.get("question") and row.get("db_id")):
            needed = "columns `question`, `query` (or `SQL`) and `db_id` are needed"
            raise ConfigError(f"text_to_sql, row {number}: {needed}: {row}")
        path = database(databases, row["db_id"])
        hint = f"Hint: {row['evidence']}\n" if row.get("evidence") else ""
        text = ASK.format(tables=tables(path), question=row["question"], hint=hint)
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
