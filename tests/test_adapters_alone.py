"""--push_lora adapters: adapters alone travel, each version is one of its own, and no sequence has two of them."""

import asyncio
import json
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from adapters_worker import CASES
from live import EVEN, Process, running, trainer
from server_fixture import make_tiny, start_server
from stub_server import INFO, stub

import train_grpo as script
import utils
from config import ConfigError, TrainConfig, load_config
from inputs import agreement, lora
from runlog.reading import read_metrics
from serving import wire
from vllm_client import ServerError, VLLMClient

PROMPT = list(range(100, 148))
CFG = TrainConfig(use_peft=True, compute_dtype="float32", num_generations=2, lora_r=8, lora_alpha=16.0)
CFG = replace(CFG, max_prompt_length=64, max_completion_length=32)


@pytest.fixture(scope="module")
def live():
    """One server for this file, the tiny Llama in float32. The tests that replace its weights come last."""
    found = start_server(make_tiny(), "--dtype", "float32", "--max-model-len", "512", "--enable-lora")
    try:
        yield found.wait(600)
    finally:
        found.stop()


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    utils.init_distributed(60)


class Trainer:
    """A policy with adapters, and its connection to a server."""

    def __init__(self, server, name: str = "policy", seed: int = 0, owner: str | None = None):
        cfg = replace(CFG, model_id=str(server.model_dir), server_urls=[server.url])
        cfg.server_token = server.token
        self.policy, inner = script.load_policy(cfg, torch.device("cpu"))
        self.client = VLLMClient([server.url], server.token, timeout=20)
        self.client.adapter, self.client.adapter_shapes = name, lora.shapes_of(inner.hf_model)
        self.client.owner = owner
        self.client.weight_dtype = torch.float32
        self.client.connect_weights("cpu")
        self.random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def learn(self) -> None:
        for parameter in self.policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=self.random) * 0.05)

    def push(self, version: int) -> None:
        script.push_weights(self.policy, self.client, version, 64)

    def sample(self, **options) -> list:
        return asyncio.run(self.client.generate(PROMPT, **{"n": 2, "max_tokens": 16} | options))

    @torch.no_grad()
    def difference(self, completions) -> float:
        """Largest |log-prob difference| of the server to this policy."""
        found = 0.0
        for one in completions:
            ids = torch.tensor([PROMPT + one.token_ids])
            logprobs = self.policy.model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            own = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
            found = max(found, (own - torch.tensor(one.logprobs)).abs().max().item())
        return found

    def weights(self) -> dict:
        return {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}

    def parts(self) -> list:
        return [item for bucket in lora.adapter_buckets(self.policy, 2**30, torch.float32) for item in bucket]


@pytest.fixture
def trained(live):
    """A trainer whose version 1 is served."""
    made = Trainer(live)
    made.learn()
    made.push(1)
    yield made
    made.client.close()


def served(server) -> dict:
    return server.request("GET", "/server_info").json()["adapter_versions"]


def until(condition, limit: float = 20) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.in_turn
def test_log_probs_are_the_trainers_however_it_is_sharded(live, tmp_path):
    """Ranks, alpha and parts of what vLLM merges, on two ranks; and nothing but adapters travels."""
    command = ["tests/adapters_worker.py", str(live.model_dir), live.url, str(tmp_path / "out.json")]
    with running(Process(command, tmp_path / "log", 2, VLLM_SERVER_TOKEN=live.token)) as ranks:
        assert ranks.end() == 0, ranks.text[-4000:]
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert len(results) == len(CASES)
    for result in results:
        assert result["before"] > 1e-3 and result["after"] < 1e-5, result
        assert result["version"] and result["untouched"], result
        sizes = [4 * rank * side for rank, *sides in result["shapes"] for side in sides]
        assert result["bytes"] == sum(-(-size // wire.ALIGN) * wire.ALIGN for size in sizes), result


def test_a_sequence_ends_with_the_adapter_it_began_with(live, trained):
    began = []
    thread = threading.Thread(target=lambda: began.extend(trained.sample(max_tokens=400, n=4)))
    thread.start()
    time.sleep(0.5)
    before = trained.weights()
    trained.learn()
    trained.push(2)
    assert thread.is_alive()  # it was under way all the time
    assert served(live) == {"policy": [1, 2]}
    new = trained.sample()
    assert {one.policy_version for one in new} == {2} and trained.difference(new) < 1e-5
    thread.join(60)
    assert {(one.policy_version, one.policy_version_last) for one in began} == {(1, 1)}
    assert trained.difference(began) > 0.1
    trained.policy.load_state_dict(before)
    assert trained.difference(began) < 1e-4
    until(lambda: served(live) == {"policy": [2]})


def test_requests_of_many_versions_and_adapters_in_one_batch(live, trained):
    """More versions than slots: those that do not fit wait. Each sequence has its own adapter to the end."""
    other = Trainer(live, name="other", seed=5)
    found: list[tuple[dict, int, list]] = []  # weights, version, what was sampled
    threads = []

    def ask(one: Trainer, weights: dict, version: int) -> None:
        found.append((weights, version, one.sample(max_tokens=60)))

    for version in range(2, 6):
        for one in (trained, other):
            one.learn()
            one.push(version)
            threads.append(threading.Thread(target=ask, args=(one, one.weights(), version)))
            threads[-1].start()
            time.sleep(0.1)
    for thread in threads:
        thread.join(120)
    assert len(found) == 8
    for weights, version, completions in found:
        assert {one.policy_version for one in completions} == {version}
        differences = []
        for others, _, _ in found:
            trained.policy.load_state_dict(others)
            differences.append(trained.difference(completions) if others is not weights else 0.0)
        trained.policy.load_state_dict(weights)
        own = trained.difference(completions)
        assert own < 1e-4 and sorted(differences)[1] > 100 * own, (own, differences)
    until(lambda: served(live) == {"policy": [5], "other": [5]})
    other.client.close()


def cached(server, adapter: str) -> int:
    """Tokens of a prompt of 160 that came from the prefix cache."""
    body = {"prompt_ids": PROMPT * 3 + PROMPT[:16], "max_tokens": 1, "adapter": adapter}
    return server.request("POST", "/generate", json=body).json()["cached_tokens"]


def test_a_version_never_takes_cached_blocks_of_another_and_pushes_empty_nothing(live, trained):
    other = Trainer(live, name="other")
    other.push(1)
    assert (cached(live, "other"), cached(live, "policy")) == (0, 0)
    assert cached(live, "other") >= 128 and cached(live, "policy") >= 128
    trained.push(2)
    assert cached(live, "policy") == 0  # though the very same weights were pushed
    assert cached(live, "policy") >= 128 and cached(live, "other") >= 128
    other.client.close()


def test_openai_routes_have_the_newest_adapter_too(live, trained):
    body = {"model": str(live.model_dir), "prompt": PROMPT, "max_tokens": 8, "logprobs": 1, "return_token_ids": True}
    answer = live.request("POST", "/v1/completions", json=body | {"prompt_logprobs": 1})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    ids = torch.tensor([PROMPT + choice["token_ids"]])
    with torch.no_grad():
        logprobs = trained.policy.model(input_ids=ids).logits[0].log_softmax(-1)
    own = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    given = [
        entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], PROMPT[1:], strict=True)
    ]
    assert torch.allclose(own, torch.tensor(given + choice["logprobs"]["token_logprobs"]), atol=1e-5)


def test_adapters_from_files_stay_closed(live):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert live.request("POST", path, json={"lora_name": "x", "lora_path": "/tmp"}).status_code == 404


def broken_off(trained, reason: str, send) -> None:
    """`send` fails for `reason`; the version before samples on, and the next push arrives."""
    with pytest.raises(ServerError, match=reason):
        trained.client.begin_push()
        send(trained.client)
        trained.client.finish_push(7)
    completions = trained.sample()
    assert {one.policy_version for one in completions} == {1} and trained.difference(completions) < 1e-5
    trained.learn()
    trained.push(8)
    completions = trained.sample()
    assert {one.policy_version for one in completions} == {8} and trained.difference(completions) < 1e-5


@pytest.mark.parametrize(
    "reason, change",
    [
        ("missing: .*lora_B", lambda parts: parts[:-1]),
        ("sent twice", lambda parts: [*parts, parts[0]]),
        ("announced was none", lambda parts: [*parts, ("base_model.model.lm_head.lora_A.weight", torch.ones(8, 128))]),
        (r"has shape \[4, 128\], announced was \[8, 128\]", lambda parts: [(parts[0][0], parts[0][1][:4]), *parts[1:]]),
    ],
    ids=["missing", "twice", "unknown", "misshapen"],
)
def test_what_is_not_as_announced_breaks_a_push_off(live, trained, reason, change):
    broken_off(trained, reason, lambda client: client.send_bucket(change(trained.parts())))


def test_a_damaged_bucket_breaks_a_push_off(live, trained, monkeypatch):
    sums = wire.checksums

    def send(client):
        with monkeypatch.context() as patch:
            patch.setattr("serving.pushing.checksums", lambda *args: [value + 1 for value in sums(*args)])
            client.send_bucket(trained.parts())

    broken_off(trained, "arrived damaged", send)


def test_nan_is_never_sent(live, trained):
    with torch.no_grad():
        next(p for n, p in trained.policy.named_parameters() if "lora_B" in n)[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="lora_B.weight"):
        trained.push(2)
    assert {one.policy_version for one in trained.sample()} == {1}


def test_a_trainer_that_falls_silent_is_given_up(live, trained):
    trained.client.close()
    trained.client.timeout = 1.0
    trained.client.connect_weights("cpu")
    trained.client.begin_push()
    until(lambda: "was silent for 1 s" in live.log.read_text(encoding="utf-8"))
    assert "version 1 goes on" in live.log.read_text(encoding="utf-8")
    with pytest.raises(ServerError, match="another trainer|not under way"):
        trained.client.send_bucket(trained.parts())
        trained.client.finish_push(2)
    assert served(live)["policy"] == [1]


def test_the_last_trainer_of_a_name_has_it(live, trained):
    other = Trainer(live)
    with pytest.raises(ServerError, match="another trainer has connected"):
        trained.push(2)
    assert {one.policy_version for one in trained.sample()} == {1}  # until the other has pushed
    other.push(1)
    with pytest.raises(ServerError, match="was started anew, or another trainer"):
        trained.sample()
    other.client.close()


# ---- the choice, before the run ------------------------------------------------------------------------------------


def connected(server, capsys=None, **options):
    cfg = replace(CFG, model_id=str(server.model_dir), server_urls=[server.url], **options)
    cfg.server_token = server.token
    _, inner = script.load_policy(cfg, torch.device("cpu"))
    client = utils.connect_servers(cfg, inner.hf_model, torch.device("cpu"))
    client.close()
    return client


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"lora_r": 100}, "rank 100 is above the server's 64; start it with --max-lora-rank 128"),
        ({"colocate": True}, "--colocate"),
    ],
)
def test_what_the_server_cannot_have_is_folded_or_refused(live, capsys, options, reason):
    if "colocate" not in options:  # which wants a server that sleeps
        assert connected(live, **options).adapter is None
        assert reason in capsys.readouterr().out
        with pytest.raises(ConfigError, match=f"--push_lora adapters: .*{re.escape(reason)}.*--push_lora folded"):
            connected(live, push_lora="adapters", **options)
    else:
        assert reason in utils.why_no_adapters(VLLMClient([live.url], live.token), 2, True)
    assert connected(live).adapter == "policy" and connected(live, push_lora="folded").adapter is None


def test_other_trained_weights_are_seen(live):
    _, inner = script.load_policy(replace(CFG, model_id=str(live.model_dir)), torch.device("cpu"))
    assert lora.why_not_alone(inner.hf_model) is None
    inner.hf_model.model.norm.weight.requires_grad_(True)
    assert "1 trained weights are no adapters, such as model.norm.weight" in lora.why_not_alone(inner.hf_model)


def test_embeddings_take_no_adapters():
    """PEFT keeps theirs under other names. They could be neither folded nor served."""
    cfg = replace(CFG, model_id=str(make_tiny()), lora_targets=["embed_tokens", "q_proj"])
    with pytest.raises(ConfigError, match="--lora_targets embed_tokens q_proj: 1 of these are no .*embed_tokens"):
        script.load_policy(cfg, torch.device("cpu"))


def test_dora_is_neither_folded_nor_served():
    from peft import LoraConfig, get_peft_model

    model = script.load_hf_model(replace(CFG, model_id=str(make_tiny())), torch.float32)
    adapted = get_peft_model(model, LoraConfig(use_dora=True, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="q_proj has DoRA's magnitudes"):
        lora.check_adapted(adapted, CFG)


def test_fsdp1_takes_no_adapters_on_the_output_layer():
    """Each would be gathered once a chunk, and ranks have other numbers of chunks."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(make_tiny(), tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ConfigError, match="has the output layer.*Use fsdp2 or ddp"):
        lora.check_adapted(adapted, replace(CFG, strategy="fsdp"))
    lora.check_adapted(adapted, replace(CFG, strategy="fsdp2"))


def test_a_server_without_adapters_gets_folded_weights():
    with stub(lambda path, earlier: None) as (url, _):
        client = VLLMClient([url])
        assert f"{url} was started without --enable-lora" in utils.why_no_adapters(client, 2, False)
    info = INFO | {"adapters": {"max_rank": 8, "slots": 2}}
    with stub(lambda path, earlier: info if path == "/server_info" else None) as (url, _):
        assert "--max-loras 3" in utils.why_no_adapters(VLLMClient([url]), 3, False)
        assert utils.why_no_adapters(VLLMClient([url]), 2, False) is None


def test_flags_that_contradict_each_other_are_refused():
    for flags, words in {
        "--push_lora adapters": "--use_peft",
        "--push_lora folded --use_peft --generator hf": "--generator vllm",
        "--push_lora adapters --use_peft --push_changes": "leave one out",
    }.items():
        with pytest.raises(ConfigError, match=words):
            load_config(TrainConfig, flags.split())


# ---- whole runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train_grpo.py", "train_async.py"])
def test_a_run_samples_from_its_adapters(live, tmp_path, name):
    (tmp_path / "rewards.py").write_text(EVEN, encoding="utf-8")
    flags = f"--model_id {live.model_dir} --use_peft --compute_dtype float32 --dataset_id examples/sums.py:rows "
    flags += "--prompts_per_step 4 --num_generations 4 --max_prompt_length 64 --max_completion_length 24 "
    flags += f"--learning_rate 1e-2 --max_steps 4 --server_urls {live.url} --push_lora adapters "
    flags += f"--reward_funcs {tmp_path}/rewards.py:even --output_dir {tmp_path} --run_name run"
    if name == "train_async.py":
        flags += " --max_staleness 2"
    run = trainer(tmp_path / "log", *flags.split(), script=name, VLLM_SERVER_TOKEN=live.token)
    with running(run) as process:
        assert process.end() == 0, process.text[-4000:]
    lines = [line for line in read_metrics(tmp_path / "run") if "sampling/logprob_diff_mean" in line]
    assert len(lines) == 4
    if name == "train_grpo.py":
        assert max(line["sampling/logprob_diff_mean"] for line in lines) < 1e-5
        sampled = [round(line["completions/mean_length"] * line["completions/count"]) for line in lines]
        extra = [line["server/tokens"] - tokens for line, tokens in zip(lines, sampled, strict=True)]
        checked = agreement.SAMPLES * min(agreement.TOKENS, 24)  # by the check at start, at most
        assert agreement.SAMPLES <= extra[0] <= checked and extra[1:] == [0, 0, 0]
        told = live.request("GET", "/server_info").json()["runs"]["run"]
        assert told["tokens"] == sum(line["server/tokens"] for line in lines)
        assert told["under_way"] == told["waiting"] == 0
    else:  # of versions apart, but each completion of one
        assert max(line["staleness/max"] for line in lines) <= 2


def test_whole_weights_end_adapters_and_these_want_the_servers_own(live, trained):
    """The last test: the server's weights are others from here on."""
    client = VLLMClient([live.url], live.token)
    client.connect_weights("cpu")
    named = list(script.load_hf_model(replace(CFG, model_id=str(live.model_dir)), torch.float32).named_parameters())
    began: list = []

    def ask():
        try:
            trained.sample(max_tokens=400)
        except ServerError as error:
            began.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    client.begin_push()
    client.send_bucket(named)
    client.finish_push(3)
    thread.join(60)
    assert len(began) == 1
    with pytest.raises(ServerError, match="no complete push of adapter policy is here"):
        trained.sample()
    with pytest.raises(ServerError, match="does not have the weights that adapters belong to"):
        trained.push(2)
    assert connected(live).adapter is None
    with pytest.raises(ConfigError, match="start it anew"):
        connected(live, push_lora="adapters")
    client.close()
