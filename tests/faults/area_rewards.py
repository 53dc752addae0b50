"""Reward functions of users that misbehave, in real runs of two steps."""

import http.server
import json
import os
import shutil
import signal
import threading
import time

from case import ROOT, Seen, either, goes_on, named, wait_until
from server_fixture import free_port

NAME = "reward function 'bad'"


def _reward(at, body: str, flags: str = "", head: str = "", sign: str = "completions, **columns") -> object:
    """A run with the reward `bad`, beside `length`."""
    body = "".join(f"    {line}\n" for line in body.splitlines())
    path = at.file("bad_reward.py", f"import os, sys, time\n{head}\ndef bad({sign}):\n{body}")
    return at.train(f"--reward_funcs {path}:bad length --reward_timeout 2 {flags}")


def _timed_out(end) -> str | None:
    return None if all(step.get("reward_timeouts") for step in end.steps) else "not counted as a timeout"


# ---- wrong values ----------------------------------------------------------------------------------------------------


def raises(at):
    """a reward raises -> named: with the function, the row and the completion"""
    return named(_reward(at, "raise KeyError('no such column')"), "bad.*raised KeyError", "row|completion")


def too_few(at):
    """a reward returns one value for four completions -> named"""
    return named(_reward(at, "return [1.0]"), "returned 1 values for 4", "return a list")


def nan(at):
    """a reward returns NaN -> named"""
    return named(_reward(at, "return [float('nan')] * len(completions)"), "bad.*finite", "return a list|None")


def infinity(at):
    """a reward returns infinity, and 1e39, which float32 cannot hold -> named"""
    for value in ("inf", "1e39"):
        end = _reward(at, f"return [float('{value}')] * len(completions)", f"--run_name r{value} ")
        if (seen := named(end, "bad.*(finite|large|range)|finite", "")).verdict != "named":
            return seen
    return seen


def strings(at):
    """a reward returns texts -> named"""
    return named(_reward(at, "return ['1.0'] * len(completions)"), "bad.*number", "return a list")


def a_number(at):
    """a reward returns one number instead of a list -> named"""
    return named(_reward(at, "return 1.0"), "bad.*returned 1.0", "return a list")


def nothing(at):
    """a reward returns None, having forgotten its return -> named"""
    return named(_reward(at, "pass"), "bad.*returned None", "return a list")


def all_none(at):
    """the only reward applies to no completion -> survived: counted as unrewarded"""
    path = at.file("none.py", "def none(completions, **c):\n    return [None] * len(completions)\n")
    end = at.train(f"--reward_funcs {path}:none ")
    return goes_on(end, None if all(s["unrewarded"] == 16 for s in end.steps) else "not counted", steps=2)


def tensors(at):
    """a reward returns tensors with a gradient -> survived: taken as numbers"""
    body = "import torch\nreturn torch.ones(len(completions), requires_grad=True) * 2"
    end = _reward(at, body)
    return goes_on(end, None if end.mean("rewards/bad/mean") == 2 else "not 2", steps=2)


def generator(at):
    """a reward returns a generator without end -> named: not run"""
    return named(
        _reward(at, "import itertools\nreturn (1.0 for _ in itertools.count())"), "bad.*generator", "return a list"
    )


def odd_components(at):
    """a reward returns dicts with keys that are numbers, tuples, half emoji and slashes -> survived or named"""
    body = "return [{'reward': 1.0, 1: 2.0, ('a', 'b'): 3.0, '\\ud83d': 1.0, '../x': 1.0}] * len(completions)"
    return either(_reward(at, body), NAME, "")


def many_components(at):
    """a reward invents a new component for every completion -> survived: bounded metrics"""
    body = "import random\nreturn [{'reward': 1.0, f'n{random.random()}': 1.0} for _ in range(len(completions))]"
    end = _reward(at, body, "--prompts_per_step 32 --num_generations 8 --max_steps 1 ")
    number = len(end.steps[0]) if end.steps else 0
    return goes_on(end, f"{number} metrics in a line" if number > 150 else None, steps=1)


# ---- late ------------------------------------------------------------------------------------------------------------


def late(at):
    """a reward that never returns -> survived: counted, scored as --reward_on_timeout"""
    end = _reward(at, "import threading\nthreading.Event().wait()")
    return goes_on(end, _timed_out(end), steps=2)


def late_holding_the_interpreter(at, limit=25):
    """a catastrophic regular expression, which holds the interpreter -> survived or named: ended in its time, named"""
    end = _reward(at, "import re\nreturn [float(bool(re.match('(a|a)*b', 'a' * 60)))] * len(completions)")
    return either(end, "bad|bad_reward", "reward_timeout|regular|interpreter|GIL|process", _timed_out(end))


def late_in_c(at, limit=25):
    """a power of a billion digits, which holds the interpreter in C -> survived or named"""
    end = _reward(at, "x = 10 ** (10 ** 10)\nreturn [1.0] * len(completions)")
    return either(end, "bad|bad_reward|MemoryError", "reward_timeout|interpreter|GIL|process", _timed_out(end))


def interrupted_while_held(at, limit=45):
    """Ctrl-C twice while a reward holds the interpreter -> named: the run ends"""
    body = "open(os.environ['REACHED'], 'w').close()\nimport re\nre.match('(a|a)*b', 'a' * 60)"
    path = at.file("bad_reward.py", "import os\ndef bad(completions, **columns):\n    " + body.replace("\n", "\n    "))
    reached = at.folder / "reached"
    run = at.start(f"--reward_funcs {path}:bad --reward_timeout 600 ", REACHED=str(reached))
    wait_until(reached.exists, 30)
    for _ in range(2):
        time.sleep(1)
        os.kill(run.members[0].pid, signal.SIGINT)
    return named(at.ended(run, 15), "interrupt|SIGINT|Ctrl-C|signal", "")


ASYNC = """
import asyncio, time
async def bad(completions, **c):
    await asyncio.sleep(1000)
async def block(completions, **c):
    time.sleep(1000)
async def good(completions, **c):
    await asyncio.sleep(0)
    return [1.0] * len(completions)
"""


def async_late(at):
    """an async reward that awaits for ever, beside one that does not -> survived: counted, the other is not held up"""
    path = at.file("bad_reward.py", ASYNC)
    end = at.train(f"--reward_funcs {path}:bad {path}:good --reward_timeout 2 ")
    wrong = None if end.mean("rewards/good/mean") == 1 else "the good one was held up"
    return goes_on(end, _timed_out(end) or wrong, steps=2)


def async_blocks(at):
    """an async reward that blocks its event loop -> survived: counted"""
    path = at.file("bad_reward.py", ASYNC)
    end = at.train(f"--reward_funcs {path}:block length --reward_timeout 2 ")
    return goes_on(end, _timed_out(end), steps=2)


def threads_left(at):
    """a reward starts threads that never end -> survived: the process still ends"""
    return goes_on(
        _reward(
            at,
            "import threading as t\nt.Thread(target=t.Event().wait).start()\nreturn [1.0] * len(completions)",
        ),
        steps=2,
    )


# ---- the process itself ----------------------------------------------------------------------------------------------


def os_exit(at):
    """a reward calls os._exit(0) -> named: not status 0"""
    return named(_reward(at, "os._exit(0)"), "bad|exit|ended|died|gone", "")


def sys_exit(at):
    """a reward calls sys.exit(0) -> named"""
    return named(_reward(at, "sys.exit(0)"), "bad.*SystemExit", "")


def keyboard_interrupt(at):
    """a reward raises KeyboardInterrupt -> named: as the reward's error, not as Ctrl-C"""
    return named(_reward(at, "raise KeyboardInterrupt"), "bad.*KeyboardInterrupt", "")


def segfault(at):
    """a reward ends in a segmentation fault -> named: non-zero status, where it was"""
    return named(_reward(at, "import ctypes\nctypes.string_at(0)"), "segmentation fault", "calls ran: bad")


def error_without_text(at):
    """a reward raises an error whose text cannot be made -> named"""
    head = "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no text')\n    __repr__ = __str__"
    return named(_reward(at, "raise Odd()", head=head), "bad.*Odd|Odd", "")


def long_error(at):
    """a reward raises with a text of 10 MB -> named: cut"""
    end = _reward(at, "raise ValueError('x' * 10**7)")
    return (
        Seen("leaked", f"{len(end.text) >> 20} MB of output")
        if len(end.text) > 10**6
        else named(end, "bad.*ValueError", "")
    )


def no_memory(at):
    """a reward raises MemoryError -> named"""
    return named(_reward(at, "raise MemoryError"), "bad.*MemoryError", "")


def changes_directory(at):
    """a reward changes the working directory -> survived: the run's files are where they belong"""
    folder = at.given / "elsewhere"
    folder.mkdir()
    path = at.file(
        "bad_reward.py",
        f"import os\ndef bad(completions, **c):\n    os.chdir({str(folder)!r})\n    return [1.0] * len(completions)\n",
    )
    name = f"fault_{at.folder.name[-8:]}"
    end = at.train(f"--reward_funcs {path}:bad --output_dir runs --save_steps 1 --run_name {name} ", run=name)
    home = ROOT / "runs" / name
    there = (home / "report.html").exists() and (home / "checkpoints/step_2").exists()
    strayed = [p.name for p in folder.rglob("*")]
    shutil.rmtree(home, ignore_errors=True)
    return goes_on(end, None if there and not strayed else f"files elsewhere: {strayed[:3]}")


def binary_output(at):
    """a reward prints bytes that are no text -> survived"""
    body = "sys.stdout.buffer.write(bytes(range(256)))\nreturn [1.0] * len(completions)"
    return goes_on(_reward(at, body), steps=2)


def prints_half_an_emoji(at):
    """a reward prints a completion with half an emoji -> survived or named: as its own error"""
    return either(_reward(at, "print('\\ud83d')\nreturn [1.0] * len(completions)"), "bad.*Unicode", "")


def closes_output(at):
    """a reward closes standard output -> survived or named: metrics are written"""
    end = _reward(at, "sys.stdout.close()\nreturn [1.0] * len(completions)")
    return either(end, "closed|stdout", "", None if len(end.steps) == 2 else "steps are missing")


def closes_descriptors(at):
    """a reward closes descriptors 1 and 2 -> survived or named: metrics are written"""
    end = _reward(at, "os.close(1)\nos.close(2)\nreturn [1.0] * len(completions)")
    return (
        goes_on(end, steps=2)
        if end.status == 0
        else Seen("named" if end.status else "hung", f"status {end.status}, nothing can be said")
    )


CHANGES = """
def check(prompts, answer, completions, **columns):
    unchanged = [p[0]["content"].startswith("What") and len(p) == len(a) == 1 for p, a in zip(prompts, answer)]
    return [float(one) for one in unchanged]

def bad(prompts, answer, completions, **columns):
    for p, a in zip(prompts, answer):
        p[0]["content"] = "CHANGED"
        p.append({"role": "user", "content": "MORE"})
        a.append("MORE")
    return [1.0] * len(completions)
"""


def changes_columns(at):
    """a reward changes prompts and columns in place -> survived: the next reward and the data set see the old ones"""
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": [str(n)]} for n in range(4)]
    path = at.file("bad_reward.py", CHANGES)
    end = at.train(f"{at.rows(rows)} --reward_funcs {path}:bad {path}:check --max_steps 3 ")
    share = end.mean("rewards/check/mean")
    return goes_on(end, None if share == 1 else f"as they were in {share:.2f} of the calls", steps=3)


def changes_tokens(at):
    """a reward changes completion_ids and completions in place -> survived: what is trained on stays"""
    body = "for ids in completion_ids:\n    ids[:] = [0] * 3\ncompletions.clear()\nreturn [1.0] * 4"
    end = _reward(at, body, sign="completions, completion_ids, **columns")
    return goes_on(end, None if all(s["completions/mean_length"] == 8 for s in end.steps) else "other lengths", steps=2)


def changes_config(at):
    """a reward changes the config that it is given -> survived or named: the run keeps its own"""
    end = _reward(
        at,
        "cfg.max_steps = 1\ncfg.learning_rate = 9.0\nreturn [1.0] * len(completions)",
        sign="completions, cfg, **columns",
    )
    return either(end, "cfg|frozen", "", None if len(end.steps) == 2 else "another number of steps")


def verify_raises(at):
    """a reward's verify raises -> named"""
    head = "def check(trajectory):\n    raise ValueError('cannot verify')\n"
    path = at.file(
        "bad_reward.py",
        head + "def bad(completions, verification, **c):\n    return [1.0] * len(completions)\nbad.verify = check\n",
    )
    return named(at.train(f"--reward_funcs {path}:bad "), "bad.*verify raised ValueError", "row|completion")


def missing_column(at):
    """a reward asks for a column that the data has not -> named: before anything is sampled"""
    return named(_reward(at, "return [1.0]", sign="completions, solution"), "solution", "column")


def no_such_function(at):
    """a reward file without the function, one that cannot be imported, one that is not there -> named"""
    broken = at.file("broken.py", "def f(:\n")
    empty = at.file("empty.py", "x = 1\n")
    for number, spec in enumerate((f"{empty}:bad", f"{broken}:bad", "nowhere.py:bad")):
        seen = named(
            at.train(f"--reward_funcs {spec} --run_name r{number} "), "bad|broken.py|nowhere.py", "has|no file|syntax"
        )
        if seen.verdict != "named":
            return seen
    return seen


def huge_values(at):
    """rewards of 1e30 and -1e30 -> survived or named: no weight becomes NaN"""
    end = _reward(at, "return [1e30 * (-1) ** i for i in range(len(completions))]")
    bad = [s for s in end.steps if s.get("grad_norm") is None]
    return either(end, "finite|large|reward", "", "grad_norm is not finite" if bad else None)


def judge_is_down(at):
    """the judge's server is not there -> survived: the reward does not apply, and that is counted"""
    url = f"http://127.0.0.1:{free_port()}/v1"
    flags = f"--reward_funcs judge length --judge_url {url} --judge_model x --prompts_per_step 1 --max_steps 1 "
    end = at.train(flags)
    return goes_on(end, steps=1)


def judge_gets_the_wrong_token(at):
    """a judge elsewhere, and only VLLM_SERVER_TOKEN is set -> survived: the policy server's token is not sent there"""
    seen = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(self.headers.get("Authorization", ""))
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"choices": [{"message": {"content": "Score: 5"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    judge = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=judge.serve_forever, daemon=True).start()
    token = os.environ["VLLM_SERVER_TOKEN"]
    flags = f"--reward_funcs judge --judge_url http://127.0.0.1:{judge.server_port}/v1 --judge_model x "
    end = at.train(flags + "--prompts_per_step 1 --max_steps 1 ", JUDGE_TOKEN="")
    sent = any(token in header for header in seen)
    return Seen("leaked", "the server's token was sent to the judge") if sent else goes_on(end, steps=1)


def says_its_arguments(at):
    """a reward raises with its whole config in the message -> named: without keys"""
    end = _reward(
        at,
        "raise ValueError(repr(cfg))",
        "--server_token canary-on-the-command-line ",
        sign="completions, cfg, **columns",
    )
    if "canary-on" in end.text:
        return Seen("leaked", "the token is in the message")
    return named(end, "bad.*ValueError", "")
