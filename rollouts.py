"""Prompts in, trajectories out: asyncio, one task per prompt, or per trajectory where there are several turns.

A rollout is a plain coroutine `(rows, generator, cfg) -> list[Trajectory]`: for each row `cfg.num_generations`
trajectories, those of one row adjacent. To add one, write it below and enter it in ROLLOUTS, with the attributes listed
there. It is called once per row; `cfg.purpose` tells it what for, and `checked_rollout` compares what it returns with
what was asked for.

The generator is `VLLMClient` (vllm_client.py) or `HFGenerator` (hf_generator.py); both answer
`await generator.generate(prompt_ids, n=..., max_tokens=..., ...)` with a list of `Completion`.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from config import ConfigError, TrainConfig, known_name, naming_domain, shorten
from data import LOOKED_AT, has_column
from inputs.parts import PartError
from inputs.prompts import begun_in, own_schemas, pattern_of, prompt_messages
from inputs.trajectory import (
    RowError,
    Trajectory,
    TrajectoryError,
    failed_trajectory,
    joined_experts,
    known_scores,
    sampling_options,
)
from inputs.vision import build_prompt, check_echo, vision_prompt
from safety.results import say_once, warn_once

# Environments and agents are imported where they are needed: a run of single turns loads none of them.

ABOVE_ZERO = 1e-3  # nats; float arithmetic may turn a log-prob of 0 into slightly more
ROLLOUT_TIMEOUT = 3600.0  # seconds that one call of your own rollout may take, sampling included


def tell_baseline(group: list[Trajectory], greedy: Trajectory) -> None:
    """Give the group the score of a greedy completion of its prompt (the group's mean if that has no score), and its
    failure if it failed."""
    baseline = fmean(known_scores([greedy]) or known_scores(group) or [0.0])
    for trajectory in group:
        trajectory.info["baselines"] = baseline
        trajectory.info |= {key: value for key, value in greedy.info.items() if key == "failure"}


async def single_turn(rows: list[dict], generator, cfg: TrainConfig) -> list[Trajectory]:
    """One answer per prompt: one request per prompt with n = num_generations."""

    async def one_prompt(group: int, row: dict) -> list[Trajectory]:
        prompt = build_prompt(row, generator, cfg)
        system = {"told": prompt_messages(row, cfg.system_prompt)} if cfg.system_prompt else {}
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
                images=prompt.images,
                finish_reason=sample.finish_reason,
                policy_version=sample.policy_version,
                policy_version_last=sample.policy_version_last,
                info={
                    "completion": generator.tokenizer.decode(sample.token_ids, skip_special_tokens=True),
                    "model_inputs": prompt.model_inputs,
                    "routed_experts": joined_experts(None, sample),
                    "spans": sample.spans,
                    "sent": (prompt.sent_ids, sample.token_ids, len(prompt.images)),
                    **system,
                },
            )
            for sample in samples
        ]

    groups = await asyncio.gather(*(one_prompt(group, row) for group, row in enumerate(rows)))
    return [trajectory for group in groups for trajectory in group]


# ---- several turns --------------------------------------------------------------------------------------------------


def check_rollout(cfg: TrainConfig) -> None:
    """ConfigError for a rollout, environment, tool or MCP server that does not exist, before anything else starts."""
    known_name("--rollout", cfg.rollout, ROLLOUTS)
    has_turns = cfg.env or cfg.tools or cfg.mcp_config
    expected = "agent" if cfg.agent else "multi_turn" if has_turns else "single_turn"
    if cfg.rollout != expected and cfg.rollout in ("agent", "multi_turn", "single_turn"):
        flags = "--agent, --env, --tools and --mcp_config"
        raise ConfigError(f"--rollout {cfg.rollout}: {flags} as given make it {expected}; leave --rollout out.")
    if cfg.agent:
        from agentic.agents import check_agent

        check_agent(cfg)
    if cfg.on_rewrite == "fork" and (cfg.teacher_urls or cfg.teacher_prompt):
        raise ConfigError("--on_rewrite fork: a teacher's server scores a single row; use --on_rewrite append.")
    if cfg.rollout == "multi_turn":
        from envs import adapters

        environment = adapters.environment_maker(cfg)()  # an error common to all of them shows here
        asyncio.run(adapters.put_away(environment, False, cfg))
    if "environment" in cfg.reward_funcs and not (cfg.env or cfg.agent):
        raise ConfigError("--reward_funcs environment: there is no --env to give a reward.")
    if has_turns and cfg.reward_funcs == ["reasoning_gym"] and not cfg.dataset_id.startswith("reasoning_gym:"):
        raise ConfigError("tools bring no reward: give --reward_funcs, such as last_number or my_rewards.py:right.")


def with_parser(cfg: TrainConfig, processor) -> TrainConfig:
    """The config, and those of its domains, with a parser of tool calls in place of `auto`. ConfigError if the chat
    template writes calls that the chosen parser cannot read."""
    parser_of = {}
    for domain in cfg.by_domain():
        if domain.env or domain.tools or domain.mcp_config or domain.agent:
            from inputs.formats import parser_for

            with naming_domain(domain):
                parser_of[domain.domain] = parser_for(domain.tool_parser, processor, bool(domain.env or domain.agent))
    entries = [e | ({"tool_parser": parser_of[e["name"]]} if e["name"] in parser_of else {}) for e in cfg.domains]
    return replace(cfg, domains=entries, tool_parser=parser_of.get("", cfg.tool_parser))


def settings_of_calls(cfg: TrainConfig, reward_functions: dict[str, Callable]) -> list[TrainConfig]:
    """The configs of the calls among which a row's trajectories are divided; those of one call are scored together.

    Usually one call makes all of them, since rewards, and rollouts, may compare completions. If the rollout and every
    reward function set `per_trajectory = True`, each trajectory is made by its own call and scored as it ends.
    """
    functions = [ROLLOUTS[cfg.rollout], *reward_functions.values()]
    if any_number(cfg) or not all(getattr(function, "per_trajectory", False) for function in functions):
        return [cfg]
    return [replace(cfg, num_generations=1)] * cfg.num_generations


async def each_alone(play_one: Callable, rows: list[dict], cfg: TrainConfig) -> list[Trajectory]:
    """The trajectories that the coroutine play_one(row, group) makes of the rows. Each runs as its own task and waits
    for no other; one that fails is returned as `failed_trajectory`."""

    async def play_or_fail(row: dict, group: int) -> Trajectory:
        try:
            return await play_one(row, group)
        except TrajectoryError as error:
            return failed_trajectory(row, group, error)

    tasks = (play_or_fail(row, group) for group, row in enumerate(rows) for _ in range(cfg.num_generations))
    return list(await asyncio.gather(*tasks))


async def agent(rows: list[dict], generator, cfg: TrainConfig) -> list[Trajectory]:
    """Agent programs that call the model through OpenAI's API (agentic/agents.py), up to --agent_concurrency at
    once."""
    from agentic import agents

    return await each_alone(lambda row, n: agents.play(row, n, generator, cfg), rows, cfg)


async def multi_turn(rows: list[dict], generator, cfg: TrainConfig) -> list[Trajectory]:
    """Model and environment (or tools) take turns: envs/turns.py."""
    from envs import adapters, turns

    make = adapters.environment_maker(cfg)

    async def play_one(row: dict, group: int) -> Trajectory:
        environment, reusable = await adapters.take_environment(make, row, cfg), False
        try:
            trajectory = await turns.play(row, group, environment, generator, cfg)
            reusable = True
            return trajectory
        finally:
            await adapters.put_away(environment, reusable, cfg)

    return await each_alone(play_one, rows, cfg)


# ---- one call of a rollout, and its result ---------------------------------------------------------------------------


class RolloutError(RuntimeError):
    """A rollout returned something else than was asked for, or something that cannot be trained on. The message holds
    the rollout's name, the row, what was asked for and what was returned."""


def any_number(cfg: TrainConfig) -> bool:
    """Whether the rollout itself decides how many trajectories a row has. A baseline is always one."""
    return getattr(ROLLOUTS[cfg.rollout], "any_number", False) and cfg.purpose != "baseline"


def group_size(row: dict, cfg: TrainConfig) -> int:
    """Completions to sample for a row in a training step: its column `num_generations`, or --num_generations."""
    return int(row.get("num_generations") or cfg.num_generations)


def group_sizes(rows: list[dict], cfg: TrainConfig) -> list[int]:
    """`group_size` of every row."""
    if not isinstance(rows, list) and not has_column(rows, "num_generations"):  # without reading all rows
        return [cfg.num_generations] * len(rows)
    return [group_size(row, cfg) for row in rows]


def sampled_by(row: dict, cfg: TrainConfig) -> TrainConfig:
    """The config by which a row is sampled: its domain's and, in training, the row's own number of completions."""
    domain_cfg = cfg.of(row)
    size = group_size(row, domain_cfg) if cfg.purpose == "train" else domain_cfg.num_generations
    return domain_cfg if size == domain_cfg.num_generations else replace(domain_cfg, num_generations=size)


async def call_rollout(row: dict, generator, cfg: TrainConfig) -> list[Trajectory]:
    """The trajectories that cfg.rollout makes of a row, cfg.num_generations of them, checked. RolloutError for anything
    else.

    If the rollout raises TrajectoryError, or takes longer than ROLLOUT_TIMEOUT, it has failed for this row: each of its
    trajectories is returned as `failed_trajectory`.
    """
    function = ROLLOUTS[cfg.rollout]
    limit = None if getattr(function, "limits_itself", False) else ROLLOUT_TIMEOUT
    try:
        returned = await asyncio.wait_for(function([row], generator, cfg), limit)
    except (TrajectoryError, TimeoutError) as error:
        timeout_error = TrajectoryError(f"rollout {cfg.rollout!r} took over {ROLLOUT_TIMEOUT:g} s", row)
        error = timeout_error if isinstance(error, TimeoutError) else error
        return [failed_trajectory(row, 0, error) for _ in range(cfg.num_generations)]
    trajectories = checked_rollout(returned, row, generator, cfg)
    for trajectory in trajectories if cfg.domain else ():
        trajectory.info["domain"] = cfg.domain
    return trajectories


def trajectory_fault(t: Trajectory, generator, cfg: TrainConfig) -> str | None:
    """What is wrong with a trajectory; None if it can be trained on."""
    for name in ("prompt_ids", "token_ids", "loss_mask", "logprobs", "token_rewards"):
        if not isinstance(value := getattr(t, name), list):
            return f"{name} is a {type(value).__name__}; give lists of plain numbers, such as {name}.tolist()"
    sampled = [place for place, mask in enumerate(t.loss_mask) if mask]
    # Image placeholders may lie beyond the vocabulary; they are never sampled.
    ids = [t.token_ids[place] for place in sampled] if t.images else t.prompt_ids + t.token_ids
    size = getattr(generator, "vocab_size", None) or math.inf
    if ids and not 0 <= min(ids) <= max(ids) < size:
        return f"token ids go from {min(ids)} to {max(ids)}, those of the model from 0 to {size - 1}"
    restarts, length, limit = t.info.get("restarts"), len(t.token_ids), cfg.max_completion_length
    if restarts is not None:  # an agent's contexts: each becomes a row and has to fit the window
        bounds, limit = [-len(t.prompt_ids), *restarts, length], limit + cfg.max_prompt_length
        if not all(a < b for a, b in pairwise([0, *bounds[1:]])):
            return f'info["restarts"], {restarts}, are not increasing places within its {length} token_ids'
        length = max(b - a for a, b in pairwise(bounds))
    if length > limit:
        return f"{length} tokens are over --max_completion_length ({limit}): end it before, with finish_reason 'length'"
    if bad_logprobs := [t.logprobs[place] for place in sampled if not -math.inf < t.logprobs[place] <= ABOVE_ZERO]:
        return f"logprobs have {bad_logprobs[0]:g} for a sampled token; give Completion.logprobs: finite, at most 0"
    return None


def checked_rollout(returned, row: dict, generator, cfg: TrainConfig) -> list[Trajectory]:
    """The returned trajectories of one row, if they are as asked for, copied so that they share nothing that scoring
    writes. RolloutError names the rollout, the row, what was asked for and what was returned. For built-in rollouts and
    others, whatever the purpose."""

    def refuse(came: str):
        request = f"asked for {cfg.num_generations} trajectories of one row (cfg.purpose {cfg.purpose!r})"
        return RolloutError(f"rollout {cfg.rollout!r}, {request}, {came}.\n  row: {shorten(row, 500)}")

    rule = "Return a list of Trajectory objects, cfg.num_generations for each row"
    if not isinstance(returned, list) or not all(isinstance(t, Trajectory) for t in returned):
        raise refuse(f"returned {shorten(returned)}, a {type(returned).__name__}. {rule}")
    if len(returned) != cfg.num_generations and not (any_number(cfg) and returned):
        exception = "or at least one, if it sets `any_number = True` (ROLLOUTS); a greedy baseline is exactly one"
        raise refuse(f"returned {len(returned)}. {rule}, {exception}")
    copies = []
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
        copies.append(t)
    return copies


# ---- data rows as the model sees them --------------------------------------------------------------------------------


def look_at(rows, name: str, processor, cfg: TrainConfig) -> list[int]:
    """Token counts of the first rows' prompts, with what tools add to them. ConfigError for a prompt that cannot be
    shown to the model, or if all are over --max_prompt_length. Prints how many are too long, and how many hold text
    that reads like special tokens."""
    head, lengths, lookalikes = rows[:LOOKED_AT], [], []
    if not (cfg.tools or cfg.mcp_config or cfg.env) and head and head[0].get("tools") and not own_schemas(head[0]):
        say_once(f"{name}: column `tools` holds no JSON schemas, and no --tools are given that it could name.")
    environment = None
    if (cfg.tools or cfg.mcp_config) and not cfg.env:
        from envs import adapters, turns

        environment = adapters.environment_maker(cfg)()
    for number, row in enumerate(head):
        try:
            prompt_row = row
            if environment:
                prompt_row, _ = turns.prompt_row(row, environment.reset(row, 0), environment, processor, cfg)
            lengths.append(len(vision_prompt(prompt_row, processor, None, cfg).token_ids))
        except PartError as error:
            raise ConfigError(f"{name}, row {number}: {error}.") from error
        lookalikes += pattern_of(processor).findall(str(row["prompt"]))[:1]
    over = sum(length > cfg.max_prompt_length for length in lengths)
    if head and over == len(head):
        limit = f"--max_prompt_length={cfg.max_prompt_length}"
        raise ConfigError(f"{limit}: {name} have longer prompts, the shortest of {min(lengths)} tokens. Raise it.")
    if over:
        say_once(f"{name}: {over} of the first {len(head)} prompts are over --max_prompt_length; they are left out.")
    if lookalikes and not cfg.no_apply_chat_template:  # without a template the prompt's special tokens are intended
        fate = "is broken up by a blank (--allow_special_tokens turns it into one)"
        fate = "becomes one" if cfg.allow_special_tokens else fate
        warning = f"text that reads like a special token, such as {lookalikes[0]!r}: it {fate}"
        say_once(f"{name}: {len(lookalikes)} of the first {len(head)} prompts hold {warning}.")
    return lengths


def cannot_be_shown(group: list[Trajectory], number: int) -> bool:
    """Whether the row of this number cannot be shown to the model; warns if so."""
    fault = next((t.info["failure"] for t in group if isinstance(t.info.get("failure"), RowError)), None)
    if fault:
        warn_once(f"row {number} of those in use is left out: {fault}", fault.cause)
    return fault is not None


# Attributes that a rollout may set:
#
#     mine.per_trajectory = True    it may be called once per completion, with num_generations 1, so that each is scored
#                                   as it ends (if all reward functions set it, too)
#     mine.any_number = True        it decides itself how many trajectories a row has, at least one: a tree search
#     mine.limits_itself = True     everything it waits for has a time limit, so ROLLOUT_TIMEOUT does not apply
ROLLOUTS: dict[str, Callable] = {
    "single_turn": single_turn,
    "multi_turn": multi_turn,
    "agent": agent,
}
single_turn.limits_itself = multi_turn.limits_itself = agent.limits_itself = True
multi_turn.per_trajectory = agent.per_trajectory = True
