"""scripts/try.py: the row and completions of a run before it starts, by the training's own functions."""

import importlib
import sys

import pytest
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from config import ConfigError
from looking.server import make_app

pytestmark = pytest.mark.quick

tried = importlib.import_module("scripts.try")
FLAGS = "--model_id models/tiny --dataset_id examples/sums.py:rows --reward_funcs exact_match".split()


def answer(monkeypatch, *words: str) -> dict:
    found = {}
    monkeypatch.setattr(tried, "show", found.update)
    tried.main([*FLAGS, *words])
    return found


def test_the_prompt_is_the_tokenizers_and_advantages_are_the_groups(monkeypatch, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n{"prompt": "And 2 + 2?", "answer": "4"}\n')
    found = answer(monkeypatch, "--dataset_id", str(rows), "--row", "1", "--completion", "4", "--completion", "5")
    tokenizer = AutoTokenizer.from_pretrained("models/tiny")
    messages = [{"role": "user", "content": "And 2 + 2?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert found["prompt"] == [tokenizer.decode([number]) for number in ids]
    assert [one["reward"] for one in found["completions"]] == [1, 0]
    # (1 - .5) / (std of [1, 0], unbiased, + 1e-6)
    assert [one["advantage"] for one in found["completions"]] == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert found["completions"][0]["tokens"] == ["4", tokenizer.eos_token] and found["rows"] == 2


def test_the_page_asks_the_same(tmp_path):
    app = make_app(tmp_path, "a token", [sys.executable, "scripts/try.py", *FLAGS])
    page = TestClient(app, headers={"Authorization": "Bearer a token"})
    printed = page.get("/api/try", params={"row": 3, "completion": ["1\n2", "5"]}).json()["text"]
    assert "completion 1: reward" in printed and "\n  5|" in printed and "\n  1|\\n|2|" in printed
    assert page.get("/api/try", params={"row": "x"}).status_code == 422


def test_mistakes_are_told():
    for words in (["--row", "9999"], ["--prompts_per_stp", "2"], ["none.py"]):
        with pytest.raises(ConfigError):
            tried.main([*words[:1], *FLAGS] if words == ["none.py"] else [*FLAGS, *words])
