"""A short supervised pass over demonstrations, where a format has to be known before reinforcement learning can begin.

    python scripts/warm_start.py --demonstrations examples/arithmetic.py:demonstrate --tools calculator \\
        --dataset_id examples/arithmetic.py:rows --reward_funcs examples/arithmetic.py:right \\
        --model_id models/SmolLM2-135M-Instruct --run_name warm --max_steps 60

A demonstration is a function (row, environment, answers) -> what a model might say next; `answers` holds the messages
that came back after each turn so far. The environment (or the tools) answer it as they would a model, and the same code
lays out the same tokens: only what was said is trained on. With --agent `environment` is None, and `answers` are what
its calls after the first one sent, as the chat template wrote it, in a message each. What a demonstration draws from
python's `random` is seeded by --seed.
It is a run of train_grpo.py with demonstrations in place of samples and advantages of 1; evaluations (--eval_steps)
sample as ever. The result is a `from_pretrained` folder, runs/NAME/checkpoints/step_N. Numbers that rest on a warm
start should say so.
"""

# ruff: noqa: E402 - the command line is parsed before torch is imported, so that a wrong flag is reported at once

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from config import ConfigError, TrainConfig, parse_args


class WarmConfig(TrainConfig):
    demonstrations: str | None = None  # file.py:function, (row, environment, answers) -> text
    policy_loss: str = "reinforce"  # with advantages of 1: the likelihood of what was said
    advantage: str = "demonstrated"  # 1 everywhere
    loss_agg: str = "token_mean"
    correction: str = "none"  # nobody sampled it
    learning_rate: float = 1e-4
    num_generations: int = 2  # demonstrations of each row
    generator: str = "hf"  # none is started
    lr_schedule: str = "cosine"
    max_steps: int | None = 60


CONFIG = parse_args(WarmConfig, description=__doc__) if __name__ == "__main__" else None

import asyncio
import inspect
import math
import random
from dataclasses import replace

import train_grpo as script
from agentic import agents
from config import function_path, load_function
from envs import adapters
from envs.adapters import put_away
from envs.turns import play
from inputs.trajectory import Completion
from rewards import TRAINER_STATE
from safety.results import warn_once


class Demonstrator:
    """Says in every turn of one trajectory what the function says; takes the sampler's place.

    stream: names the draws that the function makes from python's `random`. They are seeded turn by turn: the order in
    which trajectories come to their turns is the threads'."""

    def __init__(self, function, row: dict, environment, generator, stream: str):
        self.function, self.row, self.environment, self.answers, self.stream = function, row, environment, [], stream
        self.tokenizer, self.rope_index, self.version = generator.tokenizer, generator.rope_index, generator.version
        self.asked = 0  # how often, by an agent
        if environment is None:
            return
        step = environment.step

        async def remembered(text):
            outcome = step(text)
            outcome = await outcome if inspect.isawaitable(outcome) else outcome
            self.answers.append(outcome[0])
            return outcome

        environment.step = remembered

    async def generate(self, sent, *, n, max_tokens, expanded=None, **options) -> list[Completion]:
        tokenizer = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        if self.environment is None and self.asked:
            self.answers.append([{"role": "user", "content": tokenizer.decode(sent)}])
        self.asked += 1
        random.seed(f"{self.stream} {len(self.answers)}")
        text = self.function(self.row, self.environment, self.answers)
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= max_tokens else "length"
        if reason == "length":
            told = f"a text of {len(ids)} tokens was cut and is learned without an end: raise --max_turn_length or "
            warn_once(f"{told}--max_completion_length, or write shorter ones", "warm_start")
        seen = expanded.token_ids if expanded else sent
        return [Completion(ids[:max_tokens], [0.0] * len(ids[:max_tokens]), reason, self.version, list(seen))]


async def demonstrate(rows: list[dict], function, generator, cfg: TrainConfig, step: int = 0) -> list:
    """Trajectories of the rows, as a rollout returns them. generator: its tokenizer, rope_index and version are used,
    and it is not asked."""
    make, tasks, played = None if cfg.agent else adapters.environment_maker(cfg), [], []
    for group, row in enumerate(rows):
        for member in range(cfg.num_generations):
            environment, stream = make and make(), f"{cfg.seed} {step} {row['prompt']} {row.get('seed')} {member}"
            shown = Demonstrator(function, row, environment, generator, stream)
            if cfg.agent:
                tasks.append(agents.play(row, group, shown, cfg))
            else:
                tasks.append(play(row, group, environment, shown, cfg))
                played.append(environment)
    trajectories = await asyncio.gather(*tasks)
    await asyncio.gather(*(put_away(environment, False, cfg) for environment in played))
    return trajectories


def demonstrated(batch: script.Batch, cfg: TrainConfig):
    return batch.loss_mask.clone()  # 1: the loss is minus the log-likelihood


demonstrated.compares_group = False


def without_logprobs(trajectories: list, memory: dict, step: int, cfg: TrainConfig) -> list:
    """Nobody sampled these tokens."""
    return [replace(t, logprobs=[math.nan if sampled else 0.0 for sampled in t.loss_mask]) for t in trajectories]


def main(cfg: WarmConfig) -> None:
    if not cfg.demonstrations or not function_path(cfg.demonstrations):
        raise ConfigError("--demonstrations: give file.py:function, (row, environment, answers) -> text.")
    if cfg.domains:  # a rollout of their own would sample
        raise ConfigError("domains: warm_start.py demonstrates one task; give the settings of one domain as flags.")
    function, sampled = load_function(cfg.demonstrations), script.ROLLOUTS[cfg.rollout]

    async def rollout(rows: list[dict], generator, cfg: TrainConfig) -> list:
        if cfg.purpose != "train":
            return await sampled(rows, generator, cfg)
        return await demonstrate(rows, function, generator, cfg, TRAINER_STATE.global_step)

    script.ROLLOUTS[cfg.rollout], script.ADVANTAGES["demonstrated"] = rollout, demonstrated
    script.after_rollout = without_logprobs
    script.main(cfg)


if __name__ == "__main__":
    try:
        main(CONFIG)
    except ConfigError as error:
        print(f"warm_start.py: error: {error}", file=sys.stderr)
        raise SystemExit(error.status) from None
