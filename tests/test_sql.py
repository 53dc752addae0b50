"""A model's SQL: only reads, ends in time, is counted as BIRD counts it."""

import sqlite3
import time

import pytest

import rewards
from scoring import sql
from scoring.sql import QueryError, rows_of, schema, written

pytestmark = pytest.mark.quick


@pytest.fixture
def shop(tmp_path):
    path = tmp_path / "a shop?" / "shop.sqlite"
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE things (name TEXT, price INTEGER)")
        rows = [("mug", 3), ("lamp", 20), ("mug", 3), ("caf\u00e9", None)]
        connection.executemany("INSERT INTO things VALUES (?, ?)", rows)
        connection.execute("INSERT INTO things VALUES (CAST(x'ff41' AS TEXT), 7)")  # no UTF-8
    connection.close()
    return path


def scored(path, completion: str, query: str) -> dict:
    (score,) = sql.sql([completion], [query], [str(path)])
    return score


@pytest.mark.parametrize(
    ("completion", "reward", "runs"),
    [
        ("SELECT name FROM things WHERE price = 3", 1, 1),  # twice the same row, and its set is compared
        ("SELECT DISTINCT name FROM things WHERE price < 4", 1, 1),
        ("Look:\n```sql\nSELECT price FROM things\n```\nno,\n```sql\nSELECT 'mug'\n```", 1, 1),  # the last one
        ("<think>```sql\nSELECT 1\n```</think>```\nselect name from things where price = 3;\n```", 1, 1),
        ("<answer>SELECT 'mug'</answer>", 1, 1),
        ("SELECT name, price FROM things WHERE price = 3", 0, 1),
        ("SELECT 'Mug'", 0, 1),
        ("SELECT nothing FROM things", 0, 0),
        ("It is the mug.", 0, 0),
        ("", 0, 0),
    ],
)
def test_counted_as_bird_counts(shop, completion, reward, runs):
    assert scored(shop, completion, "SELECT name FROM things WHERE price = 3") == {"reward": reward, "runs": runs}


def test_order_and_the_kind_of_a_number_do_not_count(shop):
    assert scored(shop, "SELECT price FROM things ORDER BY price DESC", "SELECT price FROM things")["reward"] == 1
    assert scored(shop, "SELECT 3.0", "SELECT MIN(price) FROM things")["reward"] == 1
    assert ("\ufffdA",) in rows_of(shop, "SELECT name FROM things")


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("DELETE FROM things", "not authorized"),
        ("UPDATE things SET price = 0", "not authorized"),
        ("DROP TABLE things", "not authorized"),
        ("CREATE TEMP TABLE mine AS SELECT 1", "not authorized"),
        ("INSERT INTO things VALUES ('a', 1) RETURNING name", "not authorized"),
        ("ATTACH 'FOLDER/new.sqlite' AS new", "not authorized"),
        ("VACUUM INTO 'FOLDER/copy.sqlite'", "authorization denied"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("SELECT * FROM pragma_database_list", "not authorized|prohibited"),
        ("SELECT load_extension('FOLDER/x')", "not authorized|prohibited"),
        ("BEGIN EXCLUSIVE", "not authorized"),
        ("SELECT 1; DELETE FROM things", "one statement"),
        (ENDLESS + "SELECT COUNT(*) FROM n", "takes over"),
        (ENDLESS + "SELECT i FROM n", "over 1,000 rows"),
        ("SELECT zeroblob(2000000000)", "too big"),
        ("SELECT '\0'", "null character"),
        ("", "no query"),
        ("-- nothing", "no query"),
    ],
)
def test_nothing_but_reading_within_limits(shop, query, reason, monkeypatch):
    monkeypatch.setattr(sql, "SECONDS", 0.2)
    monkeypatch.setattr(sql, "MOST_ROWS", 1000)
    before, start = shop.read_bytes(), time.monotonic()
    with pytest.raises(QueryError, match=reason):
        rows_of(shop, query.replace("FOLDER", str(shop.parent)))
    assert time.monotonic() - start < 2 and shop.read_bytes() == before
    assert list(shop.parent.iterdir()) == [shop]


def test_what_takes_memory_ends(shop, monkeypatch):
    monkeypatch.setattr(sql, "MOST_MEMORY", 20 << 20)
    wide = ENDLESS + "SELECT hex(zeroblob(1000)) || i FROM n LIMIT 50000"
    with pytest.raises(QueryError, match="MemoryError|out of memory|takes over"):
        rows_of(shop, f"SELECT * FROM ({wide}) ORDER BY 1")
    monkeypatch.undo()
    assert rows_of(shop, "SELECT 1") == {(1,)}


def test_the_rows_own_query_must_run(shop):
    with pytest.raises(ValueError, match="own query cannot be run on .*shop.sqlite: no such column: colour.*colour"):
        scored(shop, "SELECT 1", "SELECT colour FROM things")
    with pytest.raises(ValueError, match="absent.sqlite"):
        scored(shop.parent / "absent.sqlite", "SELECT 1", "SELECT 1")
    assert not (shop.parent / "absent.sqlite").exists()


def test_schema_and_name(shop):
    assert schema(shop) == "CREATE TABLE things (name TEXT, price INTEGER);"
    assert rewards.get_reward_function("sql") is sql.sql and sql.sql.own_process
    assert written("```SQL\nSELECT 1\n```") == "SELECT 1"
