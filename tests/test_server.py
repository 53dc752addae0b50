"""vllm_server.py and vllm_client.py against one live server: access, sampling, pushes of weights and of adapters."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollouts
from config import ConfigError, TrainConfig
from inputs.prompts import end_ids
from safety import http
from serving import servers, wire
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


def test_it_listens_on_loopback_alone(server):
    address = wire.local_address("192.0.2.1")  # of this machine, towards others; nothing is sent
    port = server.url.rpartition(":")[2]
    if not address.startswith("127."):
        with pytest.raises(requests.ConnectionError):
            requests.get(f"http://{address}:{port}/health", timeout=5)


@pytest.mark.parametrize(
    "flags, token, message",
    [
        (["--host", "0.0.0.0"], None, "wants a token of your choice"),
        (["--port", "{port}"], "t", "cannot listen on"),
    ],
)
def test_a_server_that_must_not_or_cannot_start_says_so_before_loading(server, flags, token, message):
    flags = [flag.format(port=server.url.rpartition(":")[2]) for flag in flags]
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_SERVER_TOKEN")}
    env |= {} if token is None else {"VLLM_SERVER_TOKEN": token}
    command = [sys.executable, str(ROOT / "vllm_server.py"), "--model", "m", *flags]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode and message in ended.stderr and "loading" not in ended.stdout


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
    assert (stopped.token_ids, stopped.finish_reason) == ([first], "stop")
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


def test_a_turn_ends_as_the_chat_template_ends_it(client, model):
    """Where that is no EOS token of the model: sampling ends there, and the end is trained. The weights are such that
    it is what the model says."""
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    ends_turn = "{% if m.role == 'assistant' %}<file_sep>{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{ends_turn}{{% endfor %}}"
    end, cfg = tokenizer.convert_tokens_to_ids("<file_sep>"), TrainConfig(num_generations=2, max_completion_length=8)
    new, row, ids = moved(model, 0), {"prompt": [{"role": "user", "content": "Hi"}]}, tokenizer("Hi")["input_ids"]
    with torch.no_grad():
        last = new.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
        new.lm_head.weight[end] = 30 * last / last.square().sum()
    push(client, named(new), 1)
    client.tokenizer = tokenizer
    for ends, expected in (([], 8), (sorted(end_ids(new, tokenizer)), 1)):
        client.stop_token_ids = ends
        for t in asyncio.run(rollouts.single_turn([row], client, cfg)):
            assert t.prompt_ids == ids and t.token_ids[0] == end and t.loss_mask == [1] * expected
            assert t.finish_reason == ("length" if expected > 1 else "stop")
    assert len(ends) == 2


def test_tokens_that_are_never_to_be_sampled_are_not(client):
    client.run = None
    (free,) = sample(client, n=1, temperature=0)
    client.never = sorted({*free.token_ids})
    assert not {*client.never} & {*sample(client, n=1, temperature=0)[0].token_ids}


def test_a_cancelled_request_is_ended_on_the_server(client):
    client.run = None

    async def cancelled() -> float:
        task = asyncio.ensure_future(client.generate(PROMPT, n=8, max_tokens=300, min_tokens=300))
        await asyncio.sleep(1)
        task.cancel()
        start = time.monotonic()
        await asyncio.to_thread(client._all, "POST", "/pause?mode=wait")  # until what is under way has ended
        return time.monotonic() - start

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
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(client.generate(PROMPT, max_tokens=2), 2))
    new = moved(model, 5)
    push(client, named(new), 3)
    assert all(agrees(new, completion) for completion in sample(client))


KILLED = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_client import VLLMClient
url, token, folder = sys.argv[1:]
client = VLLMClient([url], token, run="killed", timeout=20)
client.connect_weights("cpu")
weights = list(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
client.begin_push()
client.send_bucket([(name, 2 * weight.detach()) for name, weight in weights[:10]])
print("half", flush=True)
what = dict(names=["x"], dtype_names=["float32"], shapes=[[4]], size=16)
client._begin("POST", "/update_weights", {"update_info": what})
sys.stdin.read()
"""


def test_a_trainer_killed_in_the_middle_of_a_push_leaves_no_half_new_weights_answering(client, server, model):
    """The worker waits for a bucket just then. The next trainer's push mends it."""
    push(client, named(model), 1)
    command = [sys.executable, "-c", KILLED, server.url, server.token, str(server.model_dir)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert client._all("GET", "/is_paused") == [{"is_paused": True}]
    client.abort_push()  # its group is not the server's any more
    new = moved(model, 3)
    push(client, named(new), 2)
    assert all(agrees(new, completion) for completion in sample(client))


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

    from inputs import model as lora

    base = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    base.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    wanted = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    policy = peft.get_peft_model(base, wanted)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return policy.eval(), sum(lora.adapter_buckets(policy.named_modules(), 2**20, torch.float32), [])


@pytest.fixture
def adapters(client, model):
    """A client whose server has the base, and takes adapters of `adapted`."""
    from inputs import model as lora

    client.connect_weights("cpu")
    push(client, named(model), 0)
    client._all("POST", "/update_weight_version", {"new_version": "default"})
    client.abort_push()
    assert client.why_no_adapters(lora.shapes_of(adapted(model, 0)[0])) is None
    return client


def test_adapters_travel_alone_and_are_peft_s(adapters, model):
    for version in (1, 2, 3):
        policy, bucket = adapted(model, version)
        push(adapters, bucket, version)
        for completion in sample(adapters):
            assert completion.policy_version == version and agrees(policy, completion)
    listed = {card["id"] for card in adapters._all("GET", "/v1/models")[0]["data"]}
    assert {"run-2", "run-3"} < listed and "run-1" not in listed  # the newest, and one that may still be sampled
    assert sorted(adapters.folders) == [2, 3]
    kept = load_file(adapters.folders[3] / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in bucket} == {name: tuple(t.shape) for name, t in kept.items()}
    adapters.close()
    assert not adapters.folders


def test_a_completion_keeps_the_adapter_that_it_began_with(adapters, model):
    (old, before), (new, after) = adapted(model, 1), adapted(model, 2)
    push(adapters, before, 1)

    async def across():
        task = asyncio.ensure_future(adapters.generate(PROMPT, n=1, max_tokens=200, min_tokens=200))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(push, adapters, after, 2)
        return await task, await adapters.generate(PROMPT, n=1, max_tokens=8)

    (first,), (second,) = asyncio.run(across())
    assert (first.policy_version, second.policy_version) == (1, 2)
    assert agrees(old, first, endless=True) and agrees(new, second)


def test_why_a_server_takes_no_adapters_is_said(client, model):
    shapes = {"base_model.model.model.layers.0.self_attn.q_proj": (256, 128, 128)}
    client._all("POST", "/update_weight_version", {"new_version": "default"})
    assert "--max-lora-rank 256" in client.why_no_adapters(shapes)
    push(client, named(model), 1)
    assert "weights run:1 of an earlier push" in client.why_no_adapters({next(iter(shapes)): (4, 128, 128)})


# ---- without a server ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, count", [(2**24, 1), (40, 2), (1, 4)])
def test_both_ends_cut_a_bucket_alike(monkeypatch, size, count):
    monkeypatch.setattr(wire, "PIECE", size)
    torch.manual_seed(0)
    sent = [("a", torch.randn(3, 5)), ("b", torch.randn(7)), ("c", torch.arange(3)), ("d", torch.randn(2, 1).half())]
    told = json.loads(json.dumps(wire.announced(sent, torch.bfloat16)))
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": {"content": [{"logprob": -9999.0}]}},
        {"finish_reason": "abort"},
        {"weight_versions": None},
    ],
)
def test_answers_that_cannot_be_trained_on_are_refused(monkeypatch, wrong):
    one = {"token_ids": [1], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}
    one |= {"weight_versions": [{"version": "r:1", "start": 0, "end": 1}]} | wrong
    answer = {"choices": [one], "prompt_token_ids": [1]}
    monkeypatch.setattr(http, "ask", lambda *_, **__: answer)
    with pytest.raises(ServerError):
        sample(VLLMClient(["http://a:1"], "t", run="r"), prompt=[1], n=1)


def test_turns_stay_where_their_prefix_is_and_first_turns_go_where_there_is_room(monkeypatch):
    asked: dict[str, list[str]] = {}
    one = {"token_ids": [1], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}
    one |= {"weight_versions": [{"version": "r:1", "start": 0, "end": 1}]}

    def ask(method, url, seconds, body, using):
        asked.setdefault(url.split("/")[2], []).append(body["token_ids"][0])
        time.sleep(0.01 * (body["token_ids"][0] % 3))
        return {"choices": [one], "prompt_token_ids": body["token_ids"]}

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
