"""A learned reward model: scores in process and over HTTP are those of the classifier, row by row."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from server_fixture import make_tiny

from config import ConfigError, TrainConfig, check
from reward_model import reward_model

CHAT = [[{"role": "user", "content": "2 + 2?"}]] * 3
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("4", "It is four, I think.", "")]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """(folder, tokenizer, model) of a random sequence classifier with one output."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder, tokenizer = tmp_path_factory.mktemp("reward") / "model", AutoTokenizer.from_pretrained(make_tiny())
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
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


def test_scores_over_http(classifier, monkeypatch):
    """The two routes of `vllm serve --runner pooling`, answered with the classifier itself."""
    folder, tokenizer, model = classifier
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body):
            seen.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self):
            self.answer({"data": [{"id": "rm", "root": str(folder)}]})

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert request["model"] == "rm" and request["use_activation"] is False
            with torch.no_grad():
                rows = [float(model(**tokenizer(t, return_tensors="pt")).logits[0, 0]) for t in request["input"]]
            self.answer({"data": [{"probs": [score]} for score in rows]})

        def log_message(self, *_):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("REWARD_MODEL_TOKEN", "secret")
    url = f"http://127.0.0.1:{server.server_port}/"
    assert reward_model(ANSWERS, CHAT, TrainConfig(reward_model=url)) == pytest.approx(expected(classifier), abs=1e-5)
    server.shutdown()
    assert seen == ["Bearer secret"] * 2


def test_a_missing_model_is_said_at_once():
    with pytest.raises(ConfigError, match="reward_model needs --reward_model"):
        check(TrainConfig(reward_funcs=["reward_model"]))
