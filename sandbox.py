"""Runs python code that a model wrote, contained as far as this machine allows. `contained()` says how far that is.

    result = run_python("print(2 + 2)", seconds=5)      # Result(stdout="4\n", stderr="", status=0, timed_out=False)

In layers, each used where it is to be had:

* always: a process of its own with limits on CPU time, memory, file size and processes, an empty environment, an empty
  folder, output cut at OUTPUT characters, and a time limit after which it is killed with all its children;
* namespaces (root, or user namespaces allowed): no network, no sight of other processes nor signals to them, its folder
  in memory with a limit and the rest of the disk read-only; whatever it started ends with it;
* root, where everyone may run this python: a user id of its own, so that it reads only what everyone may read;
* bubblewrap (`apt install bubblewrap`), instead of the two above: besides, home folders are not to be seen.

Never a protection: against flaws of the kernel, and against code that a reward trusts - it can print what it likes.
"""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

OUTPUT = 20_000  # characters of each of stdout and stderr
PROCESSES = 64
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000  # linux/sched.h
REC, PRIVATE, NOSUID, NODEV = 0x4000, 0x40000, 2, 4  # linux/mount.h
KILL_WITH_PARENT, DROP_CAPABILITY = 1, 24  # linux/prctl.h: PR_SET_PDEATHSIG, PR_CAPBSET_DROP
MOUNT_SETATTR, RECURSIVE = 442, 0x8000  # the same number on every architecture; AT_RECURSIVE


@dataclass
class Result:
    stdout: str
    stderr: str
    status: int  # 0 if it ended well; negative: the signal that ended it
    timed_out: bool


def run_python(code: str, stdin: str = "", seconds: float = 5.0, memory_mb: int = 512, disk_mb: int = 64) -> Result:
    """Run `code` in a process of its own. Returns whatever it does; blocks for at most about `seconds`."""
    limits = dict(seconds=seconds, memory_mb=memory_mb, disk_mb=disk_mb, code=code)
    with tempfile.TemporaryDirectory(prefix="sandbox_", ignore_cleanup_errors=True) as folder:
        paths = {name: os.path.join(folder, name) for name in ("job", "in", "out", "err")}
        for name, text in (("job", json.dumps(limits)), ("in", stdin)):
            with open(paths[name], "w") as file:
                file.write(text)
        work = os.path.join(folder, "work")
        os.mkdir(work, 0o777)
        os.chmod(work, 0o777)  # its user is another one
        with open(paths["in"]) as given, open(paths["out"], "wb") as out, open(paths["err"], "wb") as err:
            process = subprocess.Popen(
                [*bubblewrap(folder), sys.executable, "-I", os.path.abspath(__file__), paths["job"], work],
                stdin=given,
                stdout=out,
                stderr=err,
                cwd=work,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                start_new_session=True,
            )
            timed_out = False
            try:
                process.wait(seconds + 1)  # beyond its CPU seconds: starting takes some, too
            except subprocess.TimeoutExpired:
                timed_out = True
            kill(process)
        texts = {}
        for name in ("out", "err"):
            with open(paths[name], "rb") as file:
                texts[name] = file.read(4 * OUTPUT).decode("utf-8", "replace")[:OUTPUT]
    timed_out = timed_out or process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU)
    status = (
        process.returncode if process.returncode < 128 else 128 - process.returncode
    )  # bubblewrap and shells: 128 +
    return Result(texts["out"], texts["err"], status, timed_out)


def kill(process: subprocess.Popen) -> None:
    """The process, its group, and with a process namespace all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def bubblewrap(folder: str) -> list[str]:
    """The command before the command, or nothing where there is no bubblewrap that works."""
    if not has_bubblewrap():
        return []
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for hidden in {os.path.expanduser("~"), "/home", "/root"}:
        if os.path.isdir(hidden) and not os.path.realpath(sys.executable).startswith(hidden):
            command += ["--tmpfs", hidden]
    return [*command, "--bind", folder, folder]


@functools.cache
def has_bubblewrap() -> bool:
    if not shutil.which("bwrap"):
        return False
    probe = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    return subprocess.run(probe, capture_output=True, timeout=10).returncode == 0


@functools.cache
def contained() -> str:
    """What holds on this machine, in a line."""
    if has_bubblewrap():
        return "bubblewrap: no network, own processes, the rest of the disk read-only, homes hidden"
    probe = "import os, socket\nprint(os.getpid() < 10, len(socket.if_nameindex()) <= 1, os.getuid(), "
    probe += f"os.access({os.path.dirname(os.path.abspath(__file__))!r}, os.W_OK))"
    result = run_python(probe)
    if result.status:
        raise RuntimeError(f"the sandbox runs nothing on this machine: {result.stderr[-500:]}")
    own_processes, no_network, user, writes = result.stdout.split()
    parts = ["limits on time, memory, files and processes"]
    parts += ["no network" if no_network == "True" else "NETWORK NOT CLOSED"]
    parts += ["own processes" if own_processes == "True" else "CAN KILL OTHER PROCESSES OF THIS USER"]
    parts += ["the rest of the disk read-only" if writes == "False" else "WRITES WHAT THIS USER CAN WRITE"]
    parts += ["own user" if int(user) != os.getuid() else "READS WHAT THIS USER CAN READ"]
    return ", ".join(parts)


# ---- inside: this file is the process's own program, and gives up its rights one by one ------------------------------


def libc_call(name: str, *arguments) -> bool:
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == 0


def enter_namespaces() -> bool:
    """Network, processes and mounts of its own; needs root or permitted user namespaces."""
    flags, user, group = NEWNS | NEWIPC | NEWPID | NEWNET, os.getuid(), os.getgid()
    if user == 0 and libc_call("unshare", flags):
        return True
    if not libc_call("unshare", flags | NEWUSER):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def mount(kind: bytes, place: str, flags: int, options: bytes | None = None) -> bool:
    return libc_call("mount", kind, place.encode(), kind, flags, options)


def make_read_only(place: str) -> bool:
    """All mounts from `place` on."""
    import ctypes

    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # struct mount_attr: set MOUNT_ATTR_RDONLY
    return libc_call("syscall", MOUNT_SETATTR, -100, place.encode(), RECURSIVE, attributes, 32)


def everyone_may_run(program: str) -> bool:
    parts = os.path.realpath(program).split("/")
    paths = ["/".join(parts[:n]) or "/" for n in range(1, len(parts) + 1)]
    return all(os.stat(path).st_mode & 0o001 for path in paths)


def inside(job: dict, work: str) -> None:
    """Give up what can be given up, then become the code."""
    import resource

    in_bubblewrap = os.environ.get("container") == "bwrap" or has_bubblewrap()
    if not in_bubblewrap and enter_namespaces():
        child = os.fork()  # the first process of the new namespace: when it ends, all of them do
        if child:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        libc_call("prctl", KILL_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        libc_call("mount", None, b"/", None, REC | PRIVATE, None)
        mount(b"proc", "/proc", NOSUID | NODEV)
        make_read_only("/")
        options = f"size={job['disk_mb']}m,mode=777".encode()
        mount(b"tmpfs", work, NOSUID | NODEV, options)
        os.chdir(work)
        for capability in range(64):  # of root's rights in here, such as to mount it all again
            libc_call("prctl", DROP_CAPABILITY, capability, 0, 0, 0)
    if os.getuid() == 0 and not in_bubblewrap and everyone_may_run(sys.executable):
        user = random.randrange(200_000, 2**31)  # of nobody; another one each time
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    megabyte = 2**20
    seconds = max(1, int(job["seconds"] + 0.999))
    for what, limit in (
        (resource.RLIMIT_AS, job["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, job["disk_mb"] * megabyte),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU first: it tells why
    os.execv(sys.executable, [sys.executable, "-I", "-c", job["code"]])


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        given = json.load(file)
    inside(given, sys.argv[2])
