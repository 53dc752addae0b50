"""How full forward passes are, over several distributions of lengths: how many `micro_batches` makes, and their tokens
without padding in shares of --tokens_per_microbatch.

    python benchmarks/packing.py         a table in Markdown; seconds on a CPU, no model
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch  # noqa: E402

from batch import Batch  # noqa: E402
from config import TrainConfig  # noqa: E402
from inputs.packing import micro_batches  # noqa: E402

TOKENS = 16384
GENERATIONS = 8


def lognormal(median: int, spread: float, most: int):
    return lambda n, random: (median * (spread * torch.randn(n, generator=random)).exp()).clamp(1, most).int()


CASES = {  # name: prompt, groups, seed, (how many, source of random numbers) -> lengths of completions
    "4,000 each": (500, 8, 0, lambda n, random: torch.full((n,), 4000)),
    "512 each": (500, 8, 0, lambda n, random: torch.full((n,), 512)),
    "1 to 4,000, even": (500, 8, 1, lambda n, random: torch.randint(1, 4001, (n,), generator=random)),
    "log-normal, median 300, most 1,024": (200, 16, 2, lognormal(300, 0.7, 1024)),
    "log-normal, median 1,000, most 8,192": (300, 16, 3, lognormal(1000, 1.0, 8192)),
    "log-normal, median 2,000, most 8,192": (300, 8, 4, lognormal(2000, 0.8, 8192)),
    "log-normal, median 4,000, most 12,000": (300, 8, 5, lognormal(4000, 0.8, 12000)),
    "400, and 30 % cut off at 4,096": (
        300, 8, 6, lambda n, random: torch.where(torch.rand(n, generator=random) < 0.3, 4096, 400),
    ),
}  # fmt: skip


def main() -> None:
    print("| completions | seed | prompts | tokens | passes | full |\n|" + "---|" * 6)
    for (name, (prompt, groups, seed, draw)), shared in [(case, s) for case in CASES.items() for s in (True, False)]:
        number = groups * GENERATIONS
        completions = draw(number, torch.Generator().manual_seed(seed))
        lengths, tokens = prompt + completions[:, None], torch.arange(prompt + int(completions.max()))
        group = torch.arange(number) // GENERATIONS
        there = (tokens < lengths).float()  # [B, T]
        batch = Batch(group[:, None] + tokens, there, there * (tokens >= prompt), torch.zeros(there.shape), group)
        passes = micro_batches(batch, TrainConfig(tokens_per_microbatch=TOKENS, shared_prefix=shared))
        total = int(completions.sum()) + prompt * (groups if shared else number)
        print(
            f"| {name} | {seed} | {'shared' if shared else 'in each row'} | {total:,} | "
            f"{len(passes)} | {total / len(passes) / TOKENS:.0%} |"
        )


if __name__ == "__main__":
    main()
