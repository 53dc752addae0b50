"""Loss and gradient of train_minimal.py on one batch, written by rank 0. Run by test_minimal.py.

usage: minimal_worker.py OUT.pt
"""

import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))
from gradient_worker import small_llama  # noqa: E402

import train_minimal as script  # noqa: E402
import utils  # noqa: E402
from rollouts import Trajectory  # noqa: E402

GENERATIONS = 3


def trajectories() -> list[Trajectory]:
    """Four prompts with three completions each, of all lengths."""
    draw = torch.Generator().manual_seed(0)
    out = []
    for group in range(4):
        prompt = torch.randint(10, 1000, (3 + 4 * group,), generator=draw).tolist()
        for member in range(GENERATIONS):
            ids = torch.randint(10, 1000, (int(torch.randint(1, 12, (1,), generator=draw)),), generator=draw).tolist()
            rewards = [0.0] * (len(ids) - 1) + [float((group + member**2) % 3)]
            out.append(Trajectory({}, group, prompt, ids, [1] * len(ids), [-6.9] * len(ids), rewards))
    return out


def loss_and_gradient(cfg: script.Settings) -> dict[str, torch.Tensor]:
    rank, world, device = utils.init_distributed(60)
    weights = small_llama(None, torch.float32)
    model = DistributedDataParallel(weights) if world > 1 else weights
    mine = [t for t in trajectories() if t.group % world == rank]
    batch = script.tensors(mine, device)
    scores = torch.tensor([sum(t.token_rewards) for t in mine])
    batch["advantages"] = script.advantages(scores, GENERATIONS)[:, None] * batch["loss_mask"]
    if cfg.num_iterations > 1:  # as if weights had moved by now
        batch["old_logprobs"] = batch["sampling_logprobs"]
    numbers = script.accumulate_gradients(model, batch, cfg)
    gradients = {name: weight.grad for name, weight in weights.named_parameters()}
    return gradients | {"loss": torch.tensor(numbers["loss"])}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = loss_and_gradient(script.Settings(compute_dtype="float32", rows_per_microbatch=2, num_iterations=2))
    if utils.is_main():
        torch.save(found, sys.argv[1])
