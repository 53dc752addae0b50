"""Gradients of models that see, under one sharding; of two ranks the second has text only. Run by test_vision.py.

usage: vision_worker.py STRATEGY OUT.pt MODEL_FOLDER ...
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from ragged import full_gradients  # noqa: E402
from tiny_vlms import batch_of, rows_of  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402
from inputs import prompts  # noqa: E402
from inputs.processor import load_processor  # noqa: E402


def local_batch(rank: int, world: int, generator, cfg) -> script.Batch:
    """Three groups: with one image, with two, with none; the last is all that a second rank has."""
    batch = batch_of(rows_of(""), generator, cfg)
    mine = [row for row, group in enumerate(batch.groups.tolist()) if world == 1 or (group == 2) == (rank == 1)]
    return batch.select(mine)


def main(strategy: str, out: str, *folders: str) -> None:
    rank, world, device = utils.init_distributed(60)
    result = {}
    for folder in folders:
        cfg = TrainConfig(model_id=folder, strategy=strategy, compute_dtype="float32", beta=0.0)
        policy, inner = script.load_policy(cfg, device)
        generator = SimpleNamespace(tokenizer=load_processor(folder), rope_index=prompts.rope_index_of(inner.hf_model))
        batch = local_batch(rank, world, generator, cfg)
        for shared, tokens in ((True, 10_000), (True, 60), (False, 60)):
            policy.zero_grad()
            cut = replace(cfg, shared_prefix=shared, tokens_per_microbatch=tokens)
            script.accumulate_gradients(policy, replace(batch), cut)
            result[Path(folder).name, shared, tokens] = full_gradients(policy)
    if rank == 0:
        torch.save(result, out)
    utils.end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
