"""The sandbox: real attacks in real processes, each of which must fail inside, and nothing runs where nothing contains.

Where bubblewrap works they run twice, as root's foreign user (if this is root) and by a user namespace. Where it does
not, what runs says so, and the limits that are left are tested.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from config import ConfigError, TrainConfig
from safety import sandbox
from safety.sandbox import SandboxError, check_contained, contained, run_python, run_tests

CONTAINED = sandbox.why_not_contained() is None
MODES = (["own user"] if os.getuid() == 0 else []) + ["user namespace"] if CONTAINED else []


def use(mode: str, monkeypatch) -> None:
    if mode == "user namespace":
        monkeypatch.setattr(sandbox, "foreign_user", lambda program=None: None)
    elif mode == "uncontained":
        monkeypatch.setattr(sandbox, "why_not_contained", lambda: "the test says so")
        monkeypatch.setattr(sandbox, "allow_uncontained", True)


@pytest.fixture(params=[*MODES, "uncontained"])
def any_mode(request, monkeypatch):
    use(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=MODES or ["none"])
def mode(request, monkeypatch):
    """The modes that contain. Without one, what is tested instead is that nothing runs."""
    if request.param == "none":
        with pytest.raises(SandboxError, match="nothing contains the code here"):
            run_python("print(1)")
        pytest.skip(f"the attacks need bubblewrap: {sandbox.why_not_contained()}")
    use(request.param, monkeypatch)
    return request.param


def below(process: int) -> set[int]:
    """All processes below one."""
    found = set()
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text(encoding="utf-8").split()):
                found |= {child} | below(child)
    return found


def alive(processes: set[int]) -> set[int]:
    states = {}
    for process in processes:
        with contextlib.suppress(OSError):
            states[process] = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return {process for process, state in states.items() if state != "Z"}


def wait_until_gone(processes: set[int], seconds: float = 5) -> set[int]:
    deadline = time.monotonic() + seconds
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def watched(code: str, **limits) -> tuple[sandbox.Result, set[int]]:
    """(the result, every process that was seen below this one meanwhile)"""
    seen, over = set(), threading.Event()

    def look():
        while not over.wait(0.02):
            seen.update(below(os.getpid()) - before)

    before = below(os.getpid())
    thread = threading.Thread(target=look)
    thread.start()
    try:
        return run_python(code, **limits), seen
    finally:
        over.set()
        thread.join()


def test_it_runs_python(any_mode):
    code = "name = input()\nprint('hello', name)\nopen('a', 'w').write('x')\nprint(open('a').read())"
    result = run_python(code, "you\n", seconds=20)
    assert (result.stdout, result.status, result.timed_out) == ("hello you\nx\n", 0, False)
    result = run_python("print('before', flush=True); 1 / 0", seconds=20)
    assert result.status == 1 and result.stdout == "before\n" and "ZeroDivisionError" in result.stderr
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: run_python(f"print({n} ** 2)", seconds=20), range(16)))
    assert [int(result.stdout) for result in results] == [n * n for n in range(16)]
    assert run_python("import sys; print(len(sys.stdin.read()))", "x" * 3_000_000, seconds=20).stdout == "3000000\n"
    assert run_python("pass", "x" * 3_000_000, seconds=20).status == 0  # its input is not read
    long = "x = '" + "a" * 3_000_000 + "'\nprint(len(x))"
    assert run_python(long, seconds=20).stdout == "3000000\n"
    assert run_python("import os; os.kill(os.getpid(), 11)", seconds=20).status == -signal.SIGSEGV
    assert run_python("x = '\ud800'").status == 1 and run_python("x = '\0'").status == 1


def test_packages_and_several_processes_work(any_mode):
    code = (
        "import asyncio, multiprocessing, numpy, subprocess, sys, tempfile, threading\n"
        "from multiprocessing import shared_memory\n"
        "async def one(): return 1\n"
        "with multiprocessing.Pool(3) as pool: print(pool.map(abs, [-1, -2]), asyncio.run(one()))\n"
        "print(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout)\n"
        "shared_memory.SharedMemory(create=True, size=1000).unlink()\n"
        "thread = threading.Thread(target=lambda: print(numpy.ones(3).sum())); thread.start(); thread.join()\n"
        "print(tempfile.TemporaryFile().write(b'x'))"
    )
    assert run_python(code, seconds=30).stdout.split() == ["[1,", "2]", "1", "5", "3.0", "1"]


LEFT = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1000)\ntime.sleep(.3)\nprint('left')"
ALONE = (
    "import os, time\nfor _ in range(6):\n  if os.fork() == 0:\n    x = bytearray(200 * 2**20)\n    time.sleep(9)\n"
    "    os._exit(0)\ntime.sleep(5)\nprint('1,200 MB at once')"
)
BOMBS = {
    "endless loop": ("while True: pass", None),
    "sleep": ("import time; time.sleep(100)", None),
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "ended by the sandbox"),
    "children that outlive it": (LEFT, "left\n"),
    "memory": ("x = bytearray(4 * 10**9)", "MemoryError"),
    "memory of six processes": (ALONE, "used over 512 MB of memory together"),
    "a large file": ("f = open('big', 'wb')\nfor _ in range(1000): f.write(bytes(10**6))", "OSError"),
    "a gigabyte of output": ("for _ in range(10**6): print('x' * 1000)", "wrote over 1,048,576 bytes"),
    "a gigabyte of errors": ("import os\nwhile True: os.write(2, bytes(10**6))", "wrote over 1,048,576 bytes"),
    "its pipes closed": ("import os, time\nos.closerange(0, 20)\ntime.sleep(99)", None),
    "stopped": ("import os; os.kill(os.getpid(), 19)", None),
}  # fmt: skip


@pytest.mark.in_turn
@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name, any_mode):
    """Time is up, or an error within; nothing is left of it, and the machine still runs python."""
    code, message = BOMBS[name]
    start = time.perf_counter()
    result, processes = watched(code, seconds=2)
    assert time.perf_counter() - start < 15
    if message is None:
        assert result.timed_out and result.status != 0
    else:
        assert message in result.stdout + result.stderr or name == "fork bomb" and result.timed_out
    assert len(result.stdout) <= sandbox.OUTPUT and processes
    left = wait_until_gone(processes)
    if any_mode == "uncontained":  # what leaves its group lives on: one of the reasons for bubblewrap
        for process in left:
            os.kill(process, signal.SIGKILL)
    else:
        assert not left
    assert run_python("print(1)", seconds=20).stdout == "1\n"


OPEN_DEVICES = """
import os
for name in os.listdir('/dev'):
    if name not in 'null zero full random urandom tty ptmx fd stdin stdout stderr core'.split():
        try: os.close(os.open('/dev/' + name, os.O_RDWR | os.O_NONBLOCK)); print(name)
        except OSError: pass
try: os.mknod('/tmp/disk', 0o060666, os.makedev(7, 0)); print('made a device')
except OSError: pass
"""
FORKS = """
import os, time
n = 0
try:
    while n < 400:
        if os.fork() == 0: time.sleep(9); os._exit(0)
        n += 1
except OSError: print('refused after', n)
else: print('400 forks')
"""
FILES = """
import os
for path in ('/etc/shadow', '/etc/passwd', '/home', '/var', '/run', {file!r}):
    try: found = os.listdir(path) if os.path.isdir(path) else [open(path).read()]
    except OSError: found = []
    if found: print(path, str(found)[:50])
"""
WRITES = """
import os, sys
places = ['/', '/dev', '/etc', '/usr', '/run', '/proc/sys/kernel', os.path.dirname(sys.executable), sys.prefix]
for place in places + sys.path:
    try: open(place + '/written', 'w'); print(place)
    except OSError: pass
try: open('/sandbox_inside.py', 'a'); print('itself')
except OSError: pass
try: open('/proc/sys/kernel/core_pattern', 'a'); print('core pattern')
except OSError: pass
"""
NAMESPACES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, *arguments):
    if libc[name](*arguments) >= 0: print(name)
tried('unshare', 0x10000000 | 0x20000)
tried('unshare', 0x20000)
tried('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None)
tried('umount2', b'/usr', 2)
tried('setns', os.open('/proc/self/ns/user', os.O_RDONLY), 0)
tried('ptrace', 16, 1, 0, 0)
tried('chroot', b'/tmp')
pid = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)  # clone with a user namespace
if pid == 0: os._exit(0)
if pid > 0: print('clone')
if libc.syscall(425, 8, ctypes.create_string_buffer(200)) >= 0: print('io_uring')
for number in (319 + 0x40000000, 272 + 0x40000000):
    if libc.syscall(number, b'x', 0) >= 0: print('second set of calls')
try: os.setuid(0); print('root')
except OSError: pass
"""
MEMORY_NOT_IN_A_PROCESS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
try: os.memfd_create('x'); print('memfd')
except OSError: pass
if libc.shmget(0, 10**8, 0o1600) >= 0: print('segment')
if libc.msgget(0, 0o1600) >= 0: print('messages')
for place in ('/tmp', '/dev/shm'):
    try:
        for n in range(100): open(f'{place}/{n}', 'wb').write(bytes(10**7))
        print('filled', place)
    except OSError: pass
"""
NOTHING = [  # name, code that prints what it reached
    ("block devices", OPEN_DEVICES),
    ("files", FILES),
    ("writing", WRITES),
    ("namespaces", NAMESPACES),
    ("memory that is in no process", MEMORY_NOT_IN_A_PROCESS),
]


@pytest.mark.parametrize(("name", "code"), NOTHING, ids=[name for name, _ in NOTHING])
def test_nothing_is_reached(name, code, mode, tmp_path):
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    os.chmod(tmp_path, 0o777)
    result = run_python(code.replace("{file!r}", repr(str(tmp_path / "secret"))), seconds=20)
    assert (result.stdout, result.stderr, result.status) == ("", "", 0)


def test_forks_are_counted_together(mode):
    result = run_python(FORKS, seconds=5)
    found = re.match(r"refused after (\d+)\n", result.stdout)
    ended = "had over 32 processes" in result.stderr or "of memory together" in result.stderr
    assert ended or (found and int(found[1]) < sandbox.PROCESSES)
    with ThreadPoolExecutor(4) as pool:  # each for itself
        nine = "import os, time\nfor _ in range(20):\n  if os.fork() == 0: time.sleep(1); os._exit(0)\nprint('ok')"
        assert [result.stdout for result in pool.map(lambda _: run_python(nine, seconds=20), range(4))] == ["ok\n"] * 4


def test_a_process_may_give_itself_a_name_of_any_bytes(mode):
    """The name is in /proc/PID/status, which is read while the code runs."""
    code = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff\\xfe', 0, 0, 0)\ntime.sleep(1)\nprint('named')"
    assert run_python(code, seconds=20).stdout == "named\n"


def test_no_environment_but_its_own(mode, monkeypatch):
    """Of the trainer, of any process, and of bubblewrap."""
    monkeypatch.setenv("VLLM_SERVER_TOKEN", "secret-of-the-trainer")
    code = (
        "import os\nfor entry in os.listdir('/proc'):\n  if entry.isdigit():\n    print(entry)\n"
        "    for name in ('environ', 'cmdline', 'maps'):\n"
        "      try: print(open(f'/proc/{entry}/{name}').read())\n      except OSError: pass\nprint(os.environ)"
    )
    result = run_python(code, seconds=20)
    assert "secret-of" not in result.stdout and "TOKEN" not in result.stdout and result.status == 0
    assert len(re.findall(r"^\d+$", result.stdout, re.MULTILINE)) == 2  # bubblewrap and itself


def test_no_socket_of_others(mode, tmp_path):
    """In files, abstract, of the network, and of the host of a virtual machine."""
    places = [str(tmp_path / "live"), f"/tmp/sandbox_test_{os.getpid()}", "\0sandbox_test"]
    listening = [socket.socket(socket.AF_UNIX) for _ in places]
    internet = socket.create_server(("127.0.0.1", 0))
    try:
        for each, place in zip(listening, places, strict=True):
            each.bind(place)
            each.listen()
        targets = [(1, place) for place in places] + [(2, internet.getsockname())]
        code = (
            f"import socket\nfor family, place in {targets!r}:\n"
            "  try: socket.socket(family).connect(place); print('connected', place)\n  except OSError: pass\n"
            "for family in (16, 17, 38, 40, 44):  # netlink, raw, ciphers of the kernel, the machine's host, xdp\n"
            "  try: socket.socket(family, 3 if family in (16, 17, 44) else 1); print('family', family)\n"
            "  except OSError: pass\n"
            "print(open('/proc/net/dev').read().count(':'))"
        )
        result = run_python(code, seconds=20)
        assert (result.stdout, result.stderr) == ("1\n", "")
    finally:
        for each in (*listening, internet):
            each.close()
        os.unlink(places[1])


def test_no_signal_to_others(mode):
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        code = "import os\nfor pid in {}:\n  try: os.kill(pid, 9)\n  except OSError: pass"
        run_python(code.format((victim.pid, os.getpid(), 1, -1)), seconds=20)
        time.sleep(0.2)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_it_dies_with_the_trainer(mode):
    """kill -9 of the process that runs it: nothing lives on."""
    here = str(Path(sandbox.__file__).parent.parent)
    force = "sandbox.foreign_user = lambda program=None: None\n" if mode == "user namespace" else ""
    code = (
        f"import sys; sys.path.insert(0, {here!r})\nfrom safety import sandbox\n{force}sandbox.why_not_contained()\n"
        "print('ready', flush=True)\n"
        "sandbox.run_python('import os, time\\nos.fork()\\nos.setsid()\\ntime.sleep(100)', seconds=100)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert trainer.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 20
        while len(below(trainer.pid)) < 4 and time.monotonic() < deadline:  # bubblewrap twice, the program twice
            time.sleep(0.05)
        processes = below(trainer.pid)
        assert len(processes) == 4
    finally:
        trainer.kill()
        trainer.communicate()
    assert not wait_until_gone(processes)


def test_output_is_a_pipe_to_us_whatever_it_does_to_its_own(any_mode):
    code = (
        "import os, sys\nprint('seen', flush=True)\nos.mkfifo('out')\nos.symlink('/etc/passwd', 'err')\n"
        "for number in (1, 2):\n  try: os.ftruncate(number, 0)\n  except OSError: pass\n"
        "try: os.set_blocking(1, False)\nexcept OSError: pass\n"
    )
    result = run_python(code, seconds=20)
    assert (result.stdout, result.status) == ("seen\n", 0)


# ---- tests of programs ----------------------------------------------------------------------------------------------


def test_tests_of_a_program(any_mode):
    program = "import pickle\ndef f(x): return x\nclass A: pass"
    many = "[1, (2,), {3}, {'a': b'c'}, None, 2.5]"
    passing = ["assert f(1) == 1", "assert f(1) == True", f"assert {many} == f({many})"]
    passing += ["for n in range(3):\n    assert f(n) == n", "assert f(3), 'no'", f"assert f(1{'0' * 4000}) == 10**4000"]
    passing += ["assert type(pickle.loads(pickle.dumps(A()))) is A", "import numpy; assert numpy.int64(3) == f(3)"]
    passing += ["assert f(__import__('numpy').float32(.5)) == .5", r"assert f('\ud800') == '\ud800'"]
    failing = ["assert f(1) == 2", "assert f([1]) == (1,)", "assert f(1) == '1'", "assert f({1: 2}) == {1}", "1 / 0"]
    failing += ["assert f(f) == 'f'", "import sys; sys.exit(0)", "assert unknown", "assert f([]) == ()"]
    assert run_tests(program, passing + failing, 20) == ([True] * len(passing) + [False] * len(failing), False)
    with pytest.raises(ValueError, match="the test 'assert f\\(' is not python"):
        run_tests(program, ["assert f("])
    large = "x = '" + "a" * 400_000 + "'\n" + program
    assert run_tests(large, ["assert f(1) == 1"], 20) == ([True], False)


ENDINGS = {
    "reads numbers under main": "if __name__ == '__main__':\n    n = int(input())\n    print(f(n))",
    "reads all of its input under main": "import sys\nif __name__ == '__main__':\n    print(f(int(sys.stdin.read())))",
    "waits under main": "if __name__ == '__main__':\n    while True: pass",
    "reads numbers": "n = int(input())\nprint(f(n))",
    "leaves at the end of main": "import sys\ndef main():\n    print(f(1))\n    sys.exit(0)\nmain()",
    "leaves by raise": "raise SystemExit",
    "quits": "quit()",
    "tests itself under main": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 1)\n"
        "if __name__ == '__main__':\n    unittest.main()"
    ),
    "tests itself": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 1)\nunittest.main()"
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_right_programs_are_right_however_they_end(name, any_mode):
    """Programs are written to be started; tests ask for what they define."""
    assert run_tests(f"def f(x): return x\n{ENDINGS[name]}", ["assert f(1) == 1", "f(2)"], 20) == ([True, True], False)


@pytest.mark.parametrize("ending", ["sys.exit(1)", "sys.exit('no')", "int('')", "unittest.main()"])
def test_programs_that_end_by_an_error_pass_nothing(ending, any_mode):
    program = "import sys, unittest\nclass T(unittest.TestCase):\n    def test(self): self.fail()\ndef f(x): return x\n"
    assert run_tests(program + ending, ["assert f(1) == 1"], 20) == ([False], False)


CHEATS = {
    "exit": "import sys; sys.exit(0)",
    "exit at once": "import os; os._exit(0)",
    "success on every descriptor": (
        'import os\nfor n in range(20):\n  try: os.write(n, b\'passed\\n" passed"\\n "passed"\\n\' * 1000)\n'
        "  except OSError: pass"
    ),
    "marks found in frames": (
        "import sys, re\nf = sys._getframe()\nwhile f:\n  for c in (*f.f_code.co_consts, *f.f_locals.values()):\n"
        "    for m in re.findall('[0-9a-f]{16}', str(c)): print((m + chr(10)) * 700, flush=True)\n  f = f.f_back"
    ),
    "equal to everything": "class A:\n  __eq__ = lambda a, b: True\n  __repr__ = lambda a: '3'\ndef f(x): return A()",
    "an int that is equal to all": "class A(int):\n  __eq__ = lambda a, b: True\ndef f(x): return A(1)",
    "the answers of the runner itself": (
        "import os, sys\n"
        "def f(x):\n"
        "  frame = sys._getframe()\n"
        "  while 'job' not in frame.f_locals: frame = frame.f_back\n"
        "  for n in range(3, 20):\n"
        "    try: os.write(n, (frame.f_locals['job']['number'] + ' \"passed\"\\n').encode())\n"
        "    except OSError: pass"
    ),
    "asserts taken away": "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): return None",
    "endless": "while True: pass",
    "output without end": (
        "import os\nwhile True:\n  for n in range(3, 9):\n    try: os.write(n, b'x' * 10**6)\n    except OSError: pass"
    ),
    "not python": "syntax error (",
    "deep": "[" * 100_000,
    "half a character": "x = '\ud800'",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_pass_no_test(name, any_mode):
    """Of tests that compare a call with a literal, what is expected is not in the process."""
    passed, _ = run_tests(CHEATS[name], ["assert f(3) == 9", "assert f(4) == 16"], seconds=2)
    assert passed == [False, False]


# ---- what a run says ------------------------------------------------------------------------------------------------


def test_a_run_says_what_holds_or_refuses(monkeypatch, capsys):
    def runs_code(completions): ...

    runs_code.executes_code = True
    check_contained([len, print], TrainConfig())
    assert not capsys.readouterr().out
    if CONTAINED:
        check_contained([len, runs_code], TrainConfig())
        said = capsys.readouterr().out
        assert said.count("\n") == 1 and "(runs_code) runs in bubblewrap: no network" in said
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    sandbox.why_not_contained.cache_clear()
    try:
        with pytest.raises(ConfigError, match="runs_code would run code .*apt-get install bubblewrap.*--allow_unc"):
            check_contained([runs_code], TrainConfig())
        with pytest.raises(SandboxError, match="nothing contains the code here: bubblewrap is not installed"):
            run_python("print(1)")
        check_contained([runs_code], TrainConfig(allow_uncontained=True))
        assert "IT REACHES FILES, SOCKETS AND THE NETWORK" in capsys.readouterr().out
        assert run_python("print(1)", seconds=20).stdout == "1\n" and contained().startswith("nothing that contains")
    finally:
        sandbox.allow_uncontained = False
        sandbox.why_not_contained.cache_clear()


PLACES = {"/tmp": "plain", "/tmp and odd letters": "a ünï 'place' $HOME", "/tmp by a link": "link", "/dev/shm": "shm"}


@pytest.mark.skipif(not CONTAINED, reason="needs bubblewrap")
@pytest.mark.parametrize("kind", PLACES)
def test_it_works_with_a_python_from_any_place(kind):
    """A clone is tried under /tmp as a rule, where the sandbox has a /tmp of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if kind == "/dev/shm" else "/tmp") as folder:
        os.chmod(folder, 0o755)
        home = Path(folder) / PLACES[kind]
        (Path(folder) / "real").mkdir()
        home.symlink_to("real") if kind == "/tmp by a link" else home.mkdir()
        repository = Path(sandbox.__file__).parent.parent
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "new venv"], check=True)
        (packages,) = (home / "new venv/lib").glob("python3*/site-packages")
        shared = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages / "shared.pth").write_text(shared, encoding="utf-8")
        (home / "linked").symlink_to(Path(sys.prefix))  # as a .venv shared by several clones
        code = "import sys\nfrom safety import sandbox as s\ns.why_not_contained.cache_clear()\n"
        code += 'print(s.why_not_contained(), s.run_python(\'open("/tmp/a", "w").close()\'), '
        code += "s.run_tests('import numpy', ['assert int(numpy.int64(3)) == 3'])[0])"
        for name in ("new venv", "linked"):
            python = [home / name / "bin" / "python", "-c", code]
            done = subprocess.run(python, cwd=repository, capture_output=True, text=True, timeout=60, encoding="utf-8")
            assert re.fullmatch(r"None Result\(.*status=0.*\) \[True\]\n", done.stdout), (done.stdout, done.stderr)


def test_a_bubblewrap_that_does_not_work_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n", encoding="utf-8"
    )
    broken.chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: str(broken))
    sandbox.why_not_contained.cache_clear()
    try:
        assert "No permissions to create a new namespace" in sandbox.why_not_contained()
    finally:
        sandbox.why_not_contained.cache_clear()


def test_training_asks_before_it_starts(monkeypatch, capsys):
    import train_grpo

    root = Path(sandbox.__file__).parent.parent
    common = dict(model_id=str(root / "models/tiny"), generator="hf", dataset_id=f"{root}/examples/coding.py:rows")
    monkeypatch.setattr(sandbox, "why_not_contained", lambda: "the test says so")
    for given in (dict(reward_funcs=["code_tests"]), dict(reward_funcs=["format"], tools=["python", "calculator"])):
        with pytest.raises(ConfigError, match="nothing contains it here: the test says so.*--allow_uncontained"):
            train_grpo.setup(TrainConfig(**common, **given))
        train_grpo.setup(TrainConfig(**common, **given, allow_uncontained=True))
        assert "IT REACHES FILES" in capsys.readouterr().out
    train_grpo.setup(TrainConfig(**common, reward_funcs=["format"], tools=["calculator"]))
    assert "Code that" not in capsys.readouterr().out and not sandbox.allow_uncontained


def test_children_that_a_program_forks_do_not_answer_for_it():
    program = "import os\nfor _ in range(4): os.fork()\ndef f(x): return 2"
    for _ in range(4):
        assert sandbox.run_tests(program, ["assert f(1) == 2", "assert f(5) == 6"]) == ([True, False], False)
