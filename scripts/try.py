"""Before a run: a row as the model reads it, and what completions are worth. No GPU, no server.

    python scripts/try.py --config examples/sums.yaml                                 # the first row, token by token
    python scripts/try.py --config examples/sums.yaml --row 3 --completion "57" --completion "It is 58."
    python scripts/try.py --config examples/sums.yaml --row 3 --sample 8              # sampled in this process
    python scripts/try.py my_grpo.py --config my.yaml --gpus 8                        # a copy; does it fit?

Takes the flags of the train script. Rows, prompts, rewards and advantages are those of the training: the script's own
functions are called. A typed completion ends with the token that ends a turn. The page "Try" shows the same
(`python look.py runs/ --try FLAGS`). Environments and tools are played by scripts/play.py.
"""

import argparse
import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import ConfigError, load_config, load_function  # noqa: E402


class Typed:
    """A generator whose completions somebody typed."""

    rope_index = None

    def __init__(self, processor, texts: list[str]):
        self.tokenizer, self.texts = processor, iter(texts)

    async def generate(self, prompt_ids, *, n=1, max_tokens, **_) -> list:
        from inputs.trajectory import Completion

        tokenizer, made = getattr(self.tokenizer, "tokenizer", self.tokenizer), []
        for _ in range(n):
            ids = tokenizer(next(self.texts, ""), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            cut = len(ids) > max_tokens
            ids = ids[:max_tokens]
            made.append(Completion(ids, [0.0] * len(ids), "length" if cut else "stop", 0, list(prompt_ids)))
        return made


def pieces(ids: list[int], processor) -> list[str]:
    """The text of each token."""
    return getattr(processor, "tokenizer", processor).batch_decode([[number] for number in ids])


def of_rows(rows: list[dict], held_out: list[dict], given, cfg, processor) -> dict:
    """How many rows there are, and the one that was asked for: its columns and its prompt's tokens."""
    from rollouts import look_at

    if not 0 <= given.row < len(rows):
        raise ConfigError(f"--row {given.row}: there are {len(rows)} rows, from 0 on")
    row = dict(rows[given.row])
    own = cfg.of(row)
    lengths = sorted(look_at(rows, "rows", processor, own))
    return {
        "rows": len(rows),
        "held_out": len(held_out),
        "prompt_tokens": {"median": lengths[len(lengths) // 2], "longest": lengths[-1], "limit": own.max_prompt_length},
        "row": {name: repr(value)[:2000] for name, value in row.items()},
    }


def of_group(script, row: dict, given, cfg, processor, reward_functions: dict) -> dict:
    """Completions of the row, typed or sampled, with each reward function's value and the advantages of the group.
    Without any, the prompt's tokens alone."""
    import torch

    from rewards import own_functions, score

    texts = given.completion or [""]
    own = replace(cfg.of(row), num_generations=given.sample or len(texts), kl_in_reward=False)
    if given.sample:
        from hf_generator import HFGenerator

        model = script.load_hf_model(own, getattr(torch, own.compute_dtype))
        generator = HFGenerator(model, processor)
        generator.seed(own.seed)
    else:
        generator, own = Typed(processor, texts), replace(own, max_turns=1)
    trajectories = asyncio.run(script.rollouts.call_rollout(row, generator, own))
    if failed := [t.info["failure"] for t in trajectories if "failure" in t.info]:
        raise ConfigError(f"{len(failed)} of {len(trajectories)} trajectories failed: {failed[0]}")
    prompt = pieces(trajectories[0].prompt_ids, processor)
    if not (given.completion or given.sample):
        return {"prompt": prompt}
    asyncio.run(score(trajectories, own_functions(reward_functions, own), own))
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    script.shape_rewards(batch, own, {})
    script.add_advantages(batch, own)
    means = script.row_mean(batch.advantages, batch.loss_mask)[:, 0].tolist()
    completions = [
        {
            "tokens": pieces(t.token_ids, processor),
            "finish_reason": t.finish_reason,
            "rewards": t.info["rewards"],
            "reward": sum(t.token_rewards),
            "advantage": mean,
        }
        for t, mean in zip(trajectories, means, strict=True)
    ]
    return {"prompt": prompt, "completions": completions}


def line(tokens: list[str]) -> str:
    return "  " + "|".join(tokens).replace("\n", "\\n")


def show(found: dict) -> None:
    lengths = found["prompt_tokens"]
    print(f"{found['rows']} rows, {found['held_out']} held out")
    print(
        f"tokens of the first 100 prompts: median {lengths['median']}, longest {lengths['longest']}; "
        f"--max_prompt_length {lengths['limit']}\n"
    )
    for name, value in found["row"].items():
        print(f"  {name}: {value}")
    print(f"\nprompt, {len(found['prompt'])} tokens:\n{line(found['prompt'])}")
    for number, one in enumerate(found.get("completions", ())):
        worth = f"reward {one['reward']:.4g}, advantage {one['advantage']:+.4g}"
        print(f"\ncompletion {number}: {worth}, {len(one['tokens'])} tokens, {one['finish_reason']}")
        print(f"{line(one['tokens'])}\n  {one['rewards']}")
    print(f"\n{found['fit']}" * bool(found["fit"]) + f"\nTo train: {found['command']}")


def fit(flags: list[str], gpus: int | None) -> str:
    """What plan.py says of these flags on so many GPUs."""
    if gpus is None:
        return ""
    command = [sys.executable, str(ROOT / "plan.py"), *flags, "--gpus", str(gpus)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return (done.stdout + done.stderr).strip()


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--row", type=int, default=0, help="number of the row; default: 0")
    parser.add_argument("--completion", action="append", help="a typed completion; may be given again")
    parser.add_argument("--sample", type=int, help="this many completions, sampled by the model")
    parser.add_argument("--gpus", type=int, help="say by plan.py whether the run fits on so many GPUs")
    given, flags = parser.parse_known_args(words)
    path = flags.pop(0) if flags and flags[0].endswith(".py") else "train_grpo.py"
    script = sys.modules[load_function(f"{path}:setup").__module__]
    cfg = load_config(script.TrainConfig, [*flags, "--generator", "hf"])
    cfg, reward_functions, processor, rows, held_out = script.setup(cfg)
    found = of_rows(rows, held_out, given, cfg, processor)
    found |= of_group(script, dict(rows[given.row]), given, cfg, processor, reward_functions)
    start = f"torchrun --nproc_per_node={given.gpus}" if given.gpus else "python"
    show(found | {"fit": fit(flags, given.gpus), "command": " ".join([start, path, *flags])})


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"try.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
