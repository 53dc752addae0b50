"""Runs python code that a model wrote, in bubblewrap. docs/sandbox.md: what that protects against, and what not.

    result = run_python("print(2 + 2)", seconds=5)      # Result(stdout="4\n", stderr="", status=0, timed_out=False)

* bubblewrap (`apt-get install bubblewrap`, 0.7 or newer) gives the code namespaces of its own: no network, no process
  and no socket but its own, a user of its own; of the disk it sees /usr and this python, read-only, and it writes to
  folders in memory of a limited size. It dies with the process that started it.
* The kernel limits (setrlimit) CPU time and memory of each process, how many there are, and the size of each file, its
  output among them. Seconds are counted from outside, and all processes end with the namespace.

Where bubblewrap does not work nothing runs, unless `allow_uncontained` is set: then the code has limits, an empty
environment and an empty folder, and reads and writes all that its user may.
"""

import ast
import functools
import json
import os
import secrets as random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from config import ConfigError
from safety import sandbox_inside

OUTPUT = 20_000  # characters of each of stdout and stderr that are kept
LONGEST_LITERAL = 2**20  # characters of a test's value
PROCESSES = 32  # and threads, of one program
START_TIMEOUT = 60.0  # seconds until the sandbox is ready to take a program

allow_uncontained = False  # --allow_uncontained: run code where nothing contains it


class SandboxError(RuntimeError):
    """The sandbox did not start. A fault of the machine: no code ran yet."""


@dataclass
class Result:
    stdout: str
    stderr: str
    status: int  # 0 if it ended well; negative: the signal that ended it
    timed_out: bool


def run_python(
    code: str, stdin: str = "", seconds: float = 5.0, memory_mb: int = 512, disk_mb: int = 64, kept: int = OUTPUT
) -> Result:
    """Run `code` as a program. Returns whatever it does, of its output the first `kept` characters; SandboxError if it
    could not be run; blocks for at most about `seconds`."""
    require_containment()
    job = {"program": code, "stdin": stdin.encode("utf-8", "surrogatepass").decode("latin-1")}
    return run(job, seconds, memory_mb, disk_mb, kept, why_not_contained() is None)


def run_tests(
    program: str, tests: list[str], seconds: float = 5.0, memory_mb: int = 512, disk_mb: int = 64
) -> tuple[list[bool], bool]:
    """(whether each test passes, whether time was up). A test is a statement of python, such as `assert f(1) == 2`.
    All run in one process after the program, in `seconds` together. SandboxError if it could not be run; ValueError
    for a test that is not python.

    Of `assert CALL == LITERAL` the process computes CALL and this side compares: what is expected never enters it.
    """
    require_containment()
    asked, checks = zip(*map(question, tests), strict=True) if tests else ((), ())
    secret = random.token_hex(8)  # that the program does not see: what it prints is no answer
    job = {"program": program, "questions": asked, "secret": secret}
    result = run(job, seconds, memory_mb, disk_mb, disk_mb * 2**20, why_not_contained() is None)
    answers = {}
    for line in result.stdout.split("\n"):
        with suppress(ValueError, TypeError):  # not ours
            known, number, value = json.loads(line)
            answers |= {number: value} if known == secret else {}
    return [check(answers.get(number)) for number, check in enumerate(checks)], result.timed_out


def question(test: str) -> tuple[tuple[str, str], Callable]:
    """(what the process is asked: to "eval" or to "exec" something; whether an answer passes)"""
    try:
        statements = ast.parse(test).body
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(f"the test {test!r:.500} is not python: {error}") from None
    match statements:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for computed, literal in ((left, right), (right, left)):
                with suppress(ValueError, TypeError):  # not a literal
                    return ("eval", ast.unparse(computed)), functools.partial(is_literal, ast.literal_eval(literal))
    return ("exec", test), lambda answer: answer is True


def is_literal(expected, answer) -> bool:
    """Whether the literal that came from inside is the expected one. An object may equal everything; text cannot."""
    try:
        return len(answer) <= LONGEST_LITERAL and ast.literal_eval(answer) == expected
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


# ---- what holds -----------------------------------------------------------------------------------------------------


def contained() -> str:
    """What holds on this machine, in a line."""
    if fault := why_not_contained():
        rights = "IT REACHES FILES, SOCKETS AND THE NETWORK WITH THE RIGHTS OF THIS USER"
        return f"nothing that contains it ({fault}): {rights}"
    return (
        "bubblewrap: no network, processes, sockets and a user of its own, of the disk only /usr and this python, "
        f"read-only; time, memory of each process, and at most {PROCESSES} processes are limited"
    )


def check_contained(functions: Iterable[Callable], cfg) -> None:
    """ConfigError where one of the functions has `executes_code = True`, nothing contains such code, and
    --allow_uncontained is not given. Says in a line what holds."""
    global allow_uncontained
    allow_uncontained = cfg.allow_uncontained
    names = [
        getattr(function, "__name__", str(function)) for function in functions if getattr(function, "executes_code", 0)
    ]
    if not names:
        return
    if why_not_contained() and not allow_uncontained:
        raise ConfigError(
            f"{', '.join(names)} would run code that the model writes, and nothing contains it here: "
            f"{why_not_contained()}. See docs/sandbox.md, or add --allow_uncontained where nothing can be lost."
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"Code that the model writes ({', '.join(names)}) runs in {contained()}.")


def require_containment() -> None:
    if not allow_uncontained and (fault := why_not_contained()):
        raise SandboxError(f"nothing contains the code here: {fault}. See docs/sandbox.md (--allow_uncontained)")


@functools.cache
def why_not_contained() -> str | None:
    """None where code is contained; otherwise why not, and what to do. Found out by running some."""
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    try:
        found = run({"program": "print(1)", "stdin": ""}, 60, 512, 8, OUTPUT, contain=True)
    except SandboxError as error:
        return f"bubblewrap does not work here: {error}"
    if found.stdout != "1\n":
        return f"bubblewrap runs no python here: {found.stderr[-300:]}"
    return None


# ---- a process ------------------------------------------------------------------------------------------------------


def run(job: dict, seconds: float, memory_mb: int, disk_mb: int, kept: int, contain: bool) -> Result:
    """Of a job for sandbox_inside.py. Its seconds are counted from when it is ready to take it."""
    user = foreign_user() if contain else None
    job |= dict(user=user, memory_mb=memory_mb, disk_mb=disk_mb, processes=PROCESSES if contain else None)
    with ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        # Where uncontained code runs; contained code sees none of it.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox_", ignore_cleanup_errors=True))
        ready, said = os.pipe()
        stack.callback(os.close, ready)
        inside = INSIDE if contain else os.path.abspath(sandbox_inside.__file__)
        command = [*(bubblewrap(user, disk_mb) if contain else ()), sys.executable, "-I", inside, str(said)]
        how = dict(cwd="/" if contain else folder, env=ENVIRONMENT, pass_fds=[said], start_new_session=True)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, **how)
        stack.callback(end, process)
        os.close(said)
        started = select.select([ready], [], [], START_TIMEOUT)[0] and os.read(ready, 1)
        timed_out = False
        try:
            process.communicate(json.dumps(job).encode() if started else b"", seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        end(process)
        texts = []
        for file, most in ((out, kept), (err, OUTPUT)):
            file.seek(0)
            texts.append(file.read(4 * most).decode("utf-8", "replace")[:most])
        status = process.returncode if process.returncode < 128 else 128 - process.returncode  # bwrap: 128 + signal
        if not started:
            raise SandboxError(f"the sandbox did not start (status {status}): {texts[1][-500:].strip()}")
        return Result(*texts, status, timed_out)


def end(process: subprocess.Popen) -> None:
    """With all that it started: bubblewrap's process namespace ends with it, and uncontained code is a session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def foreign_user() -> int | None:
    """A user id that nobody has, another one each time, if this is root, whose processes no limit counts."""
    if os.getuid() != 0:
        return None
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        known = min(2**31, int(file.readline().split()[2]))  # less in a container with users of its own
    return known // 2 + random.randbelow(known // 2 - 2) if known >= 65536 else None


# ---- bubblewrap -----------------------------------------------------------------------------------------------------

INSIDE = "/sandbox_inside.py"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp"}
ENVIRONMENT |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}  # threads count as processes


def bubblewrap(user: int | None, disk_mb: int) -> list[str]:
    """The command before the command.  user: root's way to a foreign user; None: by a user namespace"""
    spaces = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --die-with-parent"
    command = [shutil.which("bwrap"), *spaces.split(), "--hostname", "sandbox", "--cap-drop", "ALL"]
    if user is None:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    else:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # which end as the user changes
    command += ["--ro-bind", "/usr", "/usr"]
    for place in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(place):
            command += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            command += ["--ro-bind", place, place]
    command += ["--dir", "/etc"]  # or it could not be read by a foreign user
    for file in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", file, file]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for place, megabytes in (("/tmp", disk_mb), ("/dev/shm", disk_mb)):
        command += ["--perms", "1777", "--size", str(megabytes * 2**20), "--tmpfs", place]
    for place in python_places():  # after /tmp: they may be below it
        for above in reversed(Path(place).parents[:-1]):
            command += ["--dir", str(above)]  # as open to its user as the folder itself
        command += ["--ro-bind", place, place]
    command += ["--ro-bind", os.path.abspath(sandbox_inside.__file__), INSIDE]
    for place in ("/dev", "/proc", "/"):  # without it a user that is root outside could write to /proc/sys
        command += ["--remount-ro", place]
    return [*command, "--chdir", "/tmp"]


def python_places() -> list[str]:
    """Where this python and its packages are, outer folders first, without what is below another one; then the links
    on the way from its name to its program that are elsewhere."""
    program = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    places = {sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), program}
    places |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}  # by .pth
    link = sys.executable
    links = [link]
    while os.path.islink(link):
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        links.append(link)
    kept = ["/usr"]
    for place in [*sorted(filter(os.path.isdir, places)), *links]:
        if not any(place == other or place.startswith(other + "/") for other in kept):
            kept.append(place)
    return kept[1:]
