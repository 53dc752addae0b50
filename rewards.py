"""Reward functions, and `score`, which runs them on a group of trajectories.

A reward function keeps TRL's call, so that one written for TRL runs unchanged:

    def my_reward(completions, answer, **columns):              # completions, prompts, completion_ids, every column
        return [float(completion_text(c) == a) for c, a in zip(completions, answer)]

* Every argument is passed by keyword and is a list with one element per completion. `completions` are strings, or
  [{"role": "assistant", "content": ...}] where the prompt is chat messages; `completion_text` takes both. `prompts` are
  the rows' prompts, `completion_ids` the token ids. A function without ** gets only what its signature names. With
  several turns the messages are those of all turns, including answers of tools; an assistant message holds the calls
  that were read in it as `tool_calls`. A string then holds what the model said.
* A call has the completions of one prompt together, and so waits for the last trajectory. If every function in use sets
  `my_reward.per_trajectory = True`, as those here do, each trajectory is scored by itself as it ends.
* As in TRL there are `trainer_state` (global_step, max_steps, epoch), `log_extra(column, values)` for the completions'
  file, `log_metric(name, value)`, and `environments`. Not in TRL: `trajectories` are the Trajectory objects
  (inputs/trajectory.py), `cfg` the config.
* It returns one value per completion, in a list, tuple, array or tensor: a number, None (does not apply: the function
  is left out of the row's sum), or a dict {component: number or None}. The components are logged by name and may differ
  by row; the row's reward is the component "reward" if there is one, else the sum of all. With {"turns": [number per
  turn]} it is the sum of those, and each is put at the end of its turn.
* `my_reward.verify = check`, a function (trajectory) -> anything, plain or async, runs first, on all trajectories at
  once: run the code, query the database. Its results arrive as `verification`, None where one took too long.
* The function gets copies, which it may change. Images and tensors are shared, and so is the `info` of trajectories.
* It may be `async def`. Plain functions run in a thread each, async ones on one shared event loop, so that a client
  they share stays usable; either may block without holding up sampling. With `my_reward.own_process = True` below it, a
  function runs in its own process, which is killed when it is late (docs/limits.md).
* If it takes longer than cfg.reward_timeout, every row of the call scores cfg.reward_on_timeout and counts in
  info["reward_timeouts"]. If it raises, or returns a wrong number or kind of values: RewardError, with the row and the
  completion.

The reward of a completion is the sum of weight * value over cfg.reward_weights. If all weights are 0, held-out rows are
scored with weights of 1.
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
from safety.results import UnusableResult, as_it_is, deep_copy, plain

# Some are for reward functions elsewhere.
from scoring.text import answer_part, completion_text, exact_match, last_number, numbers, tagged  # noqa: F401

OVERLONG_BUFFER = 0.2  # last share of max_completion_length, over which `overlong` falls to -1: DAPO's 4,096 of 20,480

TRAINER_STATE = SimpleNamespace(global_step=0, max_steps=0, epoch=0.0)  # kept by the training loop

# The arguments that a function can name beside the columns of the data set.
OWN_ARGUMENTS = ("completions", "prompts", "completion_ids", "trajectories", "cfg", "trainer_state", "log_extra")
OWN_ARGUMENTS += ("log_metric",)

RETURN_RULE = "return a list with one number, None (does not apply) or {component: number} per completion"

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward function raised, or returned something that cannot be used. The message holds its name, the row and the
    completion; its first line, `cause`, is the same for all completions that failed for the same reason."""

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
    """No reward, for learning from a teacher alone (--advantage distill, --distill_topk)."""
    return [0.0] * len(completions)


def length(completion_ids, cfg, **columns) -> list[float]:
    """-(tokens / max_completion_length), from 0 to -1. A small positive weight prefers short completions, a negative
    one long ones."""
    return [-len(ids) / cfg.max_completion_length for ids in completion_ids]


@dataclass(frozen=True)
class Elsewhere:
    """A reward function that is imported only when a run asks for it, as it brings a library, a server, ..."""

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
# None of these compares the completions of a group.
for _function in (last_number, exact_match, overlong, zero, length):
    _function.per_trajectory = True


def get_reward_function(name_or_path: str) -> Callable:
    """A name in REWARDS, or `path/to/file.py:function`."""
    if function_path(name_or_path):
        return load_function(name_or_path)
    known_name("--reward_funcs (names, or path/to/file.py:function)", name_or_path, REWARDS)
    if module := {"math": "math_verify", "reasoning_gym": "reasoning_gym"}.get(name_or_path):
        require(module, f"--reward_funcs {name_or_path}")  # now, not in its own process at every completion
    function = REWARDS[name_or_path]
    return function.load() if isinstance(function, Elsewhere) else function


def get_reward_functions(
    cfg, columns: Iterable[str] | None = None, held_out: Iterable[str] | None = None
) -> dict[str, Callable]:
    """{name: function} for cfg.reward_funcs, checked; the name of `file.py:function` is `function`.

    With the columns of training rows or of held-out rows given, a function that needs another one is a ConfigError
    here, before anything is sampled.
    """
    functions = {}
    for spec in cfg.reward_funcs:
        name = spec.rpartition(":")[2]
        if name in functions:
            raise ConfigError(f"--reward_funcs: two functions are named {name!r}; rename one.")
        functions[name] = get_reward_function(spec)
    if "reward_model" in functions:
        from scoring.reward_model import is_served, load

        if not is_served(cfg.reward_model):
            load(cfg.reward_model)  # now, as the first call has a time limit
    for rows, given in (("training rows", columns), ("held-out rows", held_out)):
        if clashes := {*(given or ())} & {*OWN_ARGUMENTS}:
            raise ConfigError(f"{rows}: column {min(clashes)!r} is an argument of reward functions; rename it.")
        for name, function in functions.items() if given is not None else ():
            available = {*given, *OWN_ARGUMENTS} - {"prompt"} | ({"environments"} if cfg.env else set())
            if fault := missing_arguments(function, available):
                raise ConfigError(f"--reward_funcs {name} ({rows}): {fault}")
    if any(getattr(function, "executes_code", False) for function in functions.values()):
        from safety.sandbox import check_contained

        check_contained(functions.values(), cfg)
    return functions


def functions_of_domain(reward_functions: dict[str, Callable], cfg) -> dict[str, Callable]:
    """{name: function} of those that score the rows of cfg's domain; without domains, all. In a run with domains they
    are registered as DOMAIN/NAME."""
    of_domain = {name: function for name, function in reward_functions.items() if name.startswith(cfg.prefix)}
    return {name.removeprefix(cfg.prefix): function for name, function in of_domain.items()}


# ---- scoring --------------------------------------------------------------------------------------------------------


async def score(trajectories: list, reward_functions: dict[str, Callable], cfg) -> None:
    """Run all functions, at the same time, on one group of trajectories. Fills in each trajectory:

    token_rewards           the weighted sum is added at the last sampled token (last index with loss_mask 1), rewards
                            of turns at the last token of each turn
    info["rewards"]         {function: value, "function/component": value}, nan where a function does not apply
    info["reward_components"] [value of each function]
    info["reward"]          the weighted sum; 0 where no function applies, and then
    info["unrewarded"]      1, else 0
    info["reward_timeouts"] functions that ran out of time on it
    info["reward_seconds"]  {function: seconds that its call for this group took}
    info["reward_without_token"]  1 if nothing was sampled, so that no token carries its reward, else 0
    """
    if not trajectories:
        return
    weights = cfg.reward_weights or [1.0] * len(reward_functions)
    if cfg.purpose == "eval" and not any(weights):  # a run that learns from no reward still evaluates by them
        weights = [1.0] * len(weights)
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
            places, parts = sampled[-1:], [value]  # of the whole trajectory; none if nothing was sampled
            if turns is not None:
                places, parts = turn_ends(trajectory.loss_mask), turns
                if len(places) not in (0, len(turns)):
                    fault = f"returned rewards of {len(turns)} turns, of which loss_mask shows {len(places)}: text "
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
    """The arguments of reward functions, by name. Rows may have different columns: None where a row lacks one."""
    rows = [trajectory.row for trajectory in trajectories]
    columns = dict.fromkeys(column for row in rows for column in row if column != "prompt")
    arguments = {column: [row.get(column) for row in rows] for column in columns}
    completions, prompts, completion_ids = [], [], []
    for trajectory, row in zip(trajectories, rows, strict=True):
        info, chat = trajectory.info, not isinstance(row["prompt"], str)
        opening = info.get("begun", "")  # what the chat template began, such as <think>
        messages = info.get("messages")  # of all turns, if there are several
        text = opening + info["completion"] if messages is None else completion_text(messages)
        message = {"role": "assistant", "content": text} | ({"begun": opening} if opening else {})
        completions.append((messages or [message]) if chat else text)
        prompts.append(info.get("shown", row["prompt"]) if chat else row["prompt"])  # as the environment completed it
        start = next((i for i, mask in enumerate(trajectory.loss_mask) if mask), len(trajectory.token_ids))
        completion_ids.append(list(trajectory.token_ids[start:]))
    standard = dict(completions=completions, prompts=prompts, completion_ids=completion_ids, trajectories=trajectories)
    standard |= dict(trainer_state=TRAINER_STATE, cfg=cfg)
    if any("object" in trajectory.info for trajectory in trajectories):  # with --env
        standard["environments"] = [trajectory.info.get("object") for trajectory in trajectories]

    # Local functions on purpose: these cannot be pickled for a separate process, which would lose what they record.
    def log_extra(column: str, values: list) -> None:
        """Write one value per completion to the run folder's completions, as a column of that name."""
        for trajectory, value in zip(trajectories, values, strict=True):
            trajectory.info.setdefault("extra", {})[str(column)] = plain(value)

    def log_metric(name: str, value: float) -> None:
        """Log a number; those of one name and step are averaged. The run's own metrics take precedence."""
        trajectories[0].info.setdefault("logged", []).append((str(name), float(value)))

    return arguments | standard | {"log_extra": log_extra, "log_metric": log_metric}


def copy_of(trajectory):
    """A copy for one reward function, which may change its lists and its row; `info` is shared, for notes."""
    copies = {name: deep_copy(value) for name, value in vars(trajectory).items() if name != "info"}
    return replace(trajectory, **copies)


def missing_arguments(function: Callable, available: Iterable[str]) -> str | None:
    available = {*available} | ({"verification"} if hasattr(function, "verify") else set())
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if missing := [name for name in needed if name not in available]:
        return (
            f"needs {', '.join(missing)}, but there are only {', '.join(sorted(available))}. Rename the column (in a "
            "function of yours as --dataset_id) or the parameter, give the parameter a default, add the column to "
            "every row (None where it does not apply), or name another function."
        )
    return None


async def call(name: str, function: Callable, arguments: dict, seconds: float) -> tuple[list[tuple] | None, float]:
    """Runs one function on one group. Returns per completion (value or None, components, rewards of turns or None), or
    None for all if it took over `seconds`; and the seconds that it took."""
    start, trajectories = time.perf_counter(), arguments["trajectories"]
    if hasattr(function, "verify"):
        arguments = arguments | {"verification": await verdicts(name, function, arguments, seconds)}
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    on_request = ("trajectories", "cfg")  # TRL functions with ** do not expect these
    kwargs = {k: v for k, v in arguments.items() if k in parameters or (takes_all and k not in on_request)}
    if "trajectories" in kwargs:
        kwargs["trajectories"] = [copy_of(trajectory) for trajectory in trajectories]
    turns = [trajectory.turns for trajectory in trajectories]
    outcome = await run_limited(function, kwargs, seconds, functools.partial(floats, turns=turns))
    took = time.perf_counter() - start
    if outcome is None:
        message = "reward function %r took over --reward_timeout=%g s; its %d completions get cfg.reward_on_timeout"
        logger.warning(message, name, seconds, len(trajectories))
        return None, took
    values, error = outcome
    if isinstance(error, UnusableResult):
        raise reward_error(name, str(error), arguments, error.index) from None
    if error is not None:
        raise reward_error(name, f"raised {type(error).__name__}: {str(error)[:2000]}", arguments) from error
    return values, took


async def verdicts(name: str, function: Callable, arguments: dict, seconds: float) -> list:
    """The function's `verify` of each trajectory; None where it took over `seconds`."""
    calls = ({"trajectory": copy_of(t)} for t in arguments["trajectories"])
    checks = (run_limited(function.verify, kwargs, seconds, as_it_is) for kwargs in calls)  # the function reads them
    outcomes = await asyncio.gather(*checks)
    failure = next((o[1] for o in outcomes if o and o[1] is not None), None)
    if failure is not None:
        fault = f"its verify raised {type(failure).__name__}: {str(failure)[:2000]}"
        raise reward_error(name, fault, arguments) from failure
    return [outcome and outcome[0] for outcome in outcomes]


def floats(values, turns: list[int]) -> list[tuple]:
    """A function's return value in the form that `call` describes; UnusableResult if it cannot be trained on. Read
    where the function ran, within its time. turns: the number of turns of each trajectory."""
    ordered = isinstance(values, Sequence) or getattr(values, "ndim", 0) > 0  # or an array
    if not ordered or isinstance(values, str):
        raise UnusableResult(f"returned {shorten(values)}, a {type(values).__name__}; {RETURN_RULE}")
    if len(values) != len(turns):
        raise UnusableResult(f"returned {len(values)} values for {len(turns)} completions; {RETURN_RULE}")
    results = []
    for index, (value, count) in enumerate(zip(values, turns, strict=True)):
        try:
            parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
            by_turn = parts.pop("turns", None)
            numbers_given = [*parts.values(), *(() if by_turn is None else by_turn)]
            if any(isinstance(part, (str, bytes)) for part in numbers_given):
                raise TypeError("text is not a number")
            parts = {str(name): None if part is None else float(part) for name, part in parts.items()}
            if by_turn is not None:
                by_turn = [*map(float, by_turn)]
                parts["reward"] = sum(by_turn)
                if len(by_turn) != count:
                    raise ValueError(f"{len(by_turn)} rewards for {count} turns")
            # If there is a component "reward", the others are only logged and may be nan.
            summed = [parts["reward"]] if "reward" in parts else list(parts.values())
            summed = [part for part in summed if part is not None]
            if not all(abs(part) <= LARGEST for part in (*summed, *(by_turn or ()))):
                raise ValueError(f"a reward must be finite, and from -{LARGEST:g} to {LARGEST:g}")
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises the last
            fault = f"returned {shorten(value)}, a {type(value).__name__}, for completion {index}: {error}"
            raise UnusableResult(f"{fault}; {RETURN_RULE}", index) from None
        logged = {c: v for c, v in parts.items() if c != "reward" and v is not None and math.isfinite(v)}
        results.append((sum(summed) if summed else None, logged, by_turn))
    return results


def reward_error(name: str, fault: str, arguments: dict, index: int | None = None) -> RewardError:
    """index: the completion at fault; without it all completions of the group are shown, since any may be."""
    indices = range(min(len(arguments["completions"]), 16)) if index is None else [index]
    trajectories = arguments["trajectories"]
    lines = [f"reward function {name!r} {fault}", f"  row: {shorten(trajectories[indices[0]].row, 1000)}"]
    lines += [f"  completion {i}: {shorten(trajectories[i].info['completion'], 500)}" for i in indices]
    return RewardError("\n".join(lines))
