"""Questions about a store's database, answered with SQL that is run on it: ten tables, 2,000 rows, sqlite.

    python examples/run.py store      # a warm start - what a query looks like - and two seeds
    python examples/store.py          # only makes the database, runs/store.sqlite

400 questions from 20 templates, the same ones whatever the seed. Those of split "test" come from five templates that
are never met in training, those of "test_seen" from the other 15, about other values. The reward is execution accuracy
(scoring/sql.py). For a database of your own, and for Spider and BIRD, see recipes/text_to_sql.py.
"""

import os
import random
import sqlite3
import sys
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from scoring.sql import rows_of  # noqa: E402

CITIES = "Arden Brook Calder Dover Elgin Fulham Glade Harrow".split()
COUNTRIES = "Norway Kenya Chile Japan Greece".split()
KINDS = "lamp chair mug scarf clock bag".split()
COLORS = "red blue green black white".split()
JOBS = "clerk driver manager cleaner".split()
CARRIERS = "Swift Acorn Delta".split()
REASONS = "broken late wrong".split()
STATUS = "paid sent open".split()
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo June Kai Lena Max Nora Otto Pia".split()
SURNAMES = "Abel Birch Cole Dane Ende Frost Gray Holt Ives Jonas".split()


def person(chance, number: int) -> str:
    return f"{NAMES[number % 16]} {SURNAMES[number // 16 % 10]}"


def whole(low: int, high: int):
    return lambda chance, number: chance.randint(low, high)


def one_of(values):
    return lambda chance, number: chance.choice(values)


def day(chance, number: int) -> str:
    return f"2026-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}"


def brand(chance, number: int) -> str:
    return f"{chance.choice(SURNAMES)} {number}"


def product(chance, number: int) -> str:
    return f"{COLORS[number % 5]} {kind(chance, number)} {number // 30 + 1}"


def kind(chance, number: int) -> str:
    return KINDS[number // 5 % 6]


def every(step: int):
    return lambda chance, number: number * step + 1


PRODUCT, CUSTOMER, ORDER = whole(1, 150), whole(1, 150), whole(1, 500)
TABLES = {  # name: (rows, {column: (random stream, number of the row) -> value})
    "customers": (150, {"name": person, "city": one_of(CITIES), "joined": whole(2010, 2025)}),
    "suppliers": (40, {"name": brand, "country": one_of(COUNTRIES)}),
    "products": (150, {"name": product, "kind": kind, "supplier_id": whole(1, 40), "price": whole(2, 99)}),
    "orders": (500, {"customer_id": CUSTOMER, "day": day, "status": one_of(STATUS)}),
    "items": (600, {"order_id": ORDER, "product_id": PRODUCT, "amount": whole(1, 9)}),
    "employees": (80, {"name": person, "job": one_of(JOBS), "city": one_of(CITIES), "salary": whole(2000, 9000)}),
    "shops": (30, {"city": one_of(CITIES), "opened": whole(1980, 2025), "area": whole(50, 900)}),
    "reviews": (200, {"product_id": PRODUCT, "customer_id": CUSTOMER, "stars": whole(1, 5)}),
    "shipments": (150, {"order_id": every(3), "carrier": one_of(CARRIERS), "weight": whole(1, 40)}),
    "returns": (100, {"order_id": every(5), "reason": one_of(REASONS), "day": day}),
}
FILL = {  # what stands in a template's braces
    **dict(city=CITIES, country=COUNTRIES, kind=KINDS, job=JOBS, status=STATUS, stars=range(1, 6)),
    **dict(year=range(2010, 2026), price=range(5, 95), salary=range(2200, 8900, 100), area=range(60, 850, 10)),
    **dict(weight=range(2, 38), order=range(1, 501), returned=range(1, 500, 5)),
    "product": [product(None, number) for number in range(150)],
    "customer": [person(None, number) for number in range(150)],
}
TRAINED = [
    ("How many customers live in {city}?", "SELECT COUNT(*) FROM customers WHERE city = '{city}'"),
    ("Who of our customers joined in {year}?", "SELECT name FROM customers WHERE joined = {year}"),
    ("Where does {customer} live?", "SELECT city FROM customers WHERE name = '{customer}'"),
    ("What does the {product} cost?", "SELECT price FROM products WHERE name = '{product}'"),
    ("How many products cost more than {price}?", "SELECT COUNT(*) FROM products WHERE price > {price}"),
    ("What is the cheapest {kind}?", "SELECT name FROM products WHERE kind = '{kind}' ORDER BY price LIMIT 1"),
    ("On which day was order {order} placed?", "SELECT day FROM orders WHERE id = {order}"),
    ("How many orders are {status}?", "SELECT COUNT(*) FROM orders WHERE status = '{status}'"),
    ("Which employees are {job}s in {city}?", "SELECT name FROM employees WHERE job = '{job}' AND city = '{city}'"),
    ("What do {job}s earn on average?", "SELECT AVG(salary) FROM employees WHERE job = '{job}'"),
    ("How many employees earn less than {salary}?", "SELECT COUNT(*) FROM employees WHERE salary < {salary}"),
    ("Which shops are larger than {area}?", "SELECT id FROM shops WHERE area > {area}"),
    ("What is the largest shop in {city}?", "SELECT id FROM shops WHERE city = '{city}' ORDER BY area DESC LIMIT 1"),
    ("How many reviews have {stars} stars?", "SELECT COUNT(*) FROM reviews WHERE stars = {stars}"),
    (
        "Which orders did {customer} place?",
        "SELECT orders.id FROM orders JOIN customers ON orders.customer_id = customers.id WHERE name = '{customer}'",
    ),
]
HELD_OUT = [
    ("How many employees work in {city}?", "SELECT COUNT(*) FROM employees WHERE city = '{city}'"),
    ("Which suppliers are in {country}?", "SELECT name FROM suppliers WHERE country = '{country}'"),
    ("How many shipments weigh more than {weight}?", "SELECT COUNT(*) FROM shipments WHERE weight > {weight}"),
    ("What do {kind}s cost on average?", "SELECT AVG(price) FROM products WHERE kind = '{kind}'"),
    ("What is the reason of the return of order {returned}?", "SELECT reason FROM returns WHERE order_id = {returned}"),
]
SPLITS = {"train": (TRAINED, 300), "test_seen": (TRAINED, 60), "test": (HELD_OUT, 40)}  # templates, questions


@lru_cache
def made(path: str) -> str:
    """The database at that place, made anew: the same file whoever makes it."""
    chance, unfinished = random.Random("a store"), f"{path}.{os.getpid()}"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(unfinished).unlink(missing_ok=True)
    connection = sqlite3.connect(unfinished)
    for name, (count, columns) in TABLES.items():
        connection.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, {', '.join(columns)})")
        values = [(n + 1, *(column(chance, n) for column in columns.values())) for n in range(count)]
        connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * (len(columns) + 1))})", values)
    connection.commit()
    connection.close()
    os.replace(unfinished, path)  # ranks make it at the same time
    return path


def rows(split: str = "train", seed: int = 42, database: str = "runs/store.sqlite") -> list[dict]:
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: the store has {', '.join(SPLITS)}.")
    path, met = made(str(Path(database).resolve())), set()
    tables = "\n".join(f"{name}(id, {', '.join(columns)})" for name, (_, columns) in TABLES.items())
    trained = {row["query"] for row in rows("train", database=database)} if split == "test_seen" else set()
    (templates, count), chance, questions = SPLITS[split], random.Random(f"store {split}"), []  # by no seed
    for attempt in range(100_000):
        if len(questions) == count:
            break
        asked, query = templates[attempt % len(templates)]
        values = {name: chance.choice(FILL[name]) for name in FILL}
        asked, query = asked.format(**values), query.format(**values)
        if query in met | trained or not rows_of(path, query) - {(0,), (None,)}:
            continue  # nothing to be found: any other query that finds nothing would be as right
        met.add(query)
        prompt = [{"role": "user", "content": f"{tables}\n\n{asked} Answer with one SQL query."}]
        questions.append({"prompt": prompt, "query": query, "database": path})
    return questions


def demonstrate(row: dict, environment, answers: list) -> str:
    """One who is careless: of four queries in ten a word is another one's."""
    words = row["query"].split()
    if random.random() < 0.4:
        place = random.randrange(1, len(words))
        words[place] = random.choice(["name", "id", "city", "price", "day", "products", "orders", "shops", "COUNT(*)"])
    return " ".join(words)


if __name__ == "__main__":
    path = made("runs/store.sqlite")
    print(path, {name: next(iter(rows_of(path, f"SELECT COUNT(*) FROM {name}")))[0] for name in TABLES})
