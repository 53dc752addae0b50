"""A learned reward model: scores in process and over HTTP are those of the classifier, row by row."""

import os
import sys
import time
from dataclasses import replace

import pytest
import requests
import torch
from live import Process, running
from server_fixture import free_port, make_tiny

from config import ConfigError, TrainConfig, check
from scoring.reward_model import reward_model

pytestmark = pytest.mark.in_turn

CHAT = [[{"role": "user", "content": "2 + 2?"}]] * 3
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("4", "It is four, I think.", "")]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """(folder, tokenizer, model) of a random sequence classifier with one output."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder, tokenizer = tmp_path_factory.mktemp("reward") / "model", AutoTokenizer.from_pretrained(make_tiny())
    torch.manual_seed(0)
    shape = dict(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )  # heads of 32 for vLLM
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **shape)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer, model


def expected(classifier) -> list[float]:
    """One row at a time, so that nothing is padded."""
    _, tokenizer, model = classifier
    chats = [[*prompt, *answer] for prompt, answer in zip(CHAT, ANSWERS, strict=True)]
    ids = [tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), return_tensors="pt") for chat in chats]
    with torch.no_grad():
        return [float(model(**row).logits[0, 0]) for row in ids]


def test_scores_are_the_classifiers(classifier):
    scores = reward_model(ANSWERS, CHAT, TrainConfig(reward_model=str(classifier[0])))
    assert scores == pytest.approx(expected(classifier), abs=1e-5)
    assert len(set(scores)) == 3


def test_a_string_prompt_is_scored_as_the_chat_that_the_policy_sees(classifier, capsys):
    cfg = TrainConfig(reward_model=str(classifier[0]))
    said = [answer[0]["content"] for answer in ANSWERS]
    assert reward_model(said, ["2 + 2?"] * 3, cfg) == pytest.approx(expected(classifier), abs=1e-5)
    assert "as a chat" in capsys.readouterr().out
    _, tokenizer, model = classifier
    with torch.no_grad():
        glued = float(model(**tokenizer("2 + 2?4", return_tensors="pt")).logits[0, 0])
    cfg = replace(cfg, no_apply_chat_template=True)
    assert reward_model(said[:1], ["2 + 2?"], cfg) == pytest.approx([glued], abs=1e-5)
    assert "prompt + completion" in capsys.readouterr().out


@pytest.fixture
def served(classifier, tmp_path):
    """`vllm serve` of the classifier: its address."""
    port, log = free_port(), tmp_path / "log"
    # `vllm serve` itself wants a distribution of the name vllm; the CPU build is called otherwise.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(classifier[0])]
    command += [
        "--port",
        str(port),
        "--runner",
        "pooling",
        "--api-key",
        "secret",
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
    ]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with running(Process([*command, "--enforce-eager"], log, **env)) as server:
        url = f"http://127.0.0.1:{port}"
        server.until(lambda: answers(url))
        yield url


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", headers={"Authorization": "Bearer secret"}, timeout=2).ok
    except requests.ConnectionError:
        time.sleep(0.2)
        return False


def test_scores_of_a_vllm_server(classifier, served, monkeypatch):
    monkeypatch.setenv("REWARD_MODEL_TOKEN", "secret")
    scores = reward_model(ANSWERS, CHAT, TrainConfig(reward_model=served))
    assert scores == pytest.approx(expected(classifier), abs=1e-4)


def test_a_missing_model_is_said_at_once():
    with pytest.raises(ConfigError, match="reward_model needs --reward_model"):
        check(TrainConfig(reward_funcs=["reward_model"]))
