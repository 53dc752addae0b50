"""What rewards, tools and environments of users return, or leave behind: values whose reading is code, values that can
be read in two ways, processes, other programs. Most are real calls in this process; some are whole runs."""

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
from case import ROOT, Seen, alive, goes_on, named, says, shorten, wait_until

LIMIT = 3  # seconds that a call may take here
SLOW = LIMIT + 4  # by then it has ended, on a busy machine

HOSTILE = """
import time
class Hangs:
    def wait(self, *given):
        time.sleep(30)
    METHODS = wait
"""


def _function(at, source: str, name: str = "bad"):
    from plugins import load_function

    number = len(list(at.given.iterdir()))  # a file is loaded once
    return load_function(f"{at.file(f'given_{number}.py', textwrap.dedent(source))}:{name}")


def _timed(work):
    """(what it gave or raised, seconds, MB by which this process has grown at most)"""
    start, before = time.monotonic(), psutil.Process().memory_info().rss
    try:
        found = work()
    except Exception as error:
        found = error
    return found, time.monotonic() - start, (psutil.Process().memory_info().rss - before) / 2**20


def _score(at, body: str, head: str = "", count: int = 3):
    """rewards.score of a reward `bad` with this body: the trajectories' infos, or what it raised."""
    import rewards
    from config import TrainConfig
    from rollouts import Trajectory

    lines = "".join(f"    {line}\n" for line in body.splitlines())
    bad = _function(
        at, f"import time\n{head}\ndef bad(completions, log_metric=None, log_extra=None, **columns):\n{lines}"
    )
    made = [
        Trajectory({"prompt": "?"}, 0, [1], [2, 3], [1, 1], [0.0] * 2, [0.0] * 2, info={"completion": f"text {n}"})
        for n in range(count)
    ]
    cfg = TrainConfig(reward_timeout=LIMIT, reward_on_timeout=-1.0)

    def work():
        asyncio.run(rewards.score(made, {"bad": bad}, cfg))
        return [t.info for t in made]

    return _timed(work)


def _late(outcome) -> Seen:
    """The call had to count as late, in its time."""
    infos, seconds, grown = outcome
    if seconds > SLOW:
        return Seen("hung", f"{seconds:.1f} s with a limit of {LIMIT}")
    if grown > 1000:
        return Seen("leaked", f"grew by {grown:.0f} MB")
    if isinstance(infos, Exception) or not all(info["reward_timeouts"] and info["reward"] == -1 for info in infos):
        return Seen("silent", f"not counted as late: {shorten(infos)}")
    return Seen("survived", f"late after {seconds:.1f} s")


def _refused(outcome, words: str) -> Seen:
    error, seconds, grown = outcome
    if seconds > SLOW or grown > 1000:
        return Seen("hung" if seconds > SLOW else "leaked", f"{seconds:.1f} s, {grown:.0f} MB")
    if not isinstance(error, Exception):
        return Seen("silent", f"taken as {shorten(error)}")
    return Seen("named" if says(str(error), words) else "ended", str(error).split("\n")[0])


def _rewarded(outcome, wanted: list) -> Seen:
    infos, _, _ = outcome
    if isinstance(infos, Exception):
        return Seen("ended", shorten(infos))
    found = [info["reward"] for info in infos]
    return Seen("survived" if found == wanted else "silent", f"rewards {found}")


# ---- rewards: values whose reading is code --------------------------------------------------------------------------


def hanging_float(at):
    """a reward's numbers hang in __float__ -> survived: late"""
    return _late(_score(at, "return [Hangs()] * len(completions)", HOSTILE.replace("METHODS", "__float__")))


def hanging_repr(at):
    """a reward returns an object that hangs in __repr__, which an error message would ask for -> survived: late"""
    return _late(_score(at, "return Hangs()", HOSTILE.replace("METHODS", "__repr__ = __str__")))


def hanging_length(at):
    """a reward returns an object that hangs in __len__ and __getitem__ -> survived: late"""
    return _late(_score(at, "return Hangs()", HOSTILE.replace("METHODS", "__len__ = __getitem__ = __iter__")))


def hanging_items(at):
    """a reward's dict hangs in items() -> survived: late"""
    head = "import collections\n" + HOSTILE.replace("class Hangs:", "class Hangs(collections.UserDict):")
    return _late(_score(at, "return [Hangs()] * len(completions)", head.replace("METHODS", "items = keys")))


def hanging_component_name(at):
    """the name of a reward's component hangs in __str__ -> survived: late"""
    return _late(_score(at, "return [{Hangs(): 1.0}] * 3", HOSTILE.replace("METHODS", "__str__ = __repr__")))


def hanging_error_text(at):
    """a reward raises an error that hangs in __str__ -> survived: late"""
    head = HOSTILE.replace("class Hangs:", "class Hangs(Exception):").replace("METHODS", "__str__ = __repr__")
    return _late(_score(at, "raise Hangs()", head))


def hanging_async(at):
    """an async reward's number hangs in __float__, beside another async one -> survived: late, and the other is not"""
    import rewards
    from config import TrainConfig
    from rollouts import Trajectory

    source = HOSTILE.replace("METHODS", "__float__")
    source += "async def bad(completions, **columns):\n    return [Hangs()]\n"
    source += "async def good(completions, **columns):\n    return [1.0]\n"
    functions = {name: _function(at, source, name) for name in ("bad", "good")}
    made = Trajectory({"prompt": "?"}, 0, [1], [2], [1], [0.0], [0.0], info={"completion": "x"})
    _, seconds, _ = _timed(lambda: asyncio.run(rewards.score([made], functions, TrainConfig(reward_timeout=LIMIT))))
    right = made.info.get("rewards", {}).get("good") == 1 and made.info["reward_timeouts"] == 1
    return Seen("hung" if seconds > SLOW else "survived" if right else "silent", f"{seconds:.1f} s, {made.info}"[:150])


def endless_iteration(at):
    """a reward returns a list whose __iter__ knows no end -> named: and the memory does not grow"""
    head = "class Endless(list):\n    def __iter__(self):\n        while True:\n            yield 1.0\n"
    return _refused(_score(at, "return Endless([1.0] * 3)", head), "length 3 that gives more values.*return a list")


def endless_components(at):
    """a reward's dict has components without end -> named"""
    head = "class Endless(dict):\n    def items(self):\n        n = 0\n        while True:\n"
    head += "            n += 1\n            yield str(n), 1.0\n"
    return _refused(_score(at, "return [Endless()] * 3", head), "completion 0: over 1,000 components")


def leaving_float(at):
    """a reward's number leaves by SystemExit in __float__ -> named: no end of the run as if it had gone well"""
    head = "class Leaves:\n    def __float__(self):\n        raise SystemExit(0)\n"
    return _refused(_score(at, "return [Leaves()] * 3", head), "'bad' raised SystemExit")


# ---- rewards: values that can be read in two ways -------------------------------------------------------------------


def a_set(at):
    """a reward returns a set of as many numbers as completions -> named: it has no order"""
    return _refused(_score(at, "return {1.0, 0.5, 0.25}"), "a set, which has no order.*return a list")


def a_frozen_set(at):
    """a reward returns a frozenset -> named"""
    return _refused(_score(at, "return frozenset((1.0, 0.5, 0.25))"), "a frozenset, which has no order.*return a list")


def views(at):
    """a reward returns the keys, or the values, of a dict -> named"""
    seen = _refused(_score(at, "return {1.0: 1, 0.5: 2, 0.25: 3}.keys()"), "a dict_keys, which has no order")
    return (
        seen if seen.verdict != "named" else _refused(_score(at, "return dict(a=1, b=2, c=3).values()"), "dict_values")
    )


def dicts_by_position(at):
    """a reward returns {number of the completion: reward} -> named"""
    return _refused(_score(at, "return {0: 1.0, 1: 0.5, 2: 0.25}"), "a dict; return a list")


def text_of_digits(at):
    """a reward returns "123" for three completions -> named"""
    return _refused(_score(at, "return '123'"), "'123', a str; return a list")


def an_array_of_texts(at):
    """a reward returns an array of texts that are numbers -> named"""
    return _refused(
        _score(at, "import numpy\nreturn numpy.array(['1', '2', '3'])"), "completion 0: text is not a number"
    )


def kinds_in_order(at):
    """rewards return a deque, a series of pandas, an array of objects, fractions -> survived: right numbers"""
    for made in (
        "collections.deque(n)",
        "pandas.Series(n, index=[9, 8, 7])",
        "numpy.array(n, dtype=object)",
        "fractions",
    ):
        body = "import collections, fractions, numpy, pandas\nn = [1.0, 0.5, 0.25]\n"
        body += f"return {made}" if made != "fractions" else "return [fractions.Fraction(x) for x in n]"
        if (seen := _rewarded(_score(at, body), [1.0, 0.5, 0.25])).verdict != "survived":
            return Seen(seen.verdict, f"{made}: {seen.what}")
    return seen


def turns_as_a_set(at):
    """a reward gives the rewards of turns as a set -> named"""
    return _refused(
        _score(at, "return [{'turns': {1.0, 0.5}}] * 3"), "completion 0: returned .*a set, which has no order"
    )


# ---- rewards: what is logged ----------------------------------------------------------------------------------------


def logging_own_names(at):
    """a reward logs "step", "reward", "eval/reward", "time/step" -> survived: the run's own numbers stay, these too"""
    body = "for name in ('step', 'reward', 'eval/reward', 'time/step'):\n    log_metric(name, 77.0)\n"
    body += "return [0.5] * len(completions)"
    body = "".join(f"    {line}\n" for line in body.splitlines())
    path = at.file("bad_reward.py", f"def bad(completions, log_metric, **columns):\n{body}")
    end = at.train(f"--reward_funcs {path}:bad ")
    steps = [
        (s["step"], s["reward"], s.get("eval/reward"), s.get("log_metric/step"), s["time/step"] != 77)
        for s in end.steps
    ]
    right = steps == [(1, 0.5, None, 77.0, True), (2, 0.5, None, 77.0, True)]
    return goes_on(end, None if right else f"logged {steps}", steps=2)


def logging_huge_numbers(at):
    """a reward logs 1e308 often, whose sum no float holds -> survived: not a number, and the rest is right"""
    from runlog import rollout_metrics

    found, _, _ = outcome = _score(
        at, "[log_metric('big', 1e308) for _ in range(9)]\nlog_metric('one', 1)\nreturn [1.0] * 3"
    )
    if isinstance(found, Exception):
        return _rewarded(outcome, [1.0] * 3)

    logged = rollout_metrics.logged_by_rewards([SimpleNamespace(info=info) for info in found])
    return Seen("survived" if logged["one"] == 1 and logged["big"] != logged["big"] else "silent", str(logged))


def logging_what_hangs(at):
    """a reward gives log_extra values that hang in __str__ -> survived: late"""
    head = HOSTILE.replace("METHODS", "__str__ = __repr__")
    return _late(_score(at, "log_extra('notes', [Hangs()] * 3)\nreturn [1.0] * 3", head))


def default_dtype(at):
    """a reward calls torch.set_default_dtype(float64) -> survived: put back, and said"""
    source = "import torch\ndef bad(completions, **columns):\n    torch.set_default_dtype(torch.float64)\n"
    path = at.file("bad_reward.py", source + "    return [float(len(c)) for c in completions]\n")
    end = at.train(f"--reward_funcs {path}:bad ")
    return goes_on(end, None if "left torch.set_default_dtype(torch.float64)" in end.text else "nothing said", steps=2)


# ---- tools and environments -----------------------------------------------------------------------------------------


def _call(at, body: str, head: str = ""):
    """A tool with this body, called once: (what the model reads, whether it failed), seconds, MB."""
    from config import TrainConfig
    from envs.tools import Call, Toolbox, from_function

    lines = "".join(f"    {line}\n" for line in body.splitlines())
    tool = from_function(_function(at, f'import time\n{head}\ndef bad():\n    """A tool."""\n{lines}'))

    def work():
        toolbox = Toolbox({tool.name: tool}, TrainConfig(tool_timeout=LIMIT))
        messages, events = asyncio.run(toolbox.run([Call(tool.name, {})], toolbox.tools))
        return messages[0]["content"], events[0]["failed"]

    return _timed(work)


def _told(outcome, words: str, failed: int = 1) -> Seen:
    found, seconds, grown = outcome
    if isinstance(found, Exception):
        return Seen("ended", f"raised {shorten(found)}")
    if seconds > SLOW or grown > 1000:
        return Seen("hung" if seconds > SLOW else "leaked", f"{seconds:.1f} s, {grown:.0f} MB")
    return Seen(
        "survived" if says(found[0], words) and found[1] == failed else "silent", f"the model reads {shorten(found)}"
    )


def tool_hangs_in_str(at):
    """a tool's result hangs in __str__ -> survived: the model reads that it gave no answer in its time"""
    return _told(
        _call(at, "return {'a': Hangs()}", HOSTILE.replace("METHODS", "__str__ = __repr__")), "no answer within"
    )


def tool_hangs_in_tolist(at):
    """a tool's result hangs in tolist() and item(), which arrays have -> survived: shown as text"""
    head = HOSTILE.replace("METHODS", "tolist = item") + "    shape = ()\n"
    return _told(_call(at, "return Hangs()", head), "Hangs object", 0)


def tool_result_without_end(at):
    """a tool returns a dict and a list whose items() and __iter__ know no end -> survived: what they hold is shown"""
    head = "class D(dict):\n    def items(self):\n        while True: yield 1, 1\n"
    head += "class L(list):\n    def __iter__(self):\n        while True: yield 1\n"
    return _told(_call(at, "return {'d': D(x=1), 'l': L([2])}", head), r'{"d": {"x": 1}, "l": \[2\]}', 0)


def tool_result_of_millions(at):
    """a tool returns two million numbers -> survived: the model reads that this is too much"""
    return _told(_call(at, "return [0] * 2_000_000"), "bad returned over 1,000,000 values")


def tool_result_that_doubles(at):
    """a tool returns a list of twice the same list, 150 levels deep -> survived: refused in words, or late"""
    return _told(
        _call(at, "x = []\nfor _ in range(150): x = [x, x]\nreturn x"),
        "returned over 1,000,000 values|no answer within",
    )


def tool_error_hangs(at):
    """a tool raises an error that hangs in __str__ -> survived: the model reads that it gave no answer in its time"""
    head = HOSTILE.replace("class Hangs:", "class Hangs(Exception):").replace("METHODS", "__str__ = __repr__")
    return _told(_call(at, "raise Hangs()", head), "no answer within")


def tool_is_late_to_be_shown(at):
    """the callable that is a tool hangs in its own __repr__ -> survived: nobody asks for it"""
    from safety import limits

    bad = _function(at, HOSTILE.replace("METHODS", "__repr__") + "    def __call__(self): return 5\nbad = Hangs()\n")
    found, seconds, _ = _timed(lambda: asyncio.run(limits.run_limited(bad, {}, LIMIT)))
    return Seen(
        "hung" if seconds > SLOW else "survived" if found == (5, None) else "silent", f"{found}, {seconds:.1f} s"
    )


def _step(at, result: str, head: str = ""):
    """One step of an environment that returns `result`."""
    from config import TrainConfig
    from envs import Environment, calls

    bad = _function(at, f"import time\n{head}\ndef bad(self, text):\n    return {result}\n")
    environment = type("Bad", (Environment,), {"step": bad})()
    cfg = TrainConfig(tool_timeout=LIMIT)

    async def work():
        outcome = await calls.call_environment(environment, "step", {"prompt": "?"}, cfg, text="a")
        return calls.checked_step(outcome, environment)

    return _timed(lambda: asyncio.run(work()))


def environment_reward_hangs(at):
    """a step's reward hangs in __float__ -> named: the environment, and that it is late"""
    return _refused(
        _step(at, "'On.', Hangs(), False, {}", HOSTILE.replace("METHODS", "__float__")), "Bad.step.. took over 3 s"
    )


def environment_done_hangs(at):
    """a step's `done` hangs in __bool__ -> named"""
    return _refused(
        _step(at, "'On.', 0.0, Hangs(), {}", HOSTILE.replace("METHODS", "__bool__")), "Bad.step.. took over 3 s"
    )


def environment_info_hangs(at):
    """a step's info is a mapping that hangs in items() -> named"""
    head = "import collections\n" + HOSTILE.replace("class Hangs:", "class Hangs(collections.UserDict):")
    return _refused(_step(at, "'On.', 0.0, False, Hangs()", head.replace("METHODS", "items = keys")), "took over 3 s")


def environment_reward_is_text(at):
    """a step's reward is "1.0" -> named"""
    return _refused(_step(at, "'On.', '1.0', False, {}"), "Bad.step.. returned the reward '1.0': text is not a number")


def environment_calls_of_its_own(at):
    """an environment's info has `calls`, of other forms than a tool's -> survived: the metrics of the step are made"""
    from runlog import rollout_metrics
    from safety.storable import calls_in

    infos = [
        {"calls": calls}
        for calls in ([1, 2], [{"name": "a"}], [dict(name=1, call=2, seconds="x", failed=[], cached=0)])
    ]
    played = SimpleNamespace(info={"turns": [{"info": info} for info in infos]}, turns=3)
    metrics = rollout_metrics.turn_metrics([played])
    return Seen("survived" if metrics["turns/mean"] == 3 and not any(map(calls_in, infos)) else "silent", str(metrics))


# ---- processes and other programs -----------------------------------------------------------------------------------


def _own(at, body: str, limit: float = LIMIT):
    """A function with own_process that writes numbers of processes to `pids`: its outcome, seconds, those left."""
    from safety import limits

    lines = "".join(f"    {line}\n" for line in body.splitlines())
    head = "import multiprocessing, os, subprocess, sys, time\nfrom pathlib import Path\n"
    head += 'MINUTE = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]\n'
    bad = _function(at, f"{head}def bad(at):\n{lines}\nbad.own_process = 1\n")
    pids = at.folder / "pids"
    outcome, seconds, _ = _timed(lambda: asyncio.run(limits.run_limited(bad, {"at": pids}, limit)))

    def left():
        numbers = pids.read_text(encoding="utf-8").split() if pids.exists() else ()
        return [n for n in map(int, numbers) if psutil.pid_exists(n) and alive(psutil.Process(n))]

    wait_until(lambda: not left(), 3)
    remaining = left()
    for pool in limits._pools.values():
        pool.close()
    return outcome, seconds, remaining


def _ends(outcome, late: bool = True) -> Seen:
    found, seconds, left = outcome
    if seconds > 60 + SLOW or (late and seconds > 30):  # a start may take long on a busy machine; the waits were 100 s
        return Seen("hung", f"{seconds:.1f} s with a limit of {LIMIT}")
    if left:
        return Seen("leaked", f"{len(left)} processes live on")
    right = found is None if late else not isinstance(found, Exception) and found[1] is not None
    return Seen("survived" if right else "silent", f"{shorten(found)} after {seconds:.1f} s")


def own_process_with_a_pool(at):
    """a function with own_process waits for a multiprocessing pool for ever -> survived: late, nothing lives on"""
    body = (
        "pool = multiprocessing.get_context('fork').Pool(2)\nat.write_text(' '.join(str(p.pid) for p in pool._pool))\n"
    )
    return _ends(_own(at, body + "pool.map(time.sleep, [100, 100])"))


def own_process_with_a_session(at):
    """its child in a session of its own holds the pipe open -> survived: late, nothing lives on"""
    body = "at.write_text(str(subprocess.Popen(MINUTE, start_new_session=True, pass_fds=range(3, 9) and ()).pid))\n"
    return _ends(_own(at, body + "time.sleep(100)"))


def own_process_with_a_daemon(at):
    """it starts a daemon that has left its parent, group and session -> survived: late, nothing lives on"""
    body = (
        "if not (pid := os.fork()):\n    os.setsid()\n    if not os.fork():\n        at.write_text(str(os.getpid()))\n"
    )
    body += "        time.sleep(60)\n    os._exit(0)\nos.waitpid(pid, 0)\ntime.sleep(100)"
    return _ends(_own(at, body))


def own_process_that_crashes_with_children(at):
    """it crashes while its children live -> survived: an error of that function, nothing lives on"""
    body = "at.write_text(str(subprocess.Popen(MINUTE).pid))\nos.kill(os.getpid(), 11)"
    return _ends(_own(at, body, 20), late=False)


def own_process_that_becomes_another(at):
    """it becomes another program by os.execv -> survived: an error of that function"""
    return _ends(_own(at, "os.execv('/bin/true', ['true'])", 20), late=False)


def own_process_that_returns_twice(at):
    """it forks, and both return -> survived: the parent's answer counts"""
    body = "return 'parent' if os.fork() else 'child'"
    found, _, _ = _own(at, body, 20)
    return Seen("survived" if found == ("parent", None) else "silent", str(found))


def becoming_another_program(at):
    """a reward in the trainer's process calls os.execv on a program that ends with status 0 -> named"""
    path = at.file(
        "bad_reward.py", "import os\ndef bad(completions, **columns):\n    os.execv('/bin/true', ['true'])\n"
    )
    return named(
        at.train(f"--reward_funcs {path}:bad "), "'bad' raised RuntimeError: os.exec of '/bin/true'", "subprocess"
    )


def becoming_another_program_by_c(at):
    """C code in a reward does the same -> named: killed, with the calls that ran"""
    body = "    ctypes.CDLL(None).execv(b'/bin/sleep', (ctypes.c_char_p * 3)(b'sleep', b'30', None))\n"
    path = at.file("bad_reward.py", f"import ctypes\ndef bad(completions, **columns):\n{body}")
    end = at.train(f"--reward_funcs {path}:bad ")
    wait_until(lambda: "became another program" in end.text, 2)
    return named(end, "became another program.*Running: bad")


# ---- code_tests, and where the sandbox runs -------------------------------------------------------------------------


def program_under_main(at):
    """right programs that read, leave or test themselves under `if __name__ == "__main__"` -> survived: reward 1"""
    from scoring.text import code_tests

    endings = ["n = int(input())", "import sys; sys.exit(0)", "import unittest; unittest.main()", "while True: pass"]
    programs = [f"def f(x): return x + 1\nif __name__ == '__main__':\n    {ending}" for ending in endings]
    found = code_tests(completions=[f"```python\n{p}\n```" for p in programs], tests=[["assert f(1) == 2"]] * 4)
    return Seen(
        "survived" if all(value["reward"] == 1 for value in found) else "silent", str([v["reward"] for v in found])
    )


def sandbox_below_tmp(at):
    """python is below /tmp, in a folder with blanks and odd letters, behind a link -> survived: the sandbox works"""
    folder = at.given / "a venv ünï"  # the campaign's folders are below /tmp
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python3*/site-packages")

    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (at.given / "link").symlink_to(folder)
    code = "from safety import sandbox as s\nprint(s.why_not_contained(), s.run_python('print(6 * 7)'))"
    for python in (folder, at.given / "link"):
        done = subprocess.run(
            [python / "bin/python", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, encoding="utf-8"
        )
        if "None Result(stdout='42" not in done.stdout:
            return Seen("ended", shorten(done.stdout + done.stderr))
    return Seen("survived", json.dumps(str(Path(os.path.basename(folder)))))
