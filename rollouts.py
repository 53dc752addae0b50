"""Prompts in, trajectories out: asyncio, one task per prompt (later: per trajectory), no lock-step.

A rollout is a plain coroutine `(rows, generator, cfg) -> list[Trajectory]`: for each row `cfg.num_generations`
trajectories, those of one row adjacent. To add one: write it below and enter it in ROLLOUTS.

The generator is `VLLMClient` (vllm_client.py) or `HFGenerator` (hf_generator.py); both answer
`await generator.generate(prompt_ids, n=..., max_tokens=..., ...)` with a list of `Completion`.
"""

import asyncio
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from config import TrainConfig
from prompts import build_prompt, check_echo


@dataclass
class Trajectory:
    """One prompt and everything after it, token by token. The four lists below have one entry per token after the
    prompt: `loss_mask` is 1 exactly where the policy sampled the token, its end-of-turn token included."""

    row: dict  # the data set row it came from
    group: int  # trajectories of one prompt share it
    prompt_ids: list[int]
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]  # the sampler's, 0 where loss_mask is 0
    token_rewards: list[float]
    images: list = field(default_factory=list)
    finish_reason: str = "stop"  # "stop" or "length", as the sampler said it: never inferred from the last token
    turns: int = 1
    policy_version: int = 0  # of the weights that sampled it
    info: dict = field(default_factory=dict)  # completion text, rewards by function, counters

    def __post_init__(self):
        lengths = {name: len(getattr(self, name)) for name in ("token_ids", "loss_mask", "logprobs", "token_rewards")}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a trajectory's per-token lists must have one length, got {lengths}")


def rollout_metrics(trajectories: list[Trajectory]) -> dict:
    """What a step's completions look like, over all ranks, which all call it. Keys are TRL's."""
    import torch  # here, so that an environment can be tried without it

    import utils

    groups: dict[int, list[float]] = {}
    for t in trajectories:
        groups.setdefault(t.group, []).append(sum(t.token_rewards))
    std = {number: statistics.stdev(scores) if len(scores) > 1 else 0.0 for number, scores in groups.items()}
    lengths = [sum(t.loss_mask) for t in trajectories]
    metrics = {
        "reward": [sum(t.token_rewards) for t in trajectories],
        "reward_std": [std[t.group] for t in trajectories],
        "frac_reward_zero_std": [float(std[t.group] < 1e-6) for t in trajectories],
        "frac_singleton_groups": [float(len(groups[t.group]) == 1) for t in trajectories],
        "completions/mean_length": lengths,
        "completions/clipped_ratio": [float(t.finish_reason == "length") for t in trajectories],
    }
    out = {name: float(utils.global_moments(torch.tensor(v, dtype=torch.float64))[1]) for name, v in metrics.items()}
    out |= reward_means(trajectories)
    for name in ("reward_timeouts", "unrewarded", "reward_without_token"):  # completions of the step
        out[name] = int(utils.all_sum(torch.tensor(sum(t.info[name] for t in trajectories))))
    out["completions/max_length"], out["completions/min_length"] = (
        utils.all_max(max(lengths)),
        -utils.all_max(-min(lengths)),
    )
    tokens = sum(len(t.prompt_ids) + len(t.token_ids) for t in trajectories)
    return out | {"num_tokens": int(utils.all_sum(torch.tensor(tokens)))}


def reward_means(trajectories: list[Trajectory]) -> dict:
    """Mean of every reward function and component where it applied, over all ranks, which all call it."""
    import torch

    import utils

    mine, out = {key for t in trajectories for key in t.info["rewards"]}, {}  # components may differ by row
    for key in sorted(set().union(*utils.gather_objects(mine))):
        values = [t.info["rewards"].get(key, math.nan) for t in trajectories]
        values = torch.tensor(values, dtype=torch.float64)
        out[f"rewards/{key}/mean"] = float(utils.global_moments(values.nan_to_num(), ~values.isnan())[1])
    return out


def sampling_options(cfg: TrainConfig) -> dict:
    """The sampling arguments of `generator.generate` that a config sets; every turn samples with the same ones."""
    options = dict(temperature=cfg.temperature, max_tokens=cfg.max_completion_length)
    options |= dict(min_tokens=cfg.min_completion_length, top_p=cfg.top_p, top_k=cfg.top_k, min_p=cfg.min_p)
    return {name: value for name, value in options.items() if value is not None}


async def single_turn(rows: list[dict], generator, cfg: TrainConfig) -> list[Trajectory]:
    """Each prompt is answered once: one request per prompt with n = num_generations."""

    async def one_prompt(group: int, row: dict) -> list[Trajectory]:
        prompt = build_prompt(row, generator, cfg)
        images = dict(images=prompt.images, expanded=prompt) if prompt.images else {}
        samples = await generator.generate(prompt.sent_ids, n=cfg.num_generations, **images, **sampling_options(cfg))
        check_echo(prompt, samples)
        return [
            Trajectory(
                row=row,
                group=group,
                prompt_ids=prompt.token_ids,
                token_ids=sample.token_ids,
                loss_mask=[1] * len(sample.token_ids),
                logprobs=sample.logprobs,
                token_rewards=[0.0] * len(sample.token_ids),
                images=prompt.images,
                finish_reason=sample.finish_reason,
                policy_version=sample.policy_version,
                info={
                    "completion": generator.tokenizer.decode(sample.token_ids, skip_special_tokens=True),
                    "model_inputs": prompt.model_inputs,
                },
            )
            for sample in samples
        ]

    groups = await asyncio.gather(*(one_prompt(group, row) for group, row in enumerate(rows)))
    return [trajectory for group in groups for trajectory in group]


ROLLOUTS: dict[str, Callable] = {
    "single_turn": single_turn,
}
