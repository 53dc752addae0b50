"""Training beside live servers, as users start it: on ranks, beside several servers, by turns; and how runs end."""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import cpu_sleep
import psutil
import pytest
import requests
import torch
from forks import free_port
from live import SMALL, Process, running, trainer
from push_worker import CASES, all_cases
from ranks import on_ranks
from server_fixture import make_tiny
from transformers import AutoModelForCausalLM

from runfiles.reading import read_metrics
from vllm_client import VLLMClient


@pytest.fixture
def flags(tmp_path, server):
    words = f"{SMALL} --generator vllm --server_urls {server.url} --max_steps 2 --eval_split none --run_name x "
    return [*words.split(), "--output_dir", str(tmp_path)]


def trains(tmp_path, server, *words: str) -> str:
    """What a run printed, in which server and trainer agreed at every step."""
    with running(trainer(tmp_path / "log", *words, VLLM_SERVER_TOKEN=server.token)) as process:
        assert process.end() == 0, process.text
    name = "sampling/logprob_diff_mean"
    apart = [row[name] for row in read_metrics(tmp_path / "x") if name in row]
    assert len(apart) == 2 and max(apart) < 1e-3, (apart, process.text)
    assert server.token not in process.text
    return process.text


def test_it_trains_beside_vllm_server(server, flags, tmp_path):
    text = trains(tmp_path, server, *flags)
    assert "weights travel by the server's 'torch' engine" in text


def test_it_trains_adapters_alone(server, flags, tmp_path):
    """The server's base must be the one it was started with: a push of others' weights is undone first."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny(), dtype=torch.float32)
    client = VLLMClient([server.url], server.token)
    client.connect_weights("cpu")
    client.begin_push()
    client.send_bucket(list(model.named_parameters()))
    client.finish_push(0)
    client._all("POST", "/update_weight_version", {"new_version": "default"})
    client.close()
    text = trains(tmp_path, server, *flags, "--use_peft", "--lora_r", "4", "--push_lora", "adapters")
    assert "LoRA travels as adapters alone" in text
    listed = server.request("GET", "/v1/models").json()["data"]
    assert [card["id"] for card in listed] == [str(server.model_dir)]  # nothing is left loaded


def test_ranks_push_what_they_train_and_no_more(server):
    """ddp, fsdp and fsdp2, with LoRA folded in and without: the log-probs of both ends agree only behind the push."""
    first, second = on_ranks(2, all_cases, str(make_tiny()), server.url, server.token, "float32", limit=240)
    assert [result["case"] for result in first] == [f"{kind}{' lora' * lora}" for kind, lora in CASES]
    for result in first + second:
        assert result["before"] > 0.1 and result["after"] < 1e-4, result
        assert result["version"] and result["untouched"], result


@pytest.fixture(scope="module")
def stock(server, tmp_path_factory):
    """vLLM's own server, started as docs/serving.md says (`vllm serve` wants a distribution of the name vllm), with a
    sleep mode whose worker notes in the file `slept` when it slept and woke."""
    port, folder = free_port(), tmp_path_factory.mktemp("stock")
    (block,) = re.findall(r"(?s)## Without our script\n\n```bash\n(.*?)```", Path("docs/serving.md").read_text("utf-8"))
    export, serve = block.replace("\\\n", "").replace("$VLLM_SERVER_TOKEN", server.token).strip().split("\n")
    words = f"--port {port} --enforce-eager --dtype float32 --max-model-len 512 --enable-sleep-mode "
    words += "--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(make_tiny())]
    command += [*shlex.split(serve)[3:], *words.split()]
    env = dict(word.split("=") for word in shlex.split(export)[1:]) | cpu_sleep.installed(folder)
    env |= dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", PYTHONPATH=f".:{env['PYTHONPATH']}")
    with running(Process(command, folder / "out", **env)) as process:
        process.url, process.slept = f"http://127.0.0.1:{port}", folder / "log"
        process.until(lambda: "Application startup complete" in process.text)
        yield process


def test_vllms_own_key_guards_no_more_than_is_said(stock):
    for path in ("v1/completions", "inference/v1/generate"):
        assert requests.post(f"{stock.url}/{path}", json={}, timeout=20).status_code == 401
    for path in ("pause?mode=keep", "start_weight_update", "collective_rpc", "resume"):
        assert requests.post(f"{stock.url}/{path}", json={"method": "abort_weight_update"}, timeout=20).ok, path


def test_it_trains_beside_two_servers_and_both_sample(server, stock, flags, tmp_path):
    """Of the 32 completions of two steps, and some of the start, about a half comes from each."""

    def answered() -> float:
        text = requests.get(f"{stock.url}/metrics", timeout=20).text
        return sum(map(float, re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.M)))

    before = answered()
    trains(tmp_path, server, *flags, "--server_urls", server.url, stock.url)
    assert 12 <= answered() - before <= 28


def test_server_and_trainer_take_turns(server, stock, flags, tmp_path):
    trains(tmp_path, server, *flags, "--server_urls", stock.url, "--colocate")
    turn = ["sleep 2", "wake weights", "wake kv_cache"]
    # Twice at start, where what it samples is compared, and in two steps.
    assert stock.slept.read_text(encoding="utf-8").split("\n")[:-1] == turn * 4


def test_ctrl_c_ends_a_run_and_leaves_the_server_to_the_next(server, flags, tmp_path):
    """Of the same name, and yet its weights are told from the first one's."""
    with running(trainer(tmp_path / "log", *flags, "--max_steps", "999", VLLM_SERVER_TOKEN=server.token)) as process:
        process.until(lambda: "step 2/" in process.text)
        family = process.children()
        os.kill(process.members[0].pid, signal.SIGINT)
        assert process.end(60) == 130, process.text
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    first = server.request("GET", "/weight_info").json()["weight_version"]
    trains(tmp_path / "next", server, *flags, "--output_dir", str(tmp_path / "next"))
    second = server.request("GET", "/weight_info").json()["weight_version"]
    assert re.fullmatch(r"x-\w+:2", second) and second.split(":")[0] != first.split(":")[0]


def test_a_server_that_is_killed_ends_the_run_in_seconds_by_name(server, stock, flags, tmp_path):
    """The other one cannot go on alone: it would take the next push, and this one not."""
    words = [*flags, "--server_urls", server.url, stock.url, "--max_steps", "999"]
    with running(trainer(tmp_path / "log", *words, VLLM_SERVER_TOKEN=server.token)) as process:
        process.until(lambda: "step 2/" in process.text)
        stock.kill()
        start = time.monotonic()
        assert process.end(90) == 1
    assert time.monotonic() - start < 60 and stock.url in process.text and "Traceback" not in process.text
