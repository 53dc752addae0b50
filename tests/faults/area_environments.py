"""Environments, tools and MCP servers of users that misbehave, in real runs of two steps.

An environment here misbehaves in some of a step's eight trajectories; with --env_errors drop these are left out and
counted, and the run goes on.
"""

import shutil

from case import ROOT, Seen, either, goes_on, named, option_known

CALL = '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>'
ENVIRONMENT = '''
import asyncio, itertools, math, os, sys, time
import numpy
from envs import Environment
from pathlib import Path

def sometimes(folder=Path(__file__).parent / "turns"):
    """True for every fourth trajectory of the run; counted by files, as processes and objects may be new each time."""
    folder.mkdir(exist_ok=True)
    while True:
        number = len(os.listdir(folder))
        try:
            (folder / str(number)).touch(exist_ok=False)
            return number % 4 == 1
        except FileExistsError:
            pass

class Bad(Environment):
    def reset(self, row, seed):
        self.bad = sometimes()
        return "Say something."

    async def step(self, text):
        return "Go on.", 0.5, False, {"fine": 1.0}
'''
FLAGS = "--reward_funcs environment --max_turns 2 --tool_timeout 2 --prompts_per_step 2 --num_generations 4 "
FLAGS += "--max_completion_length 60 --max_turn_length 8 --max_prompt_length 200 "


def _env(at, method: str, flags: str = "", turns=("Yes.",), drop: str = "--env_errors drop --max_failed 0.9", **how):
    """A run of an environment with these methods in place of the ordinary ones."""
    body = "".join(f"    {line}\n" for line in method.splitlines())
    path = at.file("bad_env.py", ENVIRONMENT + body)
    return at.scripted(list(turns), f"{FLAGS}--env {path}:Bad --max_steps 2 {at.known(drop)}{flags}", **how)


def _drops(at, method: str, *more: str) -> Seen:
    """Trajectories that fail are dropped and counted, the run goes on."""
    return goes_on(_env(at, method, *more), None if option_known("env_errors") else "no --env_errors", steps=2)


# ---- environments ----------------------------------------------------------------------------------------------------


def constructor_raises(at):
    """an environment's constructor raises for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(
        at, "def __init__(self):\n    if sometimes(Path(__file__).parent / 'made'): raise ValueError('no room')"
    )


def constructor_late(at):
    """an environment's constructor takes 1 s -> survived: eight at a time, not one after another"""
    end = _env(at, "def __init__(self):\n    time.sleep(1)", "--max_steps 1 ")
    took = max((s.get("time/generate", 0) for s in end.steps), default=0)
    return goes_on(end, f"sampling took {took:.1f} s for eight of 1 s" if took > 5 else None, steps=1)


def constructor_never(at, limit=30):
    """an environment's constructor never returns -> survived or named: within --tool_timeout"""
    end = _env(at, "def __init__(self):\n    time.sleep(1000)", limit=20)
    return either(end, "Bad|bad_env", "tool_timeout|max_failed")


def reset_raises(at):
    """reset() raises for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(
        at, "def reset(self, row, seed):\n    if sometimes(): raise ValueError('no game')\n    return 'Say something.'"
    )


def reset_late(at):
    """reset() never returns for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(at, "def reset(self, row, seed):\n    if sometimes(): time.sleep(1000)\n    return 'Say something.'")


def reset_junk(at):
    """reset() returns a number for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(at, "def reset(self, row, seed):\n    return 7 if sometimes() else 'Say something.'")


def reset_too_long(at):
    """reset() gives a prompt beyond --max_prompt_length for some trajectories -> survived: dropped"""
    return _drops(at, "def reset(self, row, seed):\n    return 'word ' * (5000 if sometimes() else 1)")


def step_raises(at):
    """step() raises for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(
        at,
        "def step(self, text):\n    if self.bad: raise ValueError('no more')\n    return 'Go on.', 0.5, False, {}",
    )


def step_raises_stop(at):
    """step() raises, with --env_errors stop -> named: environment, row, cause"""
    end = _env(at, "async def step(self, text):\n    raise ValueError('no more')", drop="--env_errors stop")
    return named(end, "Bad.*step.*no more", "prompt|row|env_errors")


def step_raises_always(at):
    """step() raises for all, with --env_errors drop -> named: more than --max_failed, with the commonest cause"""
    end = _env(
        at, "async def step(self, text):\n    raise ValueError('no more')", drop="--env_errors drop --max_failed 0.5"
    )
    return named(end, "no more", "max_failed|env_errors")


def step_late(at):
    """step() awaits for ever for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(
        at,
        "async def step(self, text):\n    if self.bad: await asyncio.sleep(1000)\n    return 'Go on.', 0.5, False, {}",
    )


def step_blocks(at):
    """an async step() blocks the event loop for some trajectories -> survived: dropped; steps that had not begun are
    not held up. One that had begun there and waits is late with it (docs/limits.md)."""
    return _drops(
        at, "async def step(self, text):\n    if self.bad: time.sleep(1000)\n    return 'Go on.', 0.5, False, {}"
    )


def step_holds_the_interpreter(at, limit=45):
    """step() runs a catastrophic regular expression -> survived or named: ended in its time"""
    end = _env(at, "def step(self, text):\n    import re\n    re.match('(a|a)*b', 'a' * 60)", limit=20)
    return either(end, "Bad|bad_env|step", "tool_timeout|interpreter|GIL|process|regular")


def step_junk(at):
    """step() returns texts for numbers for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(
        at,
        "async def step(self, text):\n    return ('x', 'much', 0, None) if self.bad else ('Go on.', 0.5, False, None)",
    )


def step_nan(at):
    """step() gives a reward of NaN for some trajectories -> survived or named: no weight becomes NaN"""
    end = _env(at, "async def step(self, text):\n    return 'Go on.', math.nan if self.bad else 0.5, False, {}")
    bad = [s for s in end.steps if s.get("grad_norm") is None]
    return either(end, "Bad|environment", "finite|nan", "NaN went on" if bad else None)


def step_long(at):
    """step() answers with 1 MB of text -> survived: cut as a tool's result is"""
    end = _env(
        at, "async def step(self, text):\n    return 'word ' * 200_000, 0.5, False, {}", "--max_completion_length 1900 "
    )
    return goes_on(end, steps=2)


def step_surrogate(at):
    """step() answers with half an emoji -> survived"""
    return goes_on(_env(at, "async def step(self, text):\n    return 'half \\ud83d', 0.5, False, {}"), steps=2)


def step_exits(at):
    """step() calls sys.exit(0) for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(at, "def step(self, text):\n    if self.bad: sys.exit(0)\n    return 'Go on.', 0.5, False, {}")


def step_os_exit(at):
    """step() calls os._exit(0) -> named: not status 0"""
    return named(_env(at, "def step(self, text):\n    os._exit(0)"), "step|Bad|exit|ended|died", "")


def score_raises(at):
    """score() raises for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(at, "def score(self):\n    if self.bad: raise ValueError('no score')\n    return 1.0")


def score_none(at):
    """score() returns None or text for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(at, "def score(self):\n    return None if self.bad else 1.0")


def score_nan(at):
    """score() returns NaN for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(at, "def score(self):\n    return math.nan if self.bad else 1.0")


def score_late(at):
    """score() takes 1 s -> survived: eight at a time, not one after another"""
    end = _env(at, "def score(self):\n    time.sleep(1)\n    return 1.0", "--max_steps 1 ")
    took = max((s.get("time/generate", 0) for s in end.steps), default=0)
    return goes_on(end, f"sampling took {took:.1f} s for eight of 1 s" if took > 5 else None, steps=1)


def score_never(at):
    """score() never returns for some trajectories -> survived: dropped with --env_errors drop"""
    return goes_on(_env(at, "def score(self):\n    if self.bad: time.sleep(1000)\n    return 1.0", limit=25), steps=2)


def close_raises(at):
    """close() raises -> survived: said once"""
    return goes_on(_env(at, "def close(self):\n    raise ValueError('stays open')"), steps=2)


def close_hangs(at):
    """close() never returns -> survived: not waited for"""
    return goes_on(_env(at, "def close(self):\n    time.sleep(1000)", limit=40), steps=2)


def close_is_called(at):
    """an environment holds a process until close() -> survived: none is left"""
    method = "def __init__(self):\n    import subprocess\n    self.p = subprocess.Popen(['sleep', '600'])\n"
    method += "def close(self):\n    self.p.kill()\n    self.p.wait()"
    return goes_on(_env(at, method), steps=2)


def metrics_junk(at):
    """metrics() and info hold texts, None, lists, NaN and numpy numbers -> survived: numbers are logged"""
    method = (
        "def metrics(self):\n    return {'a': 'x', 'b': None, 'c': [1], 'd': math.nan, 'e': numpy.float32(2), 7: 1.0}\n"
    )
    method += (
        "async def step(self, text):\n    info = {'a': 'x', 'n': math.nan, 'f': numpy.float32(3), 8: 1, 'l': [1]}\n"
    )
    method += "    return 'Go on.', 0.5, False, info"
    end = _env(at, method)
    logged = end.mean("rewards/environment/f/mean")
    return goes_on(end, None if logged == 3 else "a numpy number of info is not logged", steps=2)


def metrics_raises(at):
    """metrics() raises for some trajectories -> survived: dropped with --env_errors drop"""
    return _drops(at, "def metrics(self):\n    if self.bad: raise ValueError('no numbers')\n    return {}")


def state_is_not_hashable(at):
    """state() gives a list, for gigpo -> survived or named"""
    end = _env(at, "def state(self):\n    return [1, 2]", "--advantage gigpo --gamma 0.9 ")
    return either(end, "state", "hashable")


# ---- tools -----------------------------------------------------------------------------------------------------------


def _tool(at, body: str, flags: str = "", head: str = "", limit=None):
    """A run in which the model calls the tool `bad` in its first turn, and answers in its second."""
    body = "".join(f"    {line}\n" for line in body.splitlines())
    code = f"import asyncio, os, sys, time\n{head}\ndef bad() -> str:\n    '''Does something.'''\n{body}"
    path = at.file("bad_tool.py", code)
    flags = f"--tools {path}:bad --reward_funcs tool_use length --max_steps 2 {flags}"
    return at.scripted([CALL.replace("NAME", "bad"), "Well."], flags, limit=limit)


def _answered(end) -> Seen:
    return goes_on(end, None if end.mean("turns/mean") == 2 else "the model had no answer", steps=2)


def tool_odd_dict(at):
    """a tool returns a dict whose keys are tuples, None and bytes -> survived: shown to the model"""
    return _answered(_tool(at, "return {('a', 'b'): 1, None: 2, b'c': {3, 4}}"))


def tool_cycle(at):
    """a tool returns a list that holds itself -> survived: shown to the model as text or error"""
    return _answered(_tool(at, "x = []\nx.append(x)\nreturn x"))


def tool_like_parts(at):
    """a tool returns a list that looks like message parts, [{"type": "function"}] -> survived"""
    return _answered(
        _tool(at, "return [{'type': 'function', 'name': 'x'}, {'type': 'text'}, {'type': 'image', 'image': 'nothing'}]")
    )


def tool_bytes(at):
    """a tool returns bytes, and one of 10 MB of text -> survived: cut"""
    for number, result in enumerate(("b'\\xff\\xfe' * 10", "'x' * 10**7")):
        seen = _answered(_tool(at, f"return {result}", f"--max_tool_result 1000 --run_name r{number} "))
        if seen.verdict != "survived":
            return seen
    return seen


def tool_raises(at):
    """a tool raises an error whose text cannot be made -> survived: shown to the model"""
    return _answered(
        _tool(at, "raise Odd()", head="class Odd(Exception):\n    def __str__(self): raise RuntimeError('no text')")
    )


def tool_late(at):
    """a tool never returns -> survived: the model is told so after --tool_timeout"""
    return _answered(_tool(at, "time.sleep(1000)", "--tool_timeout 1 "))


def tool_holds_the_interpreter(at, limit=45):
    """a tool runs a catastrophic regular expression -> survived or named: ended in its time"""
    end = _tool(at, "import re\nre.match('(a|a)*b', 'a' * 60)", "--tool_timeout 2 ", limit=20)
    return either(end, "bad", "tool_timeout|interpreter|GIL|process|regular")


def tool_exits(at):
    """a tool calls sys.exit(0) -> survived: shown to the model"""
    return _answered(_tool(at, "sys.exit(0)"))


def tool_os_exit(at):
    """a tool calls os._exit(0) -> survived: shown to the model as an error"""
    end = _tool(at, "os._exit(0)")
    return goes_on(end, None if end.mean("tools/failure_frequency") == 1 else "not counted as failed", steps=2)


def tool_blocks(at):
    """an async tool blocks its event loop -> survived: the model is told; calls that had not begun are not held up.
    One that had begun there and waits is late with it: a coroutine cannot move to another loop (docs/limits.md)."""
    path = at.file(
        "bad_tool.py",
        """import time
async def bad() -> str:
    'Does something.'
    time.sleep(1000)
async def good() -> str:
    'Does something.'
    return 'fine'
""",
    )
    turns = [CALL.replace("NAME", "good") + CALL.replace("NAME", "bad") + CALL.replace("NAME", "good"), "Well."]
    flags = f"--tools {path}:bad {path}:good --reward_funcs tool_use length --max_steps 2 --tool_timeout 3 "
    end = at.scripted(turns, flags, limit=30)
    failed = end.mean("tools/failure_frequency")
    return goes_on(end, None if abs(failed - 1 / 3) < 0.01 else f"{failed:.2f} of the calls failed", steps=2)


def tool_changes_directory(at):
    """a tool changes the working directory -> survived: the run's files are where they belong"""
    folder = at.given / "elsewhere"
    folder.mkdir()
    name = f"fault_{at.folder.name[-8:]}"
    end = _tool(
        at, f"os.chdir({str(folder)!r})\nreturn 'moved'", f"--output_dir runs --run_name {name} --save_steps 1 "
    )
    home = ROOT / "runs" / name
    there, strayed = (home / "report.html").exists(), [p.name for p in folder.rglob("*")]
    end.run = at.runs / name
    if home.exists():
        shutil.copytree(home, end.run)
        shutil.rmtree(home)
    return goes_on(end, None if there and not strayed else f"files elsewhere: {strayed[:3]}", steps=2)


def tool_with_signals(at):
    """a tool uses signal.alarm, as TRL's example does, and fails in a thread -> survived: the user is told the cause"""
    body = "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\nsignal.alarm(5)\nreturn 'fine'"
    end = _tool(at, body)
    failed = end.mean("tools/failure_frequency")
    return goes_on(
        end, "all calls failed, not a word to the user" if failed and "main thread" not in end.text else None, steps=2
    )
