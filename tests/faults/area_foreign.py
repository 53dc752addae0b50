"""Environments and tools of other libraries that are broken, missing, or not what they seem, in real runs and plays.

What is refused is refused before a model is loaded, with what was given and what to do.
"""

from case import ROOT, Seen, goes_on, named

HEAD = """
import gymnasium
import numpy as np
from gymnasium import spaces

from envs.adapters import Gymnasium


class Fine(gymnasium.Env):
    metadata = {"render_modes": []}
    observation_space, action_space = spaces.Discrete(9), spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        return 4, {}

    def step(self, action):
        return 5, 1.0, True, False, {}


class Given(Fine):
"""
REGISTERED = """

gymnasium.register("Given-v0", Given, disable_env_checker=True)


class Made(Gymnasium):
    def __init__(self):
        super().__init__("Given-v0")
"""
PLAYED = "--max_steps 1 --reward_funcs environment --max_turns 2 --max_turn_length 20 --prompts_per_step 1 "
PLAYED += "--num_generations 4 --max_completion_length 3000 --max_prompt_length 3000 --tool_timeout 10 "


def _gymnasium(at, body: str, turns=("<answer>1</answer>",), flags: str = ""):
    """A run of a gymnasium environment with these members in place of the ordinary ones."""
    code = HEAD + "".join(f"    {line}\n" for line in body.splitlines()) + REGISTERED
    return at.scripted(list(turns), f"{PLAYED}--env {at.file('given_env.py', code)}:Made {flags}")


def _played(at, spec: str, *flags: str, said: str = "", limit: float | None = None):
    """rollouts.py plays it."""
    code = f"import io\nimport rollouts\nsys.stdin = io.StringIO({said!r})\n"
    code += f"sys.argv[1:] = {['--env', spec, *flags]!r}\nrollouts.main()"
    return at.python(code, limit)


def _tool(at, code: str, flags: str = "", turns=("Yes.",)):
    """A run with the tool `given` of a file."""
    path = at.file("given_tool.py", code)
    return at.scripted(list(turns), f"{PLAYED}--reward_funcs length --tools {path}:given {flags}")


DOCUMENTED = '    """Adds.\n\n    Args:\n        a: one\n    """\n'


# ---- environments of gymnasium ---------------------------------------------------------------------------------------


def gymnasium_four_values(at):
    """step() of a gymnasium environment returns gym's four values -> named: at start, with the form that is wanted"""
    end = _gymnasium(at, "def step(self, action):\n    return 5, 1.0, True, {}")
    return named(end, "form of gym, from before gymnasium", "gymnasium.Env of your own")


def gymnasium_reset_alone(at):
    """reset() of a gymnasium environment returns two numbers and no info -> named: they are not taken for both"""
    body = "observation_space = spaces.Box(-1, 1, (2,))\ndef reset(self, seed=None, options=None):\n"
    end = _gymnasium(at, body + "    return np.zeros(2, np.float32)")
    return named(end, "form of gym", r"\(observation, info\)")


def gymnasium_dict_too_large(at):
    """a Dict observation of 2,000 numbers -> named: it is not shortened"""
    end = _gymnasium(at, "observation_space = spaces.Dict(a=spaces.Box(0, 1, (40, 50)), b=spaces.Discrete(2))")
    return named(end, "2,001 numbers; allowed are 1,000", "class of your own")


def gymnasium_says_less_than_it_shows(at):
    """observations are larger than their space says -> survived: whole, and what is cut is said"""
    body = "observation_space = spaces.Sequence(spaces.Discrete(9))\ndef step(self, action):\n"
    end = _gymnasium(at, body + "    return np.arange(3000), 1.0, False, False, {}", ("0", "1"))
    said = "max_tool_result" in end.text
    return goes_on(end, None if said else "nothing said of what was cut", steps=1)


def gymnasium_actions_of_several_numbers(at):
    """a MultiDiscrete action space -> named: what is allowed, and what to do"""
    return named(_gymnasium(at, "action_space = spaces.MultiDiscrete([2, 3])"), "MultiDiscrete", "class of your own")


def gymnasium_of_another_package(at):
    """an id that another package registers, without its module -> named: how the module is named"""
    end = _played(at, "gymnasium?id=MiniGrid-Empty-5x5-v0")
    return named(end, "MiniGrid-Empty-5x5", "id=minigrid:MiniGrid-Empty-5x5-v0")


def gymnasium_module_that_is_not_there(at):
    """an id with a module that is not installed -> named"""
    return named(_played(at, "gymnasium?id=no_such_module:Thing-v0"), "no_such_module")


def gymnasium_raises_in_reset(at):
    """reset() of a gymnasium environment raises -> named: as its trajectories' fault"""
    end = _gymnasium(at, "def reset(self, seed=None, options=None):\n    raise RuntimeError('no board')")
    return named(end, "no board", "max_failed|env_errors")


# ---- games of TextArena ----------------------------------------------------------------------------------------------


def textarena_invalid_twice(at):
    """a move that is invalid, twice, in a game that puts its words in a wrong order -> survived: the game's own end"""
    end = at.scripted(["nonsense", "more of it"], f"{PLAYED}--env textarena?id=Countdown-v0")
    wrong = [step["reward"] for step in end.steps if step["reward"] != -1]
    return goes_on(end, f"rewards {wrong} where the game gives -1" if wrong else None, steps=1)


def textarena_invalid_at_once(at):
    """a game whose reward of an invalid move is a text -> survived: with TextArena's own reward of such"""
    end = at.scripted(["nonsense"], f"{PLAYED}--env textarena?id=ThreeCardMonte-v0")
    wrong = [step["reward"] for step in end.steps if step["reward"] != -1]
    return goes_on(end, f"rewards {wrong} where TextArena has -1" if wrong else None, steps=1)


def textarena_of_a_later_python(at):
    """a game whose file this Python may not read -> survived or named: a later Python"""
    end = _played(at, "textarena?id=Klondike-v0", "--policy", "random", "--max_turns", "1")
    return goes_on(end) if end.status == 0 else named(end, "for a later Python than", "Allowed are games")


# ---- tools -----------------------------------------------------------------------------------------------------------


def tool_with_any_arguments(at):
    """a tool that takes **kwargs -> named: and what to make of them"""
    end = _tool(at, f"def given(a: int, **more: int) -> int:\n{DOCUMENTED}    return a\n")
    return named(end, r"takes \*\*more", "a list or a dict")


def tool_without_hints(at):
    """a tool without type hints and docstring -> named: what it needs"""
    return named(_tool(at, "def given(a):\n    return a\n"), "'given' needs a type hint", "docstring")


def tool_that_is_a_class(at):
    """a class where an object is meant -> named: make an object of it"""
    return named(_tool(at, "class given:\n    def __call__(self, a: int): ...\n"), "is a class", "make an object")


def tool_that_is_nothing(at):
    """a tool that is a number -> named: what is allowed"""
    return named(_tool(at, "given = 7\n"), "given is 7", "in a function of your own")


def tool_partial_that_does_not_fit(at):
    """a functools.partial with an argument that its function does not take -> named"""
    code = f"import functools\ndef add(a: int) -> int:\n{DOCUMENTED}    return a\ngiven = functools.partial(add, z=1)\n"
    return named(_tool(at, code), "cannot be called: got an unexpected keyword argument 'z'")


def tool_object_that_is_broken(at):
    """an object with half of what a tool of another library has -> named"""
    code = (
        "class Half:\n    name, description, args = 'half', '', {}\n    def invoke(self, given): ...\ngiven = Half()\n"
    )
    return named(_tool(at, code), "Half cannot be a tool", "in a function of your own")


def tool_with_objects_as_arguments(at):
    """a call that gives a pydantic argument of a tool wrong values -> survived: the model reads what is wrong"""
    code = "from pydantic import BaseModel\nclass Point(BaseModel):\n    x: int\n"
    code += f"def given(a: Point) -> int:\n{DOCUMENTED}    return a.x\n"
    calls = ['{"name": "given", "arguments": {"a": {"x": "far"}}}', '{"name": "given", "arguments": {"a": 1}}']
    end = _tool(at, code, "--max_turn_length 200 ", [f"<tool_call>{call}</tool_call>" for call in calls] + ["Yes."])
    failed = end.mean("tools/failure_frequency")
    return goes_on(end, None if failed == 1 else f"{failed:g} of the calls failed, not all", steps=1)


# ---- others ----------------------------------------------------------------------------------------------------------


def played_without_reward(at):
    """rollouts.py plays a class of TRL's that has no get_reward() -> survived: its reward is none"""
    code = "class Look:\n    def reset(self, **row):\n        return 'Look.'\n"
    code += "    def look(self) -> str:\n        'Looks.'\n        return 'a door'\n"
    end = _played(at, f"{at.file('look.py', code)}:Look", "--policy", "random")
    return goes_on(end, None if "mean reward of 1 trajectories: none" in end.text else "its reward is not none")


def openenv_server_that_is_not_there(at):
    """the client in an environment finds no server -> named: with the address"""
    code = "import urllib.request\nclass Client:\n    def reset(self, **row):\n"
    code += "        urllib.request.urlopen('http://127.0.0.1:9/reset', timeout=2)\n"
    code += "    def get_reward(self):\n        return 1.0\n"
    end = at.scripted(["Yes."], f"{PLAYED}--env {at.file('client.py', code)}:Client")
    return named(end, "Client.*reset.*refused", "max_failed|env_errors")


def module_of_a_bridge_that_is_not_there(at):
    """a bridge's file imports a package that is not installed -> named: which"""
    path = at.file("bridge.py", "import no_such_package\nclass Bridge: ...\n")
    end = _played(at, f"{path}:Bridge")
    if end.status == 0:
        return Seen("silent", "it was played")
    return named(end, "no_such_package")


assert (ROOT / "rollouts.py").exists()
