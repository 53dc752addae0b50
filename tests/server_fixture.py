"""Live vLLM servers for tests: `server` is shared by the whole session, `start_server` starts one of your own.

The shared server holds whatever weights were pushed last: a test that compares log-probs pushes its own first.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"


@dataclass
class Server:
    url: str
    token: str
    model_dir: Path
    process: subprocess.Popen
    log: Path

    def request(self, method, path, token=None, **kwargs):
        """Any HTTP request with the right token, or with another one."""
        headers = {"Authorization": f"Bearer {token or self.token}"} | kwargs.pop("headers", {})
        return requests.request(method, self.url + path, headers=headers, timeout=60, **kwargs)

    def wait(self, timeout=240):
        deadline = time.monotonic() + timeout
        while "vllm_server: ready" not in self.log.read_text():
            assert self.process.poll() is None, f"the server ended while loading:\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"not ready after {timeout} s:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.2)
        return self

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(model_dir, *arguments):
    """Start a server without waiting for it (`.wait()` does)."""
    port, token = free_port(), secrets.token_urlsafe(8)
    log = Path(tempfile.mkdtemp(prefix="test_server_")) / "log"
    command = [sys.executable, str(ROOT / "vllm_server.py"), "--model", str(model_dir), "--port", str(port)]
    with open(log, "w") as out:
        process = subprocess.Popen(
            [*command, *arguments], stdout=out, stderr=out, env=os.environ | {"VLLM_SERVER_TOKEN": token}
        )
    return Server(f"http://127.0.0.1:{port}", token, Path(model_dir), process, log)


def make_tiny():
    """models/tiny, made if it is not there (scripts/test.sh makes it beforehand)."""
    if not (TINY / "made_by.json").is_file():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "make_models.py"), "tiny", str(TINY)], check=True)
    return TINY


def make_tiny_vlm(folder):
    """A tiny random Idefics3 on the tiny model's tokenizer: images of 64 x 64, four tokens each."""
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        text_config=text | special | {"max_position_embeddings": 2048},
        vision_config=vision | {"image_size": 64, "patch_size": 16},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).float().save_pretrained(folder)
    edge = {"longest_edge": 64}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def server():
    """A live server of the tiny random Llama in fp32, window 512."""
    live = start_server(make_tiny(), "--dtype", "float32", "--max-model-len", "512")
    try:
        yield live.wait()
    finally:
        live.stop()
