"""The gradient does not depend on how an update is cut: micro-batches, ranks, sharding, shared or repeated prompts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ragged import (
    all_gradients,
    foreign_loss,
    local_batch,
    relative_difference,
    small_llama,
    with_foreign_term,
)
from ranks import on_ranks

import train_grpo as script
import utils
from config import TrainConfig


def found(strategy: str, use_peft: bool) -> dict[tuple, dict]:
    """`all_gradients` on this rank."""
    script.load_hf_model = small_llama
    base = TrainConfig(strategy=strategy, compute_dtype="float32", use_peft=use_peft, beta=0.05)
    return all_gradients(base, *utils.init_distributed(60))


@pytest.fixture(scope="module")
def one():
    """One process: every loss x aggregation, of all weights and of adapters, in one pass and cut otherwise."""
    return {use_peft: on_ranks(1, found, "ddp", use_peft)[0] for use_peft in (False, True)}


@pytest.mark.parametrize("use_peft", [False, True])
def test_one_process_any_cut(one, use_peft):
    """Micro-batches, output-layer chunks and shared prompts change memory and speed, never the gradient."""
    for (*case, cut), gradient in one[use_peft].items():
        assert relative_difference(gradient, one[use_peft][*case, "one"]) < 1e-5, (case, cut)


@pytest.mark.parametrize("use_peft", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_two_ranks_equal_one(one, strategy, use_peft):
    """Ragged ranks: 3 groups on one, 2 on the other, so that one of them runs empty passes."""
    ranks = on_ranks(2, found, strategy, use_peft)
    for (*case, cut), gradient in ranks[0].items():
        assert relative_difference(gradient, one[use_peft][*case, "one"]) < 1e-5, (case, cut)
    assert all(relative_difference(ranks[1][case], ranks[0][case]) == 0 for case in ranks[0])


def statistics() -> dict:
    rank, world, _ = utils.init_distributed(60)
    of_rank = {"all": 1.0 + rank, f"rank_{rank}": 5.0}
    script.ADVANTAGES["mine"] = lambda batch, cfg: (script.dr_grpo(batch, cfg), of_rank)
    found = script.add_advantages(local_batch(rank, world), TrainConfig(advantage="mine"))
    return {name: value for name, value in found.items() if name in ("all", "rank_0", "rank_1")}


def test_an_advantage_may_have_a_statistic_on_some_ranks_alone():
    """Of a kind of group, say: its mean over the ranks that have it, the same on every rank."""
    assert on_ranks(2, statistics) == [{"all": 4 / 3, "rank_0": 5.0, "rank_1": 5.0}] * 2


@pytest.mark.parametrize("case", ["ppo", "reinforce", "foreign", "foreign term", "entropy", "kl"])
def test_silent_groups_are_not_passed_back(case, monkeypatch):
    """Groups with advantage 0 get no backward pass, unless the loss that was computed has a gradient there: how often
    one comes to the weights shows it. No name of a loss decides this."""
    monkeypatch.setattr(script, "load_hf_model", small_llama)
    monkeypatch.setitem(script.POLICY_LOSSES, "foreign", foreign_loss)
    cfg = TrainConfig(compute_dtype="float32", beta=0.0, tokens_per_microbatch=40, shared_prefix=False)
    cfg = replace(cfg, policy_loss=case if case in script.POLICY_LOSSES else "ppo")
    cfg = replace(cfg, entropy_coef=0.1 * (case == "entropy"), beta=0.1 * (case == "kl"))
    policy = script.load_policy(cfg, torch.device("cpu"))
    inner = script.unwrapped(policy)
    batch = local_batch(0, 1)
    batch.sampling_logprobs = script.all_logprobs(policy, batch, cfg)["logprobs"]
    batch.ref_logprobs = batch.sampling_logprobs - 0.3 if case == "kl" else None
    batch.advantages = batch.advantages * (batch.groups > 2)[:, None]
    forward, backward = [], []
    policy.register_forward_hook(lambda *_: forward.append(1))
    inner.hf_model.model.norm.weight.register_hook(lambda _: backward.append(1))
    loss_of = with_foreign_term if case == "foreign term" else script.micro_loss
    script.accumulate_gradients(policy, batch, cfg, loss_of)
    quiet = len(forward) / (2 if case == "foreign term" else 1) - len(backward)
    assert quiet >= 3 if case in ("ppo", "reinforce") else quiet == 0


@pytest.mark.parametrize("chunk", [64, 1024])
def test_chunks_of_the_output_layer_sum_their_gradient_in_float32(chunk, monkeypatch):
    """Under autocast it is as near to the one in float32 as with all tokens at once."""
    monkeypatch.setattr(script, "load_hf_model", small_llama)
    torch.manual_seed(0)
    n, device = 2048, torch.device("cpu")
    hidden, ids, weights = torch.randn(n, 64), torch.randint(0, 1000, (n,)), torch.randn(n)
    monkeypatch.setattr(script, "backbone", lambda _: lambda **_: SimpleNamespace(last_hidden_state=hidden[None]))

    def gradient(dtype: str, size: int) -> torch.Tensor:
        policy = script.load_policy(TrainConfig(compute_dtype=dtype, logprob_chunk=size), device)
        inner = script.unwrapped(policy)
        logprobs = policy({}, torch.zeros(n, dtype=torch.long), torch.arange(n), ids)["logprobs"]
        (weights * logprobs).sum().backward()
        return inner.hf_model.lm_head.weight.grad

    exact = gradient("float32", n)
    errors = [float((gradient("bfloat16", size) - exact).norm() / exact.norm()) for size in (chunk, n)]
    assert errors[0] < 1.1 * errors[1] < 0.01, errors
