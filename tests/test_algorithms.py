"""Advantages, policy losses, KL and aggregation against published numbers and against independent loops."""

import json
import math
from pathlib import Path

import pytest
import torch

from config import TrainConfig
from train_grpo import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, Batch, normalize, token_weights

pytestmark = pytest.mark.quick

OWN = sorted(ADVANTAGES.keys() - {"gae"})  # train_ppo.py's, which another test file imports, wants a critic

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "advantages_losses.json").read_text(encoding="utf-8"))
NORMALISED = json.loads((FOLDER / "reward_normalisation.json").read_text(encoding="utf-8"))
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
        baselines=torch.full((6,), 0.4, dtype=dtype),
        reward_components=torch.tensor([[1, 0, 1, 0, 1, 1], GOLDEN["scores"]], dtype=dtype).T,
        sum_pi_squared=(2 * old).exp() + 0.05,
    )
    return new, batch


def golden_advantages(name: str, batch: Batch) -> torch.Tensor:
    """The file's numbers. Some have values where nothing was sampled; here those are 0."""
    expected = torch.tensor(GOLDEN["adv"][name]["adv"], dtype=torch.float64)
    return expected * batch.loss_mask[: len(expected)]


@pytest.mark.parametrize(
    "name, golden, options",
    [
        ("grpo", "grpo", {}),
        ("grpo", "grpo_nostd", {"scale_rewards": "none"}),
        ("dr_grpo", "grpo_nostd", {}),
        ("rloo", "rloo", {}),
        ("opo", "opo", {}),
        ("otb", "otb", {}),
        ("tir_otb", "tir_otb", {}),
    ],
)
def test_advantages_match_the_published_numbers(name, golden, options):
    _, batch = golden_batch()
    ours, expected = ADVANTAGES[name](batch, TrainConfig(**options)), golden_advantages(golden, batch)
    assert torch.allclose(ours[:5], expected[:5], atol=1e-5)
    # Row 5 is a group of one. The reference passes its raw score through; here it carries no signal.
    assert (ours[5] == 0).all() and (expected[5] != 0).any()


@pytest.mark.parametrize(
    "name, golden, options",
    [
        ("grpo_passk", "grpo_passk(rows0-4)", {}),
        ("remax", "remax_b.4", {}),
        ("reinforce_plus_plus", "rfpp_g1", {}),
        ("reinforce_plus_plus", "rfpp_g.9", {"gamma": 0.9}),
    ],
)
def test_advantages_without_singletons_match_in_every_row(name, golden, options):
    _, batch = golden_batch()
    expected = golden_advantages(golden, batch)
    assert torch.allclose(ADVANTAGES[name](batch, TrainConfig(**options))[: len(expected)], expected, atol=1e-5)


@pytest.mark.parametrize("name, golden", [("reinforce_plus_plus_baseline", "rfpp_baseline"), ("gdpo", "gdpo(fmt,acc)")])
def test_whitened_advantages_match_up_to_what_the_singleton_adds_to_the_moments(name, golden):
    """The reference's raw singleton score is part of its mean and std: the five other rows are ours, moved, scaled."""
    _, batch = golden_batch()
    mask = batch.loss_mask[:5] > 0
    ours, expected = ADVANTAGES[name](batch, TrainConfig())[:5][mask], golden_advantages(golden, batch)[:5][mask]
    scale = expected.std() / ours.std()
    assert torch.allclose(expected, (ours - ours.mean()) * scale + expected.mean(), atol=1e-5)
    whole = ADVANTAGES[name](batch, TrainConfig())[batch.loss_mask > 0]
    assert whole.mean().abs() < 1e-6 and whole.std() == pytest.approx(1, abs=1e-6)


def test_gpg_counts_groups_with_differing_scores_not_scores_that_differ_from_zero():
    _, batch = golden_batch()
    # Groups a and b speak, c is alone: 5 of 6 rows. The reference counts 4 non-zero scores: 6 / 4.
    ours, reference = ADVANTAGES["gpg"](batch, TrainConfig()), golden_advantages("gpg", batch)
    assert torch.allclose(ours[:5] / (6 / 5), reference[:5] / (6 / 4), atol=1e-5)


def test_reward_normalisation_matches_the_published_numbers():
    """Two groups whose scores differ and one whose do not. Where the reference's shapes are wrong ([3, 9], each group's
    std applied to every row), the entries that belong to the row are compared."""
    scores = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.7, 1.0, 1.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    for mean in ("none", "group", "batch"):
        for std in ("none", "group", "batch"):
            ours = normalize(scores, groups, mean, std)
            names = [{"none": "None"}.get(kind, kind) for kind in (mean, std)]
            shape, values = NORMALISED[f"reward_norm mean={names[0]} std={names[1]}"]
            expected = torch.tensor(values, dtype=torch.float64)
            if len(shape) == 2:
                expected = expected.view(shape)[groups, torch.arange(9)]
            assert ours.shape == (9,)
            told = 6 if std == "group" else 9  # a std of 0: the reference divides by 1e-6, we by nothing
            assert torch.allclose(ours[:told], expected[:told], atol=2e-5), (mean, std)
            assert ours.abs().max() < 10
    running = normalize(scores, groups, "running", "running", (0.5, 0.25))
    assert torch.allclose(running, (scores - 0.5) / 0.25, atol=1e-4)


def test_turns_get_the_published_segment_returns():
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1.0]])
    rewards = torch.tensor([[0, 0.1, 0, 0, 0, 0.2, 0, 1.0]])
    batch = Batch(mask.long(), torch.ones(1, 8), mask, rewards, torch.zeros(1).long())
    ours = ADVANTAGES["turn"](batch, TrainConfig(gamma=0.9, scale_rewards="none"))
    assert torch.allclose(ours, torch.tensor([NORMALISED["agentic_reinforce g=.9"]]), atol=1e-5)


def test_gigpo_compares_turns_that_started_in_the_same_state():
    mask = torch.tensor([[1, 0, 1], [1, 0, 1.0]])
    rewards = torch.tensor([[0.0, 0, 1], [0, 0, 0]])
    batch = Batch(mask.long(), torch.ones(2, 3), mask, rewards, torch.zeros(2).long())
    cfg, half = TrainConfig(gamma=0.5), 0.5**0.5
    unknown = ADVANTAGES["gigpo"](batch, cfg)  # only the first turns, both at the prompt, are compared
    assert torch.allclose(unknown, torch.tensor([[2 * half, 0, half], [-2 * half, 0, -half]]), atol=1e-4)
    batch.states = torch.tensor([[7, 0, 9], [7, 0, 9]])
    met_again = ADVANTAGES["gigpo"](batch, cfg)
    assert torch.allclose(met_again, torch.tensor([[2 * half, 0, 2 * half], [-2 * half, 0, -2 * half]]), atol=1e-4)


def weighted(matrix, batch, mode) -> torch.Tensor:
    nonempty = int(batch.loss_mask.any(1).sum())
    counts = dict(num_tokens=float(batch.loss_mask.sum()), num_sequences=nonempty, max_tokens=6)
    return (token_weights(batch.loss_mask, mode, **counts) * matrix).sum()


# (ours, the file's entry, how it aggregates, settings)
LOSSES = [("ppo", f"vanilla/{golden}", mode, {}) for mode, golden in AGGREGATIONS.items()]
LOSSES += [(name, f"{name}/token-mean", "token_mean", {}) for name in ("gpg", "cispo", "dro", "dppo_tv", "dppo_kl")]
LOSSES += [("kl_cov", "kl_cov/token-mean", "token_mean", {"kl_cov_ratio": 0.2})]
# The reference averages these per sequence whatever aggregation it is asked for.
LOSSES += [("gspo", "gspo/token-mean", "seq_mean", {}), ("sapo", "sapo/token-mean", "seq_mean", {})]
LOSSES += [("gmpo", "geo_mean/token-mean", "seq_mean", {})]


@pytest.mark.parametrize("name, key, mode, options", LOSSES)
def test_losses_match_the_published_numbers(name, key, mode, options):
    expected = GOLDEN["loss(adv=grpo,low.2,high.28,c3)"][key]
    new, batch = golden_batch()
    # The file's losses take the file's advantages, singleton row included.
    batch.advantages = torch.tensor(GOLDEN["adv"]["grpo"]["adv"], dtype=torch.float64)
    cfg = TrainConfig(policy_loss=name, epsilon=0.2, epsilon_high=0.28, dual_clip=3.0, **options)
    matrix, _ = POLICY_LOSSES[name](new, batch, cfg)
    loss = weighted(matrix, batch, mode)
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-5)
    assert gradient.norm().item() == pytest.approx(expected["grad_l2"], abs=1e-5)
    assert torch.allclose(gradient[0], torch.tensor(expected["grad_row0"], dtype=torch.float64), atol=1e-5)
    assert (gradient[batch.loss_mask == 0] == 0).all()


def test_clip_cov_takes_the_gradient_from_a_random_few_between_the_bounds():
    new, batch = golden_batch()
    batch.advantages = torch.tensor(GOLDEN["adv"]["grpo"]["adv"], dtype=torch.float64)
    cfg = TrainConfig(policy_loss="clip_cov", clip_cov_ratio=0.1, clip_cov_min=0.1, clip_cov_max=0.9)
    matrix, stats = POLICY_LOSSES["clip_cov"](new, batch, cfg)
    chosen, sampled = stats["clip_ratio/cov"] > 0, batch.loss_mask > 0
    centred = [x.detach() - x.detach()[sampled].mean() for x in (batch.advantages, new)]
    covariance = centred[0] * centred[1]
    assert chosen.sum() == int(0.1 * 22) and (matrix[chosen] == 0).all()
    assert ((covariance > 0.1) & (covariance < 0.9) & sampled)[chosen].all()
    plain, _ = POLICY_LOSSES["ppo"](new, batch, cfg)
    assert torch.equal(matrix[~chosen], plain[~chosen])
    again, _ = POLICY_LOSSES["clip_cov"](new, batch, cfg)
    assert torch.equal(matrix, again)


def test_sequence_losses_against_plain_loops():
    new, batch = golden_batch()
    batch.advantages = ADVANTAGES["grpo"](batch, TrainConfig())
    cfg = TrainConfig(epsilon=0.2, epsilon_high=0.28)
    matrices = {name: POLICY_LOSSES[name](new, batch, cfg)[0].detach() for name in ("luspo", "vespo", "topr", "kimi")}
    for row in range(6):
        tokens = batch.loss_mask[row].nonzero()[:, 0].tolist()
        d = [float((new.detach() - batch.old_logprobs)[row, t]) for t in tokens]
        for t, step in zip(tokens, d, strict=True):
            a, logprob = float(batch.advantages[row, t]), float(new.detach()[row, t])
            ratio = math.exp(sum(d) / len(d))
            luspo = max(-a * ratio, -a * min(max(ratio, 0.8), 1.28)) * len(tokens)
            k, fade = (2, 3) if a >= 0 else (3, 2)
            w = math.exp(sum(d))
            vespo = -(w**k) * math.exp(fade * (1 - w)) * a * logprob
            topr = -a * logprob * (1 if batch.scores[row] > 0 else min(math.exp(step), 1))
            kimi = -a * logprob + 0.05 * step**2
            for name, expected in {"luspo": luspo, "vespo": vespo, "topr": topr, "kimi": kimi}.items():
                assert float(matrices[name][row, t]) == pytest.approx(expected, abs=1e-9), name


def test_luffy_shapes_demonstrations_alone():
    new, batch = golden_batch()
    batch.advantages = ADVANTAGES["grpo"](batch, TrainConfig())
    batch.sampling_logprobs = torch.zeros_like(new.detach())
    batch.sampling_logprobs[::2] = torch.nan
    found, plain = (POLICY_LOSSES[name](new, batch, TrainConfig())[0].detach() for name in ("luffy", "ppo"))
    shaped = -batch.advantages * new.detach().exp() / (new.detach().exp() + 0.1)
    assert torch.equal(found[1::2], plain[1::2]) and torch.allclose(found[::2], shaped[::2])


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


@pytest.mark.parametrize("name", sorted(GOLDEN["kl_token_mean(new,ref)"]))
def test_kl_estimators_match_the_published_numbers(name):
    new, batch = golden_batch()
    value = weighted(KL_ESTIMATORS[name](new, batch.ref_logprobs), batch, "token_mean")
    (gradient,) = torch.autograd.grad(value, new)
    expected = GOLDEN["kl_token_mean(new,ref)"][name]
    assert value.item() == pytest.approx(expected["val"], abs=1e-5)
    assert torch.allclose(gradient[0], torch.tensor(expected["grad_row0"], dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize(
    "name", ["ppo", "gspo", "sapo", "gpg", "kl_cov", "gmpo", "cispo", "dro", "tis", "kimi", "vespo"]
)
@pytest.mark.parametrize("by_token", [False, True])
def test_all_losses_share_the_policy_gradient_at_ratio_one(name, by_token):
    """by_token: of either sign, and 0 where a token is left out, within one completion."""
    _, batch = golden_batch()
    batch.advantages = ADVANTAGES["grpo"](batch, TrainConfig())
    if by_token:
        batch.advantages = (torch.arange(batch.loss_mask.numel()).view_as(batch.loss_mask) % 4 - 2.0) * batch.loss_mask
    logprobs = batch.old_logprobs.clone().requires_grad_()
    matrix, _ = POLICY_LOSSES[name](logprobs, batch, TrainConfig(policy_loss=name))
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


@pytest.mark.parametrize("score", [0.3, 11.7])
@pytest.mark.parametrize("name", OWN)
def test_equal_scores_teach_nothing_whatever_they_are(name, score):
    """In float32 the mean of eight times .7 is not .7, and a std of 6e-8 divides it up again."""
    mask = torch.ones(16, 3)
    rewards = torch.zeros(16, 3)
    rewards[:8, 2] = score
    rewards[8:, 2] = 2 * score
    batch = Batch(mask.long(), mask, mask, rewards, torch.arange(16) // 8, old_logprobs=-mask)
    batch.baselines = batch.scores
    if name not in ("reinforce_plus_plus", "remax"):  # no groups
        assert ADVANTAGES[name](batch, TrainConfig()).abs().max() < 1e-6
