"""Ideas of one's own: what a function says about itself, and the place for a term beside the policy loss."""

from dataclasses import replace

import gradient_worker
import pytest
import torch

import train_grpo as script
from config import ConfigError, TrainConfig
from rollouts import Trajectory

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """(config, policy, its Policy, a batch) of a small random Llama."""
    monkeypatch.setattr(script, "load_hf_model", gradient_worker.small_llama)
    cfg = TrainConfig(compute_dtype="float32", beta=0.0, tokens_per_microbatch=60)
    policy, inner = script.load_policy(cfg, CPU)
    return cfg, policy, inner, gradient_worker.local_batch(0, 1)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(num_generations=1), "--num_generations=1: grpo compares .* at least 2; 8 is usual"),
        (dict(num_generations=1, advantage="turn"), "turn compares"),
        (dict(num_generations=1, advantage="turn", scale_rewards="none"), None),
        (dict(num_generations=1, advantage="remax"), None),
        (dict(num_generations=1, advantage="reinforce_plus_plus"), None),
        (dict(advantage="remax", reward_mean="batch"), "--advantage remax: it compares raw scores"),
        (dict(advantage="gdpo", kl_in_reward=True), "--advantage gdpo: it normalises by itself"),
        (dict(policy_loss="kimi", old_logprobs="sampler"), "--policy_loss kimi: it has no ratio"),
        (dict(policy_loss="gpg", old_logprobs="sampler"), "--policy_loss gpg: it has no ratio"),
        (dict(advantage="gropo"), "Did you mean 'grpo'"),
    ],
)
def test_settings_an_algorithm_cannot_work_with(settings, message):
    if message is None:
        return script.check_algorithm(TrainConfig(**settings))
    with pytest.raises(ConfigError, match=message):
        script.check_algorithm(TrainConfig(**settings))


@pytest.mark.parametrize("field", ["entropy", "old_logprobs", "sum_pi_squared", "ref_logprobs"])
def test_an_advantage_gets_what_it_asks_for(field, small, monkeypatch):
    """And is told how to ask, where it reads what nobody computed."""
    cfg, policy, inner, batch = small
    source = (
        f"def mine(batch, cfg):\n    return batch.{field} * batch.loss_mask, {{'mine/mean': batch.{field}.mean()}}\n"
    )
    names: dict = {}
    exec(source, names)
    # Two updates need old log-probs: what that pass computes beside them is no reason to give zeros for the rest.
    mine, cfg = names["mine"], replace(cfg, advantage="mine", num_minibatches=1 + (field == "sum_pi_squared"))
    monkeypatch.setitem(script.ADVANTAGES, "mine", mine)
    batch.old_logprobs = batch.ref_logprobs = None
    script.add_logprobs(batch, policy, None, inner, cfg)
    with pytest.raises(TypeError, match=rf"reads batch.{field}.* write mine.needs = \('{field}',\)"):
        script.add_advantages(batch, cfg)
    mine.needs = (field,)
    reference = policy if field == "ref_logprobs" else None
    script.add_logprobs(batch, policy, reference, inner, cfg)
    metrics = script.add_advantages(batch, cfg)
    assert metrics["mine/mean"] != 0 and metrics["advantages/abs_mean"] > 0
    assert metrics["advantages/frac_zero_groups"] == 0.0


def test_a_group_of_one_is_learned_from_however_far_scores_must_differ():
    """Dynamic sampling kept it; the update left it out, in silence."""
    cfg = TrainConfig(num_generations=1, group_std_min=0.1, advantage="reinforce_plus_plus")
    batch = gradient_worker.local_batch(0, 1)
    batch.groups = torch.arange(len(batch))
    ones = [Trajectory({}, n, [0], [0], [1], [0.0], [1.0]) for n in range(len(batch))]
    assert all(script.has_signal([t], cfg) for t in ones)
    batch.advantages, before = batch.rewards.clone(), batch.loss_mask.clone()
    script.leave_out(batch, ones, cfg)
    assert torch.equal(batch.loss_mask, before)


def test_one_completion_a_prompt(monkeypatch):
    def mine(batch, cfg):
        return script.spread(batch.scores, batch.loss_mask)

    monkeypatch.setitem(script.ADVANTAGES, "mine", mine)
    with pytest.raises(ConfigError, match="mine compares"):
        script.check_algorithm(TrainConfig(advantage="mine", num_generations=1))
    mine.compares_group = False
    script.check_algorithm(TrainConfig(advantage="mine", num_generations=1))


def test_a_term_of_ones_own(small, monkeypatch):
    """It sees rows and step, is logged, counts for silent groups, and is cut as everything else is."""
    cfg, policy, inner, batch = small
    batch.advantages = batch.advantages * (batch.groups > 2)[:, None]
    batch.sampling_logprobs = script.all_logprobs(policy, batch, cfg)[0]
    batch.rows, batch.step = [{"weight": 0.1 * n} for n in range(len(batch))], 3

    def sft(logprobs, entropy, part, cfg):
        weight = torch.tensor([row["weight"] for row in part.rows])[:, None] * (part.step == 3)
        return -weight * logprobs * part.loss_mask, {"sft": -logprobs}

    gradients, sums = {}, {}
    nothing = script.own_term
    for own in (nothing, sft):
        monkeypatch.setattr(script, "own_term", own)
        for budget in (40, 100_000):
            policy.zero_grad()
            sums[own, budget] = script.accumulate_gradients(policy, batch, replace(cfg, tokens_per_microbatch=budget))
            gradients[own, budget] = torch.cat([p.grad.flatten() for p in policy.parameters()])
    with_term = gradients[sft, 40]
    assert (with_term - gradients[sft, 100_000]).norm() < 1e-5 * with_term.norm()
    assert (with_term - gradients[nothing, 40]).norm() > 0.01 * with_term.norm()
    assert sums[sft, 40]["sft"] == pytest.approx(sums[sft, 100_000]["sft"]) and "sft" not in sums[nothing, 40]
    monkeypatch.setattr(script, "own_term", lambda *_: (torch.tensor(1.0), {}))
    with pytest.raises(ValueError, match="own_term returned .*do not average"):
        script.accumulate_gradients(policy, batch, cfg)
