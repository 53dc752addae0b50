"""Where the seconds of an optimizer update go: products of matrices, attention, passes over the vocabulary, the rest.

    python benchmarks/update_profile.py [--model FOLDER] [--prompts 8] [--generations 4] [--tokens 32] [--threads 1]

The update of train_grpo.py on made-up completions, the second one of the process, under torch's profiler: seconds of
each operator without those that it calls. The default is the short case of vs_trl.py.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402
from inputs.trajectory import Trajectory  # noqa: E402

PRODUCTS, COPIES = ("mm", "addmm", "bmm", "baddbmm"), ("copy_", "_to_copy", "contiguous", "clone")


def kind_of(name: str, shapes: str, vocabulary: int) -> str:
    wide = ", over the vocabulary" if f"{vocabulary}" in shapes else ""
    operator = name.removeprefix("aten::")
    if "adam" in name or name.startswith("Optimizer"):
        return "optimizer"
    if operator in PRODUCTS:
        return f"products{wide}"
    if "attention" in name:
        return "attention kernels"
    if operator in COPIES:
        return f"casts and copies{wide}"
    return f"other passes{wide}" if name.startswith("aten::") else "Python and autograd"


def made_up(args, vocabulary: int) -> list[Trajectory]:
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(10, vocabulary, (count,), generator=draw).tolist()

    found = []
    for group in range(args.prompts):
        prompt = ids(args.prompt_tokens)
        for member in range(args.generations):
            rewards = [0.0] * (args.tokens - 1) + [float(member % 2)]
            sampled = [1] * args.tokens, [-9.0] * args.tokens
            found.append(Trajectory({}, group, prompt, ids(args.tokens), *sampled, rewards))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    for name, default in dict(prompts=8, generations=4, tokens=32, prompt_tokens=44, threads=1).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cfg = TrainConfig(
        model_id=args.model, generator="hf", dtype=args.dtype, prompts_per_step=args.prompts, max_steps=10,
        num_generations=args.generations, gradient_checkpointing=False, tokens_per_microbatch=1024,
        max_completion_length=args.tokens,
    )  # fmt: skip
    _, _, device = utils.init_distributed(60)
    policy, inner = script.load_policy(cfg, device)
    vocabulary = inner.hf_model.config.get_text_config().vocab_size
    optimizer = script.make_optimizer(policy, cfg)
    batch = script.collate(made_up(args, vocabulary), 0, device)
    script.add_advantages(batch, cfg)
    script.update(policy, optimizer, batch, cfg, 0)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        script.update(policy, optimizer, batch, cfg, 1)
    seconds, calls = Counter(), Counter()
    for event in seen.key_averages(group_by_input_shape=True):
        kind = kind_of(event.key, str(event.input_shapes), vocabulary)
        seconds[kind] += event.self_cpu_time_total / 1e6
        calls[kind] += event.count
    total = sum(seconds.values())
    print(f"| {total:.2f} s | share | calls |\n|---|---|---|")
    for kind, spent in seconds.most_common():
        print(f"| {kind} | {spent / total:.1%} | {calls[kind]} |")


if __name__ == "__main__":
    main()
