"""Questions about an invented country, which no model can know, with a search engine behind a real MCP server.

    python examples/run.py search      # warm start, three seeds beside a live server
    ... --mcp_config examples/search.json --tool_parser tags --dataset_id examples/search.py:rows \\
        --reward_funcs squad_em
    ... --tools examples/search_server.py:search        # the same without MCP

Everyone in it has a birthplace, a trade, an instrument and a friend; half of the questions take two look-ups ("the
trade of the friend of Ada"). Held-out questions are about other people, whose articles the engine has as well.
"""

import random

PEOPLE, HELD_OUT = 300, 20
BEGIN = ["Bar", "Dor", "Fen", "Gal", "Hul", "Jor", "Kel", "Lum", "Mer", "Nov", "Pel", "Ros", "Sul", "Tam", "Vor", "Zan"]
MIDDLE, END = ["a", "e", "i", "o", "u"], ["bek", "din", "fal", "gor", "len", "mir", "nas", "rik", "sun", "tov"]
PLACES = [
    a + b
    for a, b in zip(BEGIN, 2 * ["aton", "evale", "imouth", "ofield", "uby", "awick", "eham", "istead"], strict=True)
]
TRADES = ["baker", "miller", "weaver", "smith", "tailor", "mason", "potter", "glazier", "cooper", "tanner", "fisher"]
TRADES += ["clerk"]
INSTRUMENTS = ["violin", "flute", "drum", "harp", "trumpet", "cello", "organ", "lute", "horn", "piano"]
ASKED = {"birthplace": "Where was {} born?", "trade": "What is {}'s trade?", "instrument": "What does {} play?"}


def people() -> list[dict]:
    chance = random.Random("an invented country")
    names = chance.sample([a + m + e for a in BEGIN for m in MIDDLE for e in END], PEOPLE)
    return [
        {
            "name": name,
            "birthplace": chance.choice(PLACES),
            "trade": chance.choice(TRADES),
            "instrument": chance.choice(INSTRUMENTS),
            "friend": chance.choice(names),
        }
        for name in names
    ]


def articles() -> list[str]:
    """What the search engine finds."""
    return [
        f"{p['name']} was born in {p['birthplace']}, is a {p['trade']}, plays the {p['instrument']} and is a friend of "
        f"{p['friend']}."
        for p in people()
    ]


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: search has 'train' and 'test'.")
    known = people()
    by_name = {person["name"]: person for person in known}
    made = []
    for person in known[HELD_OUT:] if split == "train" else known[:HELD_OUT]:
        for asked, question in ASKED.items():
            prompt = [{"role": "user", "content": question.format(person["name"])}]
            made.append(
                {"prompt": prompt, "about": person["name"], "friend": None, "asked": asked, "answer": person[asked]}
            )
            prompt = [{"role": "user", "content": question.format(f"the friend of {person['name']}")}]
            friend = by_name[person["friend"]]
            more = {"friend": friend["name"], "answer": friend[asked]}
            made.append({"prompt": prompt, "about": person["name"], "asked": asked} | more)
    random.Random(seed).shuffle(made)
    return made


def demonstrate(row: dict, environment, answers: list) -> str:
    """A careless reader: half of the time it answers out of the blue, else looks up and answers from what it read."""
    wanted = [row["about"], *([row["friend"]] if row["friend"] else [])]
    if len(answers) < len(wanted) and random.random() < (0.5 if not answers else 0.9):
        return f"<search>{wanted[len(answers)]}</search>"
    guess = random.choice({"birthplace": PLACES, "trade": TRADES, "instrument": INSTRUMENTS}[row["asked"]])
    return f"<answer>{row['answer'] if len(answers) == len(wanted) else guess}</answer>"
