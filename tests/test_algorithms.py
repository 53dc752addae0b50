"""Advantages, policy losses, KL and aggregation against published numbers and against independent loops."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_grpo as grpo_script
from config import TrainConfig
from train_grpo import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, Batch, token_weights

GOLDEN = json.loads((Path(__file__).parent / "golden" / "advantages_losses.json").read_text())
AGGREGATIONS = {  # ours -> the name in the golden file
    "token_mean": "token-mean",
    "seq_mean": "seq-mean-token-mean",
    "seq_sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}


def golden_batch(dtype=torch.float64) -> tuple[torch.Tensor, Batch]:
    """The file's 6 x 6 batch with observation holes, and its new log-probs (a leaf)."""
    t = torch.arange(36, dtype=dtype).view(6, 6)
    old = -(0.3 + (0.05 * t) % 1.7)
    new = (old + 0.6 * torch.sin(1.3 * t)).requires_grad_()
    mask = torch.tensor(GOLDEN["mask"], dtype=dtype)
    rewards = torch.zeros(6, 6, dtype=dtype)
    rewards[range(6), GOLDEN["rewards_last_pos"]] = torch.tensor(GOLDEN["scores"], dtype=dtype)
    batch = Batch(
        input_ids=torch.zeros(6, 6, dtype=torch.long),
        attention_mask=torch.ones(6, 6),
        loss_mask=mask,
        rewards=rewards,
        groups=torch.tensor([ord(c) for c in GOLDEN["index"]]),
        old_logprobs=old,
        ref_logprobs=old - 0.2 * torch.cos(0.7 * t),
    )
    return new, batch


@pytest.mark.parametrize(
    "name, golden, options",
    [
        ("grpo", "grpo", {}),
        ("grpo", "grpo_nostd", {"scale_rewards": "none"}),
        ("dr_grpo", "grpo_nostd", {}),
        ("rloo", "rloo", {}),
    ],
)
def test_advantages_match_the_published_numbers(name, golden, options):
    _, batch = golden_batch()
    ours = ADVANTAGES[name](batch, TrainConfig(**options))
    expected = torch.tensor(GOLDEN["adv"][golden]["adv"], dtype=torch.float64)
    assert torch.allclose(ours[:5], expected[:5], atol=1e-5)
    # Row 5 is a group of one. The reference passes its raw score through; here it carries no signal.
    assert (ours[5] == 0).all() and (expected[5] != 0).any()


def test_batch_scaled_advantages_divide_by_the_std_of_all_scores():
    _, batch = golden_batch()
    ours = ADVANTAGES["grpo"](batch, TrainConfig(scale_rewards="batch"))
    plain = ADVANTAGES["dr_grpo"](batch, TrainConfig())
    assert torch.allclose(ours, plain / (torch.tensor(GOLDEN["scores"]).std().double() + 1e-6), atol=1e-6)


def weighted(matrix, batch, mode) -> torch.Tensor:
    nonempty = int(batch.loss_mask.any(1).sum())
    counts = dict(num_tokens=float(batch.loss_mask.sum()), num_sequences=nonempty, max_tokens=6)
    return (token_weights(batch.loss_mask, mode, **counts) * matrix).sum()


@pytest.mark.parametrize("mode, golden", [*AGGREGATIONS.items(), ("gspo", "gspo"), ("gpg", "gpg")])
def test_losses_match_the_published_numbers(mode, golden):
    name = {"gspo": "gspo", "gpg": "reinforce"}.get(mode, "ppo")
    key = f"vanilla/{golden}" if name == "ppo" else f"{golden}/token-mean"
    expected = GOLDEN["loss(adv=grpo,low.2,high.28,c3)"][key]
    new, batch = golden_batch()
    # The file's losses take the file's advantages, singleton row included.
    batch.advantages = torch.tensor(GOLDEN["adv"]["grpo"]["adv"], dtype=torch.float64)
    cfg = TrainConfig(epsilon=0.2, epsilon_high=0.28, dual_clip=3.0)
    matrix, _ = POLICY_LOSSES[name](new, batch, cfg)
    # The reference's gspo averages per sequence whatever aggregation it is asked for.
    loss = weighted(matrix, batch, mode if mode in AGGREGATIONS else {"gspo": "seq_mean", "gpg": "token_mean"}[mode])
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-5)
    assert gradient.norm().item() == pytest.approx(expected["grad_l2"], abs=1e-5)
    assert torch.allclose(gradient[0], torch.tensor(expected["grad_row0"], dtype=torch.float64), atol=1e-5)
    assert (gradient[batch.loss_mask == 0] == 0).all()


def test_clip_statistics_match_the_published_fraction():
    new, batch = golden_batch()
    batch.advantages = torch.tensor(GOLDEN["adv"]["grpo"]["adv"], dtype=torch.float64)
    _, stats = POLICY_LOSSES["ppo"](new, batch, TrainConfig(epsilon=0.2, epsilon_high=0.28, dual_clip=3.0))
    expected = GOLDEN["loss(adv=grpo,low.2,high.28,c3)"]["vanilla/token-mean"]["metrics"]["actor/pg_clipfrac"]
    fraction = (stats["clip_ratio/region_mean"] * batch.loss_mask).sum() / batch.loss_mask.sum()
    assert fraction.item() == pytest.approx(expected, abs=1e-5)


def test_dual_clip_bounds_the_loss_and_leaves_no_gradient():
    logprobs = torch.tensor([[2.0]], requires_grad=True)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    batch = Batch(zero.long(), one, one, zero, torch.zeros(1).long(), old_logprobs=zero, advantages=-one)
    loss, _ = POLICY_LOSSES["ppo"](logprobs, batch, TrainConfig(dual_clip=3.0))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.item() == 3.0 and gradient.item() == 0.0


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators_match_the_published_numbers(name):
    new, batch = golden_batch()
    value = weighted(KL_ESTIMATORS[name](new, batch.ref_logprobs), batch, "token_mean")
    (gradient,) = torch.autograd.grad(value, new)
    expected = GOLDEN["kl_token_mean(new,ref)"][name]
    assert value.item() == pytest.approx(expected["val"], abs=1e-5)
    assert torch.allclose(gradient[0], torch.tensor(expected["grad_row0"], dtype=torch.float64), atol=1e-5)


def slow_advantages(scores: list[float], groups: list[int], name: str) -> list[float]:
    """The formulas once more, row by row in plain Python."""
    out = []
    for score, group in zip(scores, groups, strict=True):
        members = [s for s, g in zip(scores, groups, strict=True) if g == group]
        mean = sum(members) / len(members)
        if len(members) == 1:
            out.append(0.0)
        elif name == "rloo":
            out.append(score - (sum(members) - score) / (len(members) - 1))
        elif name == "dr_grpo":
            out.append(score - mean)
        else:
            std = (sum((s - mean) ** 2 for s in members) / (len(members) - 1)) ** 0.5
            out.append((score - mean) / (std + 1e-6))
    return out


@st.composite
def random_batch(draw) -> Batch:
    rows, length = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    bits = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    mask = torch.tensor(draw(st.lists(bits, min_size=rows, max_size=rows)), dtype=torch.float64)
    scores = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=rows, max_size=rows))
    groups = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = torch.tensor(scores)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    old = -torch.rand(rows, length, generator=generator, dtype=torch.float64) * mask
    return Batch(
        input_ids=torch.zeros(rows, length, dtype=torch.long),
        attention_mask=torch.ones(rows, length),
        loss_mask=mask,
        rewards=rewards,
        groups=torch.tensor(groups),
        sampling_logprobs=old,
        old_logprobs=old,
    )


@settings(max_examples=60, deadline=None)
@given(batch=random_batch(), name=st.sampled_from(sorted(ADVANTAGES)))
def test_advantages_equal_the_plain_loop_and_keep_to_the_mask(batch, name):
    cfg = TrainConfig()
    ours = ADVANTAGES[name](batch, cfg)
    expected = torch.tensor(slow_advantages(batch.scores.tolist(), batch.groups.tolist(), name), dtype=torch.float64)
    # A constant group is 0 up to rounding, which division by 1e-6 may blow up by a million.
    assert torch.allclose(ours, expected[:, None] * batch.loss_mask, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(batch=random_batch(), loss=st.sampled_from(sorted(POLICY_LOSSES)), mode=st.sampled_from(sorted(AGGREGATIONS)))
def test_losses_are_finite_and_masked_on_any_batch(batch, loss, mode):
    batch.advantages = ADVANTAGES["grpo"](batch, TrainConfig())
    logprobs = (batch.old_logprobs * 1.5).detach().requires_grad_()
    matrix, _ = POLICY_LOSSES[loss](logprobs, batch, TrainConfig())
    value = weighted(matrix, batch, mode)
    (gradient,) = torch.autograd.grad(value, logprobs)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()
    assert (gradient[batch.loss_mask == 0] == 0).all()


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES)))
def test_all_losses_share_the_policy_gradient_at_ratio_one(name):
    _, batch = golden_batch()
    batch.advantages = ADVANTAGES["grpo"](batch, TrainConfig())
    logprobs = batch.old_logprobs.clone().requires_grad_()
    matrix, _ = POLICY_LOSSES[name](logprobs, batch, TrainConfig())
    (gradient,) = torch.autograd.grad(weighted(matrix, batch, "seq_mean"), logprobs)
    length = batch.loss_mask.sum(1, keepdim=True)
    assert torch.allclose(gradient, -batch.advantages / length / 6, atol=1e-12)


def test_an_unbounded_log_ratio_stays_finite():
    logprobs = torch.tensor([[0.0, -500.0]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 2, dtype=torch.float64)
    batch = Batch(one.long(), one, one, one, torch.zeros(1).long(), old_logprobs=-500 * one + 500 * logprobs.detach())
    batch.old_logprobs = torch.tensor([[-500.0, 0.0]], dtype=torch.float64)
    batch.advantages = -one
    for name in POLICY_LOSSES:
        matrix, _ = POLICY_LOSSES[name](logprobs, batch, TrainConfig())
        assert torch.isfinite(matrix).all(), name


def test_an_unknown_aggregation_lists_the_known_ones():
    with pytest.raises(ValueError, match="token_mean, seq_mean, seq_sum, constant"):
        token_weights(torch.ones(1, 1), "mean", num_tokens=1, num_sequences=1, max_tokens=1)


def test_learning_rate_warms_up_and_decays():
    cfg = TrainConfig(learning_rate=1.0, warmup_ratio=0.2, max_steps=10, lr_schedule="linear")
    rates = [grpo_script.lr_at(n, cfg) for n in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 8)
