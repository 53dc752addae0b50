"""Other people's environments, and which one `--env` means.

    --env gymnasium?id=FrozenLake-v1&is_slippery=false     # what is not an argument of ours goes to gymnasium.make
    --env textarena?id=Wordle-v0                           # games for one player
    --env my_envs.py:Counter                               # as TRL's environment_factory: its methods are tools

docs/environments.md has each with what it takes, and how classes of verifiers and veRL are brought over.
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
from envs.base import Environment, ToolEnvironment, limited, name_of
from envs.mcp import get_tools
from envs.tools import Tool, from_function
from inputs.parts import parts_of
from safety.calls import run_limited
from safety.results import unread, warn_once
from safety.sandbox import check_contained

# gymnasium and textarena, optional packages, are imported where their environments are made.

# ---- gymnasium ------------------------------------------------------------------------------------------------------

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")  # the last digit of a terminal's code


def plain_text(drawn: str) -> str:
    """A drawing without the terminal's codes: a coloured place as [red:F]."""
    return re.sub(
        r"\x1b\[(?:\d;)?\d*(\d)(?:;1)?m(.*?)\x1b\[0m", lambda found: f"[{COLOURS[int(found[1]) % 8]}:{found[2]}]", drawn
    )


class Gymnasium(Environment):
    """A gymnasium environment with numbered or text actions, whose observations are short, or drawn by "ansi".

    An action is the number, or with a Text space the text, in <answer>...</answer> or, without such, in the whole turn.
    An invalid one costs `penalty` and does not step. `hint` stands before the first observation. Any other argument is
    gymnasium.make's. ConfigError for what cannot be played.
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
        space, seen = self.env.action_space, self.env.observation_space
        if not isinstance(space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
            raise ConfigError(f"{where}: its actions are {space}; only Discrete and Text are played. See envs/base.py.")
        self.numbered, self.sees_a_number = (isinstance(one, gymnasium.spaces.Discrete) for one in (space, seen))

    def shown(self, observation) -> str:
        with numpy.printoptions(threshold=sys.maxsize, legacy="1.25"):  # all of it, and 3 for np.int64(3)
            drawn = plain_text(self.env.render()) if self.env.render_mode == "ansi" else str(observation)
        # Not a drawing, which may tell the last action, too: the same number is the same state.
        self.place = int(observation) if self.sees_a_number else drawn
        return drawn

    def state(self):
        return self.place

    def reset(self, row, seed):
        observation, _ = self.env.reset(seed=seed)
        space, how = self.env.action_space, "your action"
        if self.numbered:
            how = f"an action from {space.start} to {space.start + space.n - 1}"
        text = f"{self.hint} Answer each time with {how}, as <answer>...</answer>.\n{self.shown(observation)}"
        return [{"role": "user", "content": text.strip()}]

    def step(self, text):
        found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        action = given = (found[-1] if found else text).strip()
        if self.numbered:
            # At most 18 digits: more are no action, and python would not even read thousands of them.
            action = int(action) if re.fullmatch(r"-?[0-9]{1,18}", action) else None
        if action is None or not self.env.action_space.contains(action):
            message = f"{shorten(given, 50)} is no action of {self.env.action_space}."
            return [{"role": "user", "content": message}], -self.penalty, False, {"valid": 0.0}
        observation, reward, ended, cut, _ = self.env.step(action)
        return [{"role": "user", "content": self.shown(observation)}], float(reward), ended or cut, {"valid": 1.0}

    def actions(self):
        space = self.env.action_space
        return [f"<answer>{space.start + n}</answer>" for n in range(space.n)] if self.numbered else []

    def close(self):
        self.env.close()


# ---- TextArena ------------------------------------------------------------------------------------------------------

_RANDOM = threading.Lock()  # TextArena's games draw from python's one generator, which all threads share


class TextArena(Environment):
    """A TextArena game for one player:  --env textarena?id=Wordle-v0   Its outcome is the reward of the last turn.

    What the model is shown is what the game has said since it was last asked; TextArena's own wrappers would say rules
    and history again each turn. The seed fixes the whole game: its draws come from a generator of its own. Any other
    argument is the game's. ConfigError for what cannot be played.
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
                # Some print a line at every new game; a name in their module shadows the built-in one.
                vars(sys.modules[type(self.game).__module__])["print"] = lambda *args, **kwargs: None
                self.game.reset(num_players=1, seed=0)
            if not isinstance(self.game.state, textarena.SinglePlayerState):
                raise ValueError("a game for several players")
        except Exception as error:  # games of any number of players, some with faults of their own
            raise ConfigError(f"{where} cannot be played alone ({error!r:.300}); see docs/environments.md.") from error

    @contextlib.contextmanager
    def own_chance(self):
        """Within it, python's `random` is this game's, and afterwards everybody's again."""
        with _RANDOM:
            before = random.getstate()
            random.setstate(self.chance)
            try:
                yield
            finally:
                self.chance = random.getstate()
                random.setstate(before)

    def news(self) -> list[dict]:
        """What the game has said since the last call, but not the model's own move."""
        from textarena import ObservationType

        _, said = self.game.get_observation()
        # (sender, text, kind); some games put the model's own move in with these three in another order
        others = [str(entry[1]).strip("\n") for entry in said if ObservationType.PLAYER_ACTION not in entry]
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
        if isinstance(reward, str):  # some put what was invalid there
            reward = inspect.signature(self.game.state.set_invalid_move).parameters["reward"].default
        return [], float(reward), True, {"invalid": float(invalid)}


# ---- classes whose methods are tools, as TRL's ----------------------------------------------------------------------

RESERVED = ("reset", "get_reward", "close")  # what we call ourselves; every other public method is a tool


class MethodsEnvironment(ToolEnvironment):
    """An object as TRL's `environment_factory` makes it, and the tools of --tools and --mcp_config beside its own.

    reset(**row), plain or async, gives what is put behind the prompt: text, message parts (images, too), None, or a
    list of whole messages in its place. Its other public methods are tools. get_reward(), if there is one, is the
    score; None means that it does not apply. close(), if there is one, is called at the end.
    """

    in_order = True  # calls change the object's state

    def __init__(self, inner, given: dict[str, Tool], cfg):
        super().__init__(given, cfg)
        self.inner = inner
        # Looked for on its class: properties of the object would be computed.
        names = [name for name, _ in inspect.getmembers(type(inner), inspect.isfunction) if name[0] != "_"]
        methods = (from_function(getattr(inner, name)) for name in names if name not in RESERVED)
        self.methods = {tool.name: tool for tool in methods}
        if both := self.methods.keys() & given.keys():
            raise ConfigError(f"--env {cfg.env}: {type(inner).__name__} and --tools both have a tool {min(both)!r}.")

    def reset(self, row, seed):
        own = ("tools", "tools_kwargs")  # without --tools they are the environment's columns, whatever is in them
        messages = super().reset(row if self.given else {k: v for k, v in row.items() if k not in own}, seed)
        self.offer(self.methods | self.tools)
        parameters = inspect.signature(self.inner.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        row = {k: v for k, v in row.items() if takes_all or k in parameters}
        added = self.inner.reset(**row)
        return self.after(added, messages) if inspect.isawaitable(added) else with_added(messages, added)

    async def after(self, added, messages: list[dict]) -> list[dict]:
        return with_added(messages, await added)

    def score(self):
        return self.inner.get_reward() if hasattr(self.inner, "get_reward") else None

    def close(self):
        return self.inner.close() if hasattr(self.inner, "close") else None


def with_added(messages: list[dict], added) -> list[dict]:
    """The prompt with what reset() gave put behind its last message; a list of whole messages takes its place."""
    if not added:
        return messages
    if isinstance(added, list) and all(isinstance(part, dict) and "role" in part for part in added):
        return added
    last = messages[-1]["content"]
    if isinstance(last, str) and isinstance(added, str):
        content = last + added
    else:
        content = [part for part in [*parts_of(last), *parts_of(added)] if part.get("text") != ""]
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
    """A function that makes the environment `NAME?key=value&...` or `file.py:NAME?...`; NAME in a file is a class, or a
    function or functools.partial that gives an object, which is called once to see what. ConfigError if it cannot."""
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
    # It answers turns, by reset(row, seed) and step(text). Of TRL's, `step` may be a tool like others.
    plays = issubclass(cls, Environment) or {"row", "seed"} <= inspect.signature(cls.reset).parameters.keys()
    if plays and hasattr(cls, "step"):
        if cfg and (cfg.tools or cfg.mcp_config):
            raise ConfigError(f"--env {name}: {cls.__name__} answers text itself; leave out --tools and --mcp_config.")
        if not issubclass(cls, Environment):  # what it leaves out comes from there
            if not inspect.isclass(factory):
                raise ConfigError(f"--env {name}: let {cls.__name__} derive from envs.Environment, or give the class.")
            factory = type(cls.__name__, (cls, Environment), {})
        return functools.partial(factory, **arguments)
    if cfg.reward_funcs == ["environment"] and not hasattr(cls, "get_reward"):
        raise ConfigError(f"--env {name}: {cls.__name__} has no get_reward(), so --reward_funcs has to give a reward.")
    check_contained([method for _, method in inspect.getmembers(cls, inspect.isfunction)], cfg)
    given = get_tools(cfg)
    return lambda: MethodsEnvironment(factory(**arguments), given, cfg)


_MADE: dict[tuple, Callable] = {}  # tools keep their servers from step to step


def kind(cfg) -> tuple:
    """What environments and tools depend on: domains with the same share them, servers included."""
    return tuple(cfg.tools), cfg.env, cfg.mcp_config, cfg.tool_parser, cfg.tool_timeout, cfg.max_tool_result


def environment_maker(cfg) -> Callable[[], Environment]:
    """A function that makes one trajectory's environment: of --env, or of the tools alone."""
    key = kind(cfg)
    if key not in _MADE:
        if cfg.env:
            _MADE[key] = get_environment(cfg.env, cfg)
        else:
            _MADE[key] = functools.partial(ToolEnvironment, get_tools(cfg), cfg)
    return _MADE[key]


# ---- one for a trajectory -------------------------------------------------------------------------------------------

_IDLE: dict[tuple, list] = {}  # environments with `pooled = True` that nobody plays at the moment


async def take_environment(make: Callable, row: dict, cfg: TrainConfig):
    """An environment for one trajectory: an idle one, or a new one. A constructor may take as long as a step."""
    if idle := _IDLE.get(kind(cfg)):
        return idle.pop()
    return await limited(make, {}, cfg.tool_timeout, "making an environment", row)


async def put_away(environment, reusable: bool, cfg: TrainConfig) -> None:
    """close() what was played, or keep it for the next trajectory. A close() that fails costs a warning."""
    if reusable and getattr(environment, "pooled", False):
        _IDLE.setdefault(kind(cfg), []).append(environment)
        return
    outcome = await run_limited(environment.close, {}, cfg.tool_timeout, unread)
    if outcome is None or outcome[1] is not None:
        fault = f"took over {cfg.tool_timeout:g} s" if outcome is None else f"raised {shorten(outcome[1], 500)}"
        what = f"{name_of(environment)}.close()"
        warn_once(f"{what} {fault}. Said once.", kind=what)
