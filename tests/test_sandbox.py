"""The sandbox: real attacks in real processes, which must fail inside; nothing runs where nothing contains."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from config import ConfigError, TrainConfig
from safety import sandbox
from safety.sandbox import SandboxError, check_contained, run_python, run_tests

CONTAINED = sandbox.why_not_contained() is None
needs_bubblewrap = pytest.mark.skipif(not CONTAINED, reason=f"{sandbox.why_not_contained()}")


@pytest.fixture(params=(["contained", "of a user"] if CONTAINED else []) + ["uncontained"])
def mode(request, monkeypatch):
    """As root, whose way is a foreign user; as anybody, by a user namespace; and where nothing contains."""
    if request.param == "of a user":
        monkeypatch.setattr(sandbox, "foreign_user", lambda: None)
    elif request.param == "uncontained":
        monkeypatch.setattr(sandbox, "why_not_contained", lambda: "the test says so")
        monkeypatch.setattr(sandbox, "allow_uncontained", True)


def test_it_runs_python(mode):
    code = "import numpy\nname = input()\nprint('hello', name, numpy.ones(2).sum())\nopen('a', 'w').write('x')\n1 / 0"
    result = run_python(code, "you\n", seconds=20)
    assert (result.stdout, result.status, result.timed_out) == ("hello you 2.0\n", 1, False)
    assert "ZeroDivisionError" in result.stderr
    assert (
        run_python("import sys; print(len(sys.stdin.read()))", "\ud800" * 1_000_000, seconds=20).stdout == "3000000\n"
    )
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: run_python(f"print({n} ** 2)", seconds=20), range(8)))
    assert [int(result.stdout) for result in results] == [n * n for n in range(8)]


def test_time_memory_and_output_are_limited(mode):
    start = time.monotonic()
    assert run_python("while True: pass", seconds=1).timed_out
    assert run_python("import time; print(1, flush=True); time.sleep(100)", seconds=1) == sandbox.Result(
        "1\n", "", -9, True
    )
    assert time.monotonic() - start < 30
    assert "MemoryError" in run_python("x = bytearray(4 * 10**9)", seconds=20).stderr
    endless = run_python("import os\nwhile True: os.write(1, b'x' * 10**6)", seconds=20)
    assert endless.stdout == "x" * sandbox.OUTPUT and "File too large" in endless.stderr
    assert "Errno" in run_python("open('a', 'w').write('x' * 10**8)", seconds=20).stderr


@needs_bubblewrap
@pytest.mark.parametrize("user", [True, False])
def test_it_reaches_nothing(user, monkeypatch, tmp_path):
    if not user:
        monkeypatch.setattr(sandbox, "foreign_user", lambda: None)
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    monkeypatch.setenv("HF_TOKEN", "of-the-user")
    attacks = f"""
import os, pathlib, signal, socket
def tries(attack):
    try: return attack()
    except OSError as error: return type(error).__name__
print(tries(lambda: open({str(secret)!r}).read()))
print(tries(lambda: open("/etc/passwd").read()))
print(tries(lambda: open("/usr/lib/written", "w")))
print(tries(lambda: open("/written", "w")))
print(tries(lambda: socket.create_connection(("127.0.0.1", 22), 2)))
print(tries(lambda: socket.create_connection(("1.1.1.1", 53), 2)))
print(tries(lambda: os.kill({os.getpid()}, 0)))
print("HF_TOKEN" in os.environ, len([p for p in os.listdir("/proc") if p.isdigit()]) < 5)
"""
    lines = run_python(attacks, seconds=20).stdout.split("\n")
    assert lines[0] == lines[1] == "FileNotFoundError" and lines[6] == "ProcessLookupError", lines
    assert all(line.endswith("Error") for line in lines[:7]) and lines[7] == "False True", lines


BOMB = "import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(1000)\n    n += 1\n"
BOMB += "except OSError: print(n)"


@needs_bubblewrap
def test_a_fork_bomb_is_counted_and_nothing_outlives_its_program():
    before = psutil.Process().children(recursive=True)
    result = run_python(BOMB, seconds=20)
    assert int(result.stdout) <= sandbox.PROCESSES
    left = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1234)\nprint('left')"
    assert run_python(left, seconds=20).stdout == "left\n"
    time.sleep(0.5)
    found = psutil.Process().children(recursive=True)
    assert not [p for p in found if p not in before and p.status() != "zombie"]


PROGRAM = """
import collections, os, sys
class Equal:
    def __eq__(self, other): return True
    def __repr__(self): return "Equal()"
class Liar(int):
    def __eq__(self, other): return True
    def __repr__(self): return "4"
def double(x): return 2 * x
def leaves(): sys.exit(0)
def prints(): os.write(1, b'{"number": "", "passed": true}')
def count(x): return collections.Counter(x)
if __name__ == "__main__": input()
"""


def test_tests_of_a_program(mode):
    tests = [
        "assert double(2) == 4",
        "assert {'a': 2, 'b': 1} == count('aab')",
        "double(1)",
        "assert double((1,)) == (1, 1)",
    ]
    wrong = ["assert double(2) == 5", "assert Equal() == 4", "assert Liar(5) == 4", "assert leaves() == 4", "leaves()"]
    wrong += ["assert prints()", "assert double() == 1", "assert double([1]) == (1, 1)", "assert not double(1)"]
    assert run_tests(PROGRAM, tests + wrong, seconds=20) == ([True] * 4 + [False] * len(wrong), False)
    assert run_tests("while True: pass", ["assert 1"], seconds=1) == ([False], True)
    assert run_tests("1 / 0", ["assert 1"], seconds=20) == ([False], False)
    with pytest.raises(ValueError, match="is not python"):
        run_tests("", ["assert ("])


def test_nothing_runs_where_nothing_contains(monkeypatch):
    monkeypatch.setattr(sandbox, "why_not_contained", lambda: "bubblewrap is not installed")

    def runs_code(completions):
        return [0.0]

    runs_code.executes_code = True
    for run in (lambda: run_python("print(1)"), lambda: run_tests("", ["assert 1"])):
        with pytest.raises(SandboxError, match="not installed"):
            run()
    with pytest.raises(ConfigError, match="runs_code.*not installed.*--allow_uncontained"):
        check_contained([runs_code], TrainConfig())
    check_contained([len], TrainConfig())


@needs_bubblewrap
def test_a_killed_trainer_leaves_no_program(tmp_path):
    import subprocess
    import sys

    root = Path(sandbox.__file__).parent.parent
    inside = f"import time; open('/tmp/x', 'w'); time.sleep(4321.{os.getpid()})"
    code = f"import sys; sys.path.insert(0, {str(root)!r})\nfrom safety.sandbox import run_python\n"
    trainer = subprocess.Popen([sys.executable, "-c", f"{code}run_python({inside!r}, seconds=600)"])
    try:
        deadline = time.monotonic() + 60
        while not (started := psutil.Process(trainer.pid).children(recursive=True)) or len(started) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2)
        started = psutil.Process(trainer.pid).children(recursive=True)
    finally:
        trainer.kill()
        trainer.wait()
    gone, left = psutil.wait_procs(started, 20)
    assert started and not [process for process in left if process.status() != "zombie"]
