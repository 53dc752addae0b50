"""Rows from every source, bad rows by name, prompts to token ids, and the sampler's promises."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fixture import make_tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import data
import rollouts
from config import ConfigError, TrainConfig
from data import filter_overlong, gym_seed, load_rows
from envs.adapters import with_added
from envs.calls import checked_messages
from envs.tools import as_content
from inputs import on_disk, parts, prompts
from inputs.processor import load_processor
from inputs.prompts import prompt_lengths, prompt_messages, tokenize_prompt
from plugins import load_function
from runlog import resume
from scoring.text import completion_text
from train_grpo import PromptSampler

pytestmark = pytest.mark.quick

WORDS = "<unk> <s> </s> user assistant system : What is 2 + 3 a b c d"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }}{% if not loop.last %} </s> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %} </s> assistant :{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A word a token; plain text gets a BOS from the tokenizer, chat from the template."""
    vocabulary = {word: index for index, word in enumerate(WORDS.split())}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def plain_tokenizer(tokenizer):
    template, tokenizer.chat_template = tokenizer.chat_template, None
    yield tokenizer
    tokenizer.chat_template = template


ROWS = [{"prompt": "What is 2 + 3", "answer": "5", "level": 1}, {"prompt": "What is 3", "answer": "3", "level": 2}]


# ---- sources --------------------------------------------------------------------------------------------------------


def test_json_files_keep_every_column(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
    assert load_rows(str(tmp_path / "rows.jsonl")) == ROWS
    assert load_rows(str(tmp_path / "rows.json")) == ROWS


def test_one_line_without_newline_and_a_byte_order_mark(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\ufeff" + json.dumps(ROWS[0]), encoding="utf-8")
    assert load_rows(str(tmp_path / "rows.jsonl")) == ROWS[:1]


def test_csv_with_quoted_newline(tmp_path):
    (tmp_path / "rows.csv").write_text('prompt,answer\n"What is\n2, or 3",007\nb,\n', encoding="utf-8")
    assert load_rows(str(tmp_path / "rows.csv")) == [
        {"prompt": "What is\n2, or 3", "answer": "007"},
        {"prompt": "b", "answer": ""},
    ]


def test_parquet_with_chat_prompts_and_images(tmp_path):
    from PIL import Image

    chat = [{"role": "user", "content": "What is this"}]
    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "image": datasets.Image(),
            "answer": datasets.Value("string"),
        }
    )
    made = datasets.Dataset.from_list(
        [{"prompt": chat, "image": Image.new("RGB", (3, 2), "red"), "answer": "red"}], features=features
    )
    made.to_parquet(str(tmp_path / "rows.parquet"))
    rows = load_rows(str(tmp_path / "rows.parquet"))
    assert rows[0]["prompt"] == chat and rows[0]["answer"] == "red"
    assert rows[0]["image"].size == (3, 2) and rows[0]["image"].getpixel((0, 0)) == (255, 0, 0)


def test_folders_that_datasets_can_read(tmp_path):
    made = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=made, test=made.select([1])).save_to_disk(str(tmp_path / "saved"))
    assert load_rows(str(tmp_path / "saved"), split="test")[0] == ROWS[1]
    with pytest.raises(ConfigError, match="test.*train"):
        load_rows(str(tmp_path / "saved"), split="tset")
    made.save_to_disk(str(tmp_path / "one"))  # one split, without a name
    assert list(load_rows(str(tmp_path / "one"))) == ROWS
    with pytest.raises(ConfigError, match="test.*train"):
        load_rows(str(tmp_path / "one"), split="test")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    assert list(load_rows(str(tmp_path / "plain"))) == ROWS


def test_many_rows_on_disk_stay_there_and_what_was_found_out_is_found_again(tmp_path, monkeypatch):
    """Lengths may be upper bounds, but what is left out is the same; a second start reads no row to know."""
    texts = [f"{n} {'wörter und ' * (n % 90)}" for n in range(1200)]
    texts[799] = "<|im_start|>system"
    table = {"prompt": [[{"role": "user", "content": text}] for text in texts], "answer": [*map(str, range(1200))]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    model = "models/tiny"
    cfg = TrainConfig(model_id=model, dataset_id=str(tmp_path / "rows.parquet"), max_prompt_length=256)
    processor = load_processor(model)

    def load(format_row):
        rows, _ = data.load_data(cfg, format_row, lambda rows, name: rollouts.measure(rows, name, processor, cfg))
        return rows, resume.row_hashes(rows)

    listed, hashes = load(lambda row: {**row})  # what an edited format_row makes is a list
    monkeypatch.setattr(on_disk, "MANY", 1000)
    monkeypatch.setattr(on_disk, "CHUNK", 500)
    monkeypatch.setattr(on_disk, "KEPT", tmp_path / "kept")
    rows, same = load(lambda row: row)
    assert not isinstance(rows, list) and isinstance(listed, list) and 0 < len(rows) < 1200
    assert [*rows] == listed and (same == hashes).all()
    assert rows[np.int64(7)] == listed[7] and rollouts.group_sizes(rows, cfg) == [cfg.num_generations] * len(rows)
    monkeypatch.setattr(prompts, "tokenize_prompt", None)  # a call of it would raise
    again, same = load(lambda row: row)
    assert [*again["answer"]] == [row["answer"] for row in listed] and (same == hashes).all()


def test_what_tools_add_to_many_rows_on_disk_leaves_out_the_same_rows(tmp_path, monkeypatch):
    """Bytes stand for tokens there: neither do rows go for that reason, nor do some stay that are too long."""
    with open(tmp_path / "rows.jsonl", "w", encoding="utf-8") as file:
        for n in range(600):
            said = f"{n} " + "please think about these words " * (9 if n % 2 else n % 14)
            said += "and think " * (300 if n % 100 == 55 else 0)
            messages = [{"role": "system", "content": "be brief"}] * (n % 2) + [{"role": "user", "content": said}]
            file.write(json.dumps({"prompt": messages, "answer": str(n)}) + "\n")
    cfg = TrainConfig(dataset_id=str(tmp_path / "rows.jsonl"), max_prompt_length=700, tools=["calculator"])
    processor = load_processor("models/tiny")

    def load(format_row):
        measure = lambda rows, name: rollouts.measure(rows, name, processor, cfg)  # noqa: E731
        return [row["answer"] for row in data.load_data(cfg, format_row, measure)[0]]

    listed = load(lambda row: {**row})
    few_are_many(monkeypatch, tmp_path)
    monkeypatch.setattr(prompts, "TRIED", 50)
    assert load(lambda row: row) == listed and len(listed) == 594


def few_are_many(monkeypatch, folder) -> None:
    """What is for large files, of small ones: in processes of a few lines each."""
    for name, value in {"MANY": 10, "LARGE": 1, "PART": 5000, "CHUNK": 70, "KEPT": folder / "kept"}.items():
        monkeypatch.setattr(on_disk, name, value)


def test_lines_of_a_large_file_stay_there_and_are_as_those_of_a_list(tmp_path, monkeypatch):
    odd = {
        7: {"prompt": "a <|im_end|> b", "more": None},
        11: {"prompt": [{"role": "user", "content": [{"type": "text", "text": "parts " * 90}]}]},
        30: {"prompt": "\u003c|im_start|\u003e", "answer": [1, {"a": 2.5}]},
    }
    texts = ["\ufeff"]
    for n in range(400):
        messages = [{"role": "system", "content": "be brief"}] * (n % 3 == 0)
        messages += [{"role": "user", "content": f"{n % 350} wörter \n {'und ' * (n % 90)}"}]
        row = odd.get(n, {"prompt": messages, "answer": str(n)})
        texts.append(json.dumps(row, ensure_ascii=n % 2 == 0).replace("<|im_start", "\\u003c|im_start") + "\n")
        texts.append("\r\n" if n % 50 == 0 else "  \n" * (n % 40 == 0))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(texts).removesuffix("\n"), encoding="utf-8", newline="")
    cfg, processor = TrainConfig(dataset_id=str(path), max_prompt_length=64), load_processor("models/tiny")

    def load(format_row):
        measure = lambda rows, name: rollouts.measure(rows, name, processor, cfg)  # noqa: E731
        rows, _ = data.load_data(cfg, format_row, measure)
        return rows, resume.row_hashes(rows), prompts.special_text_in(rows, processor, cfg)

    listed, hashes, said = load(lambda row: {**row})
    few_are_many(monkeypatch, tmp_path)
    rows, same, also = load(lambda row: row)
    assert isinstance(rows, on_disk.Lines) and isinstance(listed, list) and 100 < len(rows) < 400
    assert [*rows] == listed and (same == hashes).all() and said == also and said.startswith("2 prompts")
    assert rows[-1] == listed[-1] and rows[np.int64(3)] == listed[3] and rows[5:9] == listed[5:9]
    assert data.columns_of(rows) == data.columns_of(listed) == {"prompt"} and "more" in rows.column_names
    assert rollouts.group_sizes(rows, cfg) == rollouts.group_sizes(listed, cfg)
    monkeypatch.setattr(prompts, "tokenize_prompt", None)  # a call of these would raise
    monkeypatch.setattr(on_disk, "by_processes", None)
    again, same, also = load(lambda row: row)
    assert [*again] == listed and (same == hashes).all() and said == also
    with path.open("a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(RuntimeError, match="has been changed while"):
        rows[0]


def test_a_file_that_is_written_to_or_replaced_is_no_other_ones_rows(tmp_path, monkeypatch):
    few_are_many(monkeypatch, tmp_path)
    path, seen = tmp_path / "rows.jsonl", on_disk.looked_at

    def write(numbers) -> None:
        lines = [json.dumps({"prompt": "x" * (n % 30 + 1)}) + "\n\f\n" * (n == 7) for n in numbers]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.utime(path, (1e9, 1e9))  # as programs do that copy files

    def load() -> list[dict]:
        rows = load_rows(str(path), format_row=lambda row: row, lines=True)
        assert isinstance(rows, on_disk.Lines)
        return [*rows]

    def grows(path, *how):
        found = seen(path, *how)
        with path.open("a", encoding="utf-8") as file:
            file.write('{"prompt": "late"}\n')
        return found

    write(range(60))
    monkeypatch.setattr(on_disk, "looked_at", grows)
    with pytest.raises(ConfigError, match="rows.jsonl: was changed while it was read"):
        load()
    monkeypatch.setattr(on_disk, "looked_at", seen)
    assert load()[-1] == {"prompt": "late"}
    for numbers in (range(60), range(59, -1, -1)):  # as long
        write(numbers)
        assert load() == [{"prompt": "x" * (n % 30 + 1)} for n in numbers]
    rows = load_rows(str(path), format_row=lambda row: row, lines=True)
    before = [*rows]
    other = tmp_path / "other.jsonl"
    other.write_text(path.read_text(encoding="utf-8").replace("x", "y"), encoding="utf-8")
    other.rename(path)
    assert [*rows.select([3, 1])] == [before[3], before[1]] and [*rows.select([3, 1]).select([1])] == [before[1]]


def test_rows_that_a_function_makes_are_not_looked_at_on_disk(tmp_path, monkeypatch):
    few_are_many(monkeypatch, tmp_path)
    rows = datasets.Dataset.from_dict({"prompt": ["a"] * 40}).with_transform(lambda some: {"prompt": ["b"] * 40})
    monkeypatch.setattr(data, "load_hub", lambda *how: rows)
    assert load_rows("some/where", format_row=lambda row: row) == [{"prompt": "b"}] * 40


def test_lines_that_end_otherwise_images_and_few_rows_are_read_as_ever(tmp_path, monkeypatch):
    few_are_many(monkeypatch, tmp_path)
    row = '{"prompt": "a"}'
    texts = {
        "cr": f"{row}\r" * 40,
        "images": '{"prompt": "a", "image": null}\n' * 40,
        "few": f"{row}\n" * 9,
        "ok": f"{row}\n" * 40,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="")
        rows = load_rows(str(tmp_path / f"{name}.jsonl"), format_row=lambda row: row, lines=True)
        assert isinstance(rows, list) == (name != "ok") and len(rows) == text.count("prompt"), name


def test_what_is_kept_of_rows_is_kept_within_limits(tmp_path, monkeypatch):
    few_are_many(monkeypatch, tmp_path)
    monkeypatch.setattr(on_disk, "KEPT_BYTES", 3000)
    made = []

    def make(name):
        return on_disk.kept(name, 100, lambda: made.append(name) or np.arange(100))

    for name, days in [("old", 31), ("a", 3), ("b", 2), ("c", 1)]:
        assert (make(name) == np.arange(100)).all()
        newest = max((tmp_path / "kept").iterdir(), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (time.time() - 86400 * days,) * 2)
    make("a")  # used: younger now than b
    make("d")
    for name in ("a", "d", "b", "old"):
        make(name)
    assert made == ["old", "a", "b", "c", "d", "b", "old"]
    (tmp_path / "rows.jsonl").touch()  # where nothing can be written
    monkeypatch.setattr(on_disk, "KEPT", tmp_path / "rows.jsonl" / "no folder")
    assert (make("e") == np.arange(100)).all()


@pytest.mark.slow
def test_ranks_look_at_rows_once(tmp_path):
    """And one that is ended in the middle leaves nothing that the next takes for whole; for one that is stopped nobody
    waits for good."""
    code = "import time; from inputs import on_disk; import numpy as np; import sys\n"
    code += "on_disk.LOCK_SECONDS = float(sys.argv[2])\n"
    code += "make = lambda: print('made') or time.sleep(float(sys.argv[1])) or np.arange(50)\n"
    code += "assert len(on_disk.kept('x', 50, make)) == 50"
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    begin = lambda *how: subprocess.Popen([sys.executable, "-uc", code, *how], stdout=-1, env=env)  # noqa: E731
    first = begin("60", "60")
    assert first.stdout.readline() == b"made\n"
    first.send_signal(signal.SIGSTOP)
    assert b"at most 0.5 s" in (said := begin("0", "0.5").communicate(timeout=60)[0]) and b"made" in said
    first.kill()
    first.wait()
    said = [one.communicate(timeout=60)[0] for one in [begin("2", "60") for _ in range(3)]]
    assert b"".join(said).count(b"made\n") == 1 and b"it holds" in b"".join(said)


def test_a_template_that_writes_more_than_its_texts_is_measured_row_by_row(tmp_path, monkeypatch):
    """There bytes would be no bound."""
    table = {"prompt": [[{"role": "user", "content": "a b c " * 20}] for _ in range(40)]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    cfg, processor = TrainConfig(model_id="models/tiny", max_prompt_length=1000), load_processor("models/tiny")
    processor.chat_template = "{% for m in messages %}{% for n in range(4) %}{{ m.content }}{% endfor %}{% endfor %}"
    rows = load_rows(str(tmp_path / "rows.parquet"))
    exact = prompts.prompt_lengths([*rows], "rows", processor, cfg)
    monkeypatch.setattr(on_disk, "MANY", 10)
    monkeypatch.setattr(on_disk, "CHUNK", 15)
    monkeypatch.setattr(on_disk, "KEPT", tmp_path / "kept")
    assert [*prompts.prompt_lengths(rows, "rows", processor, cfg)] == exact and exact[0] > 180


def test_format_row_comes_before_the_check(tmp_path):
    (tmp_path / "qa.jsonl").write_text('{"question": "a", "answer": "b"}', encoding="utf-8")
    rows = load_rows(str(tmp_path / "qa.jsonl"), format_row=lambda row: row | {"prompt": row["question"]})
    assert rows == [{"question": "a", "answer": "b", "prompt": "a"}]


@pytest.mark.parametrize(
    "name, text, parts",
    [
        ("missing.jsonl", None, ["missing.jsonl", "no such file"]),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n', ["bad.jsonl", "line 2", "not valid jsonl"]),
        ("bad.json", "[", ["not valid json"]),
        ("object.json", '{"data": [{"prompt": "a"}]}', ["object.json: is {'data'", "a dict", "a list of rows"]),
        ("null.json", "null", ["null.json: is None", "a list of rows"]),
        ("fake.parquet", "text", ["not valid parquet"]),
        ("empty.jsonl", "", ["no rows"]),
        ("bytes.jsonl", b'{"prompt": "a"}\n{"prompt": "b\xff"}\n', ["line 2", "not UTF-8", "0xff", "\"b'"]),
        ("bytes.json", b'[{"prompt": "a"},\n{"prompt": "b\xff"}]', ["bytes.json, line 2", "not UTF-8"]),
        ("bytes.csv", b'prompt\n"a\nb"\nc\xff\n', ["bytes.csv, line 4", "not UTF-8"]),
        ("half.jsonl", '{"prompt": "a"}\n{"prompt": "oh \\ud83d"}', ["line 2", r"'\ud83d'", "'oh '"]),
        ("half.json", '[{"prompt": "a"}, {"prompt": "b", "x": {"y": ["\\ude00"]}}]', ["row 1", r"'\ude00'"]),
        ("deep.jsonl", '{"prompt": "a"}\n{"x": ' + "[" * 9000 + "]" * 9000 + "}", ["line 2", "deeper than 100"]),
        ("deep.json", '[\n{"prompt": "a", "x": ' + "[" * 9000 + "]" * 9000 + "}]", ["line 2", "deeper than 100"]),
        ("deeper.jsonl", '{"prompt": "a", "x": ' + "[" * 200 + "]" * 200 + "}", ["line 1", "deeper than 100"]),
        ("number.jsonl", '{"prompt": "a"}\n{"prompt": "b", "x": ' + "7" * 5000 + "}", ["line 2", "4300 digits"]),
        ("more.csv", 'prompt,answer\na,"b\nb"\nc,d,e,f\n', ["line 4", "4 fields", "names 2", "double quotes"]),
        ("open.csv", 'prompt,answer\nq,"5\nr,6\ns,7\n', ["not valid csv", "unexpected end of data"]),
        ("fewer.csv", "prompt,answer\na,b\nc\n", ["line 3", "1 fields", "names 2"]),
        (
            "key.jsonl",
            '{"prompt": "a"}\n{"prompt": "a", "x": {"y": 1, "y": 2}}',
            ["line 2: key 'y' stands there twice"],
        ),
        (
            "key.json",
            '[{"prompt": "a"},\n{"prompt": "a",\n"x": 1, "prompt": "b"}]',
            ["line 2: key 'prompt' stands there"],
        ),
        ("nan.jsonl", '{"prompt": "a"}\n{"prompt": "a", "x": NaN}', ["line 2: NaN is no JSON", "null"]),
        ("nan.json", '[{"prompt": "a"},\n{"prompt": "a", "x": [-Infinity]}]', ["line 2: -Infinity is no JSON"]),
        ("large.jsonl", '{"prompt": "a"}\n{"prompt": "a", "x": 1e999}', ["line 2: 1e999 is too large"]),
        ("twice.csv", "prompt,prompt\na,b\n", ["line 1", "'prompt' stands there twice"]),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, parts, monkeypatch):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        load_rows(str(tmp_path / name))
    assert all(part in str(error.value) for part in parts), error.value
    if name.endswith(".jsonl"):
        few_are_many(monkeypatch, tmp_path)
        with pytest.raises(ConfigError) as same:
            load_rows(str(tmp_path / name), format_row=lambda row: row, lines=True)
        assert str(same.value) == str(error.value)


def test_whole_emoji_and_long_fields_are_fine(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "smile \U0001f600", "x": "\\ud83d"}), encoding="utf-8")
    assert load_rows(str(tmp_path / "rows.jsonl")) == [{"prompt": "smile \U0001f600", "x": "\\ud83d"}]
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n{'x' * 300_000},b\n", encoding="utf-8")
    assert len(load_rows(str(tmp_path / "rows.csv"))[0]["prompt"]) == 300_000


def test_half_an_emoji_from_a_function_names_the_row(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rows(split, seed):\n    return [{'prompt': 'a'}, {'prompt': 'b\\ud83d'}]\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"row 1: text with half a surrogate pair, '\\ud83d'"):
        load_rows(f"{tmp_path}/mine.py:rows")


def test_parquet_with_text_that_is_not_utf8(tmp_path):
    table = pyarrow.table({"prompt": pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="not valid parquet.*UTF8"):
        load_rows(str(tmp_path / "rows.parquet"))


def test_parquet_with_a_column_twice(tmp_path):
    made = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(made, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="rows.parquet: column 'answer' stands there twice; give each a name"):
        load_rows(str(tmp_path / "rows.parquet"))


def test_a_function_without_end_says_how_far_it_is_and_ends(tmp_path, capsys, monkeypatch):
    body = "import time\ndef rows(split, seed):\n    time.sleep(.05)\n    while True:\n        yield {'prompt': 'a'}\n"
    body += "def three(split, seed):\n    return [{'prompt': 'a'}] * 3\n"
    (tmp_path / "endless.py").write_text(
        body + "def class_(split, seed):\n    time.sleep(.05)\n    return iter(lambda: {'prompt': 'a'}, 0)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(data, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(data, "MOST_ROWS", 200_000)
    for name in ("rows", "class_"):
        with pytest.raises(
            ConfigError, match=rf"{name} gave 200,000 rows and goes on.*itertools.islice\(rows, N\).*list"
        ):
            load_rows(f"{tmp_path}/endless.py:{name}")
    out = capsys.readouterr().out
    assert re.search(r"endless.py:rows: 0 rows after 0\.\d s\n", out)
    assert re.search(r"endless.py:rows: [1-9]\d{0,2}(,\d{3})* rows after", out)
    monkeypatch.setattr(data, "MOST_ROWS", 2)
    assert len(load_rows(f"{tmp_path}/endless.py:three")) == 3  # a list has an end


def test_rows_that_fill_the_memory_are_refused_before_the_system_ends_the_process(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def rows(split, seed):\n    while True:\n        yield {'prompt': 'a'}\n", encoding="utf-8"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 1000, encoding="utf-8")
    monkeypatch.setattr(data, "MEMORY_SECONDS", 0)
    monkeypatch.setattr(data, "memory_left", lambda: (10**9, 10**11))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 1000}), tmp_path / "rows.parquet")
    for name in (
        f"{tmp_path}/mine.py:rows",
        f"{tmp_path}/rows.jsonl",
        f"{tmp_path}/rows.parquet",
        "seeds:1000000",
        "reasoning_gym:chain_sum?size=999",
    ):
        with pytest.raises(ConfigError, match=r"after \d+ rows .* 1\.0 of 100\.0 GB .*memory.* left"):
            load_rows(name)


@pytest.mark.parametrize("how", [dict(own_prompts=False), dict(format_row=lambda row: {"prompt": row["q"]}), {}])
@pytest.mark.parametrize("name, text", [("rows.jsonl", '{"q": "a"}\n"a text"\n'), ("rows.json", '[{"q": "a"}, ["a"]]')])
def test_a_row_that_is_no_dict_is_named_before_anything_is_done_with_it(name, text, how, tmp_path):
    (tmp_path / name).write_text(text if how else text.replace("q", "prompt"), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{name}, (row 1|line 2): is a (str|list), .*; a row must be a dict"):
        load_rows(str(tmp_path / name), **how)


def test_the_memory_left_is_that_of_the_machine_or_the_container():
    left, total = data.memory_left()
    assert 0 < left <= total and total > 2**30


def test_what_takes_long_says_how_far_it_is(tmp_path, capsys, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' * 50_000, encoding="utf-8")
    assert len(load_rows(str(path))) == 50_000 and not capsys.readouterr().out
    monkeypatch.setattr(data, "PROGRESS_SECONDS", 0.001)
    load_rows(str(path))
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if f"reading {path} (1 MB), " in line] and [line for line in out if "rows, 5" in line]
    monkeypatch.setenv("RANK", "1")
    load_rows(str(path))
    assert not capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a ", "a", "\n"], ids=["words", "one word", "white space"])
def test_a_book_in_a_prompt_is_not_measured_to_its_end(tmp_path, text):
    """A real tokenizer takes a minute for 50 MB."""
    real = AutoTokenizer.from_pretrained(make_tiny())
    rows = [{"prompt": [{"role": "user", "content": "book: " + text * (50_000_000 // len(text))}]}, {"prompt": "b"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    start = time.monotonic()
    loaded = load_rows(str(tmp_path / "rows.jsonl"))
    lengths = prompt_lengths(loaded, "rows", real, TrainConfig())
    assert time.monotonic() - start < 10
    assert lengths[0] > 1024 and filter_overlong(loaded, lengths, 1024) == (rows[1:], 1)


def test_long_texts_that_are_few_tokens_are_measured_to_their_end(tokenizer):
    rows = [{"prompt": "a" * 100_000 + " b"}]  # a word is a token, however long
    assert prompt_lengths(rows, "rows", tokenizer, TrainConfig()) == [len(ids("<s> user : a b </s> assistant :"))]


def test_unknown_hub_name_says_what_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as error:
        load_rows("nobody/nowhere")
    assert "nowhere" in str(error.value) and "file.py:function" in str(error.value)
    with pytest.raises(ConfigError, match="no such file or folder"):  # a path: the hub is not asked
        load_rows(str(tmp_path / "nowhere"))


def test_configuration_of_a_file_is_an_error(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]), encoding="utf-8")
    with pytest.raises(ConfigError, match="dataset_config=main"):
        load_rows(str(tmp_path / "rows.jsonl"), config="main")


# ---- bad rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, fault",
    [
        ({"answer": "5"}, "no column `prompt`, only answer"),
        ({"prompt": ""}, "empty string"),
        ({"prompt": "  \n"}, "empty string"),
        ({"prompt": None}, "NoneType"),
        ({"prompt": 7}, "int, 7"),
        ({"prompt": []}, "list, []"),
        ({"prompt": ["a"]}, "message 0 of `prompt` is a str, 'a'"),
        ({"prompt": [{"content": "a"}]}, "no `role`"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "user"}]}, "message 1 of `prompt` has no `content`"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]},
            "is of type 'video'; allowed",
        ),
        ({"prompt": "a", "completions": 1}, "'completions'"),
        ("a", "is a str, 'a'; a row must be a dict"),
    ],
)
def test_a_bad_row_names_itself(tmp_path, row, fault):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_rows(str(tmp_path / "rows.jsonl"))
    assert f"{tmp_path}/rows.jsonl, row 1: " in str(error.value) and fault in str(error.value)


def test_messages_without_content_but_with_tool_calls_or_parts_are_fine(tmp_path):
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": prompt}]), encoding="utf-8")
    assert load_rows(str(tmp_path / "rows.json"))[0]["prompt"] == prompt


PARTS = [  # what a list of parts may hold, and what is read; a text is what is said of what is refused
    ("a", {"type": "text", "text": "a"}),
    ({"type": "text", "text": "a", "image": None}, {"type": "text", "text": "a"}),
    ({"type": "image"}, {"type": "image"}),
    ({"type": "image", "text": None, "path": "a.png"}, {"type": "image", "image": "a.png"}),
    ({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, {"type": "image", "image": "a.png"}),
    ({"type": "image_url", "image_url": "a.png"}, {"type": "image", "image": "a.png"}),
    ({"type": "image_url"}, "part 1 of `content` is an image_url without an image"),
    ({"type": "image", "source": {"data": "a"}}, "is an image with 'source', not with one of image, url, path, base64"),
    ({"type": "image", "image": "a", "path": "b"}, "is an image with 'image' and 'path'"),
    ({"type": "text", "text": "a", "image": "b"}, "is a text with 'text' and 'image', not with `text` alone"),
    ({"type": "text"}, "is a text with nothing"),
    (
        {"type": "input_audio", "input_audio": {"data": "a"}},
        "is of type 'input_audio'; allowed are parts of",
    ),
    ({"text": "a"}, "has no type, but 'text'"),
    (7, "is a int, 7"),
]


@pytest.mark.parametrize("part, wanted", PARTS)
def test_every_part_of_a_message_is_read_or_refused_by_name(part, wanted):
    """By one function, for all who read parts: in half of a list nothing is lost either."""
    content = [{"type": "text", "text": "before"}, part]
    if isinstance(wanted, dict):
        assert parts.parts_of(content) == [content[0], wanted]
        assert parts.text_of_parts(content) == f"before\n{wanted.get('text', '[an image]')}"
        assert completion_text([{"role": "assistant", "content": content}]) == parts.text_of_parts(content)
        return
    said = {"role": "user", "content": content}
    readers = [
        lambda: parts.parts_of(content),
        lambda: completion_text([said | {"role": "assistant"}]),
        lambda: parts.transcript([said]),  # judges
        lambda: checked_messages([said], "mine.step()"),  # environments
        lambda: as_content(content) if isinstance(part, dict) and "type" in part else parts.parts_of(content),  # tools
        lambda: with_added([{"role": "user", "content": "a"}], content),  # TRL's environments
        lambda: data.check_rows([{"prompt": [said]}], "rows"),
    ]
    for reader in readers:
        with pytest.raises((ValueError, RuntimeError), match=re.escape(wanted)):
            reader()


def test_a_text_model_reads_all_parts(tokenizer):
    """Most templates want text, and would show a list as python does; those that read parts get them."""
    listed = [{"role": "user", "content": ["What is", {"type": "text", "text": "2 + 3"}]}]
    plain = [{"role": "user", "content": "What is 2 + 3"}]
    wanted = tokenize_prompt({"prompt": plain}, tokenizer)
    assert tokenize_prompt({"prompt": listed}, tokenizer) == wanted and tokenizer.unk_token_id not in wanted
    template, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE.replace("m['content']", READS_PARTS)
    try:
        assert tokenize_prompt({"prompt": listed}, tokenizer) == wanted
    finally:
        tokenizer.chat_template = template


READS_PARTS = "m['content'] if m['content'] is string else m['content'] | map(attribute='text') | join(' ')"


def test_pictures_in_prompts_do_not_fill_the_log():
    prompt = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * 10**6}}, "What?"]}]
    wanted = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    assert parts.without_sources(prompt) == wanted and parts.without_sources("What?") == "What?"


# ---- functions ------------------------------------------------------------------------------------------------------


def test_a_column_called_tool_schemas_is_a_column_like_others():
    tokenizer = load_processor("models/tiny")
    tokenizer.chat_template = "{% if tools %}Tools: {{ tools }}{% endif %}{{ messages[0].content }}"
    row = {"prompt": "Hi."}
    assert tokenize_prompt(row | {"tool_schemas": [{"name": "f"}]}, tokenizer) == tokenize_prompt(row, tokenizer)
    told = prompts.with_tools(row, [{"name": "f"}], "", tokenizer)
    assert tokenizer.decode(tokenize_prompt(told, tokenizer)).startswith("Tools: ")


def test_of_empty_images_the_column_image_is_taken():
    assert prompts.column_images({"images": [], "image": "a.png"}) == ["a.png"]
    assert prompts.column_images({"images": ["b.png"], "image": "a.png"}) == ["b.png"]
    assert prompts.column_images({"images": [None], "image": None}) == []


def test_rows_of_an_environment_that_are_one_object_are_several_games(tmp_path):
    text = "ROW = {'prompt': 'Play.'}\n\n\ndef rows(split, seed):\n    return [ROW] * 6 + [ROW | {'seed': 3}]\n"
    (tmp_path / "games.py").write_text(text, encoding="utf-8")
    cfg = TrainConfig(env="frozenlake", dataset_id=f"{tmp_path}/games.py:rows")
    rows, _ = data.load_data(cfg, lambda row: row, lambda rows, name: [1] * len(rows))
    assert len({row["seed"] for row in rows}) == 7 and rows[6]["seed"] == 3
    assert load_function(f"{tmp_path}/games.py:ROW", also=dict) == {"prompt": "Play."}


def test_function_gets_split_and_seed_and_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("WORD = 'hello'", encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        "from neighbour_of_mine import WORD\n"
        "def rows(split, seed):\n    for i in range(2):\n        yield {'prompt': f'{WORD} {split} {seed} {i}'}\n",
        encoding="utf-8",
    )
    rows = load_rows(f"{tmp_path}/mine.py:rows", split="test", seed=3)
    assert [row["prompt"] for row in rows] == ["hello test 3 0", "hello test 3 1"]
    assert load_function(f"{tmp_path}/mine.py:rows") is load_function(f"{tmp_path}/mine.py:rows")


def test_a_function_is_given_what_stands_behind_it(tmp_path):
    """As --env gives it: numbers and true as such, the rest as text, %26 for a sign that would end it."""
    (tmp_path / "mine.py").write_text(
        "def rows(split, seed, source='none', most=1, odd=False):\n"
        "    return [{'prompt': f'{split} {seed} {source!r} {most!r} {odd!r}'}]\n",
        encoding="utf-8",
    )
    spec = f"{tmp_path}/mine.py:rows"
    assert [row["prompt"] for row in load_rows(spec, seed=3)] == ["train 3 'none' 1 False"]
    (row,) = load_rows(f"{spec}?source=a/b%26c.jsonl&most=5&odd=true", split="test")
    assert row["prompt"] == "test 0 'a/b&c.jsonl' 5 True"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "read"}', encoding="utf-8")
    assert load_rows(f"{spec}?source=rows.jsonl")[0]["prompt"].startswith("train 0 'rows.jsonl'")
    with pytest.raises(ConfigError, match=r"--dataset_id .*rows.*'sorce'.*Did you mean 'source'.*"):
        load_rows(f"{spec}?sorce=a")
    with pytest.raises(ConfigError, match="split.*--dataset_split"):
        load_rows(f"{spec}?split=test")


@pytest.mark.parametrize(
    "name, parts",
    [
        ("absent.py:rows", ["no file", "absent.py"]),
        ("mine.py:row", ["has no 'row'", "rows, seedless, text"]),
        ("mine.py:seedless", ["f(split=..., seed=...)", "seed"]),
        ("mine.py:text", ["returned a str"]),
    ],
)
def test_functions_that_cannot_be_used(tmp_path, name, parts):
    (tmp_path / "mine.py").write_text(
        "from os.path import join\ndef rows(split, seed): return []\ndef _hidden(): pass\n"
        "def seedless(split): return []\ndef text(split, seed): return 'a'\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as error:
        load_rows(f"{tmp_path}/{name}")
    assert all(part in str(error.value) for part in parts), error.value


def test_the_sums_example_holds_out_pairs_in_both_orders():
    path = "examples/sums.py:rows"
    train, test = load_rows(path, split="train", seed=42), load_rows(path, split="test", seed=42)
    assert (len(train), len(test)) == (2380, 60)

    def pair(row):
        a, b = row["prompt"][0]["content"].removeprefix("What is ").split("?")[0].split(" + ")
        assert row["answer"] == str(int(a) + int(b)) and 10 <= int(a) <= 59 and 10 <= int(b) <= 59
        return int(a), int(b)

    ordered = [pair(row) for row in train]
    held_out = {frozenset(pair(row)) for row in test}
    assert len(set(ordered)) == 2380 and len(held_out) == 60
    assert not held_out & {frozenset(p) for p in ordered}
    assert test != load_rows(path, split="test", seed=43) and test == load_rows(path, split="test", seed=42)


# ---- reasoning-gym --------------------------------------------------------------------------------------------------


def test_reasoning_gym_rows():
    task = "chain_sum?min_terms=2&max_terms=2&size=5&allow_negation=true"
    rows = load_rows(f"reasoning_gym:{task}", seed=1)
    assert len(rows) == 5 and all(row["metadata"]["num_terms"] == 2 for row in rows)
    assert rows[0]["prompt"] == rows[0]["question"] and rows[0]["reasoning_gym_task"] == task
    prompts = [row["prompt"] for row in rows]
    assert prompts == [row["prompt"] for row in load_rows(f"reasoning_gym:{task}&seed=1", seed=2)]
    assert prompts != [row["prompt"] for row in load_rows(f"reasoning_gym:{task}", seed=2)]


def test_reasoning_gym_splits_and_seeds_share_no_item():
    """Item i is drawn from seed + i, so seeds 0 and 1 of the library itself have all but one row in common."""
    task = "reasoning_gym:chain_sum?min_digits=4&min_terms=5&size=200"
    questions = [
        {row["prompt"] for row in load_rows(task, split=split, seed=seed)}
        for split, seed in itertools.product(("train", "test", "validation"), (0, 1, 2))
    ]
    assert all(not a & b for a, b in itertools.combinations(questions, 2))
    assert all(gym_seed(s, "validation") < 2**32 - 10**6 for s in (0, 42, 10**6, 2**31))


@pytest.mark.parametrize(
    "task, parts",
    [
        ("chain_sums", ["chain_sums", "Did you mean 'chain_sum'"]),
        ("zzz", ["zzz", "chain_sum", "countdown"]),
        ("chain_sum?min_term=2", ["'min_term'", "Did you mean 'min_terms'", "max_digits"]),
        ("chain_sum?min_terms=two", ["min_terms=two", "a str, not a int"]),
        ("chain_sum?min_terms=2.5", ["min_terms=2.5", "a float, not a int"]),
        ("chain_sum?allow_negation=1", ["allow_negation=1", "a int, not a bool"]),
        ("chain_sum?min_terms=5&max_terms=3", ["max_terms must be >= min_terms"]),
        ("chain_sum?size=many", ["size=many"]),
    ],
)
def test_reasoning_gym_mistakes(task, parts):
    with pytest.raises(ConfigError) as error:
        load_rows(f"reasoning_gym:{task}")
    assert all(part in str(error.value) for part in parts), error.value


def test_reasoning_gym_lists_and_unknown_split():
    rows = load_rows(
        "reasoning_gym:basic_arithmetic?operators=['%2B']&allow_parentheses=false&allow_negation=False&size=20"
    )
    assert all("+" in row["prompt"] and "*" not in row["prompt"] for row in rows)
    assert len(load_rows("reasoning_gym:basic_arithmetic?operators=['+']&size=3")) == 3
    with pytest.raises(ConfigError, match="train, validation"):
        load_rows("reasoning_gym:chain_sum", split="dev")


# ---- prompts --------------------------------------------------------------------------------------------------------


def ids(text):
    return [WORDS.split().index(word) for word in text.split()]


def test_chat_template_without_a_second_bos(tokenizer):
    expected = ids("<s> user : What is 2 </s> assistant :")
    assert tokenize_prompt({"prompt": "What is 2"}, tokenizer) == expected
    chat = [{"role": "user", "content": "What is 2"}]
    got = tokenize_prompt({"prompt": chat}, tokenizer)
    assert got == expected and type(got) is list and all(type(token) is int for token in got)


def test_plain_text_gets_what_the_tokenizer_adds(plain_tokenizer):
    assert tokenize_prompt({"prompt": "What is 2"}, plain_tokenizer, apply_chat_template=False) == ids("<s> What is 2")


def test_system_prompt_only_where_there_is_none(tokenizer):
    with_system = ids("<s> system : a </s> user : b </s> assistant :")
    assert tokenize_prompt({"prompt": "b"}, tokenizer, system_prompt="a") == with_system
    own = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert tokenize_prompt({"prompt": own}, tokenizer, system_prompt="c") == with_system
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "b"}]}]
    assert prompt_messages({"prompt": parts}, "a")[0]["content"] == [{"type": "text", "text": "a"}]
    assert len(parts) == 1, "the row itself must not change"


def test_a_prompt_that_ends_with_the_assistant_is_continued(tokenizer):
    chat = [{"role": "user", "content": "What is 2"}, {"role": "assistant", "content": "2 is"}]
    assert tokenize_prompt({"prompt": chat}, tokenizer) == ids("<s> user : What is 2 </s> assistant : 2 is")


def test_template_mistakes_name_the_flag(plain_tokenizer):
    chat = {"prompt": [{"role": "user", "content": "a"}]}
    with pytest.raises(ConfigError, match="no chat template.*--no_apply_chat_template"):
        tokenize_prompt({"prompt": "a"}, plain_tokenizer)
    with pytest.raises(ConfigError, match="no chat template.*make the prompts strings"):
        tokenize_prompt(chat, plain_tokenizer)
    with pytest.raises(ConfigError, match="--no_apply_chat_template.*chat messages"):
        tokenize_prompt(chat, plain_tokenizer, apply_chat_template=False)
    with pytest.raises(ConfigError, match="--system_prompt"):
        tokenize_prompt({"prompt": "a"}, plain_tokenizer, apply_chat_template=False, system_prompt="b")


@pytest.mark.parametrize("as_dataset", [False, True])
def test_overlong_prompts_are_counted(tokenizer, as_dataset):
    rows = [{"prompt": " ".join("a" * n), "id": n} for n in (1, 6, 2, 9)]  # 6 more tokens come from the template
    rows = datasets.Dataset.from_list(rows) if as_dataset else rows
    lengths = prompt_lengths(rows, "rows", tokenizer, TrainConfig())
    assert lengths == [7, 12, 8, 15]
    kept, dropped = filter_overlong(rows, lengths, 8)
    assert [row["id"] for row in kept] == [1, 2] and dropped == 2
    assert filter_overlong(rows, lengths, 15)[1] == 0
    with pytest.raises(ConfigError, match="all 4 prompts.*shortest has 7 tokens"):
        filter_overlong(rows, lengths, 6)


# ---- sampler --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_every_row_once_an_epoch_and_steps_without_repeats(num_rows, prompts_per_step, seed):
    prompts_per_step = min(prompts_per_step, num_rows)
    sampler = PromptSampler(num_rows, prompts_per_step, seed)
    epochs = 3
    steps = [sampler.next(step) for step in range(-(-epochs * num_rows // prompts_per_step))]
    assert all(len(set(rows)) == prompts_per_step for rows in steps)
    drawn = list(itertools.chain(*steps))
    for epoch in range(epochs):
        assert sorted(drawn[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@given(st.integers(8, 50), st.sampled_from([1, 2, 4]), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_ranks_cut_one_global_order_and_a_step_needs_no_history(num_rows, world_size, step):
    whole = PromptSampler(num_rows, 8, seed=7)
    expected = [whole.next(s) for s in range(step + 1)][step]
    shares = [PromptSampler(num_rows, 8, 7, rank, world_size).next(step) for rank in range(world_size)]
    assert list(itertools.chain(*shares)) == expected and len({len(share) for share in shares}) == 1
    assert whole.next(0) == PromptSampler(num_rows, 8, 7).next(0), "asking out of order changes nothing"


def test_seed_and_epoch_change_the_order():
    first = PromptSampler(100, 100, seed=0)
    assert first.next(0) != first.next(1) != PromptSampler(100, 100, seed=1).next(1)


def test_the_order_is_the_documented_one():
    import numpy as np

    sampler = PromptSampler(10, 5, seed=3)
    assert sampler.next(2) + sampler.next(3) == np.random.default_rng([3, 1]).permutation(10).tolist()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((100, 30, 0, 0, 8), "not divisible by 8 ranks; use 24 or 32"),
        ((100, 3, 0, 0, 8), "use 8"),
        ((20, 32, 0, 0, 8), "only 20 rows.*prompts_per_step=16 or less"),
        ((5, 8, 0, 0, 8), "at most 5 ranks"),
    ],
)
def test_sampler_names_legal_values(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PromptSampler(*arguments)
