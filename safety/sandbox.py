"""Runs python code that a model wrote, in bubblewrap. docs/sandbox.md: what that protects against, and what not.

    result = run_python("print(2 + 2)", seconds=5)      # Result(stdout="4\n", stderr="", status=0, timed_out=False)

* bubblewrap (`apt-get install bubblewrap`, 0.7 or newer) gives the code namespaces of its own: no network, no process
  and no socket but its own, a user of its own; of the disk it sees /usr and this python, read-only, and it writes to
  folders in memory of a limited size. It dies with the process that started it.
* A filter of system calls closes what cannot be counted (memory in memfds and shared segments) or reaches further than
  a namespace (new namespaces, sockets to the host of a virtual machine, tracing).
* Time, memory and processes are counted over all that the code starts, from outside, and all of it is ended above a
  limit. Its output comes through pipes and is read up to a limit. Nothing that it writes is opened as a file.

Where bubblewrap does not work nothing runs, unless `allow_uncontained` is set: then the code has limits, an empty
environment and an empty folder, and reads and writes all that its user may (for root: a user of its own, if that one
may run this python).
"""

import ast
import functools
import os
import platform
import random
import re
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from config import ConfigError
from safety import sandbox_inside
from safety.sandbox_inside import READY, answer_line, canonical, frame

OUTPUT = 20_000  # characters of each of stdout and stderr that are kept
OUTPUT_LIMIT = 2**20  # bytes of each; a program that writes more is ended
PROCESSES = 32  # and threads, of one program
START_TIMEOUT = 60.0  # seconds until the sandbox is ready to take a program
COUNT_EVERY = 0.05  # seconds between two counts of memory and processes

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
    with Process(code, False, seconds, memory_mb, disk_mb) as process:
        process.send(stdin.encode("utf-8", "surrogatepass"), last=True)
        process.talk(seconds + 1)  # beyond its CPU seconds: starting takes some, too
        stdout, stderr = (bytes(process.read[name][: 4 * kept]).decode("utf-8", "replace") for name in ("out", "err"))
        status = process.status()
        stderr = stderr[:OUTPUT] + (f"\nended by the sandbox: {process.fault}\n" if process.fault else "")
        return Result(stdout[:kept], stderr, status, process.timed_out or status == -signal.SIGXCPU)


def run_tests(
    program: str, tests: list[str], seconds: float = 5.0, memory_mb: int = 512, disk_mb: int = 64
) -> tuple[list[bool], bool]:
    """(whether each test passes, whether time was up). A test is a statement of python, such as `assert f(1) == 2`.
    All run in one process after the program, in `seconds` together. SandboxError if it could not be run; ValueError
    for a test that is not python.

    Of `assert CALL == LITERAL` the process computes CALL and this side compares: what is expected never enters it.
    """
    require_containment()
    questions = [question(test) for test in tests]
    with Process(program, True, seconds, memory_mb, disk_mb) as process:
        deadline = time.monotonic() + seconds + 1
        passed = [False] * len(tests)
        if process.line(deadline) == answer_line("", "passed"):
            for index, (asked, expected) in enumerate(questions):
                number = secrets.token_hex(8)
                process.send(frame(asked | {"number": number}))
                passed[index] = process.line(deadline) == answer_line(number, expected)
        return passed, process.timed_out or process.ended and process.status() == -signal.SIGXCPU


def question(test: str) -> tuple[dict, str]:
    """(what the process is asked, the answer if the test passes)"""
    try:
        statements = ast.parse(test).body
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(f"the test {test!r:.500} is not python: {error}") from None
    match statements:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for computed, literal in ((left, right), (right, left)):
                with suppress(ValueError, TypeError):  # not a literal
                    return {"value": ast.unparse(computed)}, canonical(ast.literal_eval(literal))
    return {"test": test, "name": "test"}, "passed"


# ---- what holds -----------------------------------------------------------------------------------------------------


def contained() -> str:
    """What holds on this machine, in a line."""
    if fault := why_not_contained():
        user = "WITH THE RIGHTS OF THIS USER" if foreign_user(sys.executable) is None else "AS A USER OF ITS OWN"
        return f"nothing that contains it ({fault}): IT REACHES FILES, SOCKETS AND THE NETWORK {user}"
    return (
        "bubblewrap: no network, processes, sockets and a user of its own, of the disk only /usr and this python, "
        f"read-only; memory, time and at most {PROCESSES} processes are counted together"
    )


def check_contained(functions: Iterable[Callable], cfg) -> None:
    """ConfigError where one of the functions has `executes_code = True`, nothing contains such code, and
    --allow_uncontained is not given. Says in a line what holds."""
    global allow_uncontained
    allow_uncontained = cfg.allow_uncontained
    names = [getattr(function, "__name__", str(function)) for function in functions if executes_code(function)]
    if not names:
        return
    if why_not_contained() and not allow_uncontained:
        raise ConfigError(
            f"{', '.join(names)} would run code that the model writes, and nothing contains it here: "
            f"{why_not_contained()}. See docs/sandbox.md, or add --allow_uncontained where nothing can be lost."
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"Code that the model writes ({', '.join(names)}) runs in {contained()}.")


def executes_code(function: Callable) -> bool:
    return bool(getattr(function, "executes_code", False))


def require_containment() -> None:
    if not allow_uncontained and (fault := why_not_contained()):
        raise SandboxError(f"nothing contains the code here: {fault}. See docs/sandbox.md (--allow_uncontained)")


PROBE = """
import os
networks = [line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]
try: segment = os.memfd_create('probe')
except OSError: segment = None
print(os.getpid() < 10, networks in ([], ['lo']), not os.access('/', os.W_OK), segment is None, os.getuid())
"""


@functools.cache
def why_not_contained() -> str | None:
    """None where code is contained; otherwise why not, and what to do. Found out by running some."""
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    if platform.machine() not in CALLS:
        return f"there is no filter of system calls for {platform.machine()}"
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return "this kernel does not list the children of a process (CONFIG_PROC_CHILDREN)"
    try:
        with Process(PROBE, False, 60, 512, 8, contain=True) as process:
            process.talk(60)  # on a busy machine; in vain it would say for good that nothing contains
            found, errors = process.read["out"].decode(), process.read["err"].decode()
    except SandboxError as error:
        return f"bubblewrap does not work here: {error}"
    if found.split()[:4] != ["True"] * 4 or int(found.split()[4]) == 0:
        return f"bubblewrap does not hold what it should: {found.strip()!r} {errors[-300:]}"
    return None


# ---- a process and its limits ---------------------------------------------------------------------------------------


class Process:
    """A python in the sandbox that takes `program`, the pipes to it, and the limits over all that it starts."""

    def __init__(
        self, program: str, tests: bool, seconds: float, memory_mb: int, disk_mb: int, contain: bool | None = None
    ):
        contain = why_not_contained() is None if contain is None else contain
        self.memory, self.fault, self.timed_out, self.ended = memory_mb * 2**20, "", False, False
        self.folder = None if contain else tempfile.TemporaryDirectory(prefix="sandbox_", ignore_cleanup_errors=True)
        user = foreign_user(None if contain else sys.executable)
        job = dict(program=program, tests=tests, seconds=seconds, memory_mb=memory_mb, disk_mb=disk_mb, user=user)
        own_count = contain or user is not None  # of processes; otherwise the kernel counts all of this user's
        job |= dict(processes=PROCESSES if own_count else None, dies_with_parent=not contain)
        self.process = self.start(tests, user, disk_mb)
        self.ends = os.pidfd_open(self.process.pid)
        self.unsent, self.no_more, self.next_count = memoryview(b""), False, 0.0
        self.read = {"out": bytearray(), "err": bytearray()}
        self.poll, self.pipes = select.poll(), {}
        for name, pipe in (("out", self.process.stdout), ("err", self.process.stderr)):
            self.pipes[pipe.fileno()] = name
            os.set_blocking(pipe.fileno(), False)
            self.poll.register(pipe, select.POLLIN)
        os.set_blocking(self.process.stdin.fileno(), False)
        self.poll.register(self.ends, select.POLLIN)
        self.await_ready()
        self.send(frame(job))

    def start(self, tests: bool, user: int | None, disk_mb: int) -> subprocess.Popen:
        command = [sys.executable, "-I", *([] if tests else ["-S"])]  # the program that follows looks for its packages
        passed_on = []
        if self.folder:
            os.chmod(self.folder.name, 0o777)  # its user may be another one
            command += [os.path.abspath(sandbox_inside.__file__)]
        else:
            passed_on = [filter_pipe()]
            command = [*bubblewrap(user, disk_mb, passed_on[0]), *command, INSIDE]
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.folder.name if self.folder else "/",
                env=ENVIRONMENT,
                pass_fds=passed_on,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            if self.folder:
                self.folder.cleanup()
            raise SandboxError(f"no process could be started: {error}") from error
        finally:
            for descriptor in passed_on:
                os.close(descriptor)

    def await_ready(self) -> None:
        self.talk(START_TIMEOUT, lambda: len(self.read["out"]) >= len(READY))
        if not self.read["out"].startswith(READY):
            errors = self.read["err"].decode("utf-8", "replace").strip()[-500:]
            reason = f"not ready within {START_TIMEOUT:g} s" if self.timed_out else f"status {self.process.poll()}"
            self.__exit__()
            raise SandboxError(f"the sandbox did not start ({reason}): {errors}")
        del self.read["out"][: len(READY)]

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        self.end()
        os.close(self.ends)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        if self.folder:
            self.folder.cleanup()

    def end(self, fault: str = "") -> None:
        """Kill it and all that it started: bubblewrap's process namespace ends with it. What it wrote is kept."""
        if self.ended:
            return
        self.ended, self.fault = True, fault
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)  # what is killed ends at once, but on a machine with a sick disk
        for descriptor in list(self.pipes):
            while self.take(descriptor):
                pass

    def status(self) -> int:
        code = self.process.returncode
        return code if code < 128 else 128 - code  # bubblewrap says 128 + signal

    def send(self, data: bytes, last: bool = False) -> None:
        """Put data behind what waits to be sent; `talk` sends it.  last: then the program's input ends"""
        self.unsent, self.no_more = memoryview(bytes(self.unsent) + data), last
        self.poll.register(self.process.stdin, select.POLLOUT)

    def line(self, deadline: float) -> bytes | None:
        """What it writes up to the next end of line; None if it ends first. `deadline` is of time.monotonic()."""
        out = self.read["out"]
        self.talk(deadline - time.monotonic(), lambda: b"\n" in out)
        line, end, rest = out.partition(b"\n")
        out[:] = rest
        return bytes(line + end) if end else None

    def talk(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Send what waits and read what comes until `enough()`, until it ends, or until a limit ends it."""
        deadline = time.monotonic() + seconds
        while not self.ended and not enough():
            now = time.monotonic()
            if now >= deadline:
                self.timed_out = True
                self.end(f"its time, {seconds:g} s, was up")
                return
            if now >= self.next_count:
                self.check_use()
                self.next_count = time.monotonic() + COUNT_EVERY
            for descriptor, _ in self.poll.poll(1000 * min(COUNT_EVERY, deadline - now)):
                if descriptor == self.ends:
                    self.end()
                elif descriptor in self.pipes:
                    self.take(descriptor)
                elif not self.ended:
                    self.give(descriptor)

    def give(self, descriptor: int) -> None:
        with suppress(BlockingIOError):
            try:
                self.unsent = self.unsent[os.write(descriptor, self.unsent[:65536]) :]
            except BrokenPipeError:  # it does not want the rest
                self.unsent = memoryview(b"")
        if not self.unsent:
            self.poll.unregister(descriptor)
            if self.no_more:
                self.process.stdin.close()

    def take(self, descriptor: int) -> bool:
        """Read once from a pipe; False if there is nothing."""
        name = self.pipes[descriptor]
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.poll.unregister(descriptor)
            del self.pipes[descriptor]
        elif len(self.read[name]) + len(data) > OUTPUT_LIMIT:
            self.end(f"it wrote over {OUTPUT_LIMIT:,} bytes")
            return False
        self.read[name] += data
        return bool(data)

    def check_use(self) -> None:
        processes, memory = usage(self.process.pid)
        if memory > self.memory:
            self.end(f"it and its processes used over {self.memory >> 20} MB of memory together")
        elif processes > PROCESSES + 4:  # bubblewrap's own among them
            self.end(f"it had over {PROCESSES} processes")


RESIDENT = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+)", re.MULTILINE)


def usage(process: int) -> tuple[int, int]:
    """(processes, bytes of memory) of a process and all below it. Pages that a fork shares count in each. A process may
    have given itself a name of any bytes."""
    waiting, processes, kilobytes = [process], 0, 0
    while waiting:
        place = f"/proc/{waiting.pop()}"
        with suppress(OSError):  # it has ended meanwhile
            with open(f"{place}/status", encoding="utf-8", errors="replace") as file:
                kilobytes += sum(map(int, RESIDENT.findall(file.read())))
            processes += 1
            for task in os.listdir(f"{place}/task"):
                with open(f"{place}/task/{task}/children", encoding="utf-8") as file:
                    waiting += map(int, file.read().split())
    return processes, 1024 * kilobytes


def foreign_user(program: str | None = None) -> int | None:
    """A user id that nobody has, another one each time, if this is root.  program: only if everyone may run that"""
    if os.getuid() != 0 or (program and not everyone_may_run(program)):
        return None
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        known = min(2**31, int(file.readline().split()[2]))  # less in a container with users of its own
    return random.randrange(known // 2, known - 2) if known >= 65536 else None


def everyone_may_run(program: str) -> bool:
    parts = os.path.realpath(program).split("/")
    return all(os.stat("/".join(parts[:n]) or "/").st_mode & 0o001 for n in range(1, len(parts) + 1))


# ---- bubblewrap -----------------------------------------------------------------------------------------------------

INSIDE = "/sandbox_inside.py"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp"}
ENVIRONMENT |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}  # threads count as processes


def bubblewrap(user: int | None, disk_mb: int, filter_end: int) -> list[str]:
    """The command before the command.  user: root's way to a foreign user; None: by a user namespace"""
    command = [
        shutil.which("bwrap"),
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    command += ["--die-with-parent", "--hostname", "sandbox", "--seccomp", str(filter_end), "--cap-drop", "ALL"]
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


# ---- the filter of system calls -------------------------------------------------------------------------------------

FORBIDDEN = """memfd_create memfd_secret shmget msgget add_key request_key keyctl unshare setns mount umount2
    pivot_root open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr ptrace process_vm_readv
    process_vm_writev userfaultfd bpf perf_event_open io_uring_setup syslog""".split()
CALLS = {  # machine: (its number in linux/audit.h, {call: number})
    "x86_64": (0xC000003E, dict(
        memfd_create=319, shmget=29, msgget=68, add_key=248, request_key=249, keyctl=250, unshare=272, setns=308,
        mount=165, umount2=166, pivot_root=155, ptrace=101, process_vm_readv=310, process_vm_writev=311,
        userfaultfd=323, bpf=321, perf_event_open=298, syslog=103, clone=56, socket=41)),
    "aarch64": (0xC00000B7, dict(
        memfd_create=279, shmget=194, msgget=186, add_key=217, request_key=218, keyctl=219, unshare=97, setns=268,
        mount=40, umount2=39, pivot_root=41, ptrace=117, process_vm_readv=270, process_vm_writev=271,
        userfaultfd=282, bpf=280, perf_event_open=241, syslog=116, clone=220, socket=198)),
}  # fmt: skip
EVERYWHERE = dict(  # the same number on all machines
    memfd_secret=447, open_tree=428, move_mount=429, fsopen=430, fsconfig=431, fsmount=432, fspick=433,
    mount_setattr=442, io_uring_setup=425, clone3=435,
)  # fmt: skip
NEW_NAMESPACES = 0x7E020000  # the flags of clone that ask for one
LOCAL, INTERNET, INTERNET_6 = 1, 2, 10  # the families of sockets that are allowed


def filter_pipe() -> int:
    """The reading end of a pipe with the filter in it."""
    reading, writing = os.pipe()
    os.write(writing, call_filter())  # far less than a pipe holds
    os.close(writing)
    return reading


@functools.cache
def call_filter() -> bytes:
    """A program of classic BPF, as in the manual page of seccomp(2): steps of (code, jump if true, if false, number)"""
    audit, numbers = CALLS[platform.machine()]
    numbers = numbers | EVERYWHERE
    load, equal, above, has_bits, end = 0x20, 0x15, 0x35, 0x45, 0x06  # above: or equal
    allow, refuse, unknown, kill = (
        (end, 0, 0, 0x7FFF0000),
        (end, 0, 0, 0x50001),
        (end, 0, 0, 0x50026),
        (end, 0, 0, 1 << 31),
    )
    steps = [(load, 0, 0, 4), (equal, 1, 0, audit), kill, (load, 0, 0, 0)]  # the machine, then the call's number
    steps += [(above, 0, 1, 0x40000000), unknown]  # x86-64 has a second set of numbers there
    for name in FORBIDDEN:
        steps += [(equal, 0, 1, numbers[name]), refuse]
    steps += [(equal, 0, 1, numbers["clone3"]), unknown]  # its flags are in memory; libraries then use clone
    steps += [(equal, 0, 4, numbers["clone"]), (load, 0, 0, 16), (has_bits, 0, 1, NEW_NAMESPACES), refuse, allow]
    families = [(equal, 0, 1, family) for family in (LOCAL, INTERNET, INTERNET_6)]
    steps += [(equal, 0, 2 + 2 * len(families), numbers["socket"]), (load, 0, 0, 16)]
    for step in families:
        steps += [step, allow]
    steps += [refuse, allow]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
