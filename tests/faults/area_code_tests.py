"""The reward code_tests: programs that cheat, or cannot be run as they are."""

import tempfile
import time

from case import Seen, shorten

TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
RIGHT, HALF = "def f(x): return x + 1", "def f(x): return 2"


def _score(program: str, tests=TESTS, fence=True):
    """What the reward gives: a number, and what it counts."""
    from scoring.text import code_tests

    (value,) = code_tests(completions=[f"```python\n{program}\n```" if fence else program], tests=[tests])
    return value if isinstance(value, dict) else {"reward": value}


def _gives(program: str, right: float, tests=TESTS, counted: str = "", fence=True) -> Seen:
    """The right reward, or instead of it one of 0 with the component that says why it is none."""
    try:
        value = _score(program, tests, fence)
    except Exception as error:
        return Seen("ended", f"the reward raised {type(error).__name__}: {error}")
    reward, said = value.get("reward"), {k: v for k, v in value.items() if k != "reward" and v}
    if reward == right or (counted and said and not reward):
        return Seen("survived", f"reward {reward}, {said or 'nothing counted'}")
    return Seen("silent", f"reward {reward} where {right} is right, {said or 'nothing counted'}")


def right(at):
    """a right program -> survived: reward 1"""
    return _gives(RIGHT, 1.0)


SAY = """
for mark in found:
    print((mark + "\\n") * 625, flush=True)
"""


def mark_from_argv(at):
    """a wrong program prints the marks that it finds in /proc/self/cmdline, 625 times -> survived: reward 0"""
    code = """
import re
words = open("/proc/self/cmdline").read() + open("/proc/1/cmdline").read()
found = set(re.findall("[0-9a-f]{12,64}", words))
"""
    return _gives(code + SAY, 0.0)


def mark_from_frames(at):
    """a wrong program looks for marks in the frames and code objects above it and prints them -> survived: reward 0"""
    code = """
import re, sys
found, frame = set(), sys._getframe()
while frame:
    values = [*frame.f_code.co_consts, *frame.f_locals.values(), *frame.f_globals.values()]
    found |= set(re.findall("[0-9a-f]{12,64}", repr(values)))
    frame = frame.f_back
"""
    return _gives(code + SAY, 0.0)


def mark_from_files(at):
    """a wrong program reads every file that it may near it, and stdin, for marks -> survived: reward 0"""
    code = """
import glob, os, re
found = set()
for path in glob.glob("/proc/self/fd/*") + glob.glob("*") + glob.glob("../*") + glob.glob("/tmp/*"):
    try:
        if os.path.isfile(path):
            found |= set(re.findall("[0-9a-f]{12,64}", open(path, errors="replace").read(10**6)))
    except OSError:
        pass
"""
    return _gives(code + SAY, 0.0)


def print_replaced(at):
    """a half right program makes print say everything 100 times -> survived: reward .5"""
    code = (
        "import builtins\nsay = builtins.print\nbuiltins.print = lambda *a, **k: [say(*a, **k) for _ in range(100)]\n"
    )
    return _gives(code + HALF, 0.5)


def writes_replaced(at):
    """a half right program doubles what os.write and sys.stdout write -> survived: at most .5"""
    code = "import os, sys\nwrite = os.write\nos.write = lambda d, b: (write(d, b), write(d, b))[0]\n"
    code += "say = sys.stdout.write\nsys.stdout.write = lambda t: (say(t), say(t))[0]\n"
    return _gives(code + HALF, 0.0)


def exits_early(at):
    """programs that end with status 0 before any test -> survived: reward 0"""
    for code in ("import sys\nsys.exit(0)", "import os\nos._exit(0)", "raise SystemExit", "quit()"):
        if (seen := _gives(code, 0.0)).verdict != "survived":
            return seen
    return seen


def exits_in_a_test(at):
    """a program that ends the process when it is called -> survived: reward 0"""
    return _gives("import os\ndef f(x): os._exit(0)", 0.0)


def forks(at):
    """a half right program forks ten times, and every child goes on to the tests -> survived: reward .5"""
    return _gives(f"import os\nfor _ in range(4): os.fork()\n{HALF}", 0.5)


def long_program(at):
    """a right program of 200 kB -> survived: reward 1"""
    return _gives("# " + "x" * 200_000 + f"\n{RIGHT}", 1.0)


def long_tests(at):
    """a right program with 300 tests of 1 kB each -> survived: reward 1"""
    tests = [f"assert f({n}) == {n + 1}  # {'x' * 1000}" for n in range(300)]
    return _gives(RIGHT, 1.0, tests)


def prints_much(at):
    """a right program that prints 1 MB first -> survived: reward 1"""
    return _gives(f"for _ in range(1000): print('x' * 1000)\n{RIGHT}", 1.0)


def closes_its_output(at):
    """a right program that closes its output -> survived: a right reward, or an error that is counted"""
    return _gives(f"import os\nos.close(1)\nos.close(2)\n{RIGHT}", 1.0, counted="error")


def surrogate(at):
    """a program with half an emoji in its source, which python cannot compile -> survived: reward 0"""
    return _gives(f"s = '\ud83d'\n{RIGHT}", 0.0)


def surrogate_escaped(at):
    """a program that prints half an emoji -> survived: reward 1"""
    return _gives(f"try: print('\\ud83d')\nexcept UnicodeError: pass\n{RIGHT}", 1.0)


def nul(at):
    """a program with a NUL character -> survived: reward 0"""
    return _gives(f"s = '\0'\n{RIGHT}", 0.0)


def nested(at):
    """a program of 5,000 nested brackets -> survived: reward 0"""
    return _gives(f"x = {'(' * 5000}{')' * 5000}\n{RIGHT}", 0.0)


def endless(at):
    """a program that never ends -> survived: reward 0, counted as a timeout"""
    seen = _gives("while True: pass", 0.0)
    value = _score("while True: pass")
    return seen if any(v for k, v in value.items() if k != "reward") else Seen("silent", f"not counted: {value}")


def unclosed_fences(at):
    """a completion of 20,000 opened code blocks -> survived: scored within 10 s"""
    start = time.monotonic()
    seen = _gives("```python\n" * 20_000, 0.0, fence=False)
    seconds = time.monotonic() - start
    return Seen("hung", f"{seconds:.0f} s") if seconds > 10 else seen


def odd_tests(at):
    """rows whose `tests` are None, text, or hold a number -> survived or named: said, not scored"""
    said = []
    for tests in (None, "assert f(1) == 2", [1, 2]):
        try:
            said.append(f"{tests!r}: {_score(RIGHT, tests).get('reward')}")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            said.append(text)
            if "tests" not in text:
                return Seen("ended", f"{tests!r} gives {text}")
    return Seen("survived", shorten("; ".join(said)))


def sandbox_cannot_run(at):
    """the sandbox has no folder to work in (no temporary directory) -> survived or named: an error is counted"""
    tempfile.tempdir = str(at.folder / "no such folder")
    try:
        value = _score(RIGHT)
    except Exception as error:
        return Seen(
            "named" if "tempor" in str(error) or "sandbox" in str(error) or "no such" in str(error) else "ended",
            str(error),
        )
    finally:
        tempfile.tempdir = str(at.temp)
    said = {k: v for k, v in value.items() if k != "reward" and v}
    return Seen("survived" if value.get("reward") == 1 or said else "silent", f"reward {value.get('reward')}, {said}")
