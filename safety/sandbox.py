"""Runs Python code that a model wrote, in bubblewrap. docs/sandbox.md lists what this protects against, and what not.

    result = run_python("print(2 + 2)", seconds=5)      # Result(stdout="4\n", stderr="", status=0, timed_out=False)

* bubblewrap (`apt-get install bubblewrap`, 0.7 or newer) gives the code its own namespaces: no network, no processes
  and sockets but its own, and a separate user. Of the disk it sees /usr and this Python, read-only; it can write to
  in-memory folders of limited size. It dies with the process that started it.
* The kernel (setrlimit) limits CPU time and memory of each process, the number of processes, and the size of each file,
  including the output. Time is measured from outside, and all processes end with the namespace.

If bubblewrap does not work, nothing runs, unless `allow_uncontained` is set. Then the code has limits, an empty
environment and an empty folder, but reads and writes whatever its user may.
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

OUTPUT = 20_000  # characters kept of stdout, and of stderr
LONGEST_LITERAL = 2**20  # characters of a test's value
PROCESSES = 32  # processes and threads of one program
MEMORY_MB, DISK_MB = 512, 64  # of a process; of a file, and of each folder in memory
START_TIMEOUT = 60.0  # seconds until the sandbox is ready to take a program

allow_uncontained = False  # --allow_uncontained: run code that nothing contains


class SandboxError(RuntimeError):
    """The sandbox did not start: a fault of the machine, before any code ran."""


@dataclass
class Result:
    stdout: str
    stderr: str
    status: int  # 0 after success; negative: the signal that ended it
    timed_out: bool


def run_python(code: str, stdin: str = "", seconds: float = 5.0, max_output: int = OUTPUT) -> Result:
    """Run `code` as a program. Returns its outcome, with the first `max_output` characters of its output. SandboxError
    if it could not be run. Blocks for about `seconds` at most."""
    require_containment()
    job = {"program": code, "stdin": stdin.encode("utf-8", "surrogatepass").decode("latin-1")}
    return run(job, seconds, max_output, why_not_contained() is None)


def run_tests(program: str, tests: list[str], seconds: float = 5.0) -> tuple[list[bool], bool]:
    """(whether each test passes, whether time ran out). A test is a Python statement, such as `assert f(1) == 2`. All
    run in one process after the program, within `seconds` together. SandboxError if it could not be run; ValueError for
    a test that is not Python.

    For `assert CALL == LITERAL` the process computes CALL and this side compares: the expected value never enters it.
    """
    require_containment()
    questions, checks = zip(*map(question, tests), strict=True) if tests else ((), ())
    secret = random.token_hex(8)  # hidden from the program, so that its output cannot pass for an answer
    job = {"program": program, "questions": questions, "secret": secret}
    result = run(job, seconds, DISK_MB * 2**20, why_not_contained() is None)
    answers = {}
    for line in result.stdout.split("\n"):
        with suppress(ValueError, TypeError):  # the program's output
            line_secret, number, value = json.loads(line)
            answers |= {number: value} if line_secret == secret else {}
    return [check(answers.get(number)) for number, check in enumerate(checks)], result.timed_out


def question(test: str) -> tuple[tuple[str, str], Callable]:
    """(what the process is asked: to "eval" or "exec" a text; a function that says whether an answer passes)"""
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
    """Whether a literal that the process sent equals the expected value. An object could claim to equal everything;
    text cannot."""
    try:
        return len(answer) <= LONGEST_LITERAL and ast.literal_eval(answer) == expected
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


# ---- containment ----------------------------------------------------------------------------------------------------


def containment() -> str:
    """One line on what contains code on this machine."""
    if fault := why_not_contained():
        rights = "IT REACHES FILES, SOCKETS AND THE NETWORK WITH THE RIGHTS OF THIS USER"
        return f"nothing that contains it ({fault}): {rights}"
    limits = f"limits on time, on memory of each process, and at most {PROCESSES} processes"
    return f"bubblewrap: no network; own processes, sockets and user; only /usr and this Python, read-only; {limits}"


def check_contained(functions: Iterable[Callable], cfg) -> None:
    """ConfigError if one of the functions has `executes_code = True`, nothing contains such code, and
    --allow_uncontained is not given. Otherwise prints what contains it."""
    global allow_uncontained
    allow_uncontained = cfg.allow_uncontained
    executing = [function for function in functions if getattr(function, "executes_code", False)]
    names = ", ".join(getattr(function, "__name__", str(function)) for function in executing)
    if not names:
        return
    if why_not_contained() and not allow_uncontained:
        raise ConfigError(
            f"{names} would run code that the model writes, and nothing contains it here: {why_not_contained()}. See "
            "docs/sandbox.md, or add --allow_uncontained where nothing can be lost."
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"Code that the model writes ({names}) runs in {containment()}.")


def require_containment() -> None:
    if not allow_uncontained and (fault := why_not_contained()):
        raise SandboxError(f"nothing contains the code here: {fault}. See docs/sandbox.md (--allow_uncontained)")


@functools.cache
def why_not_contained() -> str | None:
    """None if code is contained; otherwise the reason, and what to do. Tries it by running some code."""
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    try:
        result = run({"program": "print(1)", "stdin": ""}, 60, OUTPUT, contain=True)
    except SandboxError as error:
        return f"bubblewrap does not work here: {error}"
    if result.stdout != "1\n":
        return f"bubblewrap cannot run Python here: {result.stderr[-300:]}"
    return None


# ---- a process ------------------------------------------------------------------------------------------------------


def run(job: dict, seconds: float, max_output: int, contain: bool) -> Result:
    """The result of a job for sandbox_inside.py. Time counts from when the sandbox is ready to take the job."""
    user = foreign_user() if contain else None
    job |= dict(user=user, memory_mb=MEMORY_MB, disk_mb=DISK_MB, processes=PROCESSES if contain else None)
    with ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        # Uncontained code runs here; contained code does not see it.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox_", ignore_cleanup_errors=True))
        ready_fd, signal_fd = os.pipe()
        stack.callback(os.close, ready_fd)
        inside = INSIDE if contain else os.path.abspath(sandbox_inside.__file__)
        command = [*(bubblewrap(user) if contain else ()), sys.executable, "-I", inside, str(signal_fd)]
        options = dict(cwd="/" if contain else folder, env=ENVIRONMENT, pass_fds=[signal_fd], start_new_session=True)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, **options)
        stack.callback(end, process)
        os.close(signal_fd)
        started = select.select([ready_fd], [], [], START_TIMEOUT)[0] and os.read(ready_fd, 1)
        timed_out = False
        try:
            process.communicate(json.dumps(job).encode() if started else b"", seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        end(process)
        texts = []
        for file, limit in ((out, max_output), (err, OUTPUT)):
            file.seek(0)
            texts.append(file.read(4 * limit).decode("utf-8", "replace")[:limit])
        status = process.returncode if process.returncode < 128 else 128 - process.returncode  # bwrap: 128 + signal
        if not started:
            raise SandboxError(f"the sandbox did not start (status {status}): {texts[1][-500:].strip()}")
        return Result(*texts, status, timed_out)


def end(process: subprocess.Popen) -> None:
    """Kill the process and everything it started: bubblewrap's process namespace ends with it, and uncontained code is
    one session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def foreign_user() -> int | None:
    """If this is root, whose processes no limit counts: a user id that nobody has, a different one each time. Otherwise
    None."""
    if os.getuid() != 0:
        return None
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        id_count = min(2**31, int(file.readline().split()[2]))  # fewer ids in a container with its own users
    return id_count // 2 + random.randbelow(id_count // 2 - 2) if id_count >= 65536 else None


# ---- bubblewrap -----------------------------------------------------------------------------------------------------

INSIDE = "/sandbox_inside.py"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp"}
ENVIRONMENT |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}  # threads count as processes


def bubblewrap(user: int | None) -> list[str]:
    """The bubblewrap part of the command line. user: the foreign user that root changes to; None: a user namespace
    instead."""
    spaces = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --die-with-parent"
    command = [shutil.which("bwrap"), *spaces.split(), "--hostname", "sandbox", "--cap-drop", "ALL"]
    if user is None:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    else:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # dropped when the user changes
    command += ["--ro-bind", "/usr", "/usr"]
    for place in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(place):
            command += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            command += ["--ro-bind", place, place]
    command += ["--dir", "/etc"]  # otherwise a foreign user could not read it
    for file in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", file, file]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for place in ("/tmp", "/dev/shm"):
        command += ["--perms", "1777", "--size", str(DISK_MB * 2**20), "--tmpfs", place]
    for place in python_places():  # after /tmp: they may be below it
        for above in reversed(Path(place).parents[:-1]):
            command += ["--dir", str(above)]  # readable by the user, like the folder itself
        command += ["--ro-bind", place, place]
    command += ["--ro-bind", os.path.abspath(sandbox_inside.__file__), INSIDE]
    for place in ("/dev", "/proc", "/"):  # otherwise a user that is root outside could write to /proc/sys
        command += ["--remount-ro", place]
    return [*command, "--chdir", "/tmp"]


def python_places() -> list[str]:
    """The folders of this Python and its packages, outer ones first, without those inside another; then the links,
    elsewhere, that lead from the executable's name to its file."""
    program = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    places = {sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), program}
    places |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}  # by .pth
    link = sys.executable
    links = [link]
    while os.path.islink(link):
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        links.append(link)
    outer = ["/usr"]
    for place in [*sorted(filter(os.path.isdir, places)), *links]:
        if not any(place == other or place.startswith(other + "/") for other in outer):
            outer.append(place)
    return outer[1:]
