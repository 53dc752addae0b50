"""Gradients of adapters on a base in 4 bits, on any number of ranks. Run by test_four_bits.py.

usage: four_bits_worker.py MODEL_DIR OUT.pt STRATEGY
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from gradient_worker import gradients, local_batch, wake_adapters  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402

CPU = torch.device("cpu")
CFG = TrainConfig(use_peft=True, load_in="4bit", compute_dtype="float32", lora_r=8, beta=0.05, policy_loss="gspo")
CUTS = {
    "one": {},
    "many": dict(tokens_per_microbatch=40, logprob_chunk=4),
    "plain rows": dict(shared_prefix=False),
    "checkpointed": dict(gradient_checkpointing=True),
}


def policy_of(cfg: TrainConfig):
    """With adapters that are not zero, the same on every rank."""
    original = script.shard
    script.shard = lambda policy, *rest, **more: (wake_adapters(policy), original(policy, *rest, **more))[1]
    try:
        return script.load_policy(cfg, CPU)
    finally:
        script.shard = original


def batch_of(policy, cfg: TrainConfig, rank: int, world: int):
    """The reference is the base without adapters."""
    batch = local_batch(rank, world)
    batch.old_logprobs = script.all_logprobs(policy, batch, cfg)[0]
    batch.ref_logprobs = batch.old_logprobs - 0.3 * batch.loss_mask
    return batch


def main(model_dir: str, out: str, strategy: str) -> None:
    rank, world, _ = utils.init_distributed(60)
    found = {}
    for cut, more in CUTS.items():
        cfg = replace(CFG, model_id=model_dir, strategy=strategy, **more)
        policy, inner = policy_of(cfg)
        found[cut] = gradients(policy, inner, batch_of(policy, cfg, rank, world), cfg)
    if rank == 0:
        torch.save(found, out)
    utils.end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
