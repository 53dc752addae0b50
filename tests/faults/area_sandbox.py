"""Code that a model wrote, in the sandbox: what it must not reach, use up or leave behind."""

import concurrent.futures
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from case import BASE, ROOT, SCRIPTED, SMALL, Seen, alive, either, goes_on, named, output_of, shorten, wait_until

BEGUN = "the code has begun"
RUN = "from safety.sandbox import run_python\n"
CODING = "--dataset_id examples/coding.py:rows --reward_funcs code_tests --max_prompt_length 200 "
ANSWER = "```python\ndef f(x):\n    return x\n```"


def _run(code: str, **limits):
    from safety.sandbox import run_python

    return run_python(code if "\0" in code else f"print({BEGUN!r}, flush=True)\n{code}", **limits)


def _contained(result, effect: bool, what: str) -> Seen:
    """`effect`: whether the code reached what it must not."""
    if effect:
        return Seen("leaked", what)
    if BEGUN not in result.stdout:  # else a sandbox that runs nothing would contain everything
        return Seen("ended", shorten(f"the code never ran: {result.stderr[-200:]}"))
    return Seen("survived", shorten(f"status {result.status}: {(result.stdout + result.stderr)[-300:]}", 120))


def _ends(result, marks: str = "") -> Seen:
    """It had to fail or be cut in its time, and the sandbox has to work after it."""
    if "2\n" not in _run("print(1 + 1)", seconds=20).stdout:
        return Seen("ended", "the sandbox runs nothing any more")
    if marks and marks not in result.stdout + result.stderr:
        return Seen("silent", shorten(f"no {marks!r} in {result.stdout[-80:]!r} {result.stderr[-80:]!r}"))
    if not marks and not result.timed_out and result.status == 0:
        return Seen("silent", "status 0, not timed out")
    return Seen("survived", f"status {result.status}, timed out: {result.timed_out}")


# ---- what it reaches -------------------------------------------------------------------------------------------------


def device_node(at):
    """code writes to a block device under /dev (a loop device on a small file) -> survived: refused"""
    disk = at.file("disk", bytes(1 << 20))
    node = output_of("losetup", "--find", "--show", str(disk)).strip()
    if not node:
        return Seen("skipped", "no loop device to be had")
    at.stack.callback(output_of, "losetup", "--detach", node)
    code = f"import os\nd = os.open({node!r}, os.O_WRONLY)\nos.write(d, b'SCRIBBLE' * 512)\nos.fsync(d)"
    result = _run(code)
    os.sync()
    return _contained(result, b"SCRIBBLE" in disk.read_bytes(), "wrote to the device")


def device_node_made(at):
    """code makes a device node of its own (mknod of a loop device) and writes to it -> survived: refused"""
    disk = at.file("disk", bytes(1 << 20))
    node = output_of("losetup", "--find", "--show", str(disk)).strip()
    if not node:
        return Seen("skipped", "no loop device to be had")
    at.stack.callback(output_of, "losetup", "--detach", node)
    number = os.stat(node).st_rdev
    result = _run(
        f"import os, stat\nos.mknod('n', 0o600 | stat.S_IFBLK, {number})\n"
        "d = os.open('n', os.O_WRONLY)\nos.write(d, b'SCRIBBLE' * 512)\nos.fsync(d)"
    )
    os.sync()
    return _contained(result, b"SCRIBBLE" in disk.read_bytes(), "wrote to the device")


def _listening(at, address, family=socket.AF_UNIX) -> socket.socket:
    listener = at.stack.enter_context(socket.socket(family))
    listener.bind(address)
    listener.listen()
    listener.settimeout(1)
    return listener


def _accepted(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
        return True
    except TimeoutError:
        return False


def unix_socket(at):
    """code connects to a UNIX socket in /tmp that anyone may use -> survived: there is none for it"""
    path = f"/tmp/fault_{secrets.token_hex(4)}.sock"
    at.stack.callback(os.unlink, path)
    listener = _listening(at, path)
    os.chmod(path, 0o777)
    result = _run(f"import socket\nsocket.socket(socket.AF_UNIX).connect({path!r})")
    return _contained(result, _accepted(listener), "connected to a socket in /tmp")


def abstract_socket(at):
    """code connects to an abstract UNIX socket -> survived: there is none for it"""
    name = f"\0fault_{secrets.token_hex(4)}"
    listener = _listening(at, name)
    result = _run(f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})")
    return _contained(result, _accepted(listener), "connected to an abstract socket")


def network_loopback(at):
    """code connects to a server on this machine's loopback -> survived: no network"""
    listener = _listening(at, ("127.0.0.1", 0), socket.AF_INET)
    result = _run(f"import socket\nsocket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 2)")
    return _contained(result, _accepted(listener), "connected over loopback")


def network_udp(at):
    """code sends a datagram to another address of this machine -> survived: no network"""
    receiver = at.stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    receiver.bind(("0.0.0.0", 0))
    receiver.settimeout(1)
    address = (socket.gethostbyname(socket.gethostname()), receiver.getsockname()[1])
    result = _run(f"import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {address!r})")
    try:
        reached = bool(receiver.recv(10))
    except TimeoutError:
        reached = False
    return _contained(result, reached, "a datagram arrived")


def environments_of_others(at):
    """code reads /proc/*/environ for the trainer's keys -> survived: sees no other process"""
    code = "import glob\nfor p in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):\n"
    code += "  try: t = open(p, 'rb').read()\n  except OSError: continue\n  if b'can' + b'ary-' in t: print('FOUND', p)"
    result = _run(code)
    return _contained(result, "FOUND" in result.stdout, "read keys in /proc")


def own_environment(at):
    """code prints its own environment -> survived: no keys in it"""
    result = _run("import os\nprint(os.environ)")
    return _contained(result, "canary" in result.stdout, "keys in its environment")


def trainers_files(at):
    """code reads a private file of the trainer, and one in its temporary folder -> survived: refused"""
    private, open_one = at.file("private", "canary-file"), at.temp / "open"
    private.chmod(0o600)
    open_one.write_text("canary-file", encoding="utf-8")
    paths = [str(private), str(open_one)]
    code = f"for p in {paths!r}:\n  try: print(open(p).read())\n  except OSError as e: print(e)"
    result = _run(code)
    open_one.unlink()
    return _contained(result, "canary-file" in result.stdout, "read the trainer's files")


def other_sandbox(at):
    """code looks into the folder of another program that runs at the same time -> survived: sees none"""
    first = "open('mine', 'w').write('SECRET OF THE FIRST')\nimport time\ntime.sleep(2.5)"
    second = (
        "import glob, os, time\ntime.sleep(1)\nfor base in ('/tmp', os.environ.get('TMPDIR', '/tmp'), '..', '../..'):"
    )
    second += "\n  for p in glob.glob(base + '/**/mine', recursive=True):\n    print(open(p).read())"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(_run, first), pool.submit(_run, second)
        one.result()
        return _contained(two.result(), "SECRET OF" in two.result().stdout, "read another program's file")


def writes_outside(at):
    """code writes to files and folders outside its own, all of which anyone may write -> survived: nothing changed"""
    file, folder = at.file("open", "safe"), at.given / "folder"
    folder.mkdir()
    file.chmod(0o666)
    folder.chmod(0o777)
    shm = Path(f"/dev/shm/fault_{secrets.token_hex(4)}")
    repository = ROOT / f"fault_{secrets.token_hex(4)}"
    paths = [str(file), str(folder / "new"), str(shm), str(repository)]
    code = f"for p in {paths!r}:\n  try: open(p, 'w').write('changed')\n  except OSError as e: print(e)"
    result = _run(code)
    changed = [str(p) for p in (folder / "new", shm, repository) if p.exists()]
    changed += [str(file)] if file.read_text(encoding="utf-8") != "safe" else []
    shm.unlink(missing_ok=True)
    repository.unlink(missing_ok=True)
    return _contained(result, bool(changed), f"wrote {', '.join(changed)}")


def mounts_again(at):
    """code mounts the root file system writable again, then writes -> survived: refused"""
    file = at.file("open", "safe")
    file.chmod(0o666)
    code = "import ctypes\nlibc = ctypes.CDLL(None)\n"
    code += "for f in (32 | 4096, 32):\n  print(libc.mount(None, b'/', None, f, None))\n"
    result = _run(code + f"open({str(file)!r}, 'w').write('changed')")
    return _contained(result, file.read_text(encoding="utf-8") != "safe", "wrote after a remount")


def signals_to_others(at):
    """code kills a process of the same machine and its own parents -> survived: they live"""
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    at.stack.callback(victim.wait)
    at.stack.callback(victim.kill)
    code = f"import os\nfor p in ({victim.pid}, {os.getpid()}, os.getppid()):\n"
    result = _run(code + "  try: os.kill(p, 9)\n  except OSError as e: print(e)")
    time.sleep(0.2)
    return _contained(result, victim.poll() is not None, "killed a process outside")


def shared_memory_left(at):
    """code makes a System V shared memory segment, which outlives it -> survived: gone with its namespace"""
    key = 0x5EED0000 + secrets.randbelow(65536)
    code = f"import ctypes\nprint(ctypes.CDLL(None).shmget({key}, 4096, 0o1666))"
    result = _run(code)
    found = [line.split() for line in Path("/proc/sysvipc/shm").read_text(encoding="utf-8").splitlines()[1:]]
    mine = [int(line[1]) for line in found if int(line[0]) & 0xFFFFFFFF == key]
    for number in mine:
        ctypes.CDLL(None).shmctl(number, 0, None)
    return _contained(result, bool(mine), "a shared memory segment is left")


def output_is_a_link(at):
    """code puts a symbolic link to a private file where its output is kept -> survived: nothing of it is shown"""
    private = at.file("private", "canary-file")
    private.chmod(0o600)
    code = "import os, glob\nfor p in glob.glob('../*') + glob.glob('/proc/self/fd/*'):\n  try:\n"
    code += (
        f"    p = os.path.realpath(p); os.unlink(p); os.symlink({str(private)!r}, p)\n  except OSError as e: print(e)"
    )
    result = _run(code)
    return _contained(result, "canary-file" in result.stdout + result.stderr, "a private file came as output")


# ---- what it uses up -------------------------------------------------------------------------------------------------


def fork_bomb(at):
    """code forks 400 times, the children stay -> survived: counted in all, at most 128 at a time"""
    code = "import os, time\nn = 0\nfor _ in range(400):\n  try:\n    if os.fork() == 0: time.sleep(3); os._exit(0)\n"
    result = _run(code + "  except OSError: break\n  n += 1\nprint('FORKED', n)", seconds=3)
    number = int(result.stdout.rpartition("FORKED")[2] or 0)
    return _contained(result, number > 128, f"{number} processes at a time")


def fork_bomb_endless(at):
    """code forks without end, children too -> survived: ended in its time, nothing is left"""
    code = "import os, sys\nprint('begun', flush=True)\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    return _ends(_run(code, seconds=2))


def memory_in_a_memfd(at):
    """code fills 1.2 GB in memfds of 50 MB under a limit of 512 MB -> survived: refused"""
    code = "import os\nn = 0\ntry:\n  for _ in range(24): n += os.write(os.memfd_create('x'), bytes(50 << 20))\n"
    code += "except (OSError, MemoryError) as e: print(e)\nprint('WROTE', n >> 20, flush=True)"
    result = _run(code, memory_mb=512, seconds=10)
    written = int(result.stdout.rpartition("WROTE")[2] or 0)
    return _contained(result, written > 600, f"{written} MB under a limit of 512 MB")


def memory_of_many(at):
    """code holds 6 x 200 MB in six processes under a limit of 512 MB -> survived: refused"""
    code = "import os, time\npipe = os.pipe()\nfor _ in range(6):\n  if os.fork() == 0:\n    try:\n"
    code += (
        "      x = bytearray(200 << 20); x[::4096] = b'x' * len(x[::4096]); os.write(pipe[1], b'1'); time.sleep(2)\n"
    )
    code += (
        "    finally: os._exit(0)\nos.close(pipe[1])\ntime.sleep(1.5)\nprint('HELD', 200 * len(os.read(pipe[0], 99)))"
    )
    result = _run(code, memory_mb=512, seconds=8)
    held = int(result.stdout.partition("HELD")[2] or 0)  # nothing where it was ended before
    return _contained(result, held > 600, f"{held} MB under a limit of 512 MB")


def memory_at_once(at):
    """code asks for 4 GB at once -> survived: MemoryError"""
    return _ends(_run("x = bytearray(4 * 10**9)"), "MemoryError")


def disk(at):
    """code writes 100 files of 50 MB under a limit of 64 MB -> survived: refused"""
    code = "n = 0\nfor i in range(10):\n  f = open(f'f{i}', 'wb')\n  try:\n"
    code += "    for _ in range(50): n += f.write(bytes(10**6))\n"
    code += "  except OSError: pass\nprint('WROTE', n // 10**6)"
    result = _run(code, disk_mb=64, seconds=10)
    written = int(result.stdout.rpartition("WROTE")[2] or 0)
    return _contained(result, written > 80, f"{written} MB of files under a limit of 64 MB")


def many_files(at):
    """code makes 200,000 empty files -> survived: limited, and cleaned up in its time"""
    start = time.monotonic()
    code = "try:\n  for i in range(200000): open(str(i), 'w').close()\nexcept OSError as e: print(e)"
    result = _run(code, seconds=4)
    seconds = time.monotonic() - start
    return Seen("hung" if seconds > 20 else "survived", f"{seconds:.1f} s, status {result.status}")


def output_without_end(at):
    """code prints 1 GB -> survived: cut, within its memory"""
    before = psutil.Process().memory_info().rss
    result = _run("while True: print('x' * 10**6)", seconds=3)
    grown = (psutil.Process().memory_info().rss - before) >> 20
    return _contained(
        result, grown > 300 or len(result.stdout) > 10**6, f"{len(result.stdout)} characters, +{grown} MB"
    )


def open_files(at):
    """code opens files, sockets and pipes until it is refused -> survived: an error within"""
    return _ends(_run("import os\nkeep = []\nwhile True: keep.append(os.pipe())", seconds=5), "Too many open files")


# ---- how it ends -----------------------------------------------------------------------------------------------------


def endless_loop(at):
    """an endless loop -> survived: ended in its time"""
    return _ends(_run("while True: pass", seconds=1))


def signals_ignored(at):
    """an endless loop that ignores all signals it can -> survived: ended in its time"""
    code = "from signal import *\nfor s in range(1, 65):\n  try: signal(s, SIG_IGN)\n"
    code += "  except (OSError, ValueError): pass\n"
    return _ends(_run(code + "while True: pass", seconds=1))


def stops_itself(at):
    """code that waits for a child that has stopped itself (SIGSTOP) -> survived: ended in its time"""
    code = "import os, signal\nif os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)\nos.wait()"
    return _ends(_run(code, seconds=1))


def deep_recursion(at):
    """recursion without end, in C and in python -> survived: an error within"""
    code = "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()"
    return _ends(_run(code, seconds=5))


def segfault(at):
    """a segmentation fault -> survived: its signal is the status"""
    return _ends(_run("import ctypes\nctypes.string_at(0)"))


def binary_output(at):
    """bytes that are no text, and escape codes, on both outputs -> survived: text comes back"""
    result = _run("import os\nos.write(1, bytes(range(256)))\nos.write(2, b'\\x1b[31m\\xff\\x00')")
    return _contained(result, not isinstance(result.stdout, str), "no text")


def code_that_is_no_text(at):
    """programs with lone surrogates, NUL characters and without end (5 MB) -> survived: an error within"""
    said = []
    for code in ("print('\ud800')", "print(1)\0", "x = 1\n" * 10**6, ""):
        try:
            said.append(_run(code, seconds=5).status)
        except Exception as error:  # that is what must not happen
            return Seen("ended", f"the caller got {type(error).__name__}: {error}")
    return Seen("survived", f"statuses {said}")


def children_that_stay(at):
    """code leaves a child in a session of its own -> survived: ended with it"""
    code = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1000)\nprint('left')"
    result = _run(code, seconds=2)
    return Seen("survived", shorten(result.stdout))


def _busy(run) -> list[psutil.Process]:
    """The processes below the run, once one of them has computed for a while: that is the code, in its loop."""

    def computed(process: psutil.Process) -> float:
        try:
            return process.cpu_times().user
        except psutil.Error:
            return 0.0

    over = wait_until(lambda: any(computed(p) > 0.4 for p in run.children()) or run.members[0].poll() is not None, 40)
    return run.children() if over else []


def _gone(family: list[psutil.Process], whose: str) -> Seen:
    wait_until(lambda: not any(map(alive, family)), 4)
    left = [p for p in family if alive(p)]
    return Seen("leaked", f"{len(left)} processes live on") if left else Seen("survived", f"gone with {whose}")


def parent_killed(at):
    """kill -9 of the process that runs the sandbox -> survived: the code ends with it"""
    run = at.command(sys.executable, "-c", f"{RUN}run_python('while True: pass', seconds=300)")
    if not (family := _busy(run)):
        return Seen("broken", f"the code did not start: {run.text[-200:]}")
    run.members[0].kill()
    run.members[0].wait()
    return _gone(family, "its parent")


def _trainer_ended(at, name: signal.Signals) -> Seen:
    turns = at.file("turns.json", json.dumps(["```python\nwhile True: pass\n```"]))
    flags = f"{SCRIPTED}{CODING}--reward_timeout 60 {at.known('--allow_uncontained')}"
    run = at.start(flags, script="tests/faults/scripted.py", first=(str(turns),))
    if not (family := _busy(run)):
        return Seen("broken", f"the program did not start: {shorten(run.text[-300:])}")
    os.kill(run.members[0].pid, name)
    if at.ended(run, 10).status is None:
        return Seen("hung", f"still running 10 s after {name.name}")
    return _gone(family, "the trainer")


def trainer_terminated(at):
    """SIGTERM to a trainer while a completion's program runs -> survived: the program ends with it"""
    return _trainer_ended(at, signal.SIGTERM)


def trainer_interrupted(at):
    """Ctrl-C to a trainer while a completion's program runs -> survived: the program ends with it"""
    return _trainer_ended(at, signal.SIGINT)


def trainer_killed(at):
    """kill -9 of a trainer while a completion's program runs -> survived: the program ends with it"""
    return _trainer_ended(at, signal.SIGKILL)


# ---- a machine that contains nothing ---------------------------------------------------------------------------------

# Becomes a user without capabilities in a user namespace in which no further one can be made: no way to contain.
POOR = """
import os, subprocess, sys
os.setgroups([])
pipe = os.pipe()
child = os.fork()
if child == 0:
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x10000000) == 0
    os.write(pipe[1], b"x")
    while open("/proc/self/uid_map").read() == "":
        pass
    open("/proc/sys/user/max_user_namespaces", "w").write("0")
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
os.read(pipe[0], 1)
for name in ("uid_map", "gid_map"):
    open(f"/proc/{child}/{name}", "w").write("0 0 65536")
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status if status >= 0 else 1)
"""


def uncontained(at, limit=90):
    """code_tests where nothing can contain it -> named: refused, --allow_uncontained is told"""
    return named(_uncontained(at, ANSWER, ""), "contain|sandbox|bubblewrap", "allow_uncontained")


def uncontained_by_choice(at, limit=90):
    """the same with --allow_uncontained; the code makes its output a FIFO and a link -> survived"""
    private = at.file("private", "canary-file")
    turn = "```python\nimport os, glob\nfor n, p in enumerate(sorted(glob.glob('../*'))):\n"
    turn += f"    try:\n        os.unlink(p)\n        (os.symlink({str(private)!r}, p) if n % 2 else os.mkfifo(p))\n"
    turn += "    except OSError: pass\n```"
    end = _uncontained(at, turn, at.known("--allow_uncontained"))
    return either(end, "contain", "allow_uncontained")


def _uncontained(at, turn: str, flags: str):
    poor, turns = at.file("poor.py", POOR), at.file("turns.json", json.dumps([turn]))
    flags = f"{SMALL} {BASE}--output_dir {at.runs} --run_name run {SCRIPTED}{CODING}{flags}"
    script = ["tests/faults/scripted.py", str(turns), *flags.split()]
    return at.ended(at.command(sys.executable, poor, *script))


def code_says_what_holds(at):
    """a run that executes a model's code -> survived: says when it starts how the code is contained"""
    flags = CODING + at.known("--allow_uncontained")
    end = at.scripted([ANSWER], flags)
    told = any(word in end.text.lower() for word in ("contain", "bubblewrap", "no network", "own processes"))
    return goes_on(end, None if told else "not a word about the sandbox")
