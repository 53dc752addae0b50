"""The gradient of one update under other ways to shard, compute and keep activations. Run by test_sharding.py.

usage: sharding_worker.py OUT.pt [flags of TrainConfig]
"""

import sys
from pathlib import Path

import torch
import torch._dynamo.utils

sys.path.insert(0, str(Path(__file__).parent.parent))
import gradient_worker  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402


def batch_of(rank: int, world: int) -> script.Batch:
    """The five groups of gradient_worker.py, dealt out: of four ranks the first has two."""
    batch = script.collate(
        [t for t in gradient_worker.trajectories() if t.group % world == rank], 0, torch.device("cpu")
    )
    batch.advantages = script.dr_grpo(batch, TrainConfig())
    return batch


def main(out: str, flags: list[str]) -> None:
    cfg = load_config(TrainConfig, ["--compute_dtype", "float32", "--tokens_per_microbatch", "40", *flags])
    rank, world, device = utils.init_distributed(60)
    original, script.load_hf_model = script.shard, gradient_worker.small_llama
    script.shard = lambda policy, *rest, **more: (
        gradient_worker.wake_adapters(policy),
        original(policy, *rest, **more),
    )[1]
    policy, inner = script.load_policy(cfg, device)
    gradient = gradient_worker.gradients(policy, inner, batch_of(rank, world), cfg)
    norm = script.clip_gradients(policy, 1e9)
    sent = [name for bucket in script.weight_buckets(policy, 2**30, torch.float32) for name, _ in bucket]
    if rank == 0:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]  # compiled
        torch.save({"gradient": gradient, "norm": norm, "sent": sorted(sent), "graphs": graphs}, out)
    utils.end_process(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
