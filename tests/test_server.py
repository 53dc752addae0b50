"""vllm_server.py and vllm_client.py against one live server: access, sampling, pushes of weights and of adapters."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import requests
import torch
from forks import free_port
from safetensors.torch import load_file
from server_fixture import make_tiny, start_server
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_server
from config import ConfigError, TrainConfig
from network import http, secrets
from serving import wire
from startup import servers
from vllm_client import ServerError, VLLMClient

PROMPT = [5, 6, 7, 8]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(server):
    return AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=torch.float32)


@pytest.fixture
def client(server):
    client = VLLMClient([server.url], server.token, run="run", timeout=30, request_timeout=120)
    client.wait_ready(60)
    yield client
    client.close()


def named(model) -> list:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def push(client, weights: list, version: int, *buckets: int) -> None:
    """The weights in one bucket, or cut before these numbers."""
    if client.device is None:
        client.connect_weights("cpu")
    client.begin_push()
    for start, end in zip((0, *buckets), (*buckets, len(weights)), strict=True):
        client.send_bucket(weights[start:end])
    client.finish_push(version)


@torch.no_grad()
def moved(model, seed: int):
    """The model with other weights."""
    torch.manual_seed(seed)
    other = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    for parameter in other.parameters():
        parameter += torch.randn_like(parameter) * parameter.abs().mean()
    return other


@torch.no_grad()
def logprobs(model, completion, temperature: float = 1.0, endless: bool = False) -> torch.Tensor:
    """What transformers says of a completion's tokens. endless: where it was not allowed to end (min_tokens)."""
    start = len(completion.prompt_ids)
    logits = model(torch.tensor([completion.prompt_ids + completion.token_ids])).logits[0, start - 1 : -1]
    if endless:
        logits[:, model.generation_config.eos_token_id] = -torch.inf
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def sample(client, prompt=PROMPT, **how) -> list:
    return asyncio.run(client.generate(list(prompt), **{"n": 2, "max_tokens": 12} | how))


def agrees(model, completion, **how) -> bool:
    return torch.allclose(logprobs(model, completion, **how), torch.tensor(completion.logprobs), atol=1e-5)


# ---- access ----------------------------------------------------------------------------------------------------------


def test_no_route_answers_without_the_token(server):
    """All that the app itself lists, the pages of its documentation, and what it does not have."""
    paths = server.request("GET", "/openapi.json").json()["paths"]
    asked = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    asked += [("GET", path) for path in ("/docs", "/redoc", "/openapi.json", "/health", "/nothing")]
    assert len(asked) > 40 and {path for _, path in asked} > {"/update_weights", "/pause", "/inference/v1/generate"}
    for method, path in asked:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": server.token}):
            answer = requests.request(method, server.url + path, headers=headers, timeout=20)
            assert answer.status_code == 401, (method, path)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "MTIzNDU2Nzg5MDEyMzQ1Ng=="
    assert requests.get(server.url + "/v1/realtime", headers=upgrade, timeout=20).status_code in (401, 403)
    assert server.request("GET", "/health").status_code == 200


def test_server_and_push_listen_on_loopback_alone(server, client):
    address = wire.local_address("192.0.2.1")  # of this machine, towards others; nothing is sent
    client.connect_weights("cpu")
    for port in (int(server.url.rpartition(":")[2]), client.store.port):
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(ConnectionRefusedError) if not address.startswith("127.") else contextlib.nullcontext():
            socket.create_connection((address, port), 5)


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_what_is_sampled_has_the_log_probs_of_transformers(client, model):
    client.run = None
    push(client, named(model), 0)
    for how in ({}, {"temperature": 0.7}, {"n": 5}):
        completions = sample(client, **how)
        assert len(completions) == how.get("n", 2)
        for completion in completions:
            assert completion.prompt_ids == PROMPT and len(completion.token_ids) == len(completion.logprobs) <= 12
            assert agrees(model, completion, temperature=how.get("temperature", 1.0))


def test_completions_end_as_they_are_asked_to(client):
    client.run = None
    first = sample(client, n=1, temperature=0)[0].token_ids[0]
    (stopped,) = sample(client, n=1, temperature=0, stop_token_ids=[first])
    client.stop_token_ids = [first]  # of the chat template: tests/test_ends.py
    (ended,) = sample(client, n=1, temperature=0)
    assert (stopped.token_ids, stopped.finish_reason) == ([first], "stop") == (ended.token_ids, ended.finish_reason)
    client.stop_token_ids = None
    (cut,) = sample(client, n=1, max_tokens=3, min_tokens=3)
    assert (len(cut.token_ids), cut.finish_reason) == (3, "length")
    one, two, other = (sample(client, n=1, seed=seed)[0].token_ids for seed in (1, 1, 2))
    assert one == two != other


def test_sampling_ends_with_the_token_that_completes_a_text(client, model):
    client.run = None
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    (plain,) = sample(client, n=1, max_tokens=30, seed=1)
    whole, text = plain.token_ids, tokenizer.decode(plain.token_ids, skip_special_tokens=True)
    stop = next(text[i : i + 2] for i in range(8, len(text)) if text[i : i + 2].isalpha() and text[i : i + 2].isascii())
    end = next(n for n in range(1, len(whole)) if stop in tokenizer.decode(whole[:n], skip_special_tokens=True))
    (cut,) = sample(client, n=1, max_tokens=30, seed=1, stop=("never said", stop))
    assert (cut.token_ids, cut.finish_reason) == (whole[:end], "stop") and end < len(whole)


def test_tokens_that_are_never_to_be_sampled_are_not(client):
    client.run = None
    (free,) = sample(client, n=1, temperature=0)
    client.never = sorted({*free.token_ids})
    assert not {*client.never} & {*sample(client, n=1, temperature=0)[0].token_ids}


def test_a_cancelled_request_is_ended_on_the_server(client):
    client.run = None

    async def cancelled() -> float:
        task = asyncio.ensure_future(client.generate(PROMPT, n=8, max_tokens=300, min_tokens=300))
        await asyncio.sleep(whole / 4)
        task.cancel()
        start = time.monotonic()
        await asyncio.to_thread(client._all, "POST", "/pause?mode=wait")  # until what is under way has ended
        return time.monotonic() - start

    for _ in range(2):  # the first one warms up
        start = time.monotonic()
        sample(client, n=8, max_tokens=300, min_tokens=300)
        whole = time.monotonic() - start
    try:
        assert asyncio.run(cancelled()) < whole / 2
    finally:
        client._all("POST", "/resume")


# ---- pushes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(), tuple(range(1, 20))])
def test_a_push_puts_the_weights_in_place_however_it_is_cut(client, model, cuts):
    new = moved(model, len(cuts))
    push(client, named(new), 7, *cuts)
    for completion in sample(client):
        assert agrees(new, completion) and not agrees(model, completion)
        assert completion.policy_version == completion.policy_version_last == 7


def test_a_push_in_mid_generation_is_told_by_spans(client, model):
    """Tokens before it have the old weights' log-probs, those behind it the new ones'."""
    old, new = moved(model, 1), moved(model, 2)
    push(client, named(old), 1)

    async def across():
        task = asyncio.ensure_future(client.generate(PROMPT, n=2, max_tokens=400, min_tokens=400))
        await asyncio.sleep(0.1)
        await client.generate(PROMPT, max_tokens=20, min_tokens=20)  # beside the others: by its end these are under way
        await asyncio.to_thread(push, client, named(new), 2)
        return await task

    for completion in asyncio.run(across()):
        assert (completion.policy_version, completion.policy_version_last) == (1, 2)
        given = torch.tensor(completion.logprobs)
        right = [(logprobs(weights, completion, endless=True) - given).abs() < 1e-4 for weights in (old, new)]
        changed = int(right[0].long().argmin())
        assert 0 < changed < 400 and right[0][:changed].all() and right[1][changed:].all()
        assert completion.spans == [(1, 0, changed), (2, changed, 400)]


def test_what_a_push_lacks_or_has_too_much_of_is_refused_by_name_and_nothing_answers_until_the_next(client, model):
    weights = named(model)
    push(client, weights, 1)
    without = [pair for pair in weights if pair[0] != "model.layers.1.self_attn.k_proj.weight"]
    misshapen = [(name, torch.zeros(3) if name == "model.norm.weight" else weight) for name, weight in weights]
    for wrong, message in (
        (without, r"layers\.1\.self_attn\.qkv_proj"),
        ([*weights, ("model.layers.2.odd", torch.zeros(3))], r"model\.layers\.2\.odd"),
        (misshapen, r"model\.norm\.weight"),
    ):
        with pytest.raises(ServerError, match=message):
            push(client, wrong, 2)
        client.abort_push()
        assert client._all("GET", "/is_paused") == [{"is_paused": True}]
        client.request_timeout = 1.0
        with pytest.raises(ServerError, match="no answer within 1 s"):
            sample(client)
    client.request_timeout = 120
    waiting, new = client.pool.submit(sample, client), moved(model, 5)
    push(client, named(new), 3)
    assert all(agrees(new, completion) for completion in waiting.result() + sample(client))


KILLED = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_client import VLLMClient
url, token, folder = sys.argv[1:]
client = VLLMClient([url], token, run="killed", timeout=8)
client.connect_weights("cpu")
weights = list(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
client.begin_push()
client.send_bucket([(name, 2 * weight.detach()) for name, weight in weights[:10]])
print("half", flush=True)
what = dict(names=["x"], dtype_names=["float32"], shapes=[[4]])
client._begin("POST", "/update_weights", [{"update_info": what}])
sys.stdin.read()
"""


@pytest.mark.parametrize("end, seconds", [(signal.SIGKILL, 6), (signal.SIGSTOP, 30)], ids=["killed", "silent"])
def test_a_trainer_that_ends_in_mid_push_leaves_no_half_new_weights_answering(client, server, model, end, seconds):
    """The worker waits for a bucket just then: for a trainer that is silent as long as its --server_timeout. The next
    trainer's push mends it."""
    push(client, named(model), 1)
    command = [sys.executable, "-c", KILLED, server.url, server.token, str(server.model_dir)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    time.sleep(0.5)
    process.send_signal(end)
    assert client._all("GET", "/is_paused") == [{"is_paused": True}]
    client.abort_push()  # its group is not the server's any more
    new, start = moved(model, 3), time.monotonic()
    push(client, named(new), 2)
    assert time.monotonic() - start < seconds and all(agrees(new, completion) for completion in sample(client))
    process.kill()
    process.wait()


def test_tokens_of_other_weights_than_this_runs_are_refused(client, server, model):
    push(client, named(model), 4)
    other = VLLMClient([server.url], server.token, run="another")
    with pytest.raises(ServerError, match="run:4.*run another has not pushed"):
        sample(other)
    push(other, named(model), 1)
    with pytest.raises(ServerError, match="another:1"):
        sample(client)
    client._all("POST", "/update_weight_version", {"new_version": "default"})  # as a server that was started anew
    with pytest.raises(ServerError, match="'default'"):
        sample(client)
    other.close()


def test_a_server_of_another_model_or_with_too_small_a_window_is_refused(client, model):
    infos, config = client.server_info(), model.config
    servers.check_model(client.urls, infos, config, 512)
    with pytest.raises(ConfigError, match="--max-model-len 513"):
        servers.check_model(client.urls, infos, config, 513)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        other = type(config).from_dict(config.to_dict() | {name: 2 * getattr(config, name)})
        with pytest.raises(ConfigError, match="serves .*Start the server with the trainer's --model_id"):
            servers.check_model(client.urls, infos, other, 512)


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapted(model, seed: int):
    """The model with LoRA of rank 4 on all linear layers, and what a push of it sends."""
    import peft

    from modeling import model as lora

    base = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    base.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    wanted = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    policy = peft.get_peft_model(base, wanted)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return policy.eval(), lora.adapter_weights(policy.named_modules(), torch.float32)


@pytest.fixture
def adapters(client, model):
    """A client whose server has the base, and takes adapters of `adapted`."""
    from modeling import model as lora

    client.connect_weights("cpu")
    push(client, named(model), 0)
    client._all("POST", "/update_weight_version", {"new_version": "default"})
    client.abort_push()
    assert client.why_no_adapters(lora.shapes_of(adapted(model, 0)[0])) is None
    return client


def test_adapters_travel_alone_and_are_peft_s(adapters, model):
    folders = set()
    for version in (1, 2, 3):
        policy, bucket = adapted(model, version)
        push(adapters, bucket, version)
        folders |= {Path(adapters.folders[version].name)}
        for completion in sample(adapters):
            assert completion.policy_version == version and agrees(policy, completion)
    listed = {card["id"] for card in adapters._all("GET", "/v1/models")[0]["data"]}
    assert {"run-2", "run-3"} < listed and "run-1" not in listed  # the newest, and one that may still be sampled
    assert sorted(adapters.folders) == [2, 3]
    kept = load_file(Path(adapters.folders[3].name) / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in bucket} == {name: tuple(t.shape) for name, t in kept.items()}
    adapters.close()
    assert len(folders) == 3 and not any(folder.exists() for folder in folders)


def test_runs_share_a_server_by_adapters_until_one_pushes_weights(adapters, server, model):
    other = VLLMClient([server.url], server.token, run="other", timeout=30)
    other.adapter = adapters.adapter
    for seed, client in enumerate((adapters, other)):
        client.connect_weights("cpu")
        push(client, adapted(model, seed)[1], 1)
    for seed, client in enumerate((adapters, other)):
        assert all(agrees(adapted(model, seed)[0], completion) for completion in sample(client))
    other.close()
    push(VLLMClient([server.url], server.token, run="third"), named(model), 1)
    with pytest.raises(ServerError, match="third:1"):
        sample(adapters)


def test_a_completion_keeps_the_adapter_that_it_began_with(adapters, model):
    (old, before), (new, after) = adapted(model, 1), adapted(model, 2)
    push(adapters, before, 1)

    async def across():
        task = asyncio.ensure_future(adapters.generate(PROMPT, n=1, max_tokens=400, min_tokens=400))
        await asyncio.sleep(0.1)
        await adapters.generate(PROMPT, max_tokens=20, min_tokens=20)  # beside it: by its end that is under way
        await asyncio.to_thread(push, adapters, after, 2)
        assert not task.done()
        return await task, await adapters.generate(PROMPT, n=1, max_tokens=8)

    (first,), (second,) = asyncio.run(across())
    assert (first.policy_version, second.policy_version) == (1, 2)
    assert agrees(old, first, endless=True) and agrees(new, second)


def test_why_a_server_takes_no_adapters_is_said(client, model):
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    client._all("POST", "/update_weight_version", {"new_version": "default"})
    assert "--max-lora-rank 65" in client.why_no_adapters({layer: (65, 128, 128)})
    assert client.why_no_adapters({layer: (64, 128, 128)}) is None
    client.adapter = None
    push(client, named(model), 1)
    assert "weights run:1 of an earlier push" in client.why_no_adapters({layer: (4, 128, 128)})


# ---- without a server ------------------------------------------------------------------------------------------------


def test_what_vllm_is_started_with(monkeypatch, capsys, tmp_path):
    """Our defaults where nothing else is given, as its own parser reads them; a token made up, or that of a file. What
    must not or cannot be served is said before anything is loaded."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def started(*words: str):
        monkeypatch.setattr(secrets, "_read", {})
        vllm_server.get_ready(*vllm_server.parse_command_line(["--model", "m", "--port", str(free_port()), *words]))
        return make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])

    for name in ("VLLM_SERVER_TOKEN", "VLLM_SERVER_TOKEN_FILE", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["vllm_server.py"])
    monkeypatch.setattr(vllm_server.Token, "token", "")
    monkeypatch.setattr("getpass.getuser", mock.Mock(side_effect=KeyError))  # as in a container, for a uid without name
    plain = started()
    assert (plain.host, plain.max_loras, plain.max_lora_rank, plain.ssl_certfile) == ("127.0.0.1", 4, 64, None)
    assert f"token {vllm_server.Token.token} " in capsys.readouterr().out and len(vllm_server.Token.token) > 20
    (tmp_path / "token").write_text("of-the-file")
    mine = started("--max-loras", "8", "--ssl-certfile", "c", "--ssl-keyfile", "k", "--token-file", f"{tmp_path}/token")
    assert (mine.max_loras, mine.ssl_certfile, mine.ssl_keyfile) == (8, "c", "k")
    assert vllm_server.Token.token == "of-the-file" and vllm_server.ADDRESS.startswith("https://127.0.0.1:")
    monkeypatch.delenv("VLLM_SERVER_TOKEN_FILE")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        started("--host", "0.0.0.0")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit, match="cannot listen on"):
        started("--port", str(other.getsockname()[1]))
    said = capsys.readouterr()
    assert "wants a token" in said.err and "loading" not in said.out


@pytest.mark.parametrize("flag, shown", [("--help", "--token-file"), ("--help=all", "--tensor-parallel-size")])
def test_help_is_ours_or_vllms(flag, shown):
    command = [sys.executable, "vllm_server.py", flag]
    assert shown in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout


async def answers(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


def test_under_vllm_serve_the_token_is_that_of_the_environment(monkeypatch):
    monkeypatch.setattr(secrets, "_read", {})
    monkeypatch.setattr(vllm_server.Token, "token", "")
    with pytest.raises(ValueError, match="no token"):
        vllm_server.Token(answers)
    monkeypatch.setenv("VLLM_SERVER_TOKEN", "given")
    page = TestClient(vllm_server.Token(answers))
    assert [page.get("/", headers={"Authorization": f"Bearer {t}"}).status_code for t in ("", "given")] == [401, 200]


def test_a_server_ends_with_who_started_it():
    """While it loads, here."""
    command = (
        f"{sys.executable} vllm_server.py --model m --port {free_port()} --exit-with-parent >&2 & echo $!; read line"
    )
    parent = subprocess.Popen(command, shell=True, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    server = psutil.Process(int(parent.stdout.readline()))
    with pytest.raises(psutil.TimeoutExpired):
        server.wait(2)
    parent.kill()
    parent.wait()
    psutil.wait_procs([server], timeout=20)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_server_that_loads_ends_at_once():
    """vLLM itself would wait for its engine."""
    live = start_server(make_tiny(), "--dtype", "float32")
    deadline = time.monotonic() + 120
    while not (
        engines := [c for c in psutil.Process(live.process.pid).children() if "spawn_main" in " ".join(c.cmdline())]
    ):
        assert time.monotonic() < deadline and live.process.poll() is None
        time.sleep(0.2)
    time.sleep(2)
    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(5) == 1 and not psutil.wait_procs(engines, 5)[1]
    live.stop()


@pytest.mark.parametrize(
    "gpus, backend",
    [(["a", "b", "c"], "nccl"), (["a", "b", "a"], "gloo"), (["a", None], "gloo"), ([None, "a"], "gloo")],
)
def test_nccl_where_each_rank_has_a_gpu_of_its_own(gpus, backend):
    assert wire.backend_for(gpus) == backend


@pytest.mark.parametrize(
    "flags, gpu, refused, said",
    [
        ({}, "a", None, "travels as adapters alone"),
        ({}, "a", "too wide", "is folded into the weights that are pushed: too wide"),
        ({}, None, None, "is folded into the weights that are pushed: the server is on CPUs"),
        (dict(push_lora="adapters"), None, None, "travels as adapters alone"),
        (dict(push_lora="adapters"), "a", "too wide", None),
        (dict(load_in="4bit"), "a", "too wide", None),
    ],
)
def test_how_lora_travels(model, monkeypatch, capsys, flags, gpu, refused, said):
    client = SimpleNamespace(receives_weights=True, adapter=None, why_no_adapters=lambda shapes: refused)
    monkeypatch.setattr(servers.utils, "gather_objects", lambda one: [one])
    monkeypatch.setattr(servers.utils, "is_main", lambda: True)
    with contextlib.nullcontext() if said else pytest.raises(ConfigError, match="too wide"):
        policy, infos = adapted(model, 0)[0], [SimpleNamespace(gpus=[gpu])]
        servers.choose_adapters(client, infos, policy, TrainConfig(use_peft=True, **flags))
    assert said is None or f"LoRA {said}" in capsys.readouterr().out


@pytest.mark.parametrize("size, count", [(2**24, 1), (40, 2), (1, 4)])
def test_both_ends_cut_a_bucket_alike(monkeypatch, size, count):
    monkeypatch.setattr(wire, "PIECE", size)
    torch.manual_seed(0)
    sent = [("a", torch.randn(3, 5)), ("b", torch.randn(7)), ("c", torch.arange(3)), ("d", torch.randn(2, 1).half())]
    told = json.loads(json.dumps(wire.announcement(sent, torch.bfloat16)))
    names = told.pop("names")
    here, there = (list(wire.pieces(**told, device=torch.device("cpu"))) for _ in range(2))
    for place, (_, tensor) in zip(sum((places for _, places in here), []), sent, strict=True):
        place.copy_(tensor)
    for (piece, _), (other, _) in zip(here, there, strict=True):
        other.copy_(piece)
    came = sum((tensors for _, tensors in there), [])
    assert len(there) == count and names == list("abcd")
    assert torch.equal(came[0], sent[0][1].bfloat16())
    assert all(torch.equal(one, tensor) for one, (_, tensor) in zip(came[1:], sent[1:], strict=True))


SAMPLED = {"token_ids": [1], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}
SAMPLED |= {"weight_versions": [{"version": "r:1", "start": 0, "end": 1}]}
WRONG = [{"logprobs": {"content": [{"logprob": -9999.0}]}}, {"finish_reason": "abort"}, {"weight_versions": None}]


@pytest.mark.parametrize("wrong", WRONG)
def test_answers_that_cannot_be_trained_on_are_refused(monkeypatch, wrong):
    answer = {"choices": [SAMPLED | wrong], "prompt_token_ids": [1]}
    monkeypatch.setattr(http, "ask", lambda *_, **__: answer)
    with pytest.raises(ServerError):
        sample(VLLMClient(["http://a:1"], "t", run="r"), prompt=[1], n=1)


def test_turns_stay_where_their_prefix_is_and_first_turns_go_where_there_is_room(monkeypatch):
    asked: dict[str, list[str]] = {}

    def ask(method, url, seconds, body, using):
        asked.setdefault(url.split("/")[2], []).append(body["token_ids"][0])
        time.sleep(0.01 * (body["token_ids"][0] % 3))
        return {"choices": [SAMPLED], "prompt_token_ids": body["token_ids"]}

    monkeypatch.setattr(http, "ask", ask)
    client = VLLMClient([f"http://{name}:1" for name in "abc"], "t", run="r")

    async def play(number: int) -> None:
        home, ids = {}, [number]
        for _ in range(4):
            ids = [*ids, *(await client.generate(ids, max_tokens=1, home=home))[0].token_ids]

    async def all_of_them() -> None:
        await asyncio.gather(*map(play, range(9)))

    asyncio.run(all_of_them())
    assert sorted(len(numbers) for numbers in asked.values()) == [12, 12, 12]
    assert all(numbers.count(number) == 4 for numbers in asked.values() for number in set(numbers))
