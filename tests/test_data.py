"""Rows from every source, bad rows by name, prompts to token ids, and the prompt order's promises."""

import asyncio
import itertools
import json
import random

import datasets
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import rollouts
from config import ConfigError, TrainConfig
from data import load_data, load_rows
from inputs.processor import load_processor
from inputs.prompts import prompt_ids
from inputs.trajectory import Completion, RowError
from train_grpo import PromptSampler, sample_rows

pytestmark = pytest.mark.quick

WORDS = "<unk> <s> </s> user assistant system : What is 2 + 3 a b c d"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }}{% if not loop.last %} </s> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %} </s> assistant :{% endif %}"
)


def ids(text: str) -> list[int]:
    return [WORDS.split().index(word) for word in text.split()]


@pytest.fixture
def tokenizer():
    """A word a token; plain text gets a BOS from the tokenizer, chat from the template."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS.split())}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def refused(*arguments, **how) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rows(*arguments, **how)
    return str(caught.value)


# ---- sources --------------------------------------------------------------------------------------------------------

ROWS = [{"prompt": "What is\n2, or 3", "answer": "007"}, {"prompt": 'wörter "in" quotes', "answer": "3"}]
ROWS += [{"prompt": "c \U0001f600", "answer": "none"}]


@pytest.fixture
def sources(tmp_path):
    """The same rows, as people bring them: {kind: --dataset_id}."""
    made = {kind: tmp_path / f"rows.{kind}" for kind in ("jsonl", "json", "csv", "parquet", "py")}
    made["jsonl"].write_text("\n".join(map(json.dumps, ROWS)) + "\n\n", encoding="utf-8")
    made["json"].write_text(json.dumps(ROWS, ensure_ascii=False), encoding="utf-8")
    quoted = ["prompt,answer", *(f'"{row["prompt"].replace(chr(34), chr(34) * 2)}",{row["answer"]}' for row in ROWS)]
    made["csv"].write_text("\n".join(quoted) + "\n", encoding="utf-8")
    rows = datasets.Dataset.from_list(ROWS)
    rows.to_parquet(str(made["parquet"]))
    made["py"].write_text(f"def rows(split, seed):\n    yield from {ROWS!r}\n", encoding="utf-8")
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text(made["jsonl"].read_text(encoding="utf-8"), encoding="utf-8")
    named = {kind: str(path) for kind, path in made.items()}
    named |= {"py": f"{made['py']}:rows", "saved": f"{tmp_path}/saved", "folder": f"{tmp_path}/folder"}
    return named


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "py", "saved", "folder"])
def test_every_source_gives_the_same_rows(sources, kind):
    assert [*load_rows(sources[kind])] == ROWS
    renamed = load_rows(sources[kind], format_row=lambda row: {"prompt": row["answer"], "asked": row["prompt"]})
    assert [*renamed] == [{"prompt": row["answer"], "asked": row["prompt"]} for row in ROWS]


def test_nested_columns_and_images_are_kept(tmp_path):
    chat = [{"role": "user", "content": "What is this"}]
    rows = [{"prompt": chat, "answer": 5, "tests": [{"in": [1, 2], "out": None}]}, {"prompt": "a", "level": 1.5}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert [*load_rows(f"{tmp_path}/rows.jsonl")] == rows
    columns = {"prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}]}
    columns |= {"image": datasets.Image(), "answer": datasets.Value("int64")}
    row = {"prompt": chat, "image": Image.new("RGB", (3, 2), "red"), "answer": 5}
    made = datasets.Dataset.from_list([row], features=datasets.Features(columns))
    made.to_parquet(str(tmp_path / "rows.parquet"))
    (row,) = load_rows(f"{tmp_path}/rows.parquet")
    assert (row["prompt"], row["answer"]) == (chat, 5)
    assert row["image"].size == (3, 2) and row["image"].getpixel((0, 0)) == (255, 0, 0)


def test_splits(sources):
    assert [*load_rows(sources["saved"], split="test")] == ROWS[1:2]
    assert "test" in (said := refused(sources["saved"], split="tset")) and "train" in said
    cfg = TrainConfig(dataset_id=sources["jsonl"], eval_steps=5)
    with pytest.raises(ConfigError, match="has no splits.*--eval_dataset_id"):
        load_data(cfg, dict)
    held_out = TrainConfig(dataset_id=sources["jsonl"], eval_steps=5, eval_dataset_id=sources["csv"])
    train, eval_rows = load_data(held_out, dict)
    assert [*train] == ROWS == [*eval_rows]


def test_a_function_gets_split_seed_and_what_stands_behind_its_name(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("WORD = 'hello'", encoding="utf-8")
    body = "from neighbour_of_mine import WORD\n\n\ndef rows(split, seed, source='none', most=1, odd=False):\n"
    body += "    yield {'prompt': f'{WORD} {split} {seed} {source!r} {most!r} {odd!r}'}\n"
    body += "def seedless(split): ...\ndef text(split, seed):\n    return 'a'\n"
    (tmp_path / "mine.py").write_text(body, encoding="utf-8")
    spec = f"{tmp_path}/mine.py:rows"
    assert load_rows(spec, split="test", seed=3) == [{"prompt": "hello test 3 'none' 1 False"}]
    (row,) = load_rows(f"{spec}?source=a/b%26c.jsonl&most=5&odd=true")
    assert row["prompt"] == "hello train 0 'a/b&c.jsonl' 5 True"
    for wrong in (f"{spec}?sorce=a", f"{tmp_path}/mine.py:seedless"):
        with pytest.raises(TypeError, match="'sorce'|'seed'"):
            load_rows(wrong)
    assert "has no 'row'" in refused(f"{tmp_path}/mine.py:row")
    assert "str" in refused(f"{tmp_path}/mine.py:text")


def test_reasoning_gym():
    task = "chain_sum?min_terms=2&max_terms=2&size=5&allow_negation=true"
    rows = load_rows(f"reasoning_gym:{task}", seed=1)
    assert len(rows) == 5 and all(row["metadata"]["num_terms"] == 2 for row in rows)
    assert rows[0]["prompt"] == rows[0]["question"] and rows[0]["reasoning_gym_task"] == task
    assert "min_terms=two" in refused("reasoning_gym:chain_sum?min_terms=two&max_terms=3")


@pytest.mark.parametrize("source", ["reasoning_gym:chain_sum?min_digits=4&min_terms=5&size=200", "seeds:200"])
def test_splits_and_seeds_share_no_row(source):
    """reasoning-gym draws item i from seed + i: seeds 0 and 1 of the library itself have all but one row in common."""
    made = [
        {str(row.get("seed", row["prompt"])) for row in load_rows(source, split=split, seed=seed, own_prompts=False)}
        for split, seed in itertools.product(("train", "test", "validation"), (0, 1, 42))
    ]
    assert all(len(rows) == 200 for rows in made)
    assert all(not a & b for a, b in itertools.combinations(made, 2))


def test_rows_of_an_environment_that_are_one_object_are_several_games(tmp_path):
    text = "ROW = {'prompt': 'Play.'}\n\n\ndef rows(split, seed):\n    return [ROW] * 6 + [ROW | {'seed': 3}]\n"
    (tmp_path / "games.py").write_text(text, encoding="utf-8")
    cfg = TrainConfig(env="frozenlake", dataset_id=f"{tmp_path}/games.py:rows")
    rows, _ = load_data(cfg, lambda row: row)
    assert len({row["seed"] for row in rows}) == 7 and rows[6]["seed"] == 3


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n', "not valid jsonl"),
        ("fake.parquet", "text", "not valid parquet"),
        ("more.csv", "prompt,answer\na,b\nc,d,e\n", "line 3"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, text, says):
    (tmp_path / name).write_text(text, encoding="utf-8")
    said = refused(str(tmp_path / name))
    assert name in said and says in said


@pytest.mark.parametrize(
    "row, says",
    [
        ({"answer": "5"}, "no column `prompt`, only answer"),
        ({"prompt": 7}, "7"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "user"}]}, "message 1 of `prompt` has no"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]}, "'video'"),
        ("a text", "'a text'"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "py"])
def test_a_bad_row_names_itself(tmp_path, row, says, kind):
    rows = [ROWS[0], row]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "rows.py").write_text(f"def rows(split, seed):\n    return {rows!r}\n", encoding="utf-8")
    said = refused(f"{tmp_path}/rows.{kind}" + ":rows" * (kind == "py"))
    assert f"{tmp_path}/rows.{kind}" in said and "row 1: " in said and says in said


# ---- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, settings, expected",
    [
        ("What is 2", {}, "<s> user : What is 2 </s> assistant :"),  # one BOS, though tokenizer and template have one
        ([{"role": "user", "content": "What is 2"}], {}, "<s> user : What is 2 </s> assistant :"),
        ("What is 2", {"no_apply_chat_template": True}, "<s> What is 2"),
        ("b", {"system_prompt": "a"}, "<s> system : a </s> user : b </s> assistant :"),
        (  # this template takes text: parts are joined
            [{"role": "user", "content": ["What is", {"type": "text", "text": "2 + 3"}]}],
            {},
            "<s> user : What is 2 + 3 </s> assistant :",
        ),
    ],
)
def test_prompts_become_ids(tokenizer, prompt, settings, expected):
    found = prompt_ids({"prompt": prompt}, tokenizer, TrainConfig(**settings))
    assert found == ids(expected) and all(type(token) is int for token in found)


def test_template_mistakes_name_the_flag(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template.*no_apply_chat_template"):
        prompt_ids({"prompt": "a"}, tokenizer, TrainConfig())


@pytest.fixture
def asked(tmp_path):
    """120 rows on disk, their number as the answer; and the tokens of each prompt, by a tokenizer called by hand."""
    rng = random.Random(0)
    texts = [f"{n} " + "please think about these wörter " * rng.randrange(40) for n in range(120)]
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": str(n)} for n, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    plain = AutoTokenizer.from_pretrained("models/tiny")
    counts = [len(plain.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]) for row in rows]
    return load_rows(f"{tmp_path}/rows.jsonl"), counts


class Sampler:
    """One token for every prompt."""

    tokenizer, rope_index = load_processor("models/tiny"), None

    async def generate(self, prompt_ids, *, n, **options):
        return [Completion([2], [0.0], "stop", 0, prompt_ids)] * n


@pytest.mark.parametrize("less", (0, 1))
def test_exactly_the_prompts_that_do_not_fit_are_replaced(asked, less):
    """When they are drawn; the limit is the length of one of the rows, or one less, so that off by one shows."""
    rows, counts = asked
    limit, sampler = sorted(counts)[60] - less, PromptSampler(120, 40, seed=0)
    cfg = TrainConfig(max_prompt_length=limit, num_generations=2, reward_funcs=["length"])
    further = sampler.extra(0, first := sampler.next(0), 40 * cfg.resample_rounds)
    functions = {"length": lambda completions, **columns: [1.0] * len(completions)}
    groups = asyncio.run(sample_rows(rows, first, further, Sampler(), functions, cfg, range(1)))[0]
    places = [[first[place], *further[place::40]] for place in range(40)]
    fit = [([n for n in drawn if counts[n] <= limit] or drawn[-1:])[0] for drawn in places]
    assert first != fit and [group[0].row["answer"] for group in groups] == [*map(str, fit)]
    for number, group in zip(fit, groups, strict=True):
        if counts[number] <= limit:
            assert len(group[0].prompt_ids) == counts[number]
        else:
            assert all(isinstance(t.info["failure"], RowError) for t in group)


def test_the_first_prompts_are_counted_before_anything_starts(asked, capsys):
    """With what tools add to them, the same for each."""
    rows, counts = asked
    cfg = TrainConfig(max_prompt_length=sorted(counts[:100])[60])
    assert rollouts.look_at(rows, "mine", Sampler.tokenizer, cfg) == counts[:100]
    over = sum(count > cfg.max_prompt_length for count in counts[:100])
    assert f"mine: {over} of the first 100 prompts are over --max_prompt_length" in capsys.readouterr().out
    with_tools = TrainConfig(max_prompt_length=4000, tools=["calculator"])
    more = rollouts.look_at(rows, "mine", Sampler.tokenizer, with_tools)
    (added,) = {with_it - without for with_it, without in zip(more, counts[:100], strict=True)}
    assert added > 20
    with pytest.raises(ConfigError, match=rf"mine have longer prompts, the shortest of {min(counts[:100])} tokens"):
        rollouts.look_at(rows, "mine", Sampler.tokenizer, TrainConfig(max_prompt_length=5))


# ---- prompt order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_rows, per_step, seed", [(1, 1, 0), (7, 7, 1), (10, 4, 2), (37, 8, 3), (9, 8, 4), (40, 40, 5)]
)
def test_every_row_once_an_epoch_and_steps_without_repeats(num_rows, per_step, seed):
    """But for what is too little for a step: an epoch of nine rows is one step of eight."""
    sampler, epochs, steps = PromptSampler(num_rows, per_step, seed), 5, num_rows // per_step
    for epoch in range(epochs):
        drawn = [row for step in range(steps) for row in sampler.next(epoch * steps + step)]
        assert len(set(drawn)) == len(drawn) == steps * per_step
        assert drawn == np.random.default_rng([seed, epoch]).permutation(num_rows)[: len(drawn)].tolist()


@pytest.mark.parametrize("num_rows", [8, 13, 50])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_cut_one_global_order_and_a_resumed_run_needs_no_history(num_rows, world_size):
    whole = PromptSampler(num_rows, 8, seed=7)
    for step in range(30):
        expected = whole.next(step)
        shares = [PromptSampler(num_rows, 8, 7, rank, world_size).next(step) for rank in range(world_size)]
        assert list(itertools.chain(*shares)) == expected and len({len(share) for share in shares}) == 1
