"""PPO: GAE and value loss against the published numbers and a plain loop; the critic learns, warms up and resumes."""

from dataclasses import replace

import pytest
import torch
from test_algorithms import GOLDEN, golden_advantages, golden_batch, weighted

from train_grpo import ADVANTAGES, Batch
from train_ppo import TrainConfig, gae_returns, value_loss


def batch_with_values() -> Batch:
    _, batch = golden_batch()
    batch.values = 0.1 * torch.cos(torch.arange(36, dtype=torch.float64)).view(6, 6)
    return batch


@pytest.mark.parametrize("key, gamma, lam", [("gae_g1_l1", 1.0, 1.0), ("gae_g.99_l.95", 0.99, 0.95)])
def test_gae_matches_the_published_numbers(key, gamma, lam):
    batch, cfg = batch_with_values(), TrainConfig(gamma=gamma, lam=lam)
    assert torch.allclose(ADVANTAGES["gae"](batch, cfg), golden_advantages(key, batch), atol=1e-5)
    returns = torch.tensor(GOLDEN["adv"][key]["ret"], dtype=torch.float64) * batch.loss_mask
    assert torch.allclose(gae_returns(batch, cfg)[1], returns, atol=1e-5)


def test_value_loss_matches_the_published_number():
    batch = batch_with_values()
    batch.returns = torch.tensor(GOLDEN["adv"]["gae_g1_l1"]["ret"], dtype=torch.float64)
    values = batch.values + 0.8 * torch.sin(torch.arange(36, dtype=torch.float64)).view(6, 6)
    matrix, stats = value_loss(values, batch, TrainConfig(value_clip=0.5))
    expected = GOLDEN["value_loss"]
    assert weighted(matrix, batch, "token_mean").item() == pytest.approx(expected["loss"], abs=1e-5)
    assert weighted(stats["value/clip_ratio"], batch, "token_mean").item() == pytest.approx(
        expected["clipfrac"], abs=1e-5
    )


def test_gae_on_sampled_tokens_alone_is_the_textbook_recursion():
    """Holes change nothing: the sampled tokens' numbers are those of a row without them."""
    batch, cfg = batch_with_values(), TrainConfig(gamma=0.9, lam=0.8)
    advantages, returns = gae_returns(batch, cfg)
    for row in range(6):
        tokens = batch.loss_mask[row].nonzero()[:, 0].tolist()
        following, next_value = 0.0, 0.0
        for t in reversed(tokens):
            value = float(batch.values[row, t])
            delta = float(batch.rewards[row, t]) + 0.9 * next_value - value
            following, next_value = delta + 0.9 * 0.8 * following, value
            assert float(advantages[row, t]) == pytest.approx(following, abs=1e-9)
            assert float(returns[row, t]) == pytest.approx(following + value, abs=1e-9)


def test_a_reward_after_an_observation_reaches_the_first_turn():
    mask = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 0, 0, 1.0]])
    rewards = torch.zeros(2, 5)
    rewards[0, 4] = 1
    batch = Batch(mask.long(), torch.ones(2, 5), mask, rewards, torch.arange(2), values=torch.zeros(2, 5))
    advantages, _ = gae_returns(batch, TrainConfig())
    assert (advantages[0, :2] == 1).all() and (advantages[1] == 0).all()
    late = replace(batch, rewards=torch.tensor([[0, 0, 0, 1.0, 0], [0, 0, 0, 0, 0]]))  # on the observation itself
    assert (gae_returns(late, TrainConfig())[0][0, :2] == 1).all()
