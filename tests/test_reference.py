"""What a KL compares with: the weights the run began with, whatever the policy has become. Compared with transformers'
own model, loaded anew."""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import train_grpo as script
from config import TrainConfig
from rollouts import Trajectory

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
SETTINGS = dict(model_id="models/tiny", compute_dtype="float32", beta=0.1, learning_rate=1e-2, max_steps=10)
SETTINGS |= dict(loss_agg="token_mean", correction="none")


def sampled_batch() -> script.Batch:
    """Two prompts with two completions each, of different lengths."""
    random = torch.Generator().manual_seed(0)
    trajectories = []
    for group, prompt in enumerate((6, 9)):
        ids = torch.randint(300, 4000, (2, 12), generator=random).tolist()
        prompt_ids = torch.randint(300, 4000, (prompt,), generator=random).tolist()
        for member, row in enumerate(ids):
            row = row[: 5 + 2 * member + group]
            rewards = [0.0] * (len(row) - 1) + [float(member)]
            logprobs = [-8.0] * len(row)
            trajectories.append(Trajectory({}, group, prompt_ids, row, [1] * len(row), logprobs, rewards))
    return script.collate(trajectories, 0, CPU)


def logprobs_of_transformers(batch: script.Batch) -> torch.Tensor:
    """Of each sampled token, by the checkpoint as it is on disk.  [B, T]"""
    model = AutoModelForCausalLM.from_pretrained("models/tiny", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits  # [B, T, V]
    found = logits[:, :-1].log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0)) * batch.loss_mask


@pytest.mark.parametrize("lora", [False, True])
def test_the_reference_is_the_model_that_the_run_began_with(lora):
    """After updates that have moved the policy. With LoRA it is the policy with its adapters off, whose base never
    moves; else a copy, which never moves either."""
    cfg = TrainConfig(**SETTINGS, use_peft=lora)
    policy = script.load_policy(cfg, CPU)
    inner = script.unwrapped(policy)
    reference, optimizer = script.load_reference(cfg, CPU), script.make_optimizer(policy, cfg)
    assert (reference is None) == lora
    frozen = [*reference.parameters()] if reference else [p for p in policy.parameters() if not p.requires_grad]
    before = [p.clone() for p in frozen]
    batch = sampled_batch()
    expected = logprobs_of_transformers(batch)
    for step in range(3):
        batch.old_logprobs = None
        script.add_logprobs(batch, policy, reference, cfg)
        assert torch.allclose(batch.ref_logprobs * batch.loss_mask, expected, atol=1e-4), step
        script.add_advantages(batch, cfg)
        metrics = script.update(policy, optimizer, batch, cfg, step)
        gain = float(batch.advantages.sum() / batch.loss_mask.sum())  # of ppo at a ratio of 1
        assert metrics["loss"] == pytest.approx(0.1 * metrics["kl"] - gain, abs=1e-5)
    assert metrics["kl"] > 0.01
    assert frozen and all(not p.requires_grad and torch.equal(p, was) for p, was in zip(frozen, before, strict=True))
    now = script.all_logprobs(policy, batch, cfg)["logprobs"] * batch.loss_mask
    assert (now - expected).abs().max() > 0.1, "the adapters are on again, and the policy has moved"
    with inner.model.disable_adapter() if lora else contextlib.nullcontext():
        assert (
            torch.allclose(now, script.all_logprobs(policy, batch, cfg)["logprobs"] * batch.loss_mask, atol=1e-4)
            != lora
        )
