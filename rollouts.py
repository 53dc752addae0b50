"""Prompts in, trajectories out: asyncio, one task a prompt, or a trajectory where there are several turns.

A rollout is a plain coroutine `(rows, generator, cfg) -> list[Trajectory]`: for each row `cfg.num_generations`
trajectories, those of one row adjacent. To add one: write it below and enter it in ROLLOUTS, where it says what a
rollout can say about itself. It is called once per row, `cfg.purpose` says what for, and `checked_rollout` compares
what came back with what was asked.

The generator is `VLLMClient` (vllm_client.py) or `HFGenerator` (hf_generator.py); both answer
`await generator.generate(prompt_ids, n=..., max_tokens=..., ...)` with a list of `Completion`.
"""

import asyncio
import functools
import inspect
import logging
import math
import numbers
import os
import random
import statistics
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from config import ConfigError, TrainConfig, known_name
from data import load_rows, shorten
from envs import Environment, ToolEnvironment, adapters
from envs.tools import HOW_TO_CALL, chat, cut, named_tools
from inputs.parts import NO_IMAGE, PartError, in_usual_form, parts_of, text_of_parts, without_sources
from inputs.pictures import PictureError
from inputs.prompts import (
    build_prompt,
    check_echo,
    continued,
    image_sources,
    is_vision,
    observed,
    prompt_lengths,
    prompt_messages,
    render,
    shown_by,
    special_text_in,
    with_tools,
)
from inputs.special_tokens import clean, each_text
from safety import credentials, limits, values
from safety.limits import MARGIN, Running, leave, noted, run_limited, warn_once
from safety.sandbox import check_contained
from safety.storable import calls_in, text_of
from serving.answers import ABOVE_ZERO
from serving.experts import joined

logger = logging.getLogger(__name__)


@dataclass
class Trajectory:
    """One prompt and everything after it, token by token. The four lists below have one entry per token after the
    prompt: `loss_mask` is 1 exactly where the policy sampled the token, its end-of-turn token included."""

    row: dict  # the data set row it came from
    group: int  # trajectories of one prompt share it
    prompt_ids: list[int]
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]  # the generator's, 0 where loss_mask is 0
    token_rewards: list[float]
    images: list = field(default_factory=list)
    finish_reason: str = "stop"  # "stop" or "length", as the generator said it: never inferred from the last token
    turns: int = 1
    policy_version: int = 0  # of the oldest weights that sampled any of it, and
    policy_version_last: int | None = None  # of the newest; None: the same
    info: dict = field(default_factory=dict)  # completion text, rewards by function, counters

    def __post_init__(self):
        lengths = {name: len(getattr(self, name)) for name in ("token_ids", "loss_mask", "logprobs", "token_rewards")}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a trajectory's per-token lists must have one length, got {lengths}")


def rollout_metrics(trajectories: list[Trajectory]) -> dict:
    """What a step's completions look like, over all ranks, which all call it. Keys are TRL's."""
    import torch  # here, so that an environment can be tried without it

    import utils

    lengths = [sum(t.loss_mask) for t in trajectories]
    out = means_over_ranks(by_completion(trajectories))
    out |= reward_means(trajectories)
    for name in ("reward_timeouts", "unrewarded", "reward_without_token"):  # completions of the step
        out[name] = int(utils.all_sum(torch.tensor(sum(t.info[name] for t in trajectories))))
    out["completions/max_length"], out["completions/min_length"] = (
        utils.all_max(max(lengths)),
        -utils.all_max(-min(lengths)),
    )
    out |= logged_by_rewards(trajectories)
    tokens = sum(len(t.prompt_ids) + len(t.token_ids) for t in trajectories)
    counts = {"num_tokens": tokens, "completions/count": len(trajectories)}
    counts = {name: int(utils.all_sum(torch.tensor(count))) for name, count in counts.items()}
    return out | turn_metrics(trajectories) | counts


def by_completion(trajectories: list[Trajectory]) -> dict[str, list[float]]:
    """Metrics that are means over completions: the number of each."""
    groups: dict[int, list[float]] = {}
    for t in trajectories:
        groups.setdefault(t.group, []).append(sum(t.token_rewards))
    std = {number: statistics.stdev(scores) if len(scores) > 1 else 0.0 for number, scores in groups.items()}
    return {
        "reward": [sum(t.token_rewards) for t in trajectories],
        "reward_std": [std[t.group] for t in trajectories],
        "frac_reward_zero_std": [float(std[t.group] < 1e-6) for t in trajectories],
        "frac_singleton_groups": [float(len(groups[t.group]) == 1) for t in trajectories],
        "completions/mean_length": [sum(t.loss_mask) for t in trajectories],
        "completions/clipped_ratio": [float(t.finish_reason == "length") for t in trajectories],
    }


def means_over_ranks(values: dict[str, list[float]]) -> dict[str, float]:
    """Collective."""
    import torch

    import utils

    moments = {name: utils.global_moments(torch.tensor(v, dtype=torch.float64)) for name, v in values.items()}
    return {name: float(mean) for name, (_, mean, _) in moments.items()}


def domain_metrics(trajectories: list[Trajectory], cfg: TrainConfig) -> dict:
    """NAME/reward and so on of each domain, over all ranks, which all call it; nothing of one that had no prompt."""
    import torch

    import utils

    out = {}
    for own in cfg.by_domain() if cfg.domains else ():
        mine = [t for t in trajectories if t.info.get("domain") == own.domain]
        solved = [float(sum(t.token_rewards) >= own.eval_solved) for t in mine]
        metrics = means_over_ranks(by_completion(mine) | {"solved": solved}) | reward_means(mine) | turn_metrics(mine)
        metrics |= logged_by_rewards(mine)
        prompts = int(utils.all_sum(torch.tensor(len({t.group for t in mine}))))
        out |= {own.prefix + name: value for name, value in (metrics | {"prompts": prompts}).items() if prompts}
    return out


def eval_metrics(groups: list[list[Trajectory]], cfg: TrainConfig) -> dict:
    """What completions of held-out rows are worth, over all ranks, which all call it; see `evaluate` in the script.

    The k of mean@k and pass@k is --eval_generations. Of a rollout that decides itself how many it returns it is the
    number that every row had, or else "all"; completions_per_row is their mean.
    """
    import torch

    import utils

    sizes = {(len(group), any_number(cfg.of(group[0].row))) for group in groups}
    sizes = set().union(*utils.gather_objects(sizes))
    own, counted = any(free for _, free in sizes), {size for size, _ in sizes}
    k = (counted.pop() if len(counted) == 1 else "all") if own else cfg.eval_generations
    mine = sum(groups, [])
    scores = [torch.tensor([sum(t.token_rewards) for t in group]) for group in groups]
    solved = [(row >= cfg.of(group[0].row).eval_solved).double() for row, group in zip(scores, groups, strict=True)]
    length = sum(float(len(t.token_ids)) for t in mine)
    sums = [sum(row.sum() for row in scores), sum(row.sum() for row in solved), sum(row.max() for row in solved)]
    sums = torch.tensor([*map(float, sums), length, len(mine), len(groups)], dtype=torch.float64)
    reward, right, any_right, length, count, number = utils.all_sum(sums).tolist()
    count, rows = max(count, 1), int(number)
    metrics = {"reward": reward / count, f"mean@{k}": right / count, f"pass@{k}": any_right / max(number, 1)}
    means = reward_means(mine)  # of one function alone it is the reward
    metrics |= means if len(means) > 1 else {}
    metrics |= {"completions_per_row": count / max(rows, 1)} if own else {}
    return metrics | {"mean_length": length / count, "rows": rows}


def turn_metrics(trajectories: list[Trajectory]) -> dict:
    """Turns and calls of tools, over all ranks, which all call it; {} where nothing was played in turns. Names of tools
    may differ by rank."""
    import torch

    import utils

    played = [t for t in trajectories if "turns" in t.info]  # of several domains some may have one turn alone
    infos = [turn["info"] for t in played for turn in t.info["turns"]]
    calls = [call for info in infos for call in calls_in(info)]
    sums = {"turns": sum(t.turns for t in played), "trajectories": len(played)}
    sums |= {"calls": len(calls), "failed": sum(call["failed"] for call in calls)}
    sums |= {"tools": sum(isinstance(info.get("calls"), list) for info in infos)}
    for call in calls:
        if not all(isinstance(call.get(key), (int, float)) for key in ("seconds", "cached")) or "name" not in call:
            continue  # of an environment's own making
        for key, value in (("calls", 1), ("seconds", call["seconds"]), ("cached", call["cached"])):
            sums[f"{call['name']}/{key}"] = sums.get(f"{call['name']}/{key}", 0) + value
    names = sorted(set().union(*utils.gather_objects(set(sums))))
    summed = utils.all_sum(torch.tensor([float(sums.get(name, 0)) for name in names], dtype=torch.float64)).tolist()
    total = dict(zip(names, summed, strict=True))
    if not total["trajectories"]:
        return {}
    out = {"turns/mean": total["turns"] / total["trajectories"]}
    if total["tools"]:
        out["tools/call_frequency"] = total["calls"] / total["trajectories"]
    if total["calls"]:
        out["tools/failure_frequency"] = total["failed"] / total["calls"]
        out["tools/unreadable_frequency"] = total.get("unreadable/calls", 0.0) / total["calls"]
    for name in (name.removesuffix("/calls") for name in names if name.endswith("/calls")):
        for key in ("seconds", "cached"):  # a call, on average
            out[f"tools/{name or 'unreadable'}/{key}"] = total[f"{name}/{key}"] / total[f"{name}/calls"]
    return out


def counts_by_origin(trajectories: list[Trajectory]) -> dict:
    """rollout/ORIGIN: trajectories of the step that were not sampled in it, by their info["origin"], on all ranks."""
    import utils

    mine = Counter(t.info["origin"] for t in trajectories if "origin" in t.info)
    return {f"rollout/{origin}": n for origin, n in sum(utils.gather_objects(mine), Counter()).items()}


def reward_means(trajectories: list[Trajectory]) -> dict:
    """Mean of every reward function and component where it applied, over all ranks, which all call it."""
    import torch

    import utils

    mine, out = {key for t in trajectories for key in t.info["rewards"]}, {}  # components may differ by row
    keys = set().union(*utils.gather_objects(mine))
    components = {key for key in keys if "/" in key}
    for key in sorted(keys - components | bounded("names of rewards' components", components)):
        values = [t.info["rewards"].get(key, math.nan) for t in trajectories]
        values = torch.tensor(values, dtype=torch.float64)
        count, mean, _ = utils.global_moments(values.nan_to_num(), ~values.isnan())
        out |= {f"rewards/{key}/mean": float(mean)} if count else {}
    return out


def logged_by_rewards(trajectories: list[Trajectory]) -> dict:
    """Means of what reward functions gave to `log_metric`, over all ranks, which all call it."""
    import utils

    mine = [pair for t in trajectories for pair in t.info.get("logged", ())]
    values: dict[str, list[float]] = {}
    for name, value in sum(utils.gather_objects(mine), []):
        values.setdefault(name, []).append(value)
    return {name: statistics.fmean(values[name]) for name in sorted(bounded("names given to log_metric", {*values}))}


MOST_NAMES = 100
_NAMED: dict[str, set[str]] = {}


def bounded(what: str, names: set[str]) -> set[str]:
    """Those of the names that become metrics, the same on every rank: the first MOST_NAMES of a run. Names made of what
    a model says would have no end, and a tracker keeps each of them for ever."""
    known = _NAMED.setdefault(what, set())
    known.update(sorted(names - known)[: MOST_NAMES - len(known)])
    if left_out := sorted(names - known):
        warn_once(f"over {MOST_NAMES} {what}; {shorten(left_out[0], 80)} and other new ones are no metrics. Said once.")
    return names & known


def sampling_options(cfg: TrainConfig) -> dict:
    """The sampling arguments of `generator.generate` that a config sets; every turn samples with the same ones."""
    options = dict(temperature=cfg.temperature, max_tokens=cfg.max_completion_length)
    options |= dict(min_tokens=cfg.min_completion_length, top_p=cfg.top_p, top_k=cfg.top_k, min_p=cfg.min_p)
    return {name: value for name, value in options.items() if value is not None}


async def sample_enough(sample: Callable, drawn: list[int], wanted: int, spare: int) -> tuple[list, dict]:
    """Results of `wanted` of the prompts `drawn`, and counts of the others.

    sample: a coroutine number -> (group, whether it is silent, ...).

    The moment a group ends silent another prompt begins; when `drawn` is used up silent ones stay, so that a step never
    grows or shrinks. `spare` prompts begin beforehand. Groups count in the order in which they were drawn: a spare one
    takes the place of a silent one, never of one that is merely slow, or short completions would be preferred. What is
    not needed is cancelled, on the server too.

        2 wanted, 1 spare; a b c d e drawn. Begun: a b c. b ends silent: d begins, a and c are chosen. When these two
        have ended, the step is done and d is cancelled; were c silent, too, e would begin, and d be chosen.
    """
    tasks: list[asyncio.Task] = []  # in the order of `drawn`
    try:
        while True:
            silent = [task for task in tasks if task.done() and task.result()[1]]
            chosen = [task for task in tasks if task not in silent][:wanted]  # these have signal, or still may have
            if len(tasks) == len(drawn):
                chosen += silent[: wanted - len(chosen)]
            if len(chosen) == wanted and all(task.done() for task in chosen):
                break
            new = drawn[len(tasks) : wanted + spare + len(silent)]
            tasks += [asyncio.create_task(sample(number)) for number in new]
            await asyncio.wait({task for task in tasks if not task.done()}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left_over = [task for task in tasks if not task.done()]
        for task in left_over:
            task.cancel()
        await asyncio.gather(*left_over, return_exceptions=True)
    stayed = sum(task in silent for task in chosen)
    replaced = len(silent) - stayed
    counts = {"resampled": replaced, "silent": stayed, "unused": len(tasks) - wanted - replaced}
    return [task.result() for task in chosen], counts


async def single_turn(rows: list[dict], generator, cfg: TrainConfig) -> list[Trajectory]:
    """Each prompt is answered once: one request per prompt with n = num_generations."""

    async def one_prompt(group: int, row: dict) -> list[Trajectory]:
        try:
            prompt = build_prompt(row, generator, cfg)
        except PictureError as error:  # of a file that was not decoded at start, or has changed since
            failure = RowPictureError(str(error), row)
            if cfg.env_errors == "stop":
                raise failure from error
            return [failed_trajectory(row, group, failure) for _ in range(cfg.num_generations)]
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
    several = bool(cfg.env or cfg.tools or cfg.mcp_config)
    if cfg.rollout == "multi_turn":
        if not several:
            raise ConfigError("--rollout multi_turn needs --env, --tools or --mcp_config.")
        asyncio.run(try_environment(cfg))
    elif cfg.rollout == "single_turn" and several:
        raise ConfigError(
            "--rollout single_turn asks no environment or tool; leave it out, or --env, --tools, --mcp_config."
        )
    if "environment" in cfg.reward_funcs and not cfg.env:
        raise ConfigError("--reward_funcs environment: there is no --env to give a reward.")
    if several and cfg.reward_funcs == ["reasoning_gym"] and not cfg.dataset_id.startswith("reasoning_gym:"):
        raise ConfigError("tools bring no reward: give --reward_funcs, such as last_number or my_rewards.py:right.")


async def try_environment(cfg: TrainConfig) -> None:
    """Make one environment, and close it: what is wrong with all of them shows at the start."""
    outcome = await run_limited(adapters.environment_maker(cfg), {}, cfg.tool_timeout, values.unread)
    if outcome is None:
        raise ConfigError(f"--env {cfg.env}: making one took over {cfg.tool_timeout:g} s; see --tool_timeout.")
    environment, error = outcome
    if error is not None:
        raise error
    await put_away(environment, {}, False, cfg)


def scored_together(cfg: TrainConfig, reward_functions: dict[str, Callable]) -> list[TrainConfig]:
    """How a row's trajectories are divided among calls of its rollout; those of one call are scored together.

    One call has them all, since rewards may compare completions, and a rollout may, too. If the rollout and every
    reward function say `per_trajectory = True`, each is made by a call of its own and scored as it ends.
    """
    alone = [ROLLOUTS[cfg.rollout], *reward_functions.values()]
    if any_number(cfg) or not all(getattr(function, "per_trajectory", False) for function in alone):
        return [cfg]
    return [replace(cfg, num_generations=1)] * cfg.num_generations


async def multi_turn(rows: list[dict], generator, cfg: TrainConfig) -> list[Trajectory]:
    """Model and environment (or tools) by turns. Every trajectory is a task of its own and waits for no other.

    With --env_errors drop one whose environment fails is returned as `failed_trajectory`.
    """
    make = adapters.environment_maker(cfg)

    async def one(row: dict, group: int) -> Trajectory:
        environment, reusable = None, False
        try:
            environment = await take_environment(make, row, cfg)
            trajectory = await play(row, group, environment, generator, cfg)
            reusable = True
            return trajectory
        except TrajectoryError as error:
            if cfg.env_errors == "stop":
                raise
            return failed_trajectory(row, group, error)
        finally:
            if environment is not None:
                await put_away(environment, row, reusable, cfg)

    played = (one(row, group) for group, row in enumerate(rows) for _ in range(cfg.num_generations))
    return list(await asyncio.gather(*played))


# ---- one call of a rollout, and what came back -----------------------------------------------------------------------


class RolloutError(RuntimeError):
    """A rollout returned what was not asked for, or what cannot be trained on. The message holds its name, the row,
    what was asked and what came."""


def any_number(cfg: TrainConfig) -> bool:
    """Whether the rollout decides itself how many trajectories a row has. A baseline is always one."""
    return getattr(ROLLOUTS[cfg.rollout], "any_number", False) and cfg.purpose != "baseline"


def group_size(row: dict, cfg: TrainConfig) -> int:
    """Completions to sample of a row in a training step: its column `num_generations`, or --num_generations if it has
    none, or None there. ConfigError for what is no such number."""
    size = row.get("num_generations")
    if size is None:
        return cfg.num_generations
    if isinstance(size, bool) or not isinstance(size, numbers.Real) or not 1 <= size < math.inf or size % 1:
        raise ConfigError(
            f"column num_generations is {shorten(size)} in the row with prompt {shorten(row.get('prompt'))}: it is the "
            "number of completions to sample of that row, a whole one from 1 on (or None: --num_generations). Rename "
            "the column in format_row (train script) if it means something else."
        )
    return int(size)


def group_sizes(rows: list[dict], cfg: TrainConfig) -> list[int]:
    """`group_size` of every row."""
    return [group_size(row, cfg) for row in rows]


def check_smallest(rows: list[dict], cfg: TrainConfig, check_algorithm: Callable) -> None:
    """ConfigError if the advantage cannot work with the smallest group that a row asks for."""
    if (size := min(group_sizes(rows, cfg), default=cfg.num_generations)) < cfg.num_generations:
        try:
            check_algorithm(replace(cfg, num_generations=size))
        except ConfigError as error:
            raise ConfigError(f"column num_generations of a row: {error}") from None


def sampled_by(row: dict, cfg: TrainConfig) -> TrainConfig:
    """The config by which a row is sampled: its domain's, with its own number of completions while training."""
    own = cfg.of(row)
    size = group_size(row, own) if cfg.purpose == "train" else own.num_generations
    return own if size == own.num_generations else replace(own, num_generations=size)


async def call_rollout(row: dict, generator, cfg: TrainConfig) -> list[Trajectory]:
    """What cfg.rollout makes of a row: cfg.num_generations trajectories, checked. RolloutError if they are not that.

    A rollout that raises TrajectoryError, or takes longer than --rollout_timeout, has failed for this row: with
    --env_errors drop they are returned as `failed_trajectory`.
    """
    try:
        returned = await in_time(ROLLOUTS[cfg.rollout], row, generator, cfg)
    except TrajectoryError as error:
        if cfg.env_errors == "stop":
            raise
        return [failed_trajectory(row, 0, error) for _ in range(cfg.num_generations)]
    return checked_rollout(returned, row, generator, cfg)


async def in_time(function: Callable, row: dict, generator, cfg: TrainConfig):
    """What the rollout returns for one row; TrajectoryError if it is late."""

    async def run():
        with noted(Running(limits.name_of(function), cfg.rollout_timeout, rollout=True)):
            returned = function([row], generator, cfg)
            if not inspect.isawaitable(returned):
                fault = f"rollout {cfg.rollout!r} is no coroutine, it returned {shorten(returned)} when it was called"
                raise RolloutError(f"{fault}. Write it as `async def`, and `return` a list at its end.")
            try:
                return await returned
            except SystemExit as error:  # else asyncio ends at once, and nobody knows whose it was
                remedy = "raise an error, or TrajectoryError to give up on the row"
                raise RolloutError(f"rollout {cfg.rollout!r} called sys.exit({error.code!r}): {remedy}.") from error

    if getattr(function, "limits_itself", False):
        return await function([row], generator, cfg)
    late = f"rollout {cfg.rollout!r} took over {cfg.rollout_timeout:g} s (--rollout_timeout)"
    sampling = getattr(generator, "seconds_sampling", float)  # --generator hf samples on this loop: that is not counted

    def clock() -> float:
        return time.monotonic() - sampling()

    task, deadline = asyncio.ensure_future(run()), clock() + cfg.rollout_timeout
    _UNDER_WAY[task] = clock, deadline + MARGIN, threading.get_ident(), late
    task.add_done_callback(_UNDER_WAY.pop)
    watch_calls()
    try:
        while not task.done() and (left := deadline - clock()) > 0:
            await asyncio.wait({task}, timeout=left)
        ended = task.done()
    finally:
        task.cancel()  # not waited for: it may not let itself be cancelled
    if not ended:
        raise TrajectoryError(late, row)
    if task.cancelled():
        cause = (
            "ended by asyncio.CancelledError, which something it waits for let through: catch it where it comes from"
        )
        raise RolloutError(f"rollout {cfg.rollout!r} {cause}.\n  row with prompt {shorten(row['prompt'])}")
    if isinstance(error := task.exception(), Exception):
        error.add_note(f"Raised by rollout {cfg.rollout!r} for the row with prompt {shorten(row['prompt'])}.")
    return task.result()


# A rollout's clock, when it must have ended by that, its thread, its fault.
_UNDER_WAY: dict[asyncio.Task, tuple[Callable[[], float], float, int, str]] = {}


@functools.cache
def watch_calls() -> None:
    """From here on, end the process if a rollout is far over its time although it was cancelled: it blocks the event
    loop on which all others wait, or takes no notice."""

    def look():
        while True:
            time.sleep(1)
            for task, (clock, deadline, thread, late) in list(_UNDER_WAY.items()):
                if clock() > deadline and not task.done():
                    frames = traceback.format_stack(sys._current_frames().get(thread))[-8:]
                    leave(
                        1,
                        f"{late}, and could not be cancelled: it blocks the event loop, which others wait for, or "
                        "catches asyncio.CancelledError and goes on. Write `await` where it waits, "
                        "`await asyncio.to_thread(...)` around what blocks. Its thread stands in\n" + "".join(frames),
                    )

    threading.Thread(target=look, name="limits of rollouts", daemon=True).start()


def checked_rollout(returned, row: dict, generator, cfg: TrainConfig) -> list[Trajectory]:
    """Trajectories of one row as they were asked for, none of which shares anything that scoring writes; RolloutError
    naming the rollout, the row, what was asked and what came. Of built-in rollouts and others, for whatever purpose."""

    def refuse(came: str, remedy: str):
        asked = f"asked for {cfg.num_generations} trajectories of one row (cfg.purpose {cfg.purpose!r})"
        shown = shorten(row, 500)
        return RolloutError(f"rollout {cfg.rollout!r}, {asked}, {came}. {remedy}\n  row: {shown}")

    rule = "Return a list of Trajectory objects, cfg.num_generations for each row"
    if not isinstance(returned, (list, tuple)):
        raise refuse(f"returned {shorten(returned)}, a {type(returned).__name__}", f"{rule}.")
    if others := [t for t in returned if not isinstance(t, Trajectory)]:
        raise refuse(f"returned a list with {shorten(others[0])}, a {type(others[0]).__name__}", f"{rule}.")
    if len(returned) != cfg.num_generations and not (any_number(cfg) and returned):
        more = "which is 1 for a greedy baseline" if cfg.purpose == "baseline" else "or at least one, if it says"
        more += "" if cfg.purpose == "baseline" else " `any_number = True` about itself (rollouts.py, ROLLOUTS)"
        raise refuse(f"returned {len(returned)}", f"{rule}, {more}.")
    if len({id(t) for t in returned}) < len(returned):
        raise refuse("returned one of them several times", "Sample each by itself: copies teach nothing new.")
    if len(groups := {t.group for t in returned}) > 1:
        remedy = "Those of one row are compared with one another: give them one number; after_rollout can divide them."
        raise refuse(f"returned groups {shorten(sorted(groups, key=str))} for one row", remedy)
    checked = []
    for index, t in enumerate(returned):
        if not same_row(t.row, row):
            remedy = "Give each trajectory the row it was asked for, unchanged; further columns may be added."
            raise refuse(f"returned trajectory {index} with another row, {shorten(t.row, 300)}", remedy)
        if not isinstance(t.info, dict):
            raise refuse(f"returned trajectory {index} whose info is {shorten(t.info)}", "It is a dict.")
        if "failure" not in t.info:
            if fault := trajectory_fault(t, generator, cfg):
                raise refuse(f"returned trajectory {index} whose {fault[0]}", fault[1])
            logprobs = [float(p) if m else 0.0 for p, m in zip(t.logprobs, t.loss_mask, strict=True)]
            t = replace(t, token_rewards=list(t.token_rewards), logprobs=logprobs, info=dict(t.info))
            if "completion" not in t.info:
                sampled = [token for token, mask in zip(t.token_ids, t.loss_mask, strict=True) if mask]
                t.info["completion"] = generator.tokenizer.decode(sampled, skip_special_tokens=True)
        checked.append(t)
    return checked


def same_row(given, row: dict) -> bool:
    """Whether it is the row, or a copy of it, perhaps with more columns."""

    def equal(a, b) -> bool:
        try:
            return a is b or bool(a == b)
        except Exception:  # arrays, and objects of somebody else's
            return repr(a) == repr(b)

    return given is row or isinstance(given, dict) and all(k in given and equal(given[k], row[k]) for k in row)


def trajectory_fault(t: Trajectory, generator, cfg: TrainConfig) -> tuple[str, str] | None:
    """What is wrong with a trajectory, and the remedy; None if it can be trained on."""
    per_token = ("token_ids", "loss_mask", "logprobs", "token_rewards")
    for name in ("prompt_ids", *per_token):
        given = getattr(t, name)
        if not isinstance(given, list):
            return f"{name} is a {type(given).__name__}", f"Give lists of plain numbers, such as {name}.tolist()."
        kind = numbers.Integral if name.endswith("ids") else numbers.Real
        if other := [k for k in {*map(type, given)} if not issubclass(k, kind)]:
            return f"{name} holds a {other[0].__name__}", "Give lists of plain numbers."
    lengths = {name: len(getattr(t, name)) for name in per_token}
    if len({*lengths.values()}) > 1:
        return f"per-token lists differ in length: {lengths}", "Give each an entry per token after the prompt."
    if not t.prompt_ids:
        return "prompt_ids is empty", "The first token after the prompt is predicted from it."
    ids, size = t.prompt_ids + t.token_ids, getattr(generator, "vocab_size", None) or math.inf
    # Placeholders of images may lie beyond the vocabulary; they are never sampled.
    words = [token for token, mask in zip(t.token_ids, t.loss_mask, strict=True) if mask] if t.images else ids
    if min(ids) < 0 or max(words, default=0) >= size:
        return f"token ids go from {min(ids)} to {max(ids)}", f"The model's go from 0 to {size - 1}."
    if len(t.token_ids) > cfg.max_completion_length:
        remedy = "End it before, with finish_reason 'length', or raise the flag, and the server's --max-model-len."
        return f"{len(t.token_ids)} tokens are over --max_completion_length={cfg.max_completion_length}", remedy
    if not {*t.loss_mask} <= {0, 1}:
        return f"loss_mask has {shorten(sorted({*t.loss_mask}))}", "1 where the policy sampled the token, else 0."
    wrong = [p for p, mask in zip(t.logprobs, t.loss_mask, strict=True) if mask and not -math.inf < p <= ABOVE_ZERO]
    if wrong:
        remedy = "Give the log-probabilities of Completion.logprobs, finite and at most 0, for all sampled tokens."
        return f"logprobs have {wrong[0]:g} for a sampled token", remedy
    if wrong := [reward for reward in t.token_rewards if not abs(reward) <= values.LARGEST]:
        remedy = f"Rewards are finite, from -{values.LARGEST:g} to {values.LARGEST:g}."
        return f"token_rewards have {wrong[0]:g}", remedy
    if t.finish_reason not in ("stop", "length"):
        remedy = "'stop', or 'length' where a limit cut it: see Completion."
        return f"finish_reason is {shorten(t.finish_reason)}", remedy
    return None


# ---- calls of an environment: within a time, off the event loop, at the cost of one trajectory ---------------------


class TrajectoryError(RuntimeError):
    """What ends one trajectory and no other: its environment failed, or a message of it cannot be shown to the model.
    `cause` is the same for all trajectories that failed for the same reason."""

    def __init__(self, cause: str, row: dict | None = None):
        where = "" if row is None else f"\n  row with prompt {shorten(row['prompt'])}"
        super().__init__(cause + where)
        self.cause = cause


class RowPictureError(TrajectoryError):
    """An image of a data row that cannot be read: its group's only fault, which says nothing about other rows."""


_IDLE: dict[tuple, list] = {}  # environments with `pooled = True` that nobody plays at the moment


def kind_of(row: dict, cfg: TrainConfig) -> tuple:
    """Environments of one kind can stand for each other."""
    return adapters.kind(cfg), repr(row.get(adapters.COLUMN))  # a column of this name may hold anything


async def take_environment(make: Callable, row: dict, cfg: TrainConfig):
    """An environment for one trajectory: an idle one, or a new one. A constructor may take as long as a step."""
    if idle := _IDLE.get(kind_of(row, cfg)):
        return idle.pop()
    return await limited(make, {"row": row}, cfg.tool_timeout, "making an environment", row)


async def put_away(environment, row: dict, reusable: bool, cfg: TrainConfig) -> None:
    """close() what was played, or keep it for the next trajectory. A close() that fails costs a warning."""
    if reusable and getattr(environment, "pooled", False):
        _IDLE.setdefault(kind_of(row, cfg), []).append(environment)
        return
    outcome = await run_limited(environment.close, {}, cfg.tool_timeout, values.unread)
    if outcome is None or outcome[1] is not None:
        fault = f"took over {cfg.tool_timeout:g} s" if outcome is None else f"raised {shorten(outcome[1], 500)}"
        warn_once(f"{name_of(environment)}.close() {fault}. Said once.")


async def call_environment(environment, method: str, of: dict, cfg: TrainConfig, **arguments):
    """environment.METHOD within its time; TrajectoryError naming it and the row, `of`, if it fails or is late."""
    seconds = (method == "step" and environment.step_timeout) or cfg.tool_timeout
    what = f"{name_of(environment)}.{method}()"
    read = {"step": values.step, "score": values.number, "state": values.state, "metrics": values.info_of}
    return await limited(getattr(environment, method), arguments, seconds, what, of, read.get(method, values.plain))


async def limited(function: Callable, arguments: dict, seconds: float, what: str, row: dict, read=values.unread):
    outcome = await run_limited(function, arguments, seconds, read)
    if outcome is None:
        raise TrajectoryError(f"{what} took over {seconds:g} s (--tool_timeout)", row)
    if isinstance(outcome[1], values.UnusableResult):
        raise TrajectoryError(f"{what} {outcome[1]}", row) from outcome[1]
    if outcome[1] is not None:
        raise TrajectoryError(f"{what} raised {shorten(outcome[1], 500)}", row) from outcome[1]
    return outcome[0]


def failed_trajectory(row: dict, group: int, error: Exception) -> Trajectory:
    """Stands for a trajectory that could not be played or scored to its end: nothing of it is trained on."""
    return Trajectory(row, group, [], [], [], [], [], finish_reason="failed", info={"failure": error})


def empty_trajectory(row: dict, cfg: TrainConfig) -> Trajectory:
    """In the batch of a rank on which every trajectory failed: a row without a sampled token. The ranks make the same
    collective calls, so each needs a row with the same fields."""
    counts = dict.fromkeys(("unrewarded", "reward_timeouts", "reward_without_token"), 0)
    scores = {"rewards": {}, "reward": 0.0, "reward_components": [0.0] * len(cfg.reward_funcs), "baselines": 0.0}
    info = {"completion": "", "model_inputs": {}, "row_number": -1} | counts | scores
    if cfg.rollout == "multi_turn":
        info["turns"] = []
    return Trajectory(row, 0, [0], [0], [0], [0.0], [0.0], finish_reason="failed", info=info)


def without_failed(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
    return [[t for t in group if "failure" not in t.info] for group in groups]


_SHOWN: set[str] = set()  # causes whose traceback was printed, at most MOST_SHOWN
MOST_SHOWN = 10


def check_failed(groups: list[list[Trajectory]], cfg: TrainConfig) -> int:
    """How many of a step's trajectories failed, over all ranks, which all call it. Prints the traceback of each new
    cause; above --max_failed raises the commonest one, on every rank. Rows with a damaged image are named, and do not
    end a run that has others."""
    import utils

    failures = [t.info["failure"] for group in groups for t in group if "failure" in t.info]
    damaged = [t for group in groups for t in group if isinstance(t.info.get("failure"), RowPictureError)]
    for t in damaged:
        warn_once(f"row {t.info.get('row_number', '?')} of those in use is left out: {t.info['failure']}")
    mine: dict[str, tuple[int, type, str]] = {}
    for error in failures:
        named = error.cause in mine or error.cause in _SHOWN or isinstance(error, RowPictureError)
        if not named and len(_SHOWN) < MOST_SHOWN:
            _SHOWN.add(error.cause)
            frames = traceback.format_exception(error.__cause__ or error)[:-1]  # the last is the message, said already
            logger.warning("a trajectory failed and is left out: %s\n%s", error, "".join(frames)[-5000:])
        mine[error.cause] = (mine[error.cause][0] + 1 if error.cause in mine else 1, type(error), str(error))
    everyone = utils.gather_objects((mine, len(failures), sum(map(len, groups)), len(damaged), len(groups)))
    failed, total, excused, prompts = (sum(part[k] for part in everyone) for k in (1, 2, 3, 4))
    excused *= failed < total or prompts == 1  # were no row's image readable, the run would be of none
    if failed - excused > cfg.max_failed * total:
        times: Counter = Counter()
        for causes, *_ in everyone:
            times.update({cause: count for cause, (count, _, _) in causes.items()})
        cause, most = times.most_common(1)[0]
        kind, text = next(causes[cause][1:] for causes, *_ in everyone if cause in causes)
        ours = next((error for error in failures if error.cause == cause), None)
        raise kind(
            f"{text}\n  {failed} of {total} trajectories of this step failed, {most} of them for this cause. "
            f"--max_failed={cfg.max_failed:g} is the share that may fail before the run stops."
        ) from (ours and ours.__cause__)
    return failed


# ---- what an environment says ----------------------------------------------------------------------------------------


def name_of(environment) -> str:
    """The class of an environment, or of the object whose methods are its tools."""
    return type(getattr(environment, "inner", environment)).__name__


def seed_of(row: dict, cfg: TrainConfig) -> int:
    """The row's column `seed`, or a number made of its prompt: members of a group, and a resumed run, share it."""
    if row.get("seed") is not None:
        return row["seed"]
    return cfg.seed ^ zlib.crc32(repr(without_sources(row["prompt"])).encode())  # an image shows as its address


async def reset(environment, row: dict, cfg: TrainConfig, processor=None) -> list[dict]:
    """The environment's prompt as chat messages; it may be text."""
    messages = await call_environment(environment, "reset", row, cfg, row=row, seed=seed_of(row, cfg))
    return checked_messages(messages, f"{name_of(environment)}.reset()", processor)


async def state_of(environment, row: dict, cfg: TrainConfig):
    """What the environment says of the state it is in, for advantages that compare turns; None if it says nothing."""
    if type(environment).state is Environment.state:
        return None
    return await call_environment(environment, "state", row, cfg)


def checked_messages(messages, whose: str, processor=None, most: int | None = None) -> list[dict]:
    """Chat messages as the model can be shown them. Text becomes a user's message, lone halves of emoji are replaced,
    texts longer than `most` cut; to a tokenizer, which knows no images, parts become text."""
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    usable = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), (str, list))
        for m in messages
    )
    if not usable:
        form = '[{"role": "user", "content": "..."}]'
        raise TrajectoryError(f"{whose} must give chat messages, such as {form}; it gave {shorten(messages)}")
    try:
        messages = [in_usual_form(message) for message in messages]
    except PartError as error:
        raise TrajectoryError(f"{whose} gave a message that cannot be shown: {error}") from error
    messages = each_text(messages, clean)
    if most is not None:
        shown = [message | {"content": cut(message["content"], most)} for message in messages]
        if shown != messages:
            warn_once(f"{whose} gave a message over --max_tool_result {most} characters: the model sees its beginning.")
        messages = shown
    if processor is None or is_vision(processor):
        return messages
    return [message | {"content": as_text(message["content"], whose)} for message in messages]


def as_text(content: str | list, whose: str) -> str:
    """Parts of a message as text, for models without images."""
    if any(part["type"] == "image" for part in parts_of(content)):
        warn_once(f"{whose} gives images, and the model of --model_id takes none: it reads {NO_IMAGE!r} instead.")
    return text_of_parts(content)


def checked_step(outcome, environment, processor=None, most: int | None = None) -> tuple[list[dict], float, bool, dict]:
    """What step() returned, with `checked_messages` and None as no info; TrajectoryError if it is no such."""
    whose = f"{name_of(environment)}.step()"
    if not isinstance(outcome, tuple) or len(outcome) != 4:
        raise TrajectoryError(f"{whose} must return (messages, reward, done, info); it returned {shorten(outcome)}")
    answers, reward, done, info = outcome
    answers = checked_messages(answers, whose, processor, most)
    try:
        return answers, finite_number(reward), bool(done), {} if info is None else dict(info)
    except (TypeError, ValueError, OverflowError) as error:
        raise TrajectoryError(
            f"{whose}: reward {shorten(reward)} and info {shorten(info)} must be a finite number and a dict"
        ) from error


def finite_number(value) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{number} is not finite")
    return number


def begun(row: dict, messages: list[dict], environment, processor, cfg: TrainConfig) -> tuple[dict, list[dict]]:
    """(the row with the prompt that its environment made of it, schemas of its tools for the chat template)"""
    # No chat template asks for plain tags: the environment's own words do.
    schemas = [tool.schema() for tool in environment.tools.values() if cfg.tool_parser != "tags"]
    row = row | {"prompt": messages}
    return with_tools(row, schemas, environment.instructions, processor, cfg.system_prompt), schemas


def measure(rows, name: str, processor, cfg: TrainConfig) -> list[int]:
    """Tokens of each row's prompt, with what tools add to it. ConfigError for a row that no environment can play.

    Rows whose text reads like special tokens are counted and said.
    """
    adapters.check_rows(rows, cfg)
    group_sizes(rows, cfg)
    # A resumed run has to have the rows that it had, damaged ones too.
    decode = "all" if cfg.check_images else "none" if cfg.resume else "some"
    lengths = prompt_lengths(rows, name, processor, cfg, decode)
    if (cfg.tools or cfg.mcp_config) and not cfg.env:
        lengths = lengths_with_tools(rows, lengths, processor, cfg)
    if os.environ.get("RANK", "0") == "0" and (said := special_text_in(rows, processor, cfg)):
        print(f"{name}: {said}")
    return lengths


def lengths_with_tools(rows, plain: list[int], processor, cfg: TrainConfig) -> list[int]:
    """Tokens of every prompt with what the tools of its row add, given those without, `plain`. A set of tools adds the
    same to all prompts: it is measured once. Prompts that come near the limit so are measured one by one."""
    environment, added, lengths = adapters.environment_maker(cfg)(), {}, []
    for row, length in zip(rows, plain, strict=True):
        messages = environment.reset(row, 0)
        tools = tuple((name, *tool.parameters.get("properties", ())) for name, tool in environment.tools.items())
        kind = (tools, messages[0]["role"])
        estimate = length + added.get(kind, 0)
        if kind not in added or abs(estimate - cfg.max_prompt_length) <= NEAR:
            shown, _ = begun(row, messages, environment, processor, cfg)
            (estimate,) = prompt_lengths([shown], "a row with its tools", processor, cfg)
            added.setdefault(kind, estimate - length)
        lengths.append(estimate)
    return lengths


NEAR = 32  # tokens


def check_length(prompt, row: dict, cfg: TrainConfig) -> None:
    if len(prompt.token_ids) > cfg.max_prompt_length:
        raise TrajectoryError(
            f"--max_prompt_length is {cfg.max_prompt_length}, and with what its environment adds the prompt has "
            f"{len(prompt.token_ids)} tokens: raise it, and the server's --max-model-len with it.",
            row,
        )


def shown_to_model(function: Callable, row: dict, *arguments):
    """What `function` makes token ids of. Templates and image decoders raise whatever they like at what an environment
    gave them, and that is this trajectory's fault alone."""
    try:
        return function(*arguments)
    except Exception as error:
        if isinstance(error, PictureError) and function is build_prompt and image_sources(row):
            raise RowPictureError(str(error), row) from error
        raise TrajectoryError(f"what the environment gave cannot be shown to the model: {error!r:.500}", row) from error


# ---- one trajectory --------------------------------------------------------------------------------------------------


async def play(row: dict, group: int, environment, generator, cfg: TrainConfig) -> Trajectory:
    """One trajectory, token in, token out: what was sampled is never decoded and tokenised again.

    Ends when the environment is done, a turn is cut by its length, max_turns are over, or the environment's answer does
    not fit: it is then left out altogether, text and images together. TrajectoryError if the environment fails.
    """
    processor = generator.tokenizer
    messages = await reset(environment, row, cfg, processor)
    shown, schemas = shown_to_model(begun, row, row, messages, environment, processor, cfg)
    prompt = so_far = shown_to_model(build_prompt, row, row, generator, cfg, shown)
    check_length(prompt, row, cfg)
    turns, mask, logprobs, states, versions, experts = [], [], [], [], [], None
    conversation, finish = list(shown["prompt"]), "stop"
    state = await state_of(environment, row, cfg)
    most = None if isinstance(environment, ToolEnvironment) else cfg.max_tool_result  # tools' are cut already
    for number in range(cfg.max_turns):
        budget = cfg.max_completion_length - len(mask)
        options = sampling_options(cfg) | {"max_tokens": min(budget, cfg.max_turn_length or budget)}
        options["min_tokens"] = min(cfg.min_completion_length, options["max_tokens"])
        images = dict(images=so_far.images, expanded=so_far) if so_far.images else {}
        (sample,) = await generator.generate(so_far.sent_ids, n=1, **images, **options)
        check_echo(so_far, [sample])
        last = sample.policy_version if sample.policy_version_last is None else sample.policy_version_last
        versions.append((sample.policy_version, last))
        start = len(mask)
        experts = joined(experts, sample)
        so_far = continued(so_far, sample.token_ids)
        mask, logprobs = mask + [1] * len(sample.token_ids), logprobs + sample.logprobs
        states += [state] * len(sample.token_ids)
        stopped = sample.finish_reason == "stop"
        text = processor.decode(sample.token_ids[:-1] if stopped else sample.token_ids)  # special tokens, too
        if number == 0 and conversation[-1]["role"] == "assistant":  # the prompt has begun the answer
            conversation[-1] = conversation[-1] | {"content": as_text(conversation[-1]["content"], "the prompt") + text}
        else:
            conversation.append({"role": "assistant", "content": text})
        turn = {"text": text, "reward": 0.0, "observation": None, "info": {"calls": []} if environment.tools else {}}
        turn |= {"tokens": len(sample.token_ids), "versions": versions[-1]}  # of weights: first and last that sampled
        turn |= {"start": start, "end": len(mask)}  # among the trajectory's tokens
        turn |= {} if state is None else {"state": text_of(state)}  # that it began in
        turns.append(turn)
        if not stopped:
            finish = "length"
            break
        outcome = await call_environment(environment, "step", row, cfg, text=text)
        answers, turn["reward"], done, turn["info"] = checked_step(outcome, environment, processor, most)
        if done or number + 1 == cfg.max_turns:
            break
        state = await state_of(environment, row, cfg)
        answered = shown_to_model(observed, row, so_far, answers, generator, schemas, cfg)
        added = len(answered.token_ids) - len(so_far.token_ids)
        if len(mask) + added >= cfg.max_completion_length:
            finish = "length"
            break
        turn["observation"] = answers
        conversation += answers
        so_far, mask, logprobs = answered, mask + [0] * added, logprobs + [0.0] * added
        states += [None] * added
    check_tokenization(so_far.token_ids, conversation, shown, processor, cfg)
    info = {"completion": turns[-1]["text"], "turns": turns, "shown": shown["prompt"]}
    info |= await judged(environment, turns, row, cfg)
    # Members of a group whose images are the prompt's alone hold the same tensors: they can share the prompt.
    seen = so_far if len(so_far.images) > len(prompt.images) else prompt
    info |= {"messages": sum(map(messages_of, turns), []), "model_inputs": seen.model_inputs}
    info |= {"routed_experts": experts}
    if any(state is not None for state in states):
        info["states"] = states
    if cfg.env:  # rewards may ask for it, as TRL's do for `environments`
        info["object"] = getattr(environment, "inner", environment)
    return Trajectory(
        row=row,
        group=group,
        prompt_ids=prompt.token_ids,
        token_ids=so_far.token_ids[len(prompt.token_ids) :],
        loss_mask=mask,
        logprobs=logprobs,
        token_rewards=[0.0] * len(mask),
        images=so_far.images,
        finish_reason=finish,
        turns=len(turns),
        policy_version=min(first for first, _ in versions),
        policy_version_last=max(last for _, last in versions),
        info=info,
    )


async def judged(environment, turns: list[dict], row: dict, cfg: TrainConfig) -> dict:
    """Adds the environment's score() to the last turn's reward; {"metrics": its metrics(), "unscored": whether its
    score() was None and no turn had a reward: then no reward applies}."""
    score = await call_environment(environment, "score", row, cfg)
    metrics = await call_environment(environment, "metrics", row, cfg)
    whose = name_of(environment)
    try:
        turns[-1]["reward"] += 0.0 if score is None else finite_number(score)
        nothing = score is None and not any(turn["reward"] for turn in turns)
        return {"metrics": dict(metrics or {}), "unscored": nothing}
    except (TypeError, ValueError, OverflowError) as error:
        fault = f"{whose}.score() gave {shorten(score)} and metrics() {shorten(metrics)}"
        raise TrajectoryError(f"{fault}: a finite number or None, and a dict", row) from error


def messages_of(turn: dict) -> list[dict]:
    """A turn as rewards see it: the assistant's message, with its parsed `tool_calls` as in TRL and OpenAI's API, and
    what answered it. What is tokenised has the calls in its text alone."""
    calls = turn["info"].get("tool_calls") if calls_in(turn["info"]) else None
    said = {"role": "assistant", "content": turn["text"]} | ({"tool_calls": calls} if calls else {})
    return [said, *(turn["observation"] or ())]


def check_tokenization(ids: list[int], conversation: list[dict], shown: dict, processor, cfg: TrainConfig) -> None:
    """Compare what a trajectory's tokens read with what the chat template writes for the whole conversation.

    They may differ with reason, as where a template takes the thinking out of earlier answers, and training goes by
    what was sampled. But a template that puts something else between turns shows here.
    """
    if cfg.tokenization_check == "off" or is_vision(processor) or len(conversation) <= len(shown["prompt"]) + 1:
        return
    if shown_by(processor, processor.chat_template).results == "with their calls":
        return  # the conversation has answers as they were sampled, calls in their text
    from jinja2 import TemplateError

    # The last answer is not the last message: templates treat that one otherwise.
    whole = [*conversation, {"role": "user", "content": ""}]
    try:
        whole = render(whole, processor, shown.get("tool_schemas"))
    except TemplateError as error:  # it refuses what model and environment have said: roles in this order, say
        whole = f"nothing ({error!r:.200})"
    ours = processor.decode(ids, clean_up_tokenization_spaces=False)
    if whole.startswith(ours):
        return
    same = next((i for i, pair in enumerate(zip(ours, whole, strict=False)) if pair[0] != pair[1]), len(whole))
    texts = [repr(text[max(same - 30, 0) : same + 60]) for text in (ours, whole)]
    message = f"a trajectory reads {texts[0]} where the chat template writes {texts[1]}"
    if cfg.tokenization_check == "strict":
        raise RuntimeError(f"--tokenization_check strict: {message}")
    warn_once(f"--tokenization_check: {message}. Said once; trained on is what was sampled.")


# What a rollout says about itself, as attributes:
#
#     mine.per_trajectory = True    it may be called once per completion, with num_generations 1, so that each is scored
#                                   as it ends (where all reward functions say the same of themselves)
#     mine.any_number = True        it decides itself how many trajectories a row has, one at least: a tree search
#     mine.limits_itself = True     whatever it waits for has a limit of its own: --rollout_timeout is not for it
ROLLOUTS: dict[str, Callable] = {
    "single_turn": single_turn,
    "multi_turn": multi_turn,
}
single_turn.limits_itself = multi_turn.limits_itself = multi_turn.per_trajectory = True


# ---- one environment, without model, server or torch: python rollouts.py --env NAME --policy random ------------------


CHANCE = random.Random()  # the random policy's own: an environment may draw from the same seed


def random_policy(environment, messages: list[dict]) -> str:
    actions = environment.actions()
    return CHANCE.choice(actions) if actions else "".join(CHANCE.choices("abc <>/", k=20))


def by_hand(environment, messages: list[dict]) -> str:
    try:
        return input("\nyou: ")
    except EOFError:
        raise SystemExit("\nrollouts.py: the input has ended, the game has not") from None


def openai_policy(url: str, model: str, token: str | None) -> Callable:
    """Asks any OpenAI-compatible server, such as a vllm_server.py.  url: up to and with /v1."""

    def say(environment, messages: list[dict]) -> str:
        try:
            return chat(url, model, messages, token, max_tokens=512)
        except (RuntimeError, OSError) as error:
            raise SystemExit(f"rollouts.py: {error}") from None

    return say


async def watch(environment, policy: Callable, row: dict, cfg: TrainConfig) -> float | None:
    """Play one trajectory with text alone, printing every turn; returns its reward, None where it gives none."""
    messages, total = await reset(environment, row, cfg), 0.0
    if environment.instructions:
        messages = [{"role": "system", "content": environment.instructions}, *messages]
    for message in messages:
        print(f"[{message['role']}] {text_of_parts(message['content'])}")
    for number in range(1, cfg.max_turns + 1):
        text = policy(environment, messages)
        outcome = await call_environment(environment, "step", row, cfg, text=text)
        answers, reward, done, info = checked_step(outcome, environment)
        print(f"\n--- turn {number} ---\n[assistant] {text}")
        for message in answers:
            print(f"[{message['role']}] {text_of_parts(message['content'])}")
        print(f"reward {reward:g}{', done' if done else ''}  {info or ''}")
        messages, total = [*messages, {"role": "assistant", "content": text}, *answers], total + reward
        if done:
            break
    score = await call_environment(environment, "score", row, cfg)
    metrics = await call_environment(environment, "metrics", row, cfg)
    total = None if score is None and not total else total + (score or 0.0)  # as `judged` has it
    print(f"\nreward of the trajectory {'none' if total is None else f'{total:g}'}  {metrics or ''}")
    await put_away(environment, row, False, cfg)
    return total


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description="Play an environment by hand, at random, or with a served model.")
    parser.add_argument("--env", help="name in ENVIRONMENTS or file.py:Class; NAME?key=value sets arguments")
    parser.add_argument("--tools", nargs="*", default=[], help="instead: names in TOOLS or file.py:function")
    parser.add_argument("--mcp_config", help="and, or instead: JSON file with `mcpServers`")
    parser.add_argument("--tool_parser", choices=list(HOW_TO_CALL), default="hermes", help="how calls are written")
    parser.add_argument("--tool_timeout", type=float, default=30.0, help="seconds a call, reset or step may take")
    parser.add_argument("--dataset_id", help="play its rows, as the train scripts take them")
    parser.add_argument("--policy", choices=["random", "hand", "openai", "server"], default="random")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of --policy openai or server")
    parser.add_argument("--model", default="", help="its name there")
    parser.add_argument("--prompt", default="", help="of the row, for environments that use it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--max_turns", type=int, default=8)
    parser.add_argument("--allow_uncontained", action="store_true", help="as of the train scripts")
    args = parser.parse_args()
    token = credentials.read("VLLM_SERVER_TOKEN" if args.policy == "server" else "OPENAI_API_KEY")
    policies = {"random": random_policy, "hand": by_hand}
    policy = policies.get(args.policy) or openai_policy(args.url, args.model, token)
    if not (args.env or args.tools or args.mcp_config):
        parser.error("give --env, --tools or --mcp_config")
    try:
        names = ("env", "tools", "mcp_config", "max_turns", "tool_parser", "tool_timeout", "allow_uncontained")
        cfg = TrainConfig(**{name: getattr(args, name) for name in names})
        cfg.reward_funcs = []  # it is played, not trained on: an environment needs no reward
        check_contained([tool.call for tool in named_tools(cfg)], cfg)
        make, rewards = adapters.environment_maker(cfg), []
        rows = load_rows(args.dataset_id, own_prompts=not args.env) if args.dataset_id else [{"prompt": args.prompt}]
        for episode in range(args.episodes):
            CHANCE.seed(f"policy {args.seed + episode}")
            row = {"seed": args.seed + episode} | rows[episode % len(rows)]
            rewards.append(asyncio.run(watch(make(row), policy, row, cfg)))
    except ConfigError as error:
        parser.error(str(error))
    given = [reward for reward in rewards if reward is not None]
    mean = f"{statistics.fmean(given):.3f}" if given else "none"
    print(f"mean reward of {len(given) or len(rewards)} trajectories: {mean}")


if __name__ == "__main__":
    main()
