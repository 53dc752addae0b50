"""Calls of an environment: within a time, off the event loop, at the cost of one trajectory; and what it answers, made
plain or refused by name."""

import math
import zlib
from collections.abc import Callable

from config import TrainConfig
from data import shorten
from envs import Environment, adapters
from envs.tools import cut
from inputs.parts import NO_IMAGE, PartError, in_usual_form, parts_of, text_of_parts, without_sources
from inputs.prompts import is_vision
from inputs.special_tokens import clean, each_text
from inputs.trajectory import TrajectoryError
from safety import calls
from safety.calls import run_limited, unread, warn_once

_IDLE: dict[tuple, list] = {}  # environments with `pooled = True` that nobody plays at the moment


def kind_of(row: dict, cfg: TrainConfig) -> tuple:
    """Environments of one kind can stand for each other."""
    chooses = hasattr(adapters.environment_maker(cfg), "known")  # else a column of this name may hold anything
    return adapters.kind(cfg), repr(row.get(adapters.COLUMN)) if chooses else None


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
    outcome = await run_limited(environment.close, {}, cfg.tool_timeout, unread)
    if outcome is None or outcome[1] is not None:
        fault = f"took over {cfg.tool_timeout:g} s" if outcome is None else f"raised {shorten(outcome[1], 500)}"
        what = f"{name_of(environment)}.close()"
        warn_once(f"{what} {fault}. Said once.", kind=what)


async def call_environment(environment, method: str, of: dict, cfg: TrainConfig, **arguments):
    """environment.METHOD within its time; TrajectoryError naming it and the row, `of`, if it fails or is late."""
    seconds = (method == "step" and environment.step_timeout) or cfg.tool_timeout
    what = f"{name_of(environment)}.{method}()"
    read = {"step": calls.step, "score": calls.number, "state": calls.state, "metrics": calls.plain}
    return await limited(getattr(environment, method), arguments, seconds, what, of, read.get(method, calls.plain))


async def limited(function: Callable, arguments: dict, seconds: float, what: str, row: dict, read=unread):
    outcome = await run_limited(function, arguments, seconds, read)
    if outcome is None:
        raise TrajectoryError(f"{what} took over {seconds:g} s (--tool_timeout)", row)
    if isinstance(outcome[1], calls.UnusableResult):
        raise TrajectoryError(f"{what} {outcome[1]}", row) from outcome[1]
    if outcome[1] is not None:
        raise TrajectoryError(f"{what} raised {shorten(outcome[1], 500)}", row) from outcome[1]
    return outcome[0]


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
    try:
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        read = [each_text({"role": m["role"]} | in_usual_form(m), clean) for m in messages]
        for m in read:
            parts_of(m["content"])  # PartError for what is neither text nor parts
    except (PartError, TypeError, KeyError, AttributeError) as error:
        form = '[{"role": "user", "content": "..."}]'
        fault = f"{whose} must give chat messages, such as {form}; it gave {shorten(messages)} ({error})"
        raise TrajectoryError(fault) from error
    if most is not None:
        shown = [m | {"content": cut(m["content"], most)} for m in read]
        if shown != read:
            warn_once(f"{whose} gave a message over --max_tool_result {most} characters: the model sees its beginning.")
        read = shown
    if processor is None or is_vision(processor):
        return read
    return [m | {"content": as_text(m["content"], whose)} for m in read]


def as_text(content: str | list, whose: str) -> str:
    """Parts of a message as text, for models without images."""
    if any(part["type"] == "image" for part in parts_of(content)):
        warn_once(f"{whose} gives images, and the model of --model_id takes none: it reads {NO_IMAGE!r} instead.")
    return text_of_parts(content)


def checked_step(outcome, environment, processor=None, most: int | None = None) -> tuple[list[dict], float, bool, dict]:
    """What step() returned, as safety.calls.step reads it, and `checked_messages`; TrajectoryError if it is no such."""
    whose = f"{name_of(environment)}.step()"
    if not isinstance(outcome, tuple) or len(outcome) != 4 or not isinstance(outcome[3], dict | None):
        raise TrajectoryError(f"{whose} must return (messages, reward, done, info); it returned {shorten(outcome)}")
    messages, reward, done, info = outcome
    return checked_messages(messages, whose, processor, most), reward, done, info or {}


def finite_number(value) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{number} is not finite")
    return number
