"""The gradient does not depend on how an update is cut: micro-batches, ranks, sharding, shared or repeated prompts."""

from dataclasses import replace
from types import SimpleNamespace

import gradient_worker
import pytest
import torch
from live import running, trainer
from peft.tuners.lora import LoraLayer
from torch.profiler import ProfilerActivity, profile

import train_grpo as script
from config import TrainConfig
from memory import LiveBytes

WORKER = "tests/gradient_worker.py"


def run(strategy, out, ranks) -> dict:
    with running(trainer(out.with_suffix(".log"), strategy, str(out), ranks=ranks, script=WORKER)) as worker:
        assert worker.end() == 0, worker.text
    return torch.load(out)


def relative_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    distance = sum((a[name] - b[name]).double().pow(2).sum() for name in a)
    return float((distance / sum(b[name].double().pow(2).sum() for name in b)).sqrt())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process: every loss x aggregation, of all weights and of adapters, in one pass and cut otherwise."""
    return run("ddp", tmp_path_factory.mktemp("gradient") / "one.pt", 1)


def test_one_process_any_cut(one):
    """Micro-batches, output-layer chunks and shared prompts change memory and speed, never the gradient."""
    for (*case, cut), gradient in one.items():
        assert relative_difference(gradient, one[*case, "one"]) < 1e-5, (case, cut)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_two_ranks_equal_one(one, strategy, tmp_path):
    """Ragged ranks: 3 groups on one, 2 on the other, so that one of them runs empty passes."""
    for (*case, cut), gradient in run(strategy, tmp_path / "two.pt", 2).items():
        assert relative_difference(gradient, one[*case, "one"]) < 1e-5, (case, cut)


@pytest.mark.parametrize("case", ["ppo", "reinforce", "foreign", "foreign term", "entropy", "kl"])
def test_silent_groups_are_not_passed_back(case, monkeypatch):
    """Groups with advantage 0 get no backward pass, unless the loss that was computed has a gradient there: the share
    of the forward passes that keep a graph shows it. No name of a loss decides this."""
    monkeypatch.setattr(script, "load_hf_model", gradient_worker.small_llama)
    monkeypatch.setitem(script.POLICY_LOSSES, "foreign", gradient_worker.foreign_loss)
    cfg = TrainConfig(compute_dtype="float32", beta=0.0, tokens_per_microbatch=40, shared_prefix=False)
    cfg = replace(cfg, policy_loss=case if case in script.POLICY_LOSSES else "ppo")
    cfg = replace(cfg, entropy_coef=0.1 * (case == "entropy"), beta=0.1 * (case == "kl"))
    policy, _ = script.load_policy(cfg, torch.device("cpu"))
    batch = gradient_worker.local_batch(0, 1)
    batch.sampling_logprobs = script.all_logprobs(policy, batch, cfg)[0]
    batch.ref_logprobs = batch.sampling_logprobs - 0.3 if case == "kl" else None
    batch.advantages = batch.advantages * (batch.groups > 2)[:, None]
    passes = []
    policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    loss_of = gradient_worker.with_foreign_term if case == "foreign term" else script.micro_loss
    script.accumulate_gradients(policy, batch, cfg, loss_of)
    quiet = passes.count(False) / (2 if case == "foreign term" else 1)
    assert quiet >= 3 if case in ("ppo", "reinforce") else quiet == 1  # one pass found out, the others were told


@pytest.mark.parametrize("chunk", [64, 1024])
def test_chunks_of_the_output_layer_sum_their_gradient_in_float32(chunk, monkeypatch):
    """Under autocast it is as near to the one in float32 as with all tokens at once."""
    monkeypatch.setattr(script, "load_hf_model", gradient_worker.small_llama)
    torch.manual_seed(0)
    n, device = 2048, torch.device("cpu")
    hidden, ids, weights = torch.randn(n, 64), torch.randint(0, 1000, (n,)), torch.randn(n)
    monkeypatch.setattr(script, "backbone", lambda _: lambda **_: SimpleNamespace(last_hidden_state=hidden[None]))

    def gradient(dtype: str, size: int) -> torch.Tensor:
        policy, inner = script.load_policy(TrainConfig(compute_dtype=dtype, logprob_chunk=size), device)
        logprobs = policy({}, torch.zeros(n, dtype=torch.long), torch.arange(n), ids)[0]
        (weights * logprobs).sum().backward()
        return inner.hf_model.lm_head.weight.grad

    exact = gradient("float32", n)
    errors = [float((gradient("bfloat16", size) - exact).norm() / exact.norm()) for size in (chunk, n)]
    assert errors[0] < 1.1 * errors[1] < 0.01, errors


@pytest.mark.parametrize("coef, passes", [(0.0, 1), (0.1, 2)])
def test_the_entropy_is_recomputed_only_where_it_has_a_gradient(coef, passes, monkeypatch):
    monkeypatch.setattr(script, "load_hf_model", gradient_worker.small_llama)
    cfg = TrainConfig(logprob_chunk=4, entropy_coef=coef, compute_dtype="float32")
    batch = gradient_worker.local_batch(0, 1)
    policy, _ = script.load_policy(cfg, torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        script.accumulate_gradients(policy, batch, cfg)
    exponentials = [e for e in seen.events() if e.name == "aten::exp" and e.input_shapes[0][1:] == [1000]]
    assert len(exponentials) == passes * -(-int(batch.loss_mask.sum()) // 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adapters_under_autocast_keep_no_float32_copies_of_what_reaches_them(dtype, monkeypatch):
    """PEFT makes one of each layer's input, which autocast rounds again: without it the same bits, in less memory."""
    monkeypatch.setattr(script, "load_hf_model", lambda cfg, dtype: gradient_worker.small_llama(cfg, dtype).to(dtype))
    cfg = TrainConfig(use_peft=True, dtype=dtype, beta=0.0)

    def learned(casts: bool) -> tuple[dict, int]:
        policy, _ = script.load_policy(cfg, torch.device("cpu"))
        layers = [module for module in policy.modules() if isinstance(module, LoraLayer)]
        assert layers and not any(layer.cast_input_dtype_enabled for layer in layers)
        for layer in layers:
            layer.cast_input_dtype_enabled = casts
            torch.nn.init.constant_(layer.lora_B["default"].weight, 0.1)
        ids = torch.arange(5, 85)[None]
        with LiveBytes(1000) as live:
            policy({"input_ids": ids, "attention_mask": None}, 0 * ids[0], ids[0] - 5, ids[0])[0].sum().backward()
        gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        return gradients, max(bytes.total() for bytes in live.most.values())

    (gradients, most), (with_copies, more) = learned(False), learned(True)
    assert relative_difference(gradients, with_copies) == 0
    assert most <= more - (dtype == "bfloat16") * 80 * 64 * 4
