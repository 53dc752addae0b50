"""What runs inside the sandbox: sandbox.py starts this file as a program; it becomes the code, or answers questions.

It says that it is ready, reads one job from its input, gives up what the job does not need, and then either replaces
itself by the job's program, or runs that here and says what expressions and tests give. Nothing here is a secret.
"""

import json
import os
import resource
import sys
import types

PROGRAM = "program.py"


def receive() -> dict:
    """A line of JSON. Without a buffer: none of what follows may be lost in it."""
    parts = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = os.read(0, 2**20)
        if not part:
            os._exit(0)  # nobody asks any more
        parts.append(part)
    return json.loads(b"".join(parts))


def give_up_rights(job: dict) -> None:
    if job["user"] is not None:
        os.setgroups([])
        os.setresgid(job["user"], job["user"], job["user"])
        os.setresuid(job["user"], job["user"], job["user"])
    limits = [
        (resource.RLIMIT_AS, job["memory_mb"] * 2**20),
        (resource.RLIMIT_FSIZE, job["disk_mb"] * 2**20),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_CORE, 0),
    ]
    if job["processes"] is not None:  # else the kernel counts all of this user's
        limits.append((resource.RLIMIT_NPROC, job["processes"]))
    for what, limit in limits:
        resource.setrlimit(what, (limit, limit))
    seconds = max(1, int(job["seconds"] + 0.999))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU first: it tells why


def become(program: str, stdin: str) -> None:
    for name, text in ((PROGRAM, program.encode("utf-8", "surrogatepass")), ("input", stdin.encode("latin-1"))):
        with open(name, "wb") as file:
            file.write(text)
    os.dup2(os.open("input", os.O_RDONLY), 0)
    os.remove("input")
    os.execv(sys.executable, [sys.executable, "-I", PROGRAM])


def answer_questions(program: str) -> None:
    """Run the program, then say what is asked: the "value" of an expression, or whether a "test" raises nothing."""
    questions, answers, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    # As an import runs it: what stands under `if __name__ == "__main__"` reads an input that is not there, or leaves.
    # In both places, so that its classes can be pickled and unittest.main() finds its tests.
    module = sys.modules["program"] = sys.modules["__main__"] = types.ModuleType("program")
    answering, process, end = os.getpid(), os.getpid, os._exit

    def say(message: dict) -> None:
        if process() != answering:  # a child that the program forked, and that came back out of it
            end(0)
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:
            left = left[os.write(answers, left) :]

    try:
        exec(compile(program, PROGRAM, "exec"), module.__dict__)
        ready = True
    except SystemExit as ended:  # as if all went well: what it has defined until then is there
        ready = ended.code in (None, 0)
    except EOFError:  # at the end of an input that it does not have
        ready = True
    except BaseException:
        ready = False
    say({"ready": ready})
    os.dup2(questions, 0)
    while True:
        asked = receive()
        answer = {"number": asked["number"]}
        try:
            if "value" in asked:
                value = eval(compile(asked["value"], "test", "eval"), module.__dict__)
                answer["value"] = repr(plain(value))
            else:
                exec(compile(asked["test"], "test", "exec"), module.__dict__)
                answer["passed"] = True
        except BaseException:  # sys.exit() in a program, too, is only the end of that test
            pass
        say(answer)


def plain(value):
    """A value of a subclass as one of python's own types, and numbers of numpy and torch, so that it has a literal."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, (kind, frozenset) if kind is set else kind):
            return kind(map(plain, value))
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    return value


if __name__ == "__main__":
    os.write(int(sys.argv[1]), b"r")
    os.close(int(sys.argv[1]))
    given = receive()
    give_up_rights(given)
    if "stdin" in given:
        become(given["program"], given["stdin"])
    else:
        answer_questions(given["program"])
