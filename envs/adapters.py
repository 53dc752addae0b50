"""Other people's environments, and which one `--env` means.

    --env gymnasium?id=FrozenLake-v1&is_slippery=false     # what is not an argument of ours goes to gymnasium.make
    --env textarena?id=Wordle-v0                           # games for one player
    --env my_envs.py:Counter                               # as TRL's environment_factory: its methods are tools
    --env my_envs.py:FACTORIES                             # a dict of such: the row's column `environment` chooses
    --env user?url=http://127.0.0.1:9000/v1&model=NAME     # a user whom another model plays

docs/environments.md has each with what it takes, and how classes of verifiers and veRL are brought over.
"""

import contextlib
import functools
import inspect
import logging
import math
import random
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy

from cli import nearest, shorten
from config import ConfigError, known_name
from envs import Environment, FrozenLake, Sokoban, ToolEnvironment
from envs.mcp_tools import get_tools
from envs.tools import Toolbox, from_function, instructions, model_tool
from inputs.parts import parts_of, text_of_parts
from plugins import function_path, load_function, require, with_arguments
from safety.calls import to_thread
from safety.sandbox import check_contained

# gymnasium and textarena, optional packages, are imported where their environments are made.

logger = logging.getLogger(__name__)


# ---- gymnasium ------------------------------------------------------------------------------------------------------

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")  # the last digit of a terminal's code
MOST_NUMBERS = 1000  # of an observation


def plain_text(drawn: str) -> str:
    """A drawing without the terminal's codes: coloured places in brackets, as [F], with the colours' names where the
    drawing has several, as [blue:R] and [magenta:G]."""
    pieces, style = [], ()
    for number, piece in enumerate(re.split(r"\x1b\[([\d;]*)m", drawn)):
        if number % 2 == 0:
            pieces.append((style, piece))
        elif set(codes := piece.split(";")) <= {"", "0", "22", "39", "49"}:
            style = ()
        else:
            style += tuple(COLOURS[int(c[-1])] for c in codes if re.fullmatch(r"(3|4|9|10)[0-7]", c)) or ("bold",)
    several = len({style for style, piece in pieces if style and piece}) > 1
    text = "".join(
        f"[{' '.join(style)}:{piece}]" if style and piece and several else f"[{piece}]" if style and piece else piece
        for style, piece in pieces
    )
    return re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?", "", text)  # cursor moves, titles


def numbers_in(space) -> int:
    """How many numbers an observation of the space has, those of its parts together; a text counts as one."""
    parts = getattr(space, "spaces", ())  # of a Dict, a Tuple or a OneOf
    parts = parts.values() if isinstance(parts, Mapping) else parts
    return sum(map(numbers_in, parts)) if parts else math.prod(getattr(space, "shape", None) or (1,))


def whole(observation) -> str:
    """An observation as text, all of it: numpy by itself leaves out the middle of arrays over 1,000 numbers."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {whole(part)}" for key, part in observation.items())
    if isinstance(observation, (tuple, list)):
        return f"({', '.join(map(whole, observation))})"
    if hasattr(observation, "__array__"):
        numbers = numpy.asarray(observation)
        return numpy.array2string(numbers, threshold=sys.maxsize) if numbers.ndim else str(numbers.item())
    return str(observation)


class Gymnasium(Environment):
    """A gymnasium environment with numbered or text actions, whose observations are short, or drawn by "ansi".

    An action is the number, or with a Text space the text, in <answer>...</answer> or, without such, in the whole turn.
    An invalid one costs `penalty` and does not step. `hint` stands before the first observation. Any other argument is
    gymnasium.make's. ConfigError for what cannot be played.
    """

    tried: set[str] = set()  # environments of which one step has been made in this process

    def __init__(self, id: str, hint: str = "", penalty: float = 0.1, **options):
        self.hint, self.penalty, where = hint, penalty, f"--env gymnasium?id={id}"
        require("gymnasium", where)
        import gymnasium

        try:
            self.env = gymnasium.make(id, **options)
            if "render_mode" not in options and "ansi" in self.env.metadata.get("render_modes", ()):
                self.env.close()
                self.env = gymnasium.make(id, render_mode="ansi", **options)
        except Exception as error:  # the environment's own constructor may raise anything at a wrong argument
            fault = f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"
            if isinstance(error, gymnasium.error.UnregisteredEnv) and ":" not in id:
                fault += f" Other packages' environments are named with their module: id=minigrid:{id}, say."
            raise ConfigError(fault) from error
        space, seen = self.env.action_space, self.env.observation_space
        if not isinstance(space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
            raise ConfigError(
                f"{where}: its actions are {space}; allowed are Discrete (a number) and Text. Wrap it in a class of "
                "your own that makes an action of the model's text: see the top of envs/base.py."
            )
        if self.env.render_mode != "ansi" and numbers_in(seen) > MOST_NUMBERS:
            raise ConfigError(
                f"{where}: its observations are {numbers_in(seen):,} numbers; allowed are {MOST_NUMBERS:,} at "
                'most, or a render_mode "ansi". Wrap it in a class of your own that shows them: see the top of '
                "envs/base.py."
            )
        self.numbered, self.sees_a_number = (isinstance(one, gymnasium.spaces.Discrete) for one in (space, seen))
        if (key := f"{id} {options}") not in self.tried:
            self.try_once(where)
            self.tried.add(key)

    def try_once(self, where: str) -> None:
        """ConfigError if reset() or step() has the form of gym, from before gymnasium. What they raise themselves is a
        matter of the trajectory."""
        inner = self.env.unwrapped  # wrappers raise at that form, without a word about the cause
        try:
            takes = inspect.signature(inner.reset).parameters
            if right := "seed" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values()):
                begun = inner.reset(seed=0)
                right = isinstance(begun, tuple) and len(begun) == 2 and isinstance(begun[1], Mapping)
                if right and self.numbered:  # a text may be a command: none is made up
                    right = len(inner.step(inner.action_space.sample())) == 5
        except Exception:
            return
        if not right:
            raise ConfigError(
                f"{where}: its reset() or step() has the form of gym, from before gymnasium. Allowed are reset(seed, "
                "options) that returns (observation, info), and step(action) that returns (observation, reward, "
                "terminated, truncated, info). Wrap it in a gymnasium.Env of your own."
            )

    def shown(self, observation) -> str:
        drawn = plain_text(self.env.render()) if self.env.render_mode == "ansi" else whole(observation)
        # Not a drawing, which may tell the last action, too: the same number is the same state.
        self.place = int(observation) if self.sees_a_number else drawn
        return drawn

    def state(self):
        return self.place

    def reset(self, row, seed):
        observation, _ = self.env.reset(seed=seed)
        actions = self.actions()
        how = "your action"
        if self.numbered:
            first = int(self.env.action_space.start)
            how = f"an action from {first} to {first + len(actions) - 1}"
        text = f"{self.hint} Answer each time with {how}, as <answer>...</answer>.\n{self.shown(observation)}"
        return [{"role": "user", "content": text.strip()}]

    def step(self, text):
        found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        action = (found[-1] if found else text).strip()
        if self.numbered:
            # At most 18 digits: more are no action, and python would not even read thousands of them.
            action = int(action) if re.fullmatch(r"-?[0-9]{1,18}", action) else None
        if action is None or not self.env.action_space.contains(action):
            given = shorten((found[-1] if found else text).strip(), 50)
            message = f"{given} is no action of {self.env.action_space}."
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

    tried: set[str] = set()  # games that have been begun once in this process
    idle: dict[str, list] = {}  # games of trajectories that have ended: making one may mean reading a dictionary

    def __init__(self, id: str, **options):
        self.key, self.chance, self.busy = f"{id} {options}", random.Random(0).getstate(), False
        try:
            self.game = self.idle.setdefault(self.key, []).pop()
        except IndexError:
            self.game = self.made(id, options)

    def made(self, id: str, options: dict):
        where = f"--env textarena?id={id}"
        require("textarena", where)
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        if id not in ENV_REGISTRY:
            guess = nearest(id, ENV_REGISTRY)
            raise ConfigError(f"{where}: TextArena has no such game.{f' Did you mean {guess!r}?' if guess else ''}")
        try:
            with self.own_chance():
                game = textarena.make(id, **options)
                # Some print a line at every new game; a name in their module shadows the built-in one.
                vars(sys.modules[type(unwrapped(game)).__module__])["print"] = lambda *args, **kwargs: None
                if self.key not in self.tried:
                    game.reset(num_players=1, seed=0)
                    if not isinstance(unwrapped(game).state, textarena.SinglePlayerState):
                        raise ValueError("a game for several players")
                    self.tried.add(self.key)
        except Exception as error:  # games of any number of players, some with faults of their own
            if isinstance(error, LookupError) and "nltk" in str(error).lower():
                raise ConfigError(
                    f"{where}: it needs word lists of NLTK, not found. With a network: python -m nltk.downloader "
                    "words averaged_perceptron_tagger_eng; without, copy its folder nltk_data and set NLTK_DATA to it."
                ) from error
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if isinstance(error, SyntaxError):
                fault += f", in code of TextArena for a later Python than {sys.version.split()[0]}"
            few = "Allowed are games for one player, such as GuessTheNumber-v0, Wordle-v0, Sudoku-v0 or 2048-v0"
            raise ConfigError(f"{where} cannot be played alone ({fault}). {few}.") from error
        return game

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

    def news(self) -> str:
        """What the game has said since the last call, but not the model's own move."""
        from textarena import ObservationType

        _, said = unwrapped(self.game).get_observation()
        # (sender, text, kind); some games put the model's own move in with these three in another order
        others = [entry for entry in said if ObservationType.PLAYER_ACTION not in entry]
        return "\n".join(str(text).strip("\n") for _, text, _ in others)

    def outcome(self) -> tuple[float, bool]:
        """(the reward, whether an invalid move ended the game). Some games put what was invalid where the reward of an
        invalid move belongs: then it is the one that TextArena gives if nothing is said."""
        rewards, info = self.game.close()
        reward, invalid = (rewards or {}).get(0, 0.0), bool(info[0].get("invalid_move"))
        if invalid and isinstance(reward, str):
            reward = inspect.signature(unwrapped(self.game).state.set_invalid_move).parameters["reward"].default
        return float(reward), invalid

    def reset(self, row, seed):
        self.busy, self.chance = True, random.Random(seed).getstate()
        with self.own_chance():
            self.game.reset(num_players=1, seed=seed)
        self.busy = False
        return [{"role": "user", "content": self.news()}]

    def step(self, text):
        self.busy = True
        with self.own_chance():
            done, _ = self.game.step(text)
        self.busy = False
        if done:
            reward, invalid = self.outcome()
            return [], reward, True, {"invalid": float(invalid)}
        return [{"role": "user", "content": self.news()}], 0.0, False, {}

    def close(self):
        if not self.busy and self.game is not None:  # a step that was given up may still be in it
            self.idle[self.key].append(self.game)
        self.game = None


def unwrapped(game):
    """The game itself: its wrappers repeat all that was said, the game gives what is new."""
    from textarena import Wrapper

    while isinstance(game, Wrapper):
        game = game.env
    return game


# ---- classes whose methods are tools, as TRL's ----------------------------------------------------------------------

RESERVED = ("reset", "get_reward", "close")  # what we call ourselves; every other public method is a tool


class InOrder(Toolbox):
    """Runs the calls of a turn one after another: those of one object change its state."""

    async def _all(self, calls, tools):
        return [await self._one(call, tools) for call in calls]


class MethodsEnvironment(ToolEnvironment):
    """An object as TRL's `environment_factory` makes it, and the tools of --tools and --mcp_config beside its own.

    reset(**row), plain or async, gives what is put behind the prompt: text, message parts (images, too), None, or a
    list of whole messages in its place. Its other public methods are tools. get_reward(), if there is one, is the
    score; None means that it does not apply. close(), if there is one, is called at the end.

    column: a column of the row that chose this environment, and is not given to it.
    """

    def __init__(self, inner, toolbox: Toolbox, cfg, column: str | None = None):
        super().__init__(toolbox, cfg)
        self.inner, self.column = inner, column
        own = (replace(from_function(method), cacheable=False) for method in tool_methods(inner))
        self.methods = {tool.name: tool for tool in own}
        if both := self.methods.keys() & toolbox.tools.keys():
            raise ConfigError(f"--env {cfg.env}: {type(inner).__name__} and --tools both have a tool {min(both)!r}.")

    def reset(self, row, seed):
        own = ("tools", "tools_kwargs")  # without --tools they are the environment's columns, whatever is in them
        messages = super().reset(row if self.toolbox.tools else {k: v for k, v in row.items() if k not in own}, seed)
        self.tools = self.methods | self.tools
        self.instructions = instructions([tool.schema() for tool in self.tools.values()], self.parser)
        parameters = inspect.signature(self.inner.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        row = {k: v for k, v in row.items() if k != self.column and (takes_all or k in parameters)}
        added = self.inner.reset(**row)
        return self.after(added, messages) if inspect.isawaitable(added) else with_added(messages, added)

    async def after(self, added, messages: list[dict]) -> list[dict]:
        return with_added(messages, await added)

    def score(self):
        return self.inner.get_reward() if hasattr(self.inner, "get_reward") else None

    async def close(self):
        for close in (super().close, getattr(self.inner, "close", None)):
            if close and inspect.isawaitable(outcome := await to_thread(close)):
                await outcome


def tool_methods(inner) -> list[Callable]:
    """The object's public methods. Looked for on its class: properties of the object would be computed."""
    found = inspect.getmembers(type(inner), inspect.isfunction)
    return [getattr(inner, name) for name, _ in found if name[0] != "_" and name not in RESERVED]


def with_added(messages: list[dict], added) -> list[dict]:
    """The prompt with what reset() gave put behind its last message; a list of whole messages takes its place."""
    if added is None or added == "" or added == []:
        return messages
    if isinstance(added, list) and all(isinstance(part, dict) and "role" in part for part in added):
        return added
    if not isinstance(added, (str, list)):
        raise TypeError(f"reset() must give text, message parts, messages or None; it gave {shorten(added)}")
    last = messages[-1]["content"]
    if isinstance(last, str) and isinstance(added, str):
        return [*messages[:-1], messages[-1] | {"content": last + added}]
    parts = [part for part in [*parts_of(last), *parts_of(added)] if part.get("text") != ""]
    if all(part["type"] == "text" for part in parts):  # templates for text alone write a list as it is
        parts = "".join(part["text"] for part in parts)
    return [*messages[:-1], messages[-1] | {"content": parts}]


# ---- a user ---------------------------------------------------------------------------------------------------------


class SimulatedUser(Environment):
    """Talks with a user that another model plays:  --env user?url=http://127.0.0.1:9000/v1&model=NAME

    The row's column `user` says who that is and wants; the user ends the talk by saying DONE. What it was worth is a
    matter for a reward function.
    """

    def __init__(self, url: str, model: str, max_tokens: int = 200):
        self.ask = model_tool("user", "", url, model, max_tokens=max_tokens).call

    def reset(self, row, seed):
        if not isinstance(row.get("user"), str):
            raise ConfigError(f"--env user: the row {shorten(row)} has no column `user`, a text that says who it is.")
        messages = super().reset(row, seed)
        self.talk = [f"User: {text_of_parts(m['content'])}" for m in messages if m["role"] == "user"]
        self.who = row["user"]
        return messages

    def step(self, text):
        self.talk.append(f"Assistant: {text}")
        request = f"You are this user of an assistant: {self.who}\n\n" + "\n".join(self.talk)
        said = self.ask(question=f"{request}\n\nWrite only what the user says next, or DONE if all is settled.")
        self.talk.append(f"User: {said}")
        return [{"role": "user", "content": said}], 0.0, "DONE" in said, {}


ENVIRONMENTS: dict[str, type[Environment]] = {
    "frozenlake": FrozenLake,
    "sokoban": Sokoban,
    "gymnasium": Gymnasium,
    "textarena": TextArena,
    "user": SimulatedUser,
}


# ---- from a config --------------------------------------------------------------------------------------------------

COLUMN = "environment"  # of a row: which of a dict of environments is its own. TRL's name


def get_environment(spec: str, cfg=None) -> Callable[..., Environment]:
    """A function that makes the environment `NAME?key=value&...` or `file.py:NAME?...` for a row; NAME in a file is a
    class, a function or functools.partial that gives an object, or a dict of such. ConfigError if it cannot.

    The row given to it chooses from a dict, by its column `environment`; without a row any of them is made.
    """
    name, arguments = with_arguments(spec)
    if not function_path(name):
        known_name("--env (names, or path/to/file.py:Class)", name, ENVIRONMENTS)
    given = load_function(name, also=dict) if function_path(name) else ENVIRONMENTS[name]
    toolbox = functools.cache(lambda: InOrder(get_tools(cfg), cfg))  # one for all: its limits are over them all
    if not isinstance(given, dict):
        make = maker(given, name, arguments, cfg, toolbox)
        return lambda row=None: make()
    if arguments or not given:
        fault = "has no entry" if not given else f"takes no {next(iter(arguments))}; put it into a functools.partial"
        raise ConfigError(f"--env {spec}: a dict of environments {fault}.")
    makers = {key: maker(made, f"{name}[{key!r}]", {}, cfg, toolbox, COLUMN) for key, made in given.items()}

    def make(row: dict | None = None) -> Environment:
        return makers[next(iter(makers)) if row is None else chosen(row, makers)]()

    make.known = makers  # a row says which
    return make


def chosen(row: dict, known) -> str:
    """Which of several environments the row's column names."""
    known_name(f"column `{COLUMN}` of the row {shorten(row)}", row.get(COLUMN), known)
    return row[COLUMN]


def check_rows(rows, cfg) -> None:
    """ConfigError for a row whose column `environment` names none of --env."""
    name = (cfg.env or "").partition("?")[0]
    if function_path(name) and isinstance(known := load_function(name, also=dict), dict):
        for row in rows:
            chosen(row, known)


def maker(
    factory: Callable, name: str, arguments: dict, cfg, toolbox: Callable[[], Toolbox], column: str | None = None
) -> Callable[[], Environment]:
    """A function that makes one environment of a class, function or partial; it has been tried where it is no class."""
    if not callable(factory) or inspect.iscoroutinefunction(factory):
        raise ConfigError(
            f"--env {name} is {shorten(factory)}; allowed are a class, or a plain function that gives an object."
        )
    signature = inspect.signature(factory)
    for key in arguments if all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values()) else ():
        known_name(f"argument of --env {name}", key, signature.parameters)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        what = getattr(factory, "__name__", name)
        raise ConfigError(f"--env {name}: {what} {error}; give it as --env '{name}?argument=value'.") from None
    cls = factory if inspect.isclass(factory) else type(factory(**arguments))
    if not callable(getattr(cls, "reset", None)):
        raise ConfigError(
            f"--env {name}: {cls.__name__} has no reset(); see the top of envs/base.py for a whole environment."
        )
    if plays(cls):
        if cfg and (cfg.tools or cfg.mcp_config):
            raise ConfigError(
                f"--env {name}: {cls.__name__} answers text itself and brings its own tools, if any. Leave out "
                "--tools and --mcp_config, or give a class whose methods are tools (docs/environments.md)."
            )
        if not issubclass(cls, Environment):  # what it leaves out comes from there
            if not inspect.isclass(factory):
                raise ConfigError(f"--env {name}: let {cls.__name__} derive from envs.Environment, or give the class.")
            factory = type(cls.__name__, (cls, Environment), {})
        return lambda: factory(**arguments)
    if cfg is None:
        raise ConfigError(f"--env {name}: the methods of {cls.__name__} are tools, and those need a config.")
    check_rewarded(cls, name, cfg)
    check_contained([method for _, method in inspect.getmembers(cls, inspect.isfunction)], cfg)
    shared = toolbox()  # here, where no threads make environments: it may start servers
    return lambda: MethodsEnvironment(factory(**arguments), shared, cfg, column)


def plays(cls: type) -> bool:
    """Whether a class answers turns, by reset(row, seed) and step(text). Of TRL's, `step` may be a tool like others."""
    takes = inspect.signature(cls.reset).parameters
    return hasattr(cls, "step") and (issubclass(cls, Environment) or {"row", "seed"} <= takes.keys())


def check_rewarded(cls: type, name: str, cfg) -> None:
    """Whether a class whose methods are tools gives a reward, and whether it counts; without reward functions it is
    played alone (rollouts.py)."""
    if cfg.reward_funcs == ["environment"] and not hasattr(cls, "get_reward"):
        raise ConfigError(f"--env {name}: {cls.__name__} has no get_reward(), so --reward_funcs has to give a reward.")
    if cfg.reward_funcs and "environment" not in cfg.reward_funcs and hasattr(cls, "get_reward"):
        message = "--env %s: get_reward() of %s does not count; name `environment` among --reward_funcs if it should."
        logger.warning(message, name, cls.__name__)


_MADE: dict[tuple, Callable] = {}  # tools keep their servers, results and limits from step to step


KIND = "env mcp_config tool_parser tool_timeout max_tool_result max_calls_per_turn tool_cache tool_concurrency".split()


def kind(cfg) -> tuple:
    """What environments and tools depend on: domains with the same share them, servers included."""
    return tuple(cfg.tools), *(getattr(cfg, name) for name in KIND)


def environment_maker(cfg) -> Callable[..., Environment]:
    """A function that makes one trajectory's environment, for its row: of --env, or of the tools alone."""
    key = kind(cfg)
    if key not in _MADE:
        if cfg.env:
            _MADE[key] = get_environment(cfg.env, cfg)
        else:
            toolbox = Toolbox(get_tools(cfg), cfg)
            _MADE[key] = lambda row=None: ToolEnvironment(toolbox, cfg)
    return _MADE[key]
