"""--colocate: server and trainer by turns, the whole life cycle against a live server that can sleep (cpu_sleep.py)."""

import asyncio
import gc
import json
from types import SimpleNamespace

import cpu_sleep
import pytest
import torch
from live import EVEN, SMALL, running, trainer
from memory_worker import Recorder, batch_of, random_model
from server_fixture import make_tiny, start_server
from test_plan import FLAGS, SHAPE
from transformers import AutoModelForCausalLM

import train_async
import train_grpo as script
import utils
from config import ConfigError, TrainConfig, load_config
from vllm_client import ServerError, VLLMClient, in_thread

PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def sleeper(tmp_path_factory):
    """(server, file in which its worker notes when it slept and woke)"""
    folder = tmp_path_factory.mktemp("plugin")
    words = ["--dtype", "float32", "--max-model-len", "512", "--enable-sleep-mode"]
    live = start_server(make_tiny(), *words, **cpu_sleep.installed(folder))
    try:
        yield live.wait(), folder / "log"
    finally:
        live.stop()


@pytest.fixture(scope="module")
def client(sleeper):
    client = VLLMClient([sleeper[0].url], sleeper[0].token, timeout=60, request_timeout=60)
    client.connect_weights("cpu")
    yield client
    client.close()


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(make_tiny(), dtype=torch.float32)


def push(client, model, version):
    client.begin_push()
    client.send_bucket(list(model.named_parameters()))
    client.finish_push(version)


def difference(client, model) -> float:
    """Largest |model - server| over the log-probs of what the server samples now."""
    (one,) = asyncio.run(client.generate(PROMPT, max_tokens=8))
    ids = torch.tensor([PROMPT + one.token_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    return float((logprobs.gather(-1, ids[0, len(PROMPT) :, None])[:, 0] - torch.tensor(one.logprobs)).abs().max())


def state(server) -> str:
    return server.request("GET", "/sleep").json()["state"]


def test_a_push_wakes_the_server_and_its_weights_are_whole(sleeper, client, model):
    server, log = sleeper
    assert state(server) == "awake"
    client.sleep()
    assert state(server) == "asleep" and client.server_info()[0]["state"] == "asleep"
    with pytest.raises(ServerError, match="sleeps and its weights are dropped"):
        asyncio.run(client.generate(PROMPT, max_tokens=2))
    client.sleep()  # it may be asked again
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    push(client, model, 1)
    assert state(server) == "awake" and difference(client, model) < 1e-4
    assert log.read_text(encoding="utf-8").split("\n")[:3] == ["sleep 2", "wake weights", "wake kv_cache"]


def test_what_woke_without_weights_does_not_sample(sleeper, client, model):
    server, _ = sleeper
    client.sleep()
    assert server.request("POST", "/wake_up").json() == {"state": "awake"}
    with pytest.raises(ServerError, match="woke without weights"):
        asyncio.run(client.generate(PROMPT, max_tokens=2))
    answer = server.request("POST", "/v1/completions", json={"model": str(make_tiny()), "prompt": "a", "max_tokens": 2})
    assert answer.status_code == 503 and "woke without weights" in answer.text
    push(client, model, 2)
    assert difference(client, model) < 1e-4


def test_level_1_keeps_the_weights(sleeper, client, model):
    server, _ = sleeper
    push(client, model, 3)
    assert server.request("POST", "/sleep?level=1").json() == {"state": "asleep"}
    assert server.request("POST", "/generate", json={"prompt_ids": PROMPT, "max_tokens": 2}).status_code == 503
    assert server.request("POST", "/wake_up").json() == {"state": "awake"}
    assert difference(client, model) < 1e-4


def test_its_state_is_clear_at_any_moment(sleeper, client, model):
    server, log = sleeper
    falling = in_thread(server.request, "POST", "/sleep")
    while (seen := state(server)) == "awake":
        pass
    assert seen == "in transition"
    for path in ("/sleep", "/wake_up"):
        answer = server.request("POST", path)
        assert answer.status_code == 503 and "in transition" in answer.text
    assert falling.result(30).json() == {"state": "asleep"}
    client.begin_push()
    assert state(server) == "in a push"
    answer = server.request("POST", "/sleep")
    assert answer.status_code == 503 and "in a push" in answer.text
    client.abort_push()  # weights are awake, the KV cache is not, and neither is of any policy
    assert state(server) == "half awake"
    assert server.request("POST", "/generate", json={"prompt_ids": PROMPT, "max_tokens": 2}).status_code == 503
    client.sleep()  # as the next run does at start
    assert state(server) == "asleep"
    assert log.read_text(encoding="utf-8").splitlines()[-3:] == ["sleep 2", "wake weights", "sleep 2"]
    push(client, model, 4)
    assert state(server) == "awake" and difference(client, model) < 1e-4
    assert server.request("POST", "/sleep?level=7").status_code == 400
    assert server.request("POST", "/sleep", token="wrong").status_code == 401


def test_training_by_turns(sleeper, tmp_path):
    """The server sleeps while the trainer starts and in each of three steps, which sample from what was pushed last."""
    server, log = sleeper
    noted = len(log.read_text(encoding="utf-8"))
    flags = SMALL.replace("--generator hf", "--generator vllm").split()
    (tmp_path / "even.py").write_text(EVEN, encoding="utf-8")  # a reward by which the weights change
    flags += [
        "--reward_funcs",
        f"{tmp_path}/even.py:even",
        "--beta",
        "0.1",
        "--max_steps",
        "3",
        "--server_urls",
        server.url,
    ]
    flags += ["--colocate", "--logprob_diff_limit", "1e-3", "--output_dir", str(tmp_path), "--run_name", "run"]
    with running(trainer(tmp_path / "log", *flags, VLLM_SERVER_TOKEN=server.token)) as run:
        assert run.end() == 0, run.text
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["sampling/logprob_diff_mean"] < 1e-3 and line["policy_lag"] == 0 for line in lines)
    assert log.read_text(encoding="utf-8")[noted:].split("\n")[:-1] == ["sleep 2", "wake weights", "wake kv_cache"] * 4


def test_a_server_that_cannot_sleep_is_refused(server, model):
    client = VLLMClient([server.url], server.token)
    with pytest.raises(ServerError, match="--enable-sleep-mode"):
        client.sleep()
    cfg = TrainConfig(colocate=True, server_urls=[server.url], max_prompt_length=64, max_completion_length=8)
    cfg.server_token = server.token
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        utils.connect_servers(cfg, model, torch.device("cpu"))


def test_what_cannot_take_turns_is_refused(monkeypatch):
    for flags, words in {
        "--generator hf": "--generator hf",
        "--push_steps 2": "--push_steps=2",
        "--strategy fsdp": "--strategy fsdp",
    }.items():
        with pytest.raises(ConfigError, match=words):
            load_config(TrainConfig, ["--colocate", *flags.split()])
    with pytest.raises(ConfigError, match="nothing can overlap"):
        train_async.check(load_config(train_async.TrainConfig, ["--colocate"]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 ranks"):
        load_config(TrainConfig, ["--colocate"])


def test_free_memory_is_asked_for_while_the_server_sleeps(monkeypatch):
    """Awake it has most of the GPU: micro-batches would be planned for what it leaves."""
    events = []

    def asked(device):
        events.append("asked")
        raise StopIteration

    monkeypatch.setattr(utils, "reach_servers", lambda cfg: SimpleNamespace(sleep=lambda: events.append("asleep")))
    monkeypatch.setattr(utils, "free_memory", asked)
    flags = SMALL.replace("--generator hf", "--generator vllm --reward_funcs last_number --colocate").split()
    with pytest.raises(StopIteration):
        script.start(load_config(TrainConfig, flags), None)
    assert events == ["asleep", "asked"]


def test_everything_moves_and_stays_what_the_optimizer_knows():
    """Weights, buffers and optimizer state, round after round through the same memory on the CPU."""
    policy, reference = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(2))
    policy[0].weight = torch.nn.Parameter(torch.randn(4, 4).T)  # not in rows
    optimizer = torch.optim.AdamW(policy.parameters())
    run = SimpleNamespace(
        policy=policy, reference=reference, teacher=None, critic=None, modules={"policy": (policy, optimizer)}
    )
    homes = []
    for _ in range(2):
        policy(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        state = [value for each in optimizer.state.values() for value in each.values()]
        tensors = [*policy.parameters(), *policy.buffers(), *reference.parameters(), *reference.buffers(), *state]
        assert len(tensors) == 14 + 12
        for tensor in tensors:
            tensor.data = tensor.clone()  # elsewhere, as on a GPU
        before = [tensor.clone() for tensor in tensors]
        utils.move(run, torch.device("cpu"))
        assert all(map(torch.equal, tensors, before))
        homes.append([tensor.data_ptr() for tensor in tensors])
    assert homes[0] == homes[1]


def test_memory_of_what_moves_is_pinned_where_there_is_a_gpu(monkeypatch):
    asked, empty_like, module = [], torch.empty_like, torch.nn.Linear(2, 2)

    def pinning(tensor, pin_memory, **how):
        asked.append(pin_memory)
        return empty_like(tensor, **how)

    monkeypatch.setattr(torch, "empty_like", pinning)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    utils.move(SimpleNamespace(reference=None, teacher=None, modules={"policy": (module, None)}), torch.device("cpu"))
    assert asked == [True, True, "emptied"]


class Card(Recorder):
    """What torch's caching allocator would hold of a GPU: the most that was alive since it was last emptied."""

    def held(self) -> int:
        return self.most[self.place].total()

    def empty_cache(self) -> None:
        gc.collect()
        self.most[self.place] = self.now.copy()


@pytest.mark.in_turn
def test_shards_in_cpu_memory_leave_the_gpu_to_the_server(tmp_path, monkeypatch):
    """--offload: what an update gathered and computed is given back before the push, the reference's root, too."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    words = ["--model_id", str(tmp_path), "--strategy", "fsdp2", "--offload", "--beta", "0.1", *FLAGS.split()]
    cfg = load_config(TrainConfig, ["--max_steps", "3", *words])
    monkeypatch.setattr(script, "load_hf_model", random_model)
    utils.init_distributed(60)
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    reference, optimizer = script.load_reference(cfg, torch.device("cpu")), script.make_optimizer(policy, cfg)
    run = SimpleNamespace(reference=reference, teacher=None, modules={"policy": (policy, optimizer)})
    batch = batch_of(cfg, 1, torch.device("cpu"))
    script.update(policy, optimizer, batch, cfg, 0)  # makes the optimizer's state
    state = [value for each in optimizer.state.values() for value in each.values()]
    card = Card(0, [x.to_local() for x in (*policy.parameters(), *reference.parameters(), *state) if x.ndim])
    with card:
        script.add_logprobs(batch, policy, reference, inner, cfg)
        script.update(policy, optimizer, batch, cfg, 1)
        most = card.held()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", card.empty_cache)
        utils.move(run, torch.device("cpu"))
        print(f"held {most / 2**20:.1f} MiB, after the move {card.held() / 2**20:.1f}")
    assert card.held() < 0.01 * most
