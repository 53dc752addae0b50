"""Reward functions, and `score`, which runs them on a group of trajectories.

A reward function keeps TRL's call, so that one written for TRL runs unchanged:

    def my_reward(completions, answer, **columns):              # completions, prompts, completion_ids, every column
        return [float(completion_text(c) == a) for c, a in zip(completions, answer)]

* Every argument is passed by keyword and is a list with one element a completion. `completions` are strings, or
  [{"role": "assistant", "content": ...}] where the prompt is chat messages; `completion_text` takes both. `prompts` are
  the rows' prompts, `completion_ids` the token ids. A function without ** gets only what its signature names. Of
  several turns the messages have all, answers of tools included, and an assistant message the calls that were read in
  it, as `tool_calls`; a string has what the model said.
* A call has the completions of one prompt together. Of several turns it waits for the last of them; if every function
  in use says `my_reward.per_trajectory = True`, as those here do, each trajectory is scored by itself as it ends.
* As in TRL there are `trainer_state` (global_step, max_steps, epoch), `log_extra(column, values)` for the completions'
  file, `log_metric(name, value)`, and `environments`. Not in TRL: `trajectories` are the Trajectory objects
  (inputs/trajectory.py), `cfg` the config.
* It returns one value a completion, in a list, tuple, array or tensor: a number, None (does not apply: this function is
  left out of the row's sum), or a dict {component: number or None}. The components are logged by name and may differ by
  row; the row's reward is the component "reward" if there is one, else the sum of all. With {"turns": [number a turn]}
  it is the sum of those, and each is put at the end of its turn.
* `my_reward.verify = check`, a function (trajectory) -> anything, plain or async, runs first, on all trajectories at
  once: run the code, ask the data base. Its results arrive as `verification`, None where one took too long.
* What it gets are copies: it may change them. Images and tensors are shared, and so is the `info` of trajectories.
* It may be `async def`. Plain functions run in a thread each, async ones on one event loop kept for them, so a client
  they share stays usable; either may block without holding up sampling. With `my_reward.own_process = True` below it,
  a function runs in a process of its own, which is killed when it is late (docs/limits.md).
* Longer than cfg.reward_timeout: every row of the call scores cfg.reward_on_timeout and counts in
  info["reward_timeouts"]. Raising, or a wrong number or kind of values: RewardError, with the row and the completion.

The reward of a completion is the sum of weight * value over cfg.reward_weights. Held-out rows are scored by weights of
1 if all are 0.
"""

import asyncio
import functools
import importlib
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from types import SimpleNamespace

from config import ConfigError, function_path, known_name, load_function, require, shorten
from inputs.trajectory import LARGEST
from safety.calls import run_limited
from safety.results import UnusableResult, copied, plain, unread
from scoring.text import (  # noqa: F401 - some are for reward functions elsewhere
    answer_part,
    completion_text,
    exact_match,
    last_number,
    numbers,
    tagged,
)

OVERLONG_BUFFER = 0.2  # last part of max_completion_length over which `overlong` falls to -1: DAPO's 4,096 of 20,480

TRAINER_STATE = SimpleNamespace(global_step=0, max_steps=0, epoch=0.0)  # kept by the training loop

# What a function can ask for beside the columns of the data set.
OWN_ARGUMENTS = ("completions", "prompts", "completion_ids", "trajectories", "cfg", "trainer_state", "log_extra")
OWN_ARGUMENTS += ("log_metric",)

RETURN_RULE = "return a list with one number, None (does not apply) or {component: number} a completion"

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward function raised or returned what cannot be used. The message holds its name, the row, the completion;
    its first line, `cause`, is the same for all completions that failed for the same reason."""

    @property
    def cause(self) -> str:
        return str(self).split("\n")[0]


# ---- reward functions -----------------------------------------------------------------------------------------------


def overlong(completion_ids, cfg, **columns) -> list[float]:
    """Soft over-long punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to L - buffer tokens, then linear to -1 at
    L = max_completion_length; the buffer is OVERLONG_BUFFER of L."""
    buffer = OVERLONG_BUFFER * cfg.max_completion_length
    start = cfg.max_completion_length - buffer
    return [-min(max((len(ids) - start) / buffer, 0.0), 1.0) for ids in completion_ids]


def zero(completions, **columns) -> list[float]:
    """No reward: for what is learned from a teacher alone (--advantage distill, --distill_topk)."""
    return [0.0] * len(completions)


def length(completion_ids, cfg, **columns) -> list[float]:
    """-(tokens / max_completion_length), from 0 to -1: a small weight prefers short ones, a negative one long ones."""
    return [-len(ids) / cfg.max_completion_length for ids in completion_ids]


@dataclass(frozen=True)
class Elsewhere:
    """A reward function that not every run needs, imported when one asks for it: it brings a library, a server, ..."""

    module: str
    name: str

    def load(self) -> Callable:
        return getattr(importlib.import_module(self.module), self.name)

    def __call__(self, *args, **columns):
        return self.load()(*args, **columns)


REWARDS: dict[str, Callable] = {
    "math": Elsewhere("scoring.scorers", "math_equal"),
    "last_number": last_number,
    "exact_match": exact_match,
    "multiple_choice": Elsewhere("scoring.answers", "multiple_choice"),
    "squad_em": Elsewhere("scoring.answers", "squad_em"),
    "squad_f1": Elsewhere("scoring.answers", "squad_f1"),
    "code_tests": Elsewhere("scoring.code", "code_tests"),
    "repetition": Elsewhere("scoring.answers", "repetition"),
    "format": Elsewhere("scoring.answers", "format_tags"),
    "overlong": overlong,
    "zero": zero,
    "length": length,
    "reasoning_gym": Elsewhere("scoring.scorers", "reasoning_gym"),
    "reward_model": Elsewhere("scoring.reward_model", "reward_model"),
    "judge": Elsewhere("scoring.judge", "judge"),
    "environment": Elsewhere("scoring.turns", "environment"),
    "tool_use": Elsewhere("scoring.turns", "tool_use"),
    "few_turns": Elsewhere("scoring.turns", "few_turns"),
    "instructions": Elsewhere("scoring.instructions", "instructions"),
}
for _function in REWARDS.values():  # none of them compares the completions of a group
    if not isinstance(_function, Elsewhere):
        _function.per_trajectory = True


def get_reward_function(name_or_path: str) -> Callable:
    """A name in REWARDS, or `path/to/file.py:function`."""
    if function_path(name_or_path):
        return load_function(name_or_path)
    known_name("--reward_funcs (names, or path/to/file.py:function)", name_or_path, REWARDS)
    if module := {"math": "math_verify", "reasoning_gym": "reasoning_gym"}.get(name_or_path):
        require(module, f"--reward_funcs {name_or_path}")  # here: its own process would fail at every completion
    found = REWARDS[name_or_path]
    return found.load() if isinstance(found, Elsewhere) else found


def get_reward_functions(cfg, columns: Iterable[str] | None = None) -> dict[str, Callable]:
    """{name: function} of cfg.reward_funcs, checked; the name of `file.py:function` is `function`.

    Given the data set's columns, a function that needs another one is a ConfigError here, before anything is sampled.
    """
    functions = {}
    for given in cfg.reward_funcs:
        name = given.rpartition(":")[2]
        if name in functions:
            raise ConfigError(f"--reward_funcs: two functions are named {name!r}; rename one.")
        functions[name] = get_reward_function(given)
    if "reward_model" in functions:
        from scoring.reward_model import is_served, load

        if not is_served(cfg.reward_model):
            load(cfg.reward_model)  # here: the first call has a time limit
    if taken := {*(columns or ())} & {*OWN_ARGUMENTS}:
        raise ConfigError(f"column {min(taken)!r} is an argument of reward functions; rename it in format_row.")
    for name, function in functions.items() if columns is not None else ():
        available = {*columns, *OWN_ARGUMENTS} - {"prompt"} | ({"environments"} if cfg.env else set())
        if fault := missing_arguments(function, available):
            raise ConfigError(f"--reward_funcs {name}: {fault}")
    if any(getattr(function, "executes_code", False) for function in functions.values()):
        from safety.sandbox import check_contained

        check_contained(functions.values(), cfg)
    return functions


def own_functions(reward_functions: dict[str, Callable], cfg) -> dict[str, Callable]:
    """Those that score the rows of cfg's domain, by their names; without domains, all. In a run with domains they are
    kept under DOMAIN/NAME."""
    own = {name: function for name, function in reward_functions.items() if name.startswith(cfg.prefix)}
    return {name.removeprefix(cfg.prefix): function for name, function in own.items()}


# ---- scoring --------------------------------------------------------------------------------------------------------


async def score(trajectories: list, reward_functions: dict[str, Callable], cfg) -> None:
    """Run all functions, at the same time, on one group of trajectories. Fills in each trajectory:

    token_rewards           the weighted sum is added at the last sampled token (last index with loss_mask 1), rewards
                            of turns at the last token of theirs
    info["rewards"]         {function: value, "function/component": value}, nan where a function does not apply
    info["reward_components"] [value of each function]
    info["reward"]          the weighted sum; 0 where no function applies, and then
    info["unrewarded"]      1, else 0
    info["reward_timeouts"] functions that ran out of time on it
    info["reward_seconds"]  {function: seconds that its call for this group took}
    info["reward_without_token"]  1 if nothing was sampled, so that its reward stands nowhere, else 0
    """
    if not trajectories:
        return
    weights = cfg.reward_weights or [1.0] * len(reward_functions)
    if cfg.purpose == "eval" and not any(weights):  # nothing is learned from them: held-out rows are to tell how good
        weights = [1.0] * len(weights)  # the policy became
    arguments = call_arguments(trajectories, cfg)
    calls = (call(name, function, arguments, cfg.reward_timeout) for name, function in reward_functions.items())
    results = await asyncio.gather(*calls)  # per function: its values, or None if it ran out of time; its seconds
    seconds = {name: took for name, (_, took) in zip(reward_functions, results, strict=True)}
    for index, trajectory in enumerate(trajectories):
        total, applies, logged = 0.0, False, {}
        sampled = [place for place, mask in enumerate(trajectory.loss_mask) if mask]
        for name, weight, (values, _) in zip(reward_functions, weights, results, strict=True):
            value, components, turns = (cfg.reward_on_timeout, {}, None) if values is None else values[index]
            logged[name] = nan if value is None else value
            logged |= {f"{name}/{component}": part for component, part in components.items()}
            if value is None:
                continue
            total, applies = total + weight * value, True
            places, parts = sampled[-1:], [value]  # of the whole; nowhere if nothing was sampled
            if turns is not None:
                places, parts = turn_ends(trajectory.loss_mask), turns
                if len(places) not in (0, len(turns)):
                    fault = f"returned rewards of {len(turns)} turns, of which loss_mask shows {len(places)}: a text "
                    fault += "with mask 0 has to stand between two turns"
                    raise reward_error(name, fault, arguments, index)
            for place, part in zip(places, parts, strict=bool(places)):
                trajectory.token_rewards[place] += weight * part
        trajectory.info |= {
            "rewards": logged,
            "reward_components": [logged[name] for name in reward_functions],
            "reward": total,
            "unrewarded": int(not applies),
            "reward_timeouts": sum(values is None for values, _ in results),
            "reward_seconds": seconds,
            "reward_without_token": int(not sampled),
        }


def turn_ends(loss_mask: list[int]) -> list[int]:
    """The last token of each run of sampled tokens: [0, 1, 1, 0, 1] -> [2, 4]"""
    return [i for i, (here, after) in enumerate(zip(loss_mask, [*loss_mask[1:], 0], strict=True)) if here and not after]


def call_arguments(trajectories: list, cfg) -> dict:
    """What reward functions can ask for, by name. Rows may have different columns: None where one lacks it."""
    rows = [trajectory.row for trajectory in trajectories]
    columns = dict.fromkeys(column for row in rows for column in row if column != "prompt")
    arguments = {column: [row.get(column) for row in rows] for column in columns}
    completions, prompts, completion_ids = [], [], []
    for trajectory, row in zip(trajectories, rows, strict=True):
        info, chat = trajectory.info, not isinstance(row["prompt"], str)
        begun = info.get("begun", "")  # by the chat template: <think>
        messages = info.get("messages")  # of all turns, if there are several
        text = begun + info["completion"] if messages is None else completion_text(messages)
        said = {"role": "assistant", "content": text} | ({"begun": begun} if begun else {})
        completions.append((messages or [said]) if chat else text)
        prompts.append(info.get("shown", row["prompt"]) if chat else row["prompt"])  # as the environment completed it
        start = next((i for i, mask in enumerate(trajectory.loss_mask) if mask), len(trajectory.token_ids))
        completion_ids.append(list(trajectory.token_ids[start:]))
    own = dict(completions=completions, prompts=prompts, completion_ids=completion_ids, trajectories=trajectories)
    own |= dict(trainer_state=TRAINER_STATE, cfg=cfg)
    if any("object" in trajectory.info for trajectory in trajectories):  # with --env
        own["environments"] = [trajectory.info.get("object") for trajectory in trajectories]

    # Functions within a function: these cannot be sent to a process of its own, where what they are told would be lost.
    def log_extra(column: str, values: list) -> None:
        """Put a value per completion into the run folder's completions, as a column of that name."""
        for trajectory, value in zip(trajectories, values, strict=True):
            trajectory.info.setdefault("extra", {})[str(column)] = plain(value)

    def log_metric(name: str, value: float) -> None:
        """Log a number; those of one name and step are averaged. The run's own metrics have precedence."""
        trajectories[0].info.setdefault("logged", []).append((str(name), float(value)))

    return arguments | own | {"log_extra": log_extra, "log_metric": log_metric}


def copy_of(trajectory):
    """For one reward function: its lists and its row may be changed; `info` is the trajectory's own, for notes."""
    own = {name: copied(value) for name, value in vars(trajectory).items() if name != "info"}
    return replace(trajectory, **own)


def missing_arguments(function: Callable, available: Iterable[str]) -> str | None:
    available = {*available} | ({"verification"} if hasattr(function, "verify") else set())
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if missing := [name for name in needed if name not in available]:
        return (
            f"needs {', '.join(missing)}, but there are only {', '.join(sorted(available))}. Rename the column "
            "(format_row in the train script, or a function of yours as --dataset_id) or the parameter, give that a "
            "default, add the column to every row (None where it does not apply), or name another function."
        )
    return None


async def call(name: str, function: Callable, arguments: dict, seconds: float) -> tuple[list[tuple] | None, float]:
    """One function on one group: a (value or None, components, rewards of turns or None) a completion, or None if it
    took over `seconds`; and the seconds that it took."""
    start, trajectories = time.perf_counter(), arguments["trajectories"]
    if hasattr(function, "verify"):
        arguments = arguments | {"verification": await verified(name, function, arguments, seconds)}
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    on_request = ("trajectories", "cfg")  # TRL functions with ** do not expect these
    chosen = {k: v for k, v in arguments.items() if k in parameters or (takes_all and k not in on_request)}
    if "trajectories" in chosen:
        chosen["trajectories"] = [copy_of(trajectory) for trajectory in trajectories]
    turns = [trajectory.turns for trajectory in trajectories]
    outcome = await run_limited(function, chosen, seconds, functools.partial(floats, turns=turns))
    took = time.perf_counter() - start
    if outcome is None:
        message = "reward function %r took over --reward_timeout=%g s; its %d completions get cfg.reward_on_timeout"
        logger.warning(message, name, seconds, len(trajectories))
        return None, took
    values, error = outcome
    if isinstance(error, UnusableResult):
        raise reward_error(name, str(error), arguments, error.index) from error
    if error is not None:
        raise reward_error(name, f"raised {type(error).__name__}: {str(error)[:2000]}", arguments) from error
    return values, took


async def verified(name: str, function: Callable, arguments: dict, seconds: float) -> list:
    """What the function's `verify` says of each trajectory; None where it took over `seconds`."""
    given = ({"trajectory": copy_of(t)} for t in arguments["trajectories"])
    checks = (run_limited(function.verify, one, seconds, unread) for one in given)  # read by the function alone
    outcomes = await asyncio.gather(*checks)
    broken = next((o[1] for o in outcomes if o and o[1] is not None), None)
    if broken is not None:
        fault = f"its verify raised {type(broken).__name__}: {str(broken)[:2000]}"
        raise reward_error(name, fault, arguments) from broken
    return [outcome and outcome[0] for outcome in outcomes]


def floats(values, turns: list[int]) -> list[tuple]:
    """What a function returned, as `call` says; UnusableResult if it cannot be trained on. Read where the function ran,
    within its time.  turns: how many each trajectory has"""
    ordered = isinstance(values, Sequence) or getattr(values, "ndim", 0) > 0  # or an array
    if not ordered or isinstance(values, str):
        raise UnusableResult(f"returned {shorten(values)}, a {type(values).__name__}; {RETURN_RULE}")
    if len(values) != len(turns):
        raise UnusableResult(f"returned {len(values)} values for {len(turns)} completions; {RETURN_RULE}")
    read = []
    for index, (value, count) in enumerate(zip(values, turns, strict=True)):
        try:
            parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
            by_turn = parts.pop("turns", None)
            given = [*parts.values(), *(() if by_turn is None else by_turn)]
            if any(isinstance(part, (str, bytes)) for part in given):
                raise TypeError("text is not a number")
            parts = {str(name): None if part is None else float(part) for name, part in parts.items()}
            if by_turn is not None:
                by_turn = [*map(float, by_turn)]
                parts["reward"] = sum(by_turn)
                if len(by_turn) != count:
                    raise ValueError(f"{len(by_turn)} rewards for {count} turns")
            # With a reward of its own, the other components are logged alone: they may be nan.
            summed = [parts["reward"]] if "reward" in parts else list(parts.values())
            summed = [part for part in summed if part is not None]
            if not all(abs(part) <= LARGEST for part in (*summed, *(by_turn or ()))):
                raise ValueError(f"a reward must be finite, and from -{LARGEST:g} to {LARGEST:g}")
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises the last
            fault = f"returned {shorten(value)}, a {type(value).__name__}, for completion {index}: {error}"
            raise UnusableResult(f"{fault}; {RETURN_RULE}", index) from None
        logged = {c: v for c, v in parts.items() if c != "reward" and v is not None and math.isfinite(v)}
        read.append((sum(summed) if summed else None, logged, by_turn))
    return read


def reward_error(name: str, fault: str, arguments: dict, index: int | None = None) -> RewardError:
    """`index`: the completion at fault; without it all of the group are shown, since any may be."""
    shown = range(min(len(arguments["completions"]), 16)) if index is None else [index]
    trajectories = arguments["trajectories"]
    lines = [f"reward function {name!r} {fault}", f"  row: {shorten(trajectories[shown[0]].row, 1000)}"]
    lines += [f"  completion {i}: {shorten(trajectories[i].info['completion'], 500)}" for i in shown]
    return RewardError("\n".join(lines))
