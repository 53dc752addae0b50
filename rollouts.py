"""Prompts in, trajectories out: asyncio, one task a prompt, or a trajectory where there are several turns.

A rollout is a plain coroutine `(rows, generator, cfg) -> list[Trajectory]`: for each row `cfg.num_generations`
trajectories, those of one row adjacent. To add one: write it below and enter it in ROLLOUTS, where it says what a
rollout can say about itself. It is called once per row, `cfg.purpose` says what for, and `checked_rollout` compares
what came back with what was asked.

The generator is `VLLMClient` (vllm_client.py) or `HFGenerator` (hf_generator.py); both answer
`await generator.generate(prompt_ids, n=..., max_tokens=..., ...)` with a list of `Completion`.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from config import ConfigError, TrainConfig, known_name, named, shorten
from data import LOOKED_AT, has_column
from inputs.parts import PartError
from inputs.prompts import begun_in, own_schemas, pattern_of, prompt_messages
from inputs.trajectory import (
    RowError,
    Trajectory,
    TrajectoryError,
    failed_trajectory,
    joined,
    known_scores,
    sampling_options,
)
from inputs.vision import build_prompt, check_echo, vision_prompt
from safety.results import say_once, warn_once

# Environments and agents are imported where they are asked for: a run of single turns reads none of them.

ABOVE_ZERO = 1e-3  # nats; a log-prob that is 0 may come out of float arithmetic a little larger
ROLLOUT_TIMEOUT = 3600.0  # seconds one call of a rollout of your own may take, its sampling included


def tell_baseline(group: list[Trajectory], greedy: Trajectory) -> None:
    """Tell the group the score of a greedy completion of its prompt (the group's mean where that has none), or that it
    failed."""
    baseline = fmean(known_scores([greedy]) or known_scores(group) or [0.0])
    for trajectory in group:
        trajectory.info["baselines"] = baseline
        trajectory.info |= {key: value for key, value in greedy.info.items() if key == "failure"}


async def single_turn(rows: list[dict], generator, cfg: TrainConfig) -> list[Trajectory]:
    """Each prompt is answered once: one request per prompt with n = num_generations."""

    async def one_prompt(group: int, row: dict) -> list[Trajectory]:
        prompt = build_prompt(row, generator, cfg)
        told = {"told": prompt_messages(row, cfg.system_prompt)} if cfg.system_prompt else {}
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
                policy_version_last=sample.policy_version_last,
                info={
                    "completion": generator.tokenizer.decode(sample.token_ids, skip_special_tokens=True),
                    "model_inputs": prompt.model_inputs,
                    "routed_experts": joined(None, sample),
                    "spans": sample.spans,
                    "sent": (prompt.sent_ids, sample.token_ids, len(prompt.images)),
                    **told,
                },
            )
            for sample in samples
        ]

    groups = await asyncio.gather(*(one_prompt(group, row) for group, row in enumerate(rows)))
    return [trajectory for group in groups for trajectory in group]


# ---- several turns --------------------------------------------------------------------------------------------------


def check_rollout(cfg: TrainConfig) -> None:
    """ConfigError for a rollout, environment, tool or MCP server that is not there, before anything else starts."""
    known_name("--rollout", cfg.rollout, ROLLOUTS)
    several = cfg.env or cfg.tools or cfg.mcp_config
    wanted = "agent" if cfg.agent else "multi_turn" if several else "single_turn"
    if cfg.rollout != wanted and cfg.rollout in ("agent", "multi_turn", "single_turn"):
        flags = "--agent, --env, --tools and --mcp_config"
        raise ConfigError(f"--rollout {cfg.rollout}: {flags} as they are make it {wanted}; leave --rollout out.")
    if cfg.agent:
        from agentic.agents import check_agent

        check_agent(cfg)
    if cfg.on_rewrite == "fork" and (cfg.teacher_urls or cfg.teacher_prompt):
        raise ConfigError("--on_rewrite fork: a teacher's server is told of one row; use --on_rewrite append.")
    if cfg.rollout == "multi_turn":
        from envs import adapters

        environment = adapters.environment_maker(cfg)()  # what is wrong with all of them shows now
        asyncio.run(adapters.put_away(environment, False, cfg))
    if "environment" in cfg.reward_funcs and not (cfg.env or cfg.agent):
        raise ConfigError("--reward_funcs environment: there is no --env to give a reward.")
    if several and cfg.reward_funcs == ["reasoning_gym"] and not cfg.dataset_id.startswith("reasoning_gym:"):
        raise ConfigError("tools bring no reward: give --reward_funcs, such as last_number or my_rewards.py:right.")


def with_parser(cfg: TrainConfig, processor) -> TrainConfig:
    """The config, and those of its domains, with a parser of calls in place of `auto`. ConfigError where the chat
    template writes calls that the chosen parser does not read."""
    names = {}
    for own in cfg.by_domain():
        if own.env or own.tools or own.mcp_config or own.agent:
            from inputs.formats import parser_for

            with named(own):
                names[own.domain] = parser_for(own.tool_parser, processor, bool(own.env or own.agent))
    entries = [e | ({"tool_parser": names[e["name"]]} if e["name"] in names else {}) for e in cfg.domains]
    return replace(cfg, domains=entries, tool_parser=names.get("", cfg.tool_parser))


def settings_of_calls(cfg: TrainConfig, reward_functions: dict[str, Callable]) -> list[TrainConfig]:
    """How a row's trajectories are divided among calls of its rollout; those of one call are scored together.

    One call has them all, since rewards may compare completions, and a rollout may, too. If the rollout and every
    reward function say `per_trajectory = True`, each is made by a call of its own and scored as it ends.
    """
    alone = [ROLLOUTS[cfg.rollout], *reward_functions.values()]
    if any_number(cfg) or not all(getattr(function, "per_trajectory", False) for function in alone):
        return [cfg]
    return [replace(cfg, num_generations=1)] * cfg.num_generations


async def each_alone(play_one: Callable, rows: list[dict], cfg: TrainConfig) -> list[Trajectory]:
    """What the coroutine play_one(row, group) makes of each trajectory of the rows: every one is a task of its own and
    waits for no other. One that fails is returned as `failed_trajectory`."""

    async def one(row: dict, group: int) -> Trajectory:
        try:
            return await play_one(row, group)
        except TrajectoryError as error:
            return failed_trajectory(row, group, error)

    played = (one(row, group) for group, row in enumerate(rows) for _ in range(cfg.num_generations))
    return list(await asyncio.gather(*played))


async def agent(rows: list[dict], generator, cfg: TrainConfig) -> list[Trajectory]:
    """Programs of others, which ask the model by OpenAI's API (agentic/agents.py): as many at once as
    --agent_concurrency says."""
    from agentic import agents

    return await each_alone(lambda row, n: agents.play(row, n, generator, cfg), rows, cfg)


async def multi_turn(rows: list[dict], generator, cfg: TrainConfig) -> list[Trajectory]:
    """Model and environment (or tools) by turns: envs/turns.py."""
    from envs import adapters, turns

    make = adapters.environment_maker(cfg)

    async def one(row: dict, group: int) -> Trajectory:
        environment, reusable = await adapters.take_environment(make, row, cfg), False
        try:
            trajectory = await turns.play(row, group, environment, generator, cfg)
            reusable = True
            return trajectory
        finally:
            await adapters.put_away(environment, reusable, cfg)

    return await each_alone(one, rows, cfg)


# ---- one call of a rollout, and what came back -----------------------------------------------------------------------


class RolloutError(RuntimeError):
    """A rollout returned what was not asked for, or what cannot be trained on. The message holds its name, the row,
    what was asked and what came."""


def any_number(cfg: TrainConfig) -> bool:
    """Whether the rollout decides itself how many trajectories a row has. A baseline is always one."""
    return getattr(ROLLOUTS[cfg.rollout], "any_number", False) and cfg.purpose != "baseline"


def group_size(row: dict, cfg: TrainConfig) -> int:
    """Completions to sample of a row in a training step: its column `num_generations`, or --num_generations."""
    return int(row.get("num_generations") or cfg.num_generations)


def group_sizes(rows: list[dict], cfg: TrainConfig) -> list[int]:
    """`group_size` of every row."""
    if not isinstance(rows, list) and not has_column(rows, "num_generations"):  # all rows need not be read
        return [cfg.num_generations] * len(rows)
    return [group_size(row, cfg) for row in rows]


def sampled_by(row: dict, cfg: TrainConfig) -> TrainConfig:
    """The config by which a row is sampled: its domain's, with its own number of completions while training."""
    own = cfg.of(row)
    size = group_size(row, own) if cfg.purpose == "train" else own.num_generations
    return own if size == own.num_generations else replace(own, num_generations=size)


async def call_rollout(row: dict, generator, cfg: TrainConfig) -> list[Trajectory]:
    """What cfg.rollout makes of a row: cfg.num_generations trajectories, checked. RolloutError if they are not that.

    A rollout that raises TrajectoryError, or takes longer than ROLLOUT_TIMEOUT, has failed for this row:
    they are returned as `failed_trajectory`.
    """
    function = ROLLOUTS[cfg.rollout]
    limit = None if getattr(function, "limits_itself", False) else ROLLOUT_TIMEOUT
    try:
        returned = await asyncio.wait_for(function([row], generator, cfg), limit)
    except (TrajectoryError, TimeoutError) as error:
        late = TrajectoryError(f"rollout {cfg.rollout!r} took over {ROLLOUT_TIMEOUT:g} s", row)
        error = late if isinstance(error, TimeoutError) else error
        return [failed_trajectory(row, 0, error) for _ in range(cfg.num_generations)]
    trajectories = checked_rollout(returned, row, generator, cfg)
    for trajectory in trajectories if cfg.domain else ():
        trajectory.info["domain"] = cfg.domain
    return trajectories


def trajectory_fault(t: Trajectory, generator, cfg: TrainConfig) -> str | None:
    """What is wrong with a trajectory; None if it can be trained on."""
    for name in ("prompt_ids", "token_ids", "loss_mask", "logprobs", "token_rewards"):
        if not isinstance(given := getattr(t, name), list):
            return f"{name} is a {type(given).__name__}; give lists of plain numbers, such as {name}.tolist()"
    sampled = [place for place, mask in enumerate(t.loss_mask) if mask]
    # Placeholders of images may lie beyond the vocabulary; they are never sampled.
    ids = [t.token_ids[place] for place in sampled] if t.images else t.prompt_ids + t.token_ids
    size = getattr(generator, "vocab_size", None) or math.inf
    if ids and not 0 <= min(ids) <= max(ids) < size:
        return f"token ids go from {min(ids)} to {max(ids)}, and the model's from 0 to {size - 1}"
    restarts, longest, limit = t.info.get("restarts"), len(t.token_ids), cfg.max_completion_length
    if restarts is not None:  # contexts that an agent made: each of its rows fits the window
        bounds, limit = [-len(t.prompt_ids), *restarts, longest], limit + cfg.max_prompt_length
        if not all(a < b for a, b in pairwise([0, *bounds[1:]])):
            return f'info["restarts"], {restarts}, are no places in its {longest} token_ids, in their order'
        longest = max(b - a for a, b in pairwise(bounds))
    if longest > limit:
        return f"{longest} tokens are over --max_completion_length ({limit}): end it before, as one of 'length'"
    if wrong := [t.logprobs[place] for place in sampled if not -math.inf < t.logprobs[place] <= ABOVE_ZERO]:
        return f"logprobs have {wrong[0]:g} for a sampled token; give Completion.logprobs, finite and at most 0"
    return None


def checked_rollout(returned, row: dict, generator, cfg: TrainConfig) -> list[Trajectory]:
    """Trajectories of one row as they were asked for, none of which shares anything that scoring writes; RolloutError
    naming the rollout, the row, what was asked and what came. Of built-in rollouts and others, for whatever purpose."""

    def refuse(came: str):
        asked = f"asked for {cfg.num_generations} trajectories of one row (cfg.purpose {cfg.purpose!r})"
        return RolloutError(f"rollout {cfg.rollout!r}, {asked}, {came}.\n  row: {shorten(row, 500)}")

    rule = "Return a list of Trajectory objects, cfg.num_generations for each row"
    if not isinstance(returned, list) or not all(isinstance(t, Trajectory) for t in returned):
        raise refuse(f"returned {shorten(returned)}, a {type(returned).__name__}. {rule}")
    if len(returned) != cfg.num_generations and not (any_number(cfg) and returned):
        more = "or at least one, if it says `any_number = True` about itself (ROLLOUTS); a greedy baseline is one"
        raise refuse(f"returned {len(returned)}. {rule}, {more}")
    checked = []
    for index, t in enumerate(returned):
        if "failure" not in t.info:
            if fault := trajectory_fault(t, generator, cfg):
                raise refuse(f"returned trajectory {index} whose {fault}")
            logprobs = [float(p) if m else 0.0 for p, m in zip(t.logprobs, t.loss_mask, strict=True)]
            t = replace(t, token_rewards=list(t.token_rewards), logprobs=logprobs, info=dict(t.info))
            if "completion" not in t.info:
                sampled = [token for token, mask in zip(t.token_ids, t.loss_mask, strict=True) if mask]
                t.info["completion"] = generator.tokenizer.decode(sampled, skip_special_tokens=True)
            if "messages" not in t.info:
                t.info["begun"] = begun_in(t.prompt_ids, generator.tokenizer, cfg)
        checked.append(t)
    return checked


# ---- data rows as the model sees them --------------------------------------------------------------------------------


def look_at(rows, name: str, processor, cfg: TrainConfig) -> list[int]:
    """Tokens of the first rows' prompts, with what tools add to them. ConfigError for one that cannot be shown to the
    model, or if all are over --max_prompt_length. Said is how many are, or have text that reads like special tokens."""
    some, lengths, forged = rows[:LOOKED_AT], [], []
    if not (cfg.tools or cfg.mcp_config or cfg.env) and some and some[0].get("tools") and not own_schemas(some[0]):
        say_once(f"{name}: column `tools` holds no JSON schemas, and there are no --tools that it could name.")
    environment = None
    if (cfg.tools or cfg.mcp_config) and not cfg.env:
        from envs import adapters, turns

        environment = adapters.environment_maker(cfg)()
    for number, row in enumerate(some):
        try:
            shown = row
            if environment:
                shown, _ = turns.begun(row, environment.reset(row, 0), environment, processor, cfg)
            lengths.append(len(vision_prompt(shown, processor, None, cfg).token_ids))
        except PartError as error:
            raise ConfigError(f"{name}, row {number}: {error}.") from error
        forged += pattern_of(processor).findall(str(row["prompt"]))[:1]
    over = sum(length > cfg.max_prompt_length for length in lengths)
    if some and over == len(some):
        limit = f"--max_prompt_length={cfg.max_prompt_length}"
        raise ConfigError(f"{limit}: {name} have longer prompts, the shortest of {min(lengths)} tokens. Raise it.")
    if over:
        say_once(f"{name}: {over} of the first {len(some)} prompts are over --max_prompt_length; such are left out.")
    if forged and not cfg.no_apply_chat_template:  # prompts without one bring the tokens of their template along
        remedy = "is broken by a blank (--allow_special_tokens: becomes one)"
        remedy = "becomes one" if cfg.allow_special_tokens else remedy
        what = f"text that reads like a special token, such as {forged[0]!r}: it {remedy}"
        say_once(f"{name}: {len(forged)} of the first {len(some)} prompts hold {what}.")
    return lengths


def cannot_be_shown(group: list[Trajectory], number: int) -> bool:
    """Whether the row of this number cannot be shown to the model, which is said."""
    fault = next((t.info["failure"] for t in group if isinstance(t.info.get("failure"), RowError)), None)
    if fault:
        warn_once(f"row {number} of those in use is left out: {fault}", fault.cause)
    return fault is not None


# What a rollout says about itself, as attributes:
#
#     mine.per_trajectory = True    it may be called once per completion, with num_generations 1, so that each is scored
#                                   as it ends (where all reward functions say the same of themselves)
#     mine.any_number = True        it decides itself how many trajectories a row has, one at least: a tree search
#     mine.limits_itself = True     whatever it waits for has a limit of its own: ROLLOUT_TIMEOUT is not for it
ROLLOUTS: dict[str, Callable] = {
    "single_turn": single_turn,
    "multi_turn": multi_turn,
    "agent": agent,
}
single_turn.limits_itself = multi_turn.limits_itself = agent.limits_itself = True
multi_turn.per_trajectory = agent.per_trajectory = True
