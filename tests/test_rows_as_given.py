"""What a row says reaches the model and the rewards as it stands there: nothing of Arrow's other rows, one BOS, a begun
answer as it was begun, tools and settings of the template in columns."""

import json

import datasets
import pytest
from server_fixture import make_tiny
from transformers import AutoTokenizer

from config import ConfigError, TrainConfig, load_function
from data import load_rows
from inputs.prompts import prompt_ids
from rollouts import look_at

pytestmark = pytest.mark.quick
calls = load_function("recipes/function_calling.py:calls")


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [call("weather", city="Oslo"), call("add", a=1, b=2)]
ROWS = [
    {
        "prompt": [
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": None, "tool_calls": [one]},
            {"role": "tool", "name": one["function"]["name"], "content": "3"},
        ],
        "wanted": [one["function"]],
    }
    for one in CALLS
]
ROWS.append({"prompt": [{"role": "user", "content": "Hello."}], "wanted": None})


def stored(kind, folder):
    """The name by which load_rows gets ROWS, through Arrow."""
    plain = datasets.Dataset.from_list(ROWS)
    if kind == "parquet":
        plain.to_parquet(folder / "rows.parquet")
        return str(folder / "rows.parquet")
    if kind == "disk":
        plain.save_to_disk(folder / "rows")
        return str(folder / "rows")
    code = "import datasets\n\n\ndef rows(split, seed):\n    found = datasets.load_from_disk('{}')\n    return {}\n"
    plain.save_to_disk(folder / "rows")
    text = code.format(folder / "rows", {"dataset": "found", "dicts": "[*found]"}[kind])
    (folder / "mine.py").write_text(text, encoding="utf-8")
    return f"{folder / 'mine.py'}:rows"


@pytest.mark.parametrize("kind", ["parquet", "disk", "dataset", "dicts"])
def test_a_row_has_none_of_the_keys_of_others(kind, tmp_path):
    rows = [*load_rows(stored(kind, tmp_path))]
    assert rows == ROWS
    said = [f"<tool_call>{json.dumps(row['wanted'][0])}</tool_call>" for row in rows[:2]]
    assert [score["reward"] for score in calls(said, [row["wanted"] for row in rows[:2]])] == [1, 1]


def tokenizer_of(template=None, bos=False):
    """The tiny model's; with a template of its own, and with the habit of adding a BOS."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    tokenizer.chat_template = template or tokenizer.chat_template
    if bos:
        from tokenizers.processors import TemplateProcessing

        first = (tokenizer.bos_token, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    return tokenizer


def text_of(row, tokenizer, **settings):
    return tokenizer.decode(prompt_ids(row, tokenizer, TrainConfig(**settings)))


@pytest.mark.parametrize("begins", [True, False])
def test_a_prompt_rendered_beforehand_has_one_bos(begins):
    tokenizer = tokenizer_of(bos=True)
    bos = tokenizer.bos_token
    assert text_of({"prompt": bos * begins + "Hi there"}, tokenizer, no_apply_chat_template=True) == bos + "Hi there"


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ BODY }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{{ OPEN }}{% endif %}"
EMPTY = "('<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' and loop.last else '') + m.content.strip()"
LAST = "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)"  # DeepSeek's


def template(body="m.content", opened=""):
    return CHATML.replace("BODY", body).replace("OPEN", repr(opened))


@pytest.mark.parametrize(
    "template, begun, before",
    [
        (template(), "Let me ", ""),
        (template("m.content.strip()"), "Let me \n", ""),
        (template("m.content.strip()"), "\n  one", ""),
        (template(EMPTY), "<think>\n", ""),
        (template(EMPTY), "<think>\nLet me see", ""),
        (template(EMPTY), "It is ", ""),
        (template(EMPTY, "<think>\n"), "<think>\n", ""),
        (template(LAST, "<think>\n"), "<think>\nWell</think>It is", ""),
        (template(LAST, "<think>\n"), "<think>\nWell", ""),
    ],
)
def test_a_begun_answer_stands_at_the_end_as_the_row_has_it(template, begun, before):
    row = {"prompt": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": begun}]}
    asked = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(row, tokenizer_of(template)) == asked + before + begun


def test_a_prompt_that_the_template_refuses_is_named():
    refusing = "{{ raise_exception('only users here') if messages[-1].role == 'system' }}" + template()
    rows = [{"prompt": "Hi"}, {"prompt": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}]
    with pytest.raises(ConfigError, match="rows, row 1: the chat template refuses this prompt: only users here"):
        look_at(rows, "rows", tokenizer_of(refusing), TrainConfig())


TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% if loud %}LOUD {% endif %}"
SCHEMA = {"type": "function", "function": {"name": "weather", "description": "-", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("form", [lambda value: value, json.dumps])
def test_tools_and_settings_of_the_template_in_a_row_are_used(form):
    tokenizer = tokenizer_of(TOOLS + template())
    plain = {"prompt": "Hi"}
    row = plain | {"tools": form([SCHEMA]), "chat_template_kwargs": form({"loud": True})}
    assert text_of(row, tokenizer) == "[weather]LOUD " + text_of(plain, tokenizer)
    lengths = look_at([row], "rows", tokenizer, TrainConfig())
    assert lengths == [len(prompt_ids(row, tokenizer, TrainConfig()))]
