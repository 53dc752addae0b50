"""Before a run: a row as the model reads it, and what completions are worth. No GPU, no server.

    python scripts/try.py --config examples/sums.yaml                                 # the first row, token by token
    python scripts/try.py --config examples/sums.yaml --row 3 --completion "57" --completion "It is 58."
    python scripts/try.py --config examples/sums.yaml --row 3 --sample 8              # sampled in this process
    python scripts/try.py my_grpo.py --config my.yaml --gpus 8                        # a copy; does it fit?
    python scripts/try.py --model_id models/tiny --env frozenlake --hand              # you are the model, turn by turn

Takes the flags of the train script. Rows, prompts, rewards and advantages are those of the training: the script's own
functions are called. A typed completion ends with the token that ends a turn. The page "Try" shows the same
(`python look.py runs/ --try FLAGS`). With --hand an environment or tools answer you, turn by turn; calls are typed as
the model would write them.
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
    """A generator whose completions somebody typed; texts None: types now, having read what is new in the prompt."""

    rope_index = None

    def __init__(self, processor, texts: list[str] | None):
        self.tokenizer, self.texts, self.shown = processor, texts and iter(texts), 0

    async def generate(self, prompt_ids, *, n=1, max_tokens, **_) -> list:
        from inputs.trajectory import Completion

        tokenizer, made = getattr(self.tokenizer, "tokenizer", self.tokenizer), []
        for _ in range(n):
            if self.texts is None:
                print(f"\n{tokenizer.decode(prompt_ids[self.shown :])}")
            text = input("you: ") if self.texts is None else next(self.texts, "")
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            cut = len(ids) > max_tokens
            ids = ids[:max_tokens]
            self.shown = len(prompt_ids) + len(ids)
            made.append(Completion(ids, [0.0] * len(ids), "length" if cut else "stop", 0, list(prompt_ids)))
        return made


def pieces(ids: list[int], processor) -> str:
    """The text of each token."""
    tokens = getattr(processor, "tokenizer", processor).batch_decode([[number] for number in ids])
    return "  " + "|".join(tokens).replace("\n", "\\n")


def show_row(rows: list[dict], held_out: list[dict], given, cfg, processor) -> dict:
    """Say how many rows there are, and what is in the one that was asked for, which is returned."""
    from rollouts import look_at

    if not 0 <= given.row < len(rows):
        raise ConfigError(f"--row {given.row}: there are {len(rows)} rows, from 0 on")
    row = dict(rows[given.row])
    own = cfg.of(row)
    lengths = sorted(look_at(rows, "rows", processor, own))
    print(f"{len(rows)} rows, {len(held_out)} held out")
    print(
        f"tokens of the first 100 prompts: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}; "
        f"--max_prompt_length {own.max_prompt_length}\n"
    )
    for name, value in row.items():
        print(f"  {name}: {repr(value)[:2000]}")
    return row


def show_group(script, row: dict, given, cfg, processor, reward_functions: dict) -> None:
    """Print completions of the row, typed or sampled, with each reward function's value and the advantages of the
    group. Without any, the prompt's tokens alone."""
    import torch

    from rewards import functions_of_domain, score

    texts = None if given.hand else given.completion or [""]
    own = replace(cfg.of(row), num_generations=given.sample or len(texts or [""]), kl_in_reward=False)
    if given.sample:
        from hf_generator import HFGenerator

        model = script.load_hf_model(own, getattr(torch, own.compute_dtype))
        generator = HFGenerator(model, processor)
        generator.seed(own.seed)
    else:
        generator, own = Typed(processor, texts), own if given.hand else replace(own, max_turns=1)
    trajectories = asyncio.run(script.rollouts.call_rollout(row, generator, own))
    if failed := [t.info["failure"] for t in trajectories if "failure" in t.info]:
        raise ConfigError(f"{len(failed)} of {len(trajectories)} trajectories failed: {failed[0]}")
    prompt = trajectories[0].prompt_ids
    print(f"\nprompt, {len(prompt)} tokens:\n{pieces(prompt, processor)}")
    if not (given.completion or given.sample or given.hand):
        return
    asyncio.run(score(trajectories, functions_of_domain(reward_functions, own), own))
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    script.shape_rewards(batch, own, {})
    script.add_advantages(batch, own)
    means = script.row_mean(batch.advantages, batch.loss_mask)[:, 0].tolist()
    for number, (t, mean) in enumerate(zip(trajectories, means, strict=True)):
        worth = f"reward {sum(t.token_rewards):.4g}, advantage {mean:+.4g}"
        print(f"\ncompletion {number}: {worth}, {len(t.token_ids)} tokens, {t.finish_reason}")
        print(f"{pieces(t.token_ids, processor)}\n  {t.info['rewards']}")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--row", type=int, default=0, help="number of the row; default: 0")
    parser.add_argument("--completion", action="append", help="a typed completion; may be given again")
    parser.add_argument("--sample", type=int, help="this many completions, sampled by the model")
    parser.add_argument("--hand", action="store_true", help="type a completion now, turn by turn")
    parser.add_argument("--gpus", type=int, help="say by plan.py whether the run fits on so many GPUs")
    given, flags = parser.parse_known_args(words)
    path = flags.pop(0) if flags and flags[0].endswith(".py") else "train_grpo.py"
    script = sys.modules[load_function(f"{path}:setup").__module__]
    cfg = load_config(script.TrainConfig, [*flags, "--generator", "hf"])
    cfg, reward_functions, processor, rows, held_out = script.setup(cfg)
    row = show_row(rows, held_out, given, cfg, processor)
    try:
        show_group(script, row, given, cfg, processor, reward_functions)
    except script.RewardError as error:
        raise SystemExit(script.utils.print_failure(error, cfg)) from None
    print(flush=True)
    if given.gpus:
        plan = [sys.executable, str(ROOT / "plan.py"), *flags, "--gpus", str(given.gpus)]
        done = subprocess.run(plan, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        print(done.stdout.replace("train_grpo.py", path))
    else:
        print(f"To train: {' '.join(['python', path, *flags])}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"try.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except EOFError:
        raise SystemExit("\ntry.py: the input has ended, the completion has not") from None
