"""Environments, which answer the model between its turns.

    --env frozenlake?compass=true           # a name in ENVIRONMENTS, then arguments of its __init__
    --env my_env.py:Guess                   # a class in a file; examples/ has some, each with its rows and reward

Each trajectory has an environment of its own, of a class like this:

    import random
    from envs import Environment

    class Guess(Environment):
        def reset(self, row, seed):                 # -> the prompt: text or chat messages
            self.secret, self.right = random.Random(seed).randint(1, 9), False
            return "Guess my number from 1 to 9."

        async def step(self, text):                 # the model's turn -> (answer to it, reward of the turn, done, info)
            self.right = text.strip() == str(self.secret)
            return "No.", float(self.right), self.right, {"valid": float(text.strip().isdigit())}

        def metrics(self):                          # logged once a trajectory
            return {"success": float(self.right)}

Every method, the constructor included, may be plain or async, has --tool_timeout seconds, and does not hold up other
trajectories. If one raises or is late, its trajectory is left out and counted; above --max_failed of a step the run
stops and shows the commonest cause. The seed is the row's column `seed`, which every row loaded with --env has; the
members of a group share it. The numbers of `info`, averaged over a trajectory's turns, are logged as
rewards/environment/NAME; `score()` is added to the last turn's reward. A turn that is cut by its length ends the
trajectory without a step. `state()` lets --advantage gigpo compare turns that began alike. `close()` is called at the
end, however the trajectory ends; with `pooled = True` an instance is reset and played again instead. `tools` are those
that the model can call ({name: Tool}); most environments have none and read the text.

`python scripts/try.py --env NAME --hand` has you play one in place of the model.
"""

import math
from collections.abc import Callable

from config import TrainConfig, shorten
from envs.tools import Tool, cut, run_calls, tools_of
from inputs.formats import instructions, outside_thinking, parser_of, read_calls
from inputs.parts import NO_IMAGE, PartError, in_usual_form, parts_of, text_of_parts
from inputs.prompts import clean, each_text, is_vision, prompt_messages
from inputs.trajectory import LARGEST, TrajectoryError
from safety.calls import run_limited
from safety.results import as_it_is, plain, warn_once


class Environment:
    """What every environment has; a subclass needs `step`, and mostly `reset`."""

    tools: dict[str, Tool] = {}  # the model can call them in this trajectory; set by reset()
    instructions = ""  # how to call them, for chat templates that do not say
    step_timeout: float | None = None  # seconds; None: --tool_timeout
    pooled = False  # whether an instance may be reset() and played again; for environments that are slow to make

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Begin anew; returns the prompt as chat messages."""
        return prompt_messages(row)

    async def step(self, text: str) -> tuple[list[dict], float, bool, dict]:
        """Answer one turn of the model: (messages to it, reward of the turn, done, info)."""
        raise NotImplementedError

    def state(self):
        """The current state, anything hashable; None: not known. Called after reset() and each step(). --advantage
        gigpo compares turns of a group that start in equal states."""
        return None

    def score(self) -> float | None:
        """What the trajectory earns beyond the rewards of its turns; called once, at its end. None, if no turn had a
        reward either, means that the environment gives no reward and the other reward functions count alone."""
        return 0.0

    def close(self) -> None:
        """Release what the environment holds; called once, at the end of the trajectory, however that ends."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log about the whole trajectory; called once, at its end."""
        return {}


class ToolEnvironment(Environment):
    """A bare set of tools. It runs the calls of a turn, all at the same time; a turn without calls is the answer."""

    begun = ""  # the beginning of the answer that is part of the prompt: "<think>\n"
    schemas: list[dict] = []  # of the tools
    step_timeout = math.inf  # calls have limits of their own, and may have to queue
    in_order = False  # whether a turn's calls run one after another

    def __init__(self, tools: dict[str, Tool], cfg):
        self.all_tools, self.cfg, self.parser = tools, cfg, parser_of(cfg)

    def reset(self, row, seed):
        self.offer(tools_of(row, self.all_tools))
        return super().reset(row, seed)

    def offer(self, tools: dict[str, Tool]) -> None:
        self.tools, self.schemas = tools, [tool.schema() for tool in tools.values()]
        self.instructions = instructions(self.schemas, self.parser) if tools else ""

    async def step(self, text):
        text = self.begun + text
        calls = read_calls(text, self.schemas, self.parser)
        quoted = sum(str(call.arguments).count("</answer>") for call in calls)
        if not calls or outside_thinking(text).count("</answer>") > quoted:
            return [], 0.0, True, {"calls": []}
        messages, events = await run_calls(calls, self.tools, self.cfg, self.in_order)
        readable = [call.as_message() for call in calls if not call.error]
        return messages, 0.0, False, {"calls": events, "tool_calls": readable}


# ---- calling one: within a time limit, off the event loop, at the cost of one trajectory -----------------------------


async def call_environment(environment, method: str, of_row: dict, cfg: TrainConfig, **arguments):
    """environment.METHOD(**arguments) in its time limit. TrajectoryError naming it and the row if it fails."""
    seconds = (method == "step" and environment.step_timeout) or cfg.tool_timeout
    call = f"{name_of(environment)}.{method}()"
    return await result_of(getattr(environment, method), arguments, seconds, call, of_row, READ.get(method, plain))


async def result_of(function: Callable, arguments: dict, seconds: float, call: str, row: dict, read=as_it_is, flag=""):
    """The function's result; TrajectoryError if it fails or is late. flag: the option that sets the limit."""
    outcome = await run_limited(function, arguments, seconds, read)
    if outcome is None:
        raise TrajectoryError(f"{call} took over {seconds:g} s ({flag or '--tool_timeout'})", row)
    if outcome[1] is not None:
        raise TrajectoryError(f"{call} raised {shorten(outcome[1], 500)}", row) from outcome[1]
    return outcome[0]


def reward_of(value) -> float:
    """A number of any kind, tensors and numpy scalars too, as a float to train on; TypeError for text."""
    if isinstance(value, (str, bytes)):
        raise TypeError("text is not a number")
    value = float(value)
    if not abs(value) <= LARGEST:
        raise ValueError(f"a reward must be finite, and from -{LARGEST:g} to {LARGEST:g}")
    return value


def read_step(outcome) -> tuple[list, float, bool, dict]:
    """The result of step() as plain python values."""
    if not isinstance(outcome, tuple) or len(outcome) != 4:
        raise TypeError(f"it must return (messages, reward, done, info), not {shorten(outcome)}")
    messages, reward, done, info = outcome
    return plain(messages), reward_of(reward), bool(done), read_metrics(info)


def read_score(value) -> float | None:
    return None if value is None else reward_of(value)


def read_metrics(value) -> dict:
    return plain(dict(value or {}))


def read_state(value):
    hash(value)  # states are compared by it; TypeError for a list
    return value


READ = {"step": read_step, "score": read_score, "state": read_state, "metrics": read_metrics}


def name_of(environment) -> str:
    """The class of an environment, or of the object whose methods are its tools."""
    return type(getattr(environment, "inner", environment)).__name__


async def reset(environment, row: dict, cfg: TrainConfig, processor=None) -> list[dict]:
    """The prompt of environment.reset(), as chat messages."""
    seed = cfg.seed if row.get("seed") is None else row["seed"]
    messages = await call_environment(environment, "reset", row, cfg, row=row, seed=seed)
    return checked_messages(messages, f"{name_of(environment)}.reset()", processor)


async def state_of(environment, row: dict, cfg: TrainConfig):
    """The environment's state(), for advantages that compare turns; None if it does not define one."""
    if type(environment).state is Environment.state:
        return None
    return await call_environment(environment, "state", row, cfg)


def checked_messages(messages, source: str, processor=None, limit: int | None = None) -> list[dict]:
    """Chat messages in the form that templates take: text becomes a user's message, lone halves of emoji are replaced,
    texts are cut to `limit` characters, and for a tokenizer, which takes no images, parts become text."""
    try:
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        checked = [each_text({"role": m["role"]} | in_usual_form(m), clean) for m in messages]
        for m in checked:
            parts_of(m["content"])  # PartError if it is neither text nor parts
    except (PartError, TypeError, KeyError, AttributeError) as error:
        form = '[{"role": "user", "content": "..."}]'
        fault = f"{source} must give chat messages, such as {form}; it gave {shorten(messages)} ({error})"
        raise TrajectoryError(fault) from error
    if limit is not None:
        shortened = [m | {"content": cut(m["content"], limit)} for m in checked]
        if shortened != checked:
            warn_once(f"{source} gave a message over --max_tool_result {limit} characters: the model sees its start.")
        checked = shortened
    if processor is None or is_vision(processor):
        return checked
    return [m | {"content": as_text(m["content"], source)} for m in checked]


def as_text(content: str | list, source: str) -> str:
    """Parts of a message as text, for models without images."""
    if any(part["type"] == "image" for part in parts_of(content)):
        warn_once(f"{source} gives images, and the model of --model_id takes none: it reads {NO_IMAGE!r} instead.")
    return text_of_parts(content)


def checked_step(outcome: tuple, environment, processor=None, limit: int | None = None) -> tuple:
    """The outcome of `read_step`, with `checked_messages`."""
    source = f"{name_of(environment)}.step()"
    messages, reward, done, info = outcome
    return checked_messages(messages, source, processor, limit), reward, done, info
