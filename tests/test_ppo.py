"""PPO: GAE and value loss against the published numbers and a plain loop; the critic learns, warms up and resumes."""

import json

import pytest
import torch
from live import SMALL, trained
from safetensors.torch import load_file
from server_fixture import make_tiny
from test_algorithms import GOLDEN, golden_advantages, golden_batch, weighted
from transformers import AutoTokenizer

from config import ConfigError
from inputs.processor import load_processor
from train_grpo import ADVANTAGES, Batch
from train_ppo import CriticTrainer, TrainConfig, gae_returns, value_loss


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


def test_a_critic_of_another_vocabulary_is_refused(tmp_path):
    tokenizer = load_processor(str(make_tiny()))
    file = json.loads((make_tiny() / "tokenizer.json").read_text(encoding="utf-8"))
    words = file["model"]["vocab"]
    one, other = list(words)[300:302]
    words[one], words[other] = words[other], words[one]
    AutoTokenizer.from_pretrained(make_tiny()).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((make_tiny() / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    CriticTrainer.check(TrainConfig(model_id=str(make_tiny()), critic_model_id=str(make_tiny())), tokenizer)
    for critic, message in ((tmp_path, "token 300 is"), (tmp_path / "none", "no folder")):
        with pytest.raises(ConfigError, match=f"(?s){critic}.*{message}"):
            CriticTrainer.check(TrainConfig(model_id=str(make_tiny()), critic_model_id=str(critic)), tokenizer)


def test_a_critic_that_nothing_reads_is_refused(monkeypatch):
    """One of a user's own works as it is."""

    def own(batch, cfg):
        return batch.returns - batch.values

    monkeypatch.setitem(ADVANTAGES, "own", own)
    for name in ("gae", "own"):
        CriticTrainer.check(TrainConfig(advantage=name), None)
    with pytest.raises(ConfigError, match="--strategy fsdp --dtype bfloat16: .* use fsdp2"):
        CriticTrainer.check(TrainConfig(advantage="gae", strategy="fsdp", dtype="bfloat16"), None)
    with pytest.raises(ConfigError, match="--advantage grpo reads no values of a critic.*train_grpo.py"):
        CriticTrainer.check(TrainConfig(advantage="grpo"), None)


FLAGS = f"{SMALL} --prompts_per_step 4 --num_generations 1 --max_steps 2 --critic_learning_rate 1e-3"


def test_two_ranks_train_policy_and_critic(tmp_path):
    flags = f"{FLAGS} --strategy fsdp2 --use_peft --dtype bfloat16"
    lines = trained(tmp_path, flags, ranks=2, script="train_ppo.py")
    assert len(lines) == 2 and all(line["value/grad_norm"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert "value/explained_variance" in lines[-1]


def test_critic_warmup_leaves_the_policy_bit_identical(tmp_path):
    # With a teacher, whose likeliest tokens are no business of the critic.
    teacher = f"--teacher_id {make_tiny()} --distill_topk 4"
    lines = trained(tmp_path, f"{FLAGS} --critic_warmup 2 {teacher}", script="train_ppo.py")
    before = load_file(make_tiny() / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoints" / "step_2" / "model.safetensors")
    assert all(torch.equal(after[name].to(weight.dtype), weight) for name, weight in before.items())
    assert all(line["value/grad_norm"] > 0 and "grad_norm" not in line for line in lines)
