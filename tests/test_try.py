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


def test_the_prompt_is_the_tokenizers_and_advantages_are_the_groups(capsys, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n{"prompt": "And 2 + 2?", "answer": "4"}\n')
    tried.main([*FLAGS, "--dataset_id", str(rows), "--row", "1", "--completion", "4", "--completion", "5"])
    printed, tokenizer = capsys.readouterr().out, AutoTokenizer.from_pretrained("models/tiny")
    messages = [{"role": "user", "content": "And 2 + 2?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens = "|".join(tokenizer.decode([number]) for number in ids).replace("\n", "\\n")
    assert f"prompt, {len(ids)} tokens:\n  {tokens}\n" in printed and "2 rows, " in printed
    # (1 - .5) / (std of [1, 0], unbiased, + 1e-6)
    assert f"0: reward 1, advantage +0.7071, 2 tokens, stop\n  4|{tokenizer.eos_token}\n" in printed
    assert "1: reward 0, advantage -0.7071" in printed


def test_tools_answer_who_types(capsys, monkeypatch, tmp_path):
    """A class written for TRL, whose method is a tool, by hand."""
    (tmp_path / "look.py").write_text(
        "class Look:\n    def reset(self, **row):\n        return 'Look.'\n\n"
        "    def look(self) -> str:\n        'Looks around.'\n        return 'a red door'\n",
        encoding="utf-8",
    )
    said = iter(['<tool_call>{"name": "look", "arguments": {}}</tool_call>', "A door."])
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    flags = ["--env", f"{tmp_path}/look.py:Look", "--reward_funcs", "exact_match"]
    tried.main([*FLAGS, *flags, "--hand"])
    asked, answered = capsys.readouterr().out.split("a red door", 1)
    assert "Look." in asked and "completion 0: reward 0" in answered and "A| do|or|." in answered


def test_an_agent_that_asks_again_gets_an_empty_answer(capsys, tmp_path):
    """A typed completion is one turn; --hand types them all."""
    (tmp_path / "agent.py").write_text(
        "import openai\n\ndef run(row, endpoint):\n"
        "    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)\n"
        "    messages = [{'role': 'user', 'content': '1 + 1?'}]\n"
        "    for _ in range(2):\n"
        "        answer = client.chat.completions.create(model=endpoint.model, messages=messages).choices[0].message\n"
        "        messages += [answer, {'role': 'user', 'content': 'Sure?'}]\n"
        "    return 0.5\n",
        encoding="utf-8",
    )
    tried.main([*FLAGS, "--agent", f"{tmp_path}/agent.py:run", "--reward_funcs", "environment", "--completion", "12"])
    assert "completion 0: reward 0.5" in capsys.readouterr().out


def test_the_page_asks_the_same(tmp_path):
    app = make_app(tmp_path, "a token", [sys.executable, "scripts/try.py", *FLAGS, "--gpus", "2"])
    page = TestClient(app, headers={"Authorization": "Bearer a token"})
    printed = page.get("/api/try", params={"row": 3, "completion": ["1\n2", "5"]}).json()["text"]
    assert "completion 1: reward" in printed and "\n  5|" in printed and "\n  1|\\n|2|" in printed
    assert printed.count("train_grpo.py") == printed.count("--nproc_per_node=1") == 1, "the server has the other GPU"
    assert page.get("/api/try", params={"row": "x"}).status_code == 422


def test_mistakes_are_told(tmp_path, capsys):
    (tmp_path / "boom.py").write_text("def boom(completions, **_):\n    return 1 / 0\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        tried.main([*FLAGS, "--reward_funcs", f"{tmp_path}/boom.py:boom", "--completion", "12"])
    told = capsys.readouterr().err
    assert "return 1 / 0" in told and "raised ZeroDivisionError" in told and "asyncio" not in told
    for words in (["--row", "9999"], ["--prompts_per_stp", "2"], ["none.py"]):
        with pytest.raises(ConfigError):
            tried.main([*words[:1], *FLAGS] if words == ["none.py"] else [*FLAGS, *words])
