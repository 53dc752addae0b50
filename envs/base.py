"""Environments: what answers the model between its turns.

    --env frozenlake?slippery=true          # a name in ENVIRONMENTS, arguments of its __init__ behind it
    --env my_env.py:Guess                   # a class of a file; examples/ has some, each with its rows and reward

An environment is one object a trajectory, and a class like this:

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

        def actions(self):                          # what --policy random chooses from
            return [str(n) for n in range(1, 10)]

Every method may be plain or async and has --tool_timeout seconds, the constructor too; none of them holds up other
trajectories. One that raises or is late costs its trajectory, which is left out and counted; above --max_failed of a
step the run stops and shows the commonest cause. The seed is the row's column `seed`, which every row has that is
loaded with --env: the members of a group share it. The numbers of `info` are logged, their means over a trajectory's
turns, as rewards/environment/NAME; `score()` is added to the last turn's reward. A turn that is cut by its length ends
the trajectory without a step. `state()` lets --advantage gigpo compare turns that began alike. `close()` is
called at the end, however it ends; with `pooled = True` an instance is reset and played again instead. `tools` is what
the model can call ({name: Tool}); most environments have none and read the text.

`python scripts/play.py --env NAME --policy random` plays one without model, server or torch.distributed.
"""

import math
from collections.abc import Callable

from config import TrainConfig, shorten
from envs.tools import Tool, cut, run_calls, tools_of
from inputs.formats import instructions, outside_thinking, parser_of, read_calls
from inputs.parts import NO_IMAGE, PartError, in_usual_form, parts_of, text_of_parts
from inputs.prompts import clean, each_text, is_vision
from inputs.trajectory import LARGEST, TrajectoryError
from safety.calls import run_limited
from safety.results import plain, unread, warn_once


class Environment:
    """What every environment has; a subclass needs `step`, and mostly `reset`."""

    tools: dict[str, Tool] = {}  # the model's in this trajectory, set by reset()
    instructions = ""  # how to call them, for chat templates that do not say
    step_timeout: float | None = None  # seconds; None: --tool_timeout
    pooled = False  # whether an instance may be played again after another reset(), where making one is slow

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Begin anew; returns the prompt as chat messages."""
        prompt = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    async def step(self, text: str) -> tuple[list[dict], float, bool, dict]:
        """Answer one turn of the model: (messages to it, reward of the turn, done, info)."""
        raise NotImplementedError

    def state(self):
        """The state the environment is in, anything hashable: asked after reset() and each step(). Turns that start in
        equal states of one group are compared by --advantage gigpo. None: not known."""
        return None

    def score(self) -> float | None:
        """What the whole trajectory earns beyond its turns, asked once at its end. None where no turn had a reward,
        either: this environment gives none, and other rewards count alone."""
        return 0.0

    def close(self) -> None:
        """Release what the environment holds; called once, at the end of its trajectory, however that ended."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log about the whole trajectory, asked once at its end."""
        return {}

    def actions(self) -> list[str]:
        """Turns a random policy may choose from, where there are such."""
        return []


class ToolEnvironment(Environment):
    """A bare set of tools: runs the calls of a turn, all at once; a turn without any is the answer."""

    begun = ""  # what the prompt has begun the answer with: "<think>\n"
    schemas: list[dict] = []  # of the tools
    step_timeout = math.inf  # calls have limits of their own, and may wait for their turn
    in_order = False  # whether a turn's calls run one after another

    def __init__(self, given: dict[str, Tool], cfg):
        self.given, self.cfg, self.parser = given, cfg, parser_of(cfg)

    def reset(self, row, seed):
        self.offer(tools_of(row, self.given))
        return super().reset(row, seed)

    def offer(self, tools: dict[str, Tool]) -> None:
        self.tools, self.schemas = tools, [tool.schema() for tool in tools.values()]
        self.instructions = instructions(self.schemas, self.parser) if tools else ""

    async def step(self, text):
        text = self.begun + text
        calls = read_calls(text, self.schemas, self.parser)
        within = sum(str(call.arguments).count("</answer>") for call in calls)
        if not calls or outside_thinking(text).count("</answer>") > within:
            return [], 0.0, True, {"calls": []}
        messages, events = await run_calls(calls, self.tools, self.cfg, self.in_order)
        read = [call.as_message() for call in calls if not call.error]
        return messages, 0.0, False, {"calls": events, "tool_calls": read}


# ---- asking one: within a time, off the event loop, at the cost of one trajectory ------------------------------------


async def call_environment(environment, method: str, of: dict, cfg: TrainConfig, **arguments):
    """environment.METHOD within its time; TrajectoryError naming it and the row, `of`, if it fails or is late."""
    seconds = (method == "step" and environment.step_timeout) or cfg.tool_timeout
    what = f"{name_of(environment)}.{method}()"
    return await limited(getattr(environment, method), arguments, seconds, what, of, READ.get(method, plain))


async def limited(function: Callable, arguments: dict, seconds: float, what: str, row: dict, read=unread, flag=""):
    """What the function returned; TrajectoryError if it fails or is late. flag: that of the limit"""
    outcome = await run_limited(function, arguments, seconds, read)
    if outcome is None:
        raise TrajectoryError(f"{what} took over {seconds:g} s ({flag or '--tool_timeout'})", row)
    if outcome[1] is not None:
        raise TrajectoryError(f"{what} raised {shorten(outcome[1], 500)}", row) from outcome[1]
    return outcome[0]


def reward_of(value) -> float:
    """A number of any kind, tensors and numpy scalars too, that can be trained on; text is none."""
    if isinstance(value, (str, bytes)):
        raise TypeError("text is not a number")
    value = float(value)
    if not abs(value) <= LARGEST:
        raise ValueError(f"a reward must be finite, and from -{LARGEST:g} to {LARGEST:g}")
    return value


def read_step(outcome) -> tuple[list, float, bool, dict]:
    """Of step(), made plain."""
    if not isinstance(outcome, tuple) or len(outcome) != 4:
        raise TypeError(f"it must return (messages, reward, done, info), not {shorten(outcome)}")
    messages, reward, done, info = outcome
    return plain(messages), reward_of(reward), bool(done), read_metrics(info)


def read_score(value) -> float | None:
    return None if value is None else reward_of(value)


def read_metrics(value) -> dict:
    return plain(dict(value or {}))


def read_state(value):
    hash(value)  # by which states are compared; TypeError for a list
    return value


READ = {"step": read_step, "score": read_score, "state": read_state, "metrics": read_metrics}


def name_of(environment) -> str:
    """The class of an environment, or of the object whose methods are its tools."""
    return type(getattr(environment, "inner", environment)).__name__


async def reset(environment, row: dict, cfg: TrainConfig, processor=None) -> list[dict]:
    """The environment's prompt as chat messages; it may be text."""
    seed = cfg.seed if row.get("seed") is None else row["seed"]
    messages = await call_environment(environment, "reset", row, cfg, row=row, seed=seed)
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


def checked_step(outcome: tuple, environment, processor=None, most: int | None = None) -> tuple:
    """What `read_step` made of step(), with `checked_messages`."""
    whose = f"{name_of(environment)}.step()"
    messages, reward, done, info = outcome
    return checked_messages(messages, whose, processor, most), reward, done, info
