"""Every recipe on rows of its data set's columns, written here: prompts; what the reference's grader says of right,
wrong and malformed answers; two steps of training with its own settings; what plan.py says of it."""

import json
import re
import sqlite3
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_vlms
import yaml
from families import saved
from forks import free_port
from live import Process, running, trained
from server_fixture import make_tiny
from transformers import AutoTokenizer

from config import ConfigError, TrainConfig, load_function
from inputs.vision import build_prompt
from rewards import get_reward_function
from safety import sandbox

ROOT = Path(__file__).parent.parent
RECIPES = {p.stem: yaml.safe_load(p.read_text(encoding="utf-8")) for p in sorted((ROOT / "recipes").glob("*.yaml"))}
TEXTS = {name: (ROOT / f"recipes/{name}.yaml").read_text(encoding="utf-8") for name in RECIPES}


def script_of(name: str) -> str:
    """The train script of the recipe's own command line."""
    return re.search(r"^# trainer(?:.*\n# {5})*.*?(train_\w+\.py)", TEXTS[name], re.M)[1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Search-R1's protocol, spoken by the BM25 server: its address."""
    port, log = free_port(), tmp_path_factory.mktemp("engine") / "log"
    command = f"{sys.executable} recipes/bm25_server.py tests/recipes/corpus.jsonl --port {port}".split()
    with running(Process(command, log)) as engine:
        engine.until(lambda: "startup complete" in engine.text)
        yield f"http://127.0.0.1:{port}/retrieve"


@pytest.fixture(scope="module")
def databases(tmp_path_factory) -> Path:
    """A folder of sqlite databases, as Spider's and BIRD's downloads have them."""
    folder = tmp_path_factory.mktemp("databases")
    (folder / "concert_singer").mkdir()
    connection = sqlite3.connect(folder / "concert_singer" / "concert_singer.sqlite")
    connection.executescript("""
        CREATE TABLE singer (singer_id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INTEGER);
        CREATE TABLE concert (concert_id INTEGER PRIMARY KEY, singer_id INTEGER, year INTEGER);
        INSERT INTO singer VALUES (1, 'Ada', 'France', 52), (2, 'Ben', 'Chile', 17), (3, 'Cleo', 'France', 40);
        INSERT INTO concert VALUES (1, 1, 2014), (2, 1, 2015), (3, 3, 2014);
    """)
    connection.close()
    return folder


def spec_of(name: str, databases: Path) -> str:
    """The recipe's --dataset_id, with the rows of tests/recipes in place of the hub's."""
    if not (function := RECIPES[name].get("dataset_id", "")).startswith("recipes/"):
        return ""  # made here, as it stands
    file = name if name in FROM_FILES else Path(function.partition(":")[0]).stem
    more = f"&databases={databases}" if name == "text_to_sql" else ""
    return f"{function}?source=tests/recipes/{file}.jsonl{more}"


def rows_of(spec: str, split: str = "train") -> list[dict]:
    name, _, query = spec.partition("?")
    return list(load_function(f"{ROOT}/{name}")(split, 0, **dict(pair.split("=", 1) for pair in query.split("&"))))


# Rows that stand there again, cannot be read, have no test, or ask for what is not checked.
LEFT_OUT = {"dapo_math": 5, "toolace": 1, "code_with_tests": 2, "ifeval": 1}
FROM_FILES = [name for name in RECIPES if (ROOT / f"tests/recipes/{name}.jsonl").exists()]


@pytest.mark.parametrize("name", [*FROM_FILES, "toolace"])
def test_rows(name, databases, monkeypatch):
    monkeypatch.chdir(ROOT)
    spec = (
        "recipes/toolace.py:rows?source=tests/recipes/toolace.jsonl" if name == "toolace" else spec_of(name, databases)
    )
    train, test = rows_of(spec), rows_of(spec, "test")
    given = (ROOT / f"tests/recipes/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(train) + len(test) == len(given) - LEFT_OUT.get(name, 0) and test
    asked, held_out = ({str(row["prompt"]) for row in r if not {"image", "images"} & {*row}} for r in (train, test))
    assert not asked & held_out, "of pictures the questions may be the same"
    generator = types.SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(make_tiny()), rope_index=None)
    cfg = TrainConfig(max_prompt_length=100_000)
    for row in train + test:
        assert {"image", "images"} & set(row) or build_prompt(row, generator, cfg).token_ids
    with pytest.raises(ConfigError, match="'train' and 'test'"):
        rows_of(spec, "validation")


# ---- graders --------------------------------------------------------------------------------------------------------


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tagged(*texts: tuple[str, float]) -> list:
    """(completion, score) of answers in <answer>."""
    return [(f"<answer>{text}</answer>", score) for text, score in texts]


def truth(name: str, **arguments) -> str:
    """RLVR-IFEval's `ground_truth`: every argument of every check, most of them null."""
    every = "N quantifier end_phrase keyword_list word forbidden_words letter i first_word postscript_marker options"
    return json.dumps({"func_name": name} | dict.fromkeys(every.split()) | arguments)


CALLS, SQL = "recipes/function_calling.py:calls", "recipes/text_to_sql.py:sql"
GSM8K, COUNTDOWN, DAPO = "recipes/gsm8k.py:strict", "recipes/countdown.py:countdown", "recipes/dapo_math.py:dapo"
WEATHER = '[{"name": "weather", "arguments": {"city": "Rome", "days": 3}}]'
TWO = [{"name": "f", "arguments": {"a": [1, {"b": True}]}}, {"name": "f", "arguments": {"a": 2}}]
GRADED = [  # reward function, columns of the row, [(completion, what the reference's grader gives)]
    # openai's grader and verl's strict one: the number behind the first "#### ", compared as a text.
    (
        GSM8K,
        dict(answer="36*40=<<36*40=1440>>1440\n#### 1,440"),
        [("So\n#### 1440", 1), ("#### 1440 seats", 1), ("1440", 0), ("#### 1440.", 0), ("#### 5, no: #### 1440", 0)],
    ),
    # TinyZero's: 1, .1 for the form, else 0. What python alone takes for a number, and powers, are none.
    (
        COUNTDOWN,
        dict(target=98, nums=[44, 19, 35]),
        tagged(("44 + 19 + 35", 1), ("(35+44)+19", 1), ("44 + 19 * 35", 0.1), ("98", 0.1), ("44 + 54", 0.1), ("", 0.1))
        + tagged(("44 + 19 + 35 + 0", 0.1), ("44 + 19 +", 0.1), ("1</answer> no: <answer> 19+35+44 ", 1))
        + tagged(("__import__('os').getpid() + 44 + 19 + 35", 0.1), ("9**9**9**9", 0.1))
        + [("44 + 19 + 35", 0)],
    ),
    # DAPO's, as verl has it (math_dapo.py): 1 or -1.
    (
        DAPO,
        dict(answer="34"),
        [("So\nAnswer: 34", 1), ("answer : $34$", 1), ("Answer: \\boxed{34}", 1), ("Answer: 12\nAnswer: 34", 1)]
        + [("Answer: $34\\text{ feet}$", 1), ("Answer: x = 34", 1), ("34", -1), ("Answer: 34.", -1), ("", -1)]
        + [("Answer: 34\n" + 300 * "x", -1), ("Answer: **34**", -1), ("Answer: 034", -1)],
    ),
    (DAPO, dict(answer="1000"), [("Answer: 1,000", 1), ("Answer: 1{,}000", 1), ("Answer: 1,00", -1)]),
    # Half for the arguments, half for all of it.
    (
        CALLS,
        dict(wanted=WEATHER),
        [(call("weather", city="Rome", days=3), 1), (call("weather", days=3.0, city="Rome"), 1)]
        + [(call("weather", city="Rome", days="3"), 0.25), (call("weather", city="Rome"), 0.25)]
        + [(call("wether", city="Rome", days=3), 0), (2 * call("weather", city="Rome", days=3), 0.25)]
        + [("<think>" + call("no") + "</think>I cannot.", 0), ("weather(city='Rome', days=3)", 0)],
    ),
    (CALLS, dict(wanted=TWO), [(call("f", a=2) + call("f", a=[1.0, {"b": True}]), 1), (call("f", a=2), 0.25)]),
    (CALLS, dict(wanted="[]"), [("Which city?", 1), (call("weather"), 0)]),
    # Search-R1's: exact match of the last <answer>; without one 0.
    (
        "recipes/search_r1.py:em",
        dict(answer=["Calder", "the city of Calder"]),
        tagged(("calder.", 1), ("The City of  Calder", 1), ("Calder, a city", 0), ("no</answer><answer>Calder", 1))
        + [("Calder", 0), ("<answer>Calder", 0)],
    ),
    # open-instruct's (if_functions.py).
    *(
        ("recipes/ifeval.py:follows", dict(ground_truth=truth(name, **arguments)), [(kept, 1), (broken, 0)])
        for name, arguments, kept, broken in (
            ("validate_word_constraint", dict(N=20, quantifier="around"), "a " * 22, "a " * 23),
            ("verify_keywords", dict(keyword_list=["sea", "Ship"]), "Seas, ships", "sea"),
            ("verify_letter_frequency", dict(letter="s", N=1), "sea", "Sea"),
            ("validate_paragraphs", dict(N=2, first_word="And", i=2), "a\n\nAnd", "And\n\na"),
            ("validate_json_format", {}, '{"a": 1}', "{a}"),
        )
    ),
    # IoU and the form, each half.
    (
        "recipes/pictures.py:boxes",
        dict(box=[100, 100, 600, 600]),
        [("It is [100, 100, 600, 600].", 1), ("[100, 100, 600, 350]", 0.625), ("[600, 1, 2, 3]", 0), ("nowhere", 0)],
    ),
]


@pytest.mark.parametrize(("name", "columns", "completions"), GRADED)
def test_graded_as_the_reference_does(name, columns, completions):
    function = get_reward_function(f"{ROOT}/{name}")
    texts = [text for text, _ in completions]
    scores = function(completions=texts, **{key: [value] * len(texts) for key, value in columns.items()})
    found = [score["reward"] if isinstance(score, dict) else score for score in scores]
    assert dict(zip(texts, found, strict=True)) == pytest.approx(dict(completions))


def test_the_result_of_a_published_solution_is_the_answer():
    row = load_function(f"{ROOT}/recipes/published.py:format_row")(
        {"problem": "A half?", "solution": r"\boxed{\frac{1}{2}}."}
    )
    assert row["answer"] == r"\frac{1}{2}" and row["prompt"][0]["content"].startswith("A half? ")


def test_schemas_and_calls_are_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    first = rows_of("recipes/function_calling.py:rows?source=tests/recipes/function_calling.jsonl")[0]
    told = first["prompt"][0]["content"]
    schema = json.loads(next(line for line in told.splitlines() if line.startswith('{"name": "weather"')))["parameters"]
    kinds = {name: about["type"] for name, about in schema["properties"].items()}
    assert kinds == {"city": "string", "days": "integer"} and schema["required"] == []
    rows = rows_of("recipes/toolace.py:rows?source=tests/recipes/toolace.jsonl")
    calls = [json.loads(row["wanted"]) for row in rows]
    assert calls[0] == [{"name": "Get Weather", "arguments": {"city": "Rome", "days": 3}}] and len(calls[1]) == 2
    assert calls[3] == [] and calls[4][0]["arguments"] == {"city": "Rome, [Get Weather(]"}


# ---- SQL ------------------------------------------------------------------------------------------------------------

sql = sys.modules[load_function(f"{ROOT}/{SQL}").__module__]
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


def test_queries_are_counted_as_bird_counts(databases):
    """By the set of rows; the last query of the answer. The row's own must run."""
    path, query = str(databases / "concert_singer/concert_singer.sqlite"), "SELECT country FROM singer WHERE age > 30"
    cases = [
        ("SELECT DISTINCT country FROM singer WHERE age >= 40", 1, 1),
        ("```sql\nSELECT age FROM singer\n```\nno,\n```SQL\nSELECT 'France'\n```", 1, 1),
        ("<answer>SELECT 'France'</answer>", 1, 1),
        ("SELECT country, age FROM singer WHERE age > 30", 0, 1),
        ("SELECT nothing FROM singer", 0, 0),
        ("It is France.", 0, 0),
    ]
    scores = sql.sql([text for text, _, _ in cases], [query] * len(cases), [path] * len(cases))
    assert [(score["reward"], score["runs"]) for score in scores] == [case[1:] for case in cases]
    assert sql.sql(["SELECT 40.0"], ["SELECT age FROM singer WHERE name = 'Cleo'"], [path])[0]["reward"] == 1
    with pytest.raises(ValueError, match="own query cannot be run on .*: no such column: colour"):
        sql.sql(["SELECT 1"], ["SELECT colour FROM singer"], [path])


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("DELETE FROM singer", "not authorized"),
        ("ATTACH 'FOLDER/new.sqlite' AS new", "not authorized"),
        (ENDLESS + "SELECT COUNT(*) FROM n", "takes over"),
    ],
)
def test_nothing_but_reading_within_limits(databases, query, reason, monkeypatch):
    monkeypatch.setattr(sql, "SECONDS", 0.5)
    path = databases / "concert_singer/concert_singer.sqlite"
    before = path.read_bytes()
    with pytest.raises(sql.QueryError, match=reason):
        sql.rows_of(path, query.replace("FOLDER", str(path.parent)))
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


# ---- tools and programs ---------------------------------------------------------------------------------------------


SOLUTIONS = ["a, b = map(int, input().split())\nprint(a + b)"]
SOLUTIONS += ["import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])"]
SOLUTIONS += ["def twice(n):\n    return 2 * n"]
SOLUTIONS += ["class Solution:\n    def addTo(self, nums, k):\n        return [n + k for n in nums]"]
SOLUTIONS += ["print('hello ')"]
SOLUTIONS += ["def turned(text):\n    return text[::-1]", "def negated(value):\n    return not value"]
SOLUTIONS += ["def times(words, word):\n    return words.count(word)", SOLUTIONS[3]]


def test_programs_of_all_three_forms_of_tests(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sandbox, "allow_uncontained", True)
    rows = rows_of("recipes/code_with_tests.py:rows?source=tests/recipes/code_with_tests.jsonl")[:9]
    assert "2 of 14 rows have no tests that can be read" in capsys.readouterr().out
    graded = load_function(f"{ROOT}/recipes/code_with_tests.py:all_pass")
    right = [f"Think.\n```python\n{program}\n```" for program in SOLUTIONS]
    scores = graded(completions=right, cases=[row["cases"] for row in rows])
    assert [score["reward"] for score in scores] == [1] * 9
    wrong = ["```python\nprint(3)\n```", "no program", "```python\ndef twice(n):\n    return 4\n```", *right[1:3]]
    wrong += ["```python\ndef turned(text):\n    return ''\n```", *right[5:8]]
    scores = graded(completions=wrong, cases=[row["cases"] for row in rows])
    passed = [score["passed"] for score in scores]
    assert [score["reward"] for score in scores] == [0] * 9 and passed == [0.5, 0, 0.5, 0, 0, 0.5, 0, 0, 0]


# ---- whole runs -----------------------------------------------------------------------------------------------------

SMALL = "--generator hf --compute_dtype float32 --strategy ddp --prompts_per_step 4 --num_minibatches 1 --max_steps 2 "
SMALL += "--max_prompt_length 1024 --max_completion_length 24 --eval_steps 2 --eval_generations 1 --resample_rounds 1 "
SMALL += "--save_steps none --print_samples_every 0 --allow_uncontained "
MORE = {"train_async.py": "--max_staleness 0", "train_ppo.py": "", "train_grpo.py": "--num_generations 2"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], str]:
    """recipe -> a tiny model of its kind."""
    folder = tmp_path_factory.mktemp("models")

    def of(name: str) -> str:
        if name == "qwen3_moe":
            return str(saved("qwen3_moe", folder / "moe", max_position_embeddings=2048))
        if "-VL-" in RECIPES[name]["model_id"]:
            return str(tiny_vlms.make("qwen2_5_vl", folder / "vlm"))
        return str(make_tiny())

    return of


# With tools and a search engine. Those with a critic, pictures, teachers, mixtures and so on beside it.
CHEAP = ("search_r1",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow) for name in RECIPES]
)
def test_trains_two_steps(name, models, databases, engine, tmp_path):
    spec, script = spec_of(name, databases), script_of(name)
    (tmp_path / f"{name}.yaml").write_text(re.sub(r"size=\d+", "size=4", TEXTS[name]), encoding="utf-8")
    flags = f"--config {tmp_path}/{name}.yaml {SMALL} {MORE[script]} --model_id {models(name)} "
    flags += f"--dataset_id '{spec}' " * bool(spec) + f"--teacher_id {make_tiny()}" * (name == "distill_math")
    lines = trained(tmp_path, flags, script=script, RETRIEVER_URL=engine)
    assert sum("reward" in line for line in lines) == 2 and any("eval/reward" in line for line in lines), lines
