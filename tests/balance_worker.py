"""Gradient and value of --router_aux_coef under one sharding, written by rank 0. Run by test_routing.py.

usage: balance_worker.py STRATEGY OUT.pt
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from gradient_worker import gradients, local_batch  # noqa: E402
from test_routing import made  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402


def main(strategy: str, out: str) -> None:
    rank, world, device = utils.init_distributed(60)
    script.load_hf_model = lambda cfg, dtype: made("qwen3_moe", dtype)
    result = {}
    cfg = TrainConfig(strategy=strategy, compute_dtype="float32", beta=0.0, router_aux_coef=0.3)
    cfg.tokens_per_microbatch, cfg.gradient_checkpointing = 40, True
    policy, inner = script.load_policy(cfg, device)
    for replay in (False, True):
        batch = local_batch(rank, world)
        if replay:  # of a token the same experts on any rank
            first = batch.input_ids[:, :, None] + torch.arange(3)
            batch.routed_experts = torch.stack([first % 8, (first + 1 + first % 7) % 8], -1).short()
        result[replay] = gradients(policy, inner, batch, cfg), inner.routing.mean_cost(cfg)
    if rank == 0:
        torch.save(result, out)
    utils.end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
