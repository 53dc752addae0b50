"""Environments of other libraries, and the one that `--env` names.

    --env gymnasium?id=FrozenLake-v1&is_slippery=false     # arguments that are not ours go to gymnasium.make
    --env textarena?id=Wordle-v0                           # games for one player
    --env my_envs.py:Counter                               # as TRL's environment_factory: its methods are tools

docs/environments.md describes each, and how to bring over classes of verifiers and veRL.
"""

import contextlib
import functools
import inspect
import random
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy

from config import ConfigError, TrainConfig, function_path, known_name, load_function, require, shorten, with_arguments
from envs.base import Environment, ToolEnvironment, name_of, result_of
from envs.mcp import get_tools
from envs.tools import Tool, from_function
from inputs.parts import parts_of
from safety.calls import run_limited
from safety.results import as_it_is, warn_once
from safety.sandbox import check_contained

# gymnasium and textarena are optional packages, imported where their environments are made.

# ---- gymnasium ------------------------------------------------------------------------------------------------------

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")  # the last digit of a terminal's code


def plain_text(text: str) -> str:
    """A drawing without the terminal's codes: a coloured character becomes [red:F]."""
    return re.sub(r"\x1b\[(?:\d;)?\d*(\d)(?:;1)?m(.*?)\x1b\[0m", lambda m: f"[{COLOURS[int(m[1]) % 8]}:{m[2]}]", text)


class Gymnasium(Environment):
    """A gymnasium environment whose actions are numbers or text, and whose observations are short or drawn by "ansi".

    The action is the number (with a Text space, the text) in the last <answer>...</answer>, or in the whole turn if
    there is no such tag. An invalid action costs `penalty` and does not step. `hint` precedes the first observation.
    Other arguments go to gymnasium.make. ConfigError if the environment cannot be played.
    """

    def __init__(self, id: str, hint: str = "", penalty: float = 0.1, **options):
        self.hint, self.penalty, where = hint, penalty, f"--env gymnasium?id={id}"
        require("gymnasium", where)
        import gymnasium

        try:
            self.env = gymnasium.make(id, **options)
            if "render_mode" not in options and "ansi" in self.env.metadata.get("render_modes", ()):
                self.env = gymnasium.make(id, render_mode="ansi", **options)
        except Exception as error:  # the environment's own constructor may raise anything at a wrong argument
            raise ConfigError(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from error
        space, obs_space = self.env.action_space, self.env.observation_space
        if not isinstance(space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
            raise ConfigError(f"{where}: its actions are {space}; only Discrete and Text are played. See envs/base.py.")
        self.numbered, self.sees_a_number = (isinstance(s, gymnasium.spaces.Discrete) for s in (space, obs_space))

    def described(self, observation) -> str:
        with numpy.printoptions(threshold=sys.maxsize, legacy="1.25"):  # in full, and 3 rather than np.int64(3)
            drawing = plain_text(self.env.render()) if self.env.render_mode == "ansi" else str(observation)
        # A number where there is one: the drawing may show the last action, too, and differ in the same state.
        self.place = int(observation) if self.sees_a_number else drawing
        return drawing

    def state(self):
        return self.place

    def reset(self, row, seed):
        observation, _ = self.env.reset(seed=seed)
        space, answer = self.env.action_space, "your action"
        if self.numbered:
            answer = f"an action from {space.start} to {space.start + space.n - 1}"
        text = f"{self.hint} Answer each time with {answer}, as <answer>...</answer>.\n{self.described(observation)}"
        return text.strip()

    def step(self, text):
        answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        action = answer = (answers[-1] if answers else text).strip()
        if self.numbered:
            # At most 18 digits: no action has more, and python refuses to read thousands of them.
            action = int(action) if re.fullmatch(r"-?[0-9]{1,18}", action) else None
        if action is None or not self.env.action_space.contains(action):
            text = f"{shorten(answer, 50)} is no action of {self.env.action_space}."
            return text, -self.penalty, False, {"valid": 0.0}
        observation, reward, ended, cut, _ = self.env.step(action)
        return self.described(observation), float(reward), ended or cut, {"valid": 1.0}

    def close(self):
        self.env.close()


# ---- TextArena ------------------------------------------------------------------------------------------------------

_RANDOM = threading.Lock()  # TextArena's games draw from python's global generator, which all threads share


class TextArena(Environment):
    """A TextArena game for one player:  --env textarena?id=Wordle-v0   Its outcome is the reward of the last turn.

    Each turn the model sees the game's new messages; TextArena's own wrappers would repeat rules and history. The seed
    determines the whole game, which draws from its own random generator. Other arguments go to the game. ConfigError if
    it cannot be played.
    """

    pooled = True  # making a game may mean reading a dictionary

    def __init__(self, id: str, **options):
        where, self.chance = f"--env textarena?id={id}", random.Random(0).getstate()
        require("textarena", where)
        import textarena

        try:
            with self.own_chance():
                self.game = textarena.make(id, **options)
                while isinstance(self.game, textarena.Wrapper):
                    self.game = self.game.env
                # Some print a line at every new game: `print` in their module shadows the built-in one.
                vars(sys.modules[type(self.game).__module__])["print"] = lambda *args, **kwargs: None
                self.game.reset(num_players=1, seed=0)
            if not isinstance(self.game.state, textarena.SinglePlayerState):
                raise ValueError("a game for several players")
        except Exception as error:  # games of any number of players, some with faults of their own
            raise ConfigError(f"{where} cannot be played alone ({error!r:.300}); see docs/environments.md.") from error

    @contextlib.contextmanager
    def own_chance(self):
        """Within this context, python's `random` has the state of this game's generator."""
        with _RANDOM:
            before = random.getstate()
            random.setstate(self.chance)
            try:
                yield
            finally:
                self.chance = random.getstate()
                random.setstate(before)

    def news(self) -> list[dict]:
        """The game's messages since the last call, without the model's own move."""
        from textarena import ObservationType

        _, entries = self.game.get_observation()
        # (sender, text, kind); for the model's own move some games have another order
        others = [str(entry[1]).strip("\n") for entry in entries if ObservationType.PLAYER_ACTION not in entry]
        return [{"role": "user", "content": "\n".join(others)}]

    def reset(self, row, seed):
        self.chance = random.Random(seed).getstate()
        with self.own_chance():
            self.game.reset(num_players=1, seed=seed)
        return self.news()

    def step(self, text):
        with self.own_chance():
            done, _ = self.game.step(text)
        if not done:
            return self.news(), 0.0, False, {}
        rewards, info = self.game.close()
        reward, invalid = (rewards or {}).get(0, 0.0), bool(info[0].get("invalid_move"))
        if isinstance(reward, str):  # some games put the reason for an invalid move there
            reward = inspect.signature(self.game.state.set_invalid_move).parameters["reward"].default
        return [], float(reward), True, {"invalid": float(invalid)}


# ---- classes whose methods are tools, as TRL's ----------------------------------------------------------------------

RESERVED = ("reset", "get_reward", "close")  # methods for us to call; every other public method is a tool


class MethodsEnvironment(ToolEnvironment):
    """An object as TRL's `environment_factory` makes it, with the tools of --tools and --mcp_config beside its own.

    reset(**row), plain or async, returns text or message parts (images, too) to append to the prompt, a list of whole
    messages to replace it, or None. Public methods are tools, except three: reset(); get_reward(), which may be
    missing, for the score, None if it does not apply; and close(), which may be missing, called at the end.
    """

    in_order = True  # calls change the object's state

    def __init__(self, inner, tools: dict[str, Tool], cfg):
        super().__init__(tools, cfg)
        self.inner = inner
        # Looked up on the class: on the object, properties would be computed.
        names = [name for name, _ in inspect.getmembers(type(inner), inspect.isfunction) if name[0] != "_"]
        methods = (from_function(getattr(inner, name)) for name in names if name not in RESERVED)
        self.methods = {tool.name: tool for tool in methods}
        if clash := self.methods.keys() & tools.keys():
            raise ConfigError(f"--env {cfg.env}: {type(inner).__name__} and --tools both have a tool {min(clash)!r}.")

    def reset(self, row, seed):
        columns = ("tools", "tools_kwargs")  # ours only with --tools; else the environment may use these columns
        messages = super().reset(row if self.all_tools else {k: v for k, v in row.items() if k not in columns}, seed)
        self.offer(self.methods | self.tools)
        parameters = inspect.signature(self.inner.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        row = {k: v for k, v in row.items() if takes_all or k in parameters}
        addition = self.inner.reset(**row)
        return self.after(addition, messages) if inspect.isawaitable(addition) else with_added(messages, addition)

    async def after(self, addition, messages: list[dict]) -> list[dict]:
        return with_added(messages, await addition)

    def score(self):
        return self.inner.get_reward() if hasattr(self.inner, "get_reward") else None

    def close(self):
        return self.inner.close() if hasattr(self.inner, "close") else None


def with_added(messages: list[dict], addition) -> list[dict]:
    """The prompt with the result of reset() appended to its last message; whole messages replace it."""
    if not addition:
        return messages
    if isinstance(addition, list) and all(isinstance(part, dict) and "role" in part for part in addition):
        return addition
    last = messages[-1]["content"]
    if isinstance(last, str) and isinstance(addition, str):
        content = last + addition
    else:
        content = [part for part in [*parts_of(last), *parts_of(addition)] if part.get("text") != ""]
    return [*messages[:-1], messages[-1] | {"content": content}]


# ---- from a config --------------------------------------------------------------------------------------------------

GAMES = Path(__file__).resolve().parent.parent / "examples" / "games.py"
ENVIRONMENTS: dict[str, type[Environment] | str] = {  # classes, or file.py:Class
    "frozenlake": f"{GAMES}:FrozenLake",
    "sokoban": f"{GAMES}:Sokoban",
    "gymnasium": Gymnasium,
    "textarena": TextArena,
}


def get_environment(spec: str, cfg=None) -> Callable[[], Environment]:
    """A function that makes the environment `NAME?key=value&...` or `file.py:NAME?...`. NAME in a file is a class, or a
    function or functools.partial that returns an object; the latter is called once, to learn the object's class.
    ConfigError if it cannot be used."""
    name, arguments = with_arguments(spec)
    if not function_path(name):
        known_name("--env (names, or path/to/file.py:Class)", name, ENVIRONMENTS)
    factory = ENVIRONMENTS.get(name, name)
    factory = load_function(factory) if isinstance(factory, str) else factory
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"--env {spec}: {error}; give it as --env '{name}?argument=value'.") from None
    cls = factory if inspect.isclass(factory) else type(factory(**arguments))
    if not callable(getattr(cls, "reset", None)):
        raise ConfigError(f"--env {name}: {cls.__name__} has no reset(); see the top of envs/base.py.")
    # Such a class answers turns, by reset(row, seed) and step(text). In one of TRL's, `step` may be a tool like others.
    answers_turns = issubclass(cls, Environment) or {"row", "seed"} <= inspect.signature(cls.reset).parameters.keys()
    if answers_turns and hasattr(cls, "step"):
        if cfg and (cfg.tools or cfg.mcp_config):
            raise ConfigError(f"--env {name}: {cls.__name__} answers text itself; leave out --tools and --mcp_config.")
        if not issubclass(cls, Environment):  # which has the methods that this class leaves out
            if not inspect.isclass(factory):
                raise ConfigError(f"--env {name}: let {cls.__name__} derive from envs.Environment, or give the class.")
            factory = type(cls.__name__, (cls, Environment), {})
        return functools.partial(factory, **arguments)
    if cfg.reward_funcs == ["environment"] and not hasattr(cls, "get_reward"):
        raise ConfigError(f"--env {name}: {cls.__name__} has no get_reward(), so --reward_funcs has to give a reward.")
    check_contained([method for _, method in inspect.getmembers(cls, inspect.isfunction)], cfg)
    tools = get_tools(cfg)
    return lambda: MethodsEnvironment(factory(**arguments), tools, cfg)


_MAKERS: dict[tuple, Callable] = {}  # by `kind`, so that tools keep their servers from step to step


def kind(cfg) -> tuple:
    """The settings that environments and tools depend on: domains with equal ones share them, servers included."""
    return tuple(cfg.tools), cfg.env, cfg.mcp_config, cfg.tool_parser, cfg.tool_timeout, cfg.max_tool_result


def environment_maker(cfg) -> Callable[[], Environment]:
    """A function that makes one trajectory's environment: that of --env, or the tools alone."""
    key = kind(cfg)
    if key not in _MAKERS:
        if cfg.env:
            _MAKERS[key] = get_environment(cfg.env, cfg)
        else:
            _MAKERS[key] = functools.partial(ToolEnvironment, get_tools(cfg), cfg)
    return _MAKERS[key]


# ---- one for a trajectory -------------------------------------------------------------------------------------------

_IDLE: dict[tuple, list] = {}  # environments with `pooled = True` that nobody plays at the moment


async def take_environment(make: Callable, row: dict, cfg: TrainConfig):
    """An environment for one trajectory: an idle one, or a new one. A constructor may take as long as a step."""
    if idle := _IDLE.get(kind(cfg)):
        return idle.pop()
    return await result_of(make, {}, cfg.tool_timeout, "making an environment", row)


async def put_away(environment, reusable: bool, cfg: TrainConfig) -> None:
    """Keep the environment for the next trajectory, or close() it. A close() that fails costs a warning."""
    if reusable and getattr(environment, "pooled", False):
        _IDLE.setdefault(kind(cfg), []).append(environment)
        return
    outcome = await run_limited(environment.close, {}, cfg.tool_timeout, as_it_is)
    if outcome is None or outcome[1] is not None:
        fault = f"took over {cfg.tool_timeout:g} s" if outcome is None else f"raised {shorten(outcome[1], 500)}"
        call = f"{name_of(environment)}.close()"
        warn_once(f"{call} {fault}. Said once.", kind=call)
