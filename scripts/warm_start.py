"""A short supervised pass over demonstrations, where a format has to be known before reinforcement learning can begin.

    python scripts/warm_start.py --demonstrations examples/arithmetic.py:demonstrate --tools calculator \\
        --dataset_id examples/arithmetic.py:rows --model_id models/SmolLM2-135M-Instruct --run_name warm --max_steps 60

A demonstration is a function (row, environment, answers) -> what a model might say next; `answers` holds the messages
that came back after each turn so far. The environment (or the tools) answer it as they would a model, and the same code
lays out the same tokens: only what was said is trained on. With --agent `environment` is None, and `answers` are what
its calls after the first one sent, as the chat template wrote it, in a message each. What a demonstration draws from
python's `random` is seeded by --seed.
The result is a `from_pretrained` folder, runs/NAME/checkpoints/step_N. Flags are train_grpo.py's; numbers that rest on
a warm start should say so.
"""

# ruff: noqa: E402 - the command line is parsed before torch is imported, so that a wrong flag is reported at once

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from config import ConfigError, TrainConfig, parse_args


class WarmConfig(TrainConfig):
    demonstrations: str | None = None  # file.py:function, (row, environment, answers) -> text
    policy_loss: str = "reinforce"  # with advantages of 1: the likelihood of what was said
    advantage: str = "reinforce_plus_plus"  # not used, but one demonstration of a row is enough
    loss_agg: str = "token_mean"
    correction: str = "none"  # nobody sampled it
    learning_rate: float = 1e-4
    num_generations: int = 2  # demonstrations of each row
    generator: str = "hf"  # none is started
    lr_schedule: str = "cosine"


CONFIG = parse_args(WarmConfig, description=__doc__) if __name__ == "__main__" else None

import asyncio
import inspect
import os
import random
import time
from dataclasses import replace

import data
import train_grpo as script
import utils
from agentic import agents
from config import function_path, load_function
from envs import adapters
from envs.adapters import put_away
from envs.turns import play
from inputs.processor import load_processor, with_template_kwargs
from inputs.trajectory import Completion
from modeling.model import rope_index_of
from rollouts import look_at, with_parser
from safety.results import warn_once
from saving import checkpoints


class Demonstrator:
    """Says in every turn of one trajectory what the function says; takes the sampler's place.

    stream: names the draws that the function makes from python's `random`. They are seeded turn by turn: the order in
    which trajectories come to their turns is the threads'."""

    def __init__(self, function, row: dict, environment, processor, rope_index, stream: str):
        self.function, self.row, self.environment, self.answers, self.stream = function, row, environment, [], stream
        self.tokenizer, self.rope_index = processor, rope_index
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
        return [Completion(ids[:max_tokens], [0.0] * len(ids[:max_tokens]), reason, 0, list(seen))]


async def demonstrate(rows: list[dict], function, processor, rope_index, cfg: TrainConfig, step: int = 0) -> list:
    make, tasks, played = None if cfg.agent else adapters.environment_maker(cfg), [], []
    for group, row in enumerate(rows):
        for member in range(cfg.num_generations):
            environment, stream = make and make(), f"{cfg.seed} {step} {group} {member}"
            shown = Demonstrator(function, row, environment, processor, rope_index, stream)
            if cfg.agent:
                tasks.append(agents.play(row, group, shown, cfg))
            else:
                tasks.append(play(row, group, environment, shown, cfg))
                played.append(environment)
    trajectories = await asyncio.gather(*tasks)
    await asyncio.gather(*(put_away(environment, False, cfg) for environment in played))
    return trajectories


def main(cfg: WarmConfig) -> None:
    if not cfg.demonstrations or not function_path(cfg.demonstrations):
        raise ConfigError("--demonstrations: give file.py:function, (row, environment, answers) -> text.")
    if cfg.domains:
        raise ConfigError("domains: warm_start.py demonstrates one task; give the settings of one domain as flags.")
    if cfg.load_in:
        raise ConfigError(f"--load_in {cfg.load_in}: a warm start is saved whole; leave it out here.")
    function = load_function(cfg.demonstrations)
    processor = with_template_kwargs(load_processor(cfg.model_id), cfg.chat_template_kwargs)
    cfg = with_parser(cfg, processor)
    rows, _ = data.load_data(cfg, script.format_row)
    look_at(rows, "rows", processor, cfg)
    _, _, device = utils.init_distributed(cfg.dist_timeout)
    cfg = utils.computable(cfg, device)
    policy = script.load_policy(cfg, device)
    inner = script.unwrapped(policy)
    optimizer, sampler = (
        script.make_optimizer(policy, cfg),
        script.PromptSampler(len(rows), cfg.prompts_per_step, cfg.seed),
    )
    pad_id, start = getattr(processor, "tokenizer", processor).pad_token_id or 0, time.perf_counter()
    rope_index = rope_index_of(inner.hf_model)
    for step in range(cfg.max_steps):
        chosen = [rows[i] for i in sampler.next(step)]
        trajectories = asyncio.run(demonstrate(chosen, function, processor, rope_index, cfg, step))
        batch = script.collate(trajectories, pad_id, device)
        batch.advantages = batch.loss_mask.clone()  # 1: the loss is minus the log-likelihood
        metrics = script.update(policy, optimizer, batch, cfg, step)
        if (step + 1) % 10 == 0 or step + 1 == cfg.max_steps:
            print(f"step {step + 1}/{cfg.max_steps}: loss {metrics['loss']:.3f}, {time.perf_counter() - start:.0f} s")
    run_dir = Path(cfg.output_dir) / (cfg.run_name or f"{Path(cfg.model_id).name}-warm")
    buckets, modules = script.weight_buckets(policy, 2**30, next(policy.parameters()).dtype), {"policy": (policy, None)}
    checkpoints.save_checkpoint(run_dir, cfg.max_steps, modules, inner.hf_model, buckets, processor, {}, {}, 1)
    print(f"warm_start: {run_dir}/checkpoints/step_{cfg.max_steps}")


if __name__ == "__main__":
    try:
        main(replace(CONFIG, max_steps=CONFIG.max_steps or 60))
    except ConfigError as error:
        print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
