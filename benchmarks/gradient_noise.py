"""How much of a step's gradient is signal: gradients of several steps' samples at the same weights, compared.

    python benchmarks/gradient_noise.py --steps 4 -- FLAGS OF train_grpo.py

Nothing is updated. The mean cosine c between gradients of disjoint steps is the signal's share of their squared length:
the noise is (1 - c) / c of it. Among settings that aim at the same gradient, the larger one learns faster.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_grpo as script  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402


def gradient(step: int, run, cfg: TrainConfig) -> torch.Tensor:
    """Of the samples of a step, all parameters behind one another."""
    run.generator.seed(cfg.seed + 1_000_003 * (step + 1))
    versions = range(run.first, run.first + 1)
    sampled = script.sample_step(run.rows, run.sampler, step, run.generator, run.reward_functions, cfg, versions)
    trajectories, _ = script.collect(run.rows, *asyncio.run(sampled), cfg)
    trajectories = sorted(trajectories, key=lambda t: t.group)
    pad_id = getattr(run.processor, "tokenizer", run.processor).pad_token_id or 0
    batch = script.collate(trajectories, pad_id, run.device)
    script.add_teacher(batch, run, trajectories, pad_id, cfg)
    script.add_logprobs(batch, run.policy, run.reference, run.inner, cfg)
    script.shape_rewards(batch, cfg, {})
    script.add_advantages(batch, cfg)
    script.leave_out(batch, trajectories, cfg)
    run.optimizer.zero_grad()
    script.accumulate_gradients(run.policy, batch, cfg)
    return torch.cat([p.grad.flatten() for p in run.policy.parameters() if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args, flags = parser.parse_args(own), sys.argv[len(own) + 2 :]
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: gradients of 2 steps at least are compared")
    cfg = load_config(TrainConfig, [*flags, "--generator", "hf", "--eval_steps", "none"])
    if cfg.num_iterations * cfg.num_minibatches > 1:
        parser.error("one update a step is compared: leave --num_iterations and --num_minibatches out")
    cfg, run = script.start(cfg, None)
    gradients = torch.stack([gradient(step, run, cfg) for step in range(args.steps)])
    lengths = gradients.norm(dim=1)
    cosines = gradients @ gradients.T / lengths.outer(lengths)
    n = args.steps
    print(f"cosine {float((cosines.sum() - n) / (n * (n - 1))):.3f}, length {float(lengths.mean()):.3g}")


if __name__ == "__main__":
    main()
