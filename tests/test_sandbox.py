"""The sandbox: what code may do, each contained here or said to be open, and the run goes on."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import sandbox
from sandbox import contained, run_python


def test_it_runs_python():
    result = run_python(
        "name = input()\nprint('hello', name)\nopen('a', 'w').write('x')\nprint(open('a').read())", "you\n"
    )
    assert (result.stdout, result.status, result.timed_out) == ("hello you\nx\n", 0, False)
    result = run_python("print('before', flush=True); 1 / 0")
    assert result.status == 1 and result.stdout == "before\n" and "ZeroDivisionError" in result.stderr
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: run_python(f"print({n} ** 2)", seconds=20), range(16)))
    assert [int(result.stdout) for result in results] == [n * n for n in range(16)]


LEFT = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1000)\nprint('left')"
BOMBS = {
    "endless loop": ("while True: pass", None),
    "sleep": ("import time; time.sleep(100)", None),
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", None),
    "children that outlive it": (LEFT, "left\n"),
    "memory": ("x = bytearray(4 * 10**9)", "MemoryError"),
    "a large file": ("f = open('big', 'wb')\nfor _ in range(1000): f.write(bytes(10**6))", "OSError"),
    "a gigabyte of output": ("for _ in range(10**6): print('x' * 1000)", "OSError"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name):
    """Time is up, or an error within; nothing is left of it, and the machine still runs python."""
    code, message = BOMBS[name]
    marker = f"bomb_{os.getpid()}_{time.time_ns()}"
    start = time.perf_counter()
    result = run_python(f"# {marker}\n{code}", seconds=2)
    assert time.perf_counter() - start < 15
    if message is None:
        assert result.timed_out and result.status != 0
    else:
        assert message in result.stdout + result.stderr
    assert len(result.stdout) <= sandbox.OUTPUT
    if "own processes" in contained():  # the kernel ends them, in its own time
        deadline = time.monotonic() + 5
        while subprocess.run(["pgrep", "-f", marker], capture_output=True).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert run_python("print(1)", seconds=20).stdout == "1\n"


def test_many_files_do_not_fill_the_disk():
    if "read-only" not in contained():
        pytest.skip("without namespaces files are limited one by one: " + contained())
    code = "for n in range(100):\n  f = open(f'{n}', 'wb')\n  for _ in range(50): f.write(bytes(10**6))"
    assert "No space left" in run_python(code, disk_mb=64).stderr


def test_network_processes_and_files(tmp_path):
    """Each is closed, or `contained()` says in capital letters that it is open."""
    assert contained() == sandbox.contained() and len(contained()) < 300
    network = run_python("import socket\nsocket.create_connection(('127.0.0.1', 22), 2)")
    alone = run_python("import socket\nprint(len(socket.if_nameindex()))")
    assert ("no network" in contained()) == (int(alone.stdout) <= 1) and network.status == 1
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run_python(f"import os\nos.kill({victim.pid}, 9)")
        time.sleep(0.2)
        assert victim.poll() is None or "CAN KILL" in contained()
        run_python("import os\nos.kill(os.getppid(), 9)")
    finally:
        victim.kill()
    target = tmp_path / "mine"
    target.write_text("safe")
    run_python(f"open({str(target)!r}, 'w').write('changed')")
    assert target.read_text() == "safe" or "WRITES" in contained()
    secret = run_python("import os\nprint(os.environ)").stdout
    assert "HOME" not in secret and "TOKEN" not in secret
    assert run_python(f"print(open({str(Path(__file__))!r}).read()[:9])").status == 0 or "own user" in contained()
