"""The gradient of one update under other ways to shard, compute and keep activations. For test_sharding.py, and run by
scripts/gpu_check.py.

usage: sharding_worker.py OUT.pt [flags of TrainConfig]
"""

import sys
from pathlib import Path

import torch
import torch._dynamo.utils

sys.path.insert(0, str(Path(__file__).parent.parent))
import ragged  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402


def batch_of(rank: int, world: int, device: torch.device) -> script.Batch:
    """The five groups of ragged.py, dealt out: of four ranks the first has two, of eight three have none."""
    rows = ragged.trajectories()
    batch = script.collate([t for t in rows if t.group % world == rank] or rows[:1], 0, device)
    if rank >= 5:
        batch.loss_mask = torch.zeros_like(batch.loss_mask)
    batch.advantages = script.dr_grpo(batch, TrainConfig())
    return batch


def found(flags: list[str], rank: int, world: int, device: torch.device) -> dict:
    """Whole gradient by name, its norm, names of what a push sends, and how many graphs were compiled."""
    cfg = load_config(TrainConfig, ["--compute_dtype", "float32", "--tokens_per_microbatch", "40", *flags])
    script.load_hf_model = ragged.small_llama
    policy = ragged.load_awake(cfg, device)
    gradient = ragged.gradients(policy, batch_of(rank, world, device), cfg)
    norm = script.clip_gradients(policy, 1e9)
    sent = [name for bucket in script.weight_buckets(policy, 2**30, torch.float32) for name, _ in bucket]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]  # compiled
    return {"gradient": gradient, "norm": norm, "sent": sorted(sent), "graphs": graphs}


def main(out: str, flags: list[str]) -> None:
    rank, world, device = utils.init_distributed(60)
    result = found(flags, rank, world, device)
    if rank == 0:
        torch.save(result, out)
    utils.end_process(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
