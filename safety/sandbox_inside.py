"""What runs inside the sandbox: sandbox.py starts this file as a program; it becomes the code, or answers questions.

It says that it is ready, reads a job from its input, gives up what the job does not need, and then either replaces
itself by the job's program, or runs that here and says what expressions and tests give.
"""

import json
import os
import resource
import sys
import types

PROGRAM = "program.py"


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


def become(program: str, stdin: str) -> None:
    for name, text in ((PROGRAM, program.encode("utf-8", "surrogatepass")), ("input", stdin.encode("latin-1"))):
        with open(name, "wb") as file:
            file.write(text)
    os.dup2(os.open("input", os.O_RDONLY), 0)
    os.remove("input")
    os.execv(sys.executable, [sys.executable, "-I", PROGRAM])


def answer_questions(program: str, questions: list, secret: str) -> None:
    """Run the program, then say what is asked: the literal of an expression, or whether a test raises nothing."""
    answers, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    # As an import runs it: what stands under `if __name__ == "__main__"` reads an input that is not there, or leaves.
    # In both places, so that its classes can be pickled and unittest.main() finds its tests.
    module = sys.modules["program"] = sys.modules["__main__"] = types.ModuleType("program")
    answering, process, end, write, dumps = os.getpid(), os.getpid, os._exit, os.write, json.dumps
    try:
        exec(compile(program, PROGRAM, "exec"), module.__dict__)
    except SystemExit as ended:  # as if all went well: what it has defined until then is there
        if ended.code not in (None, 0):
            return
    except EOFError:  # at the end of an input that it does not have
        pass
    for number, (how, text) in enumerate(questions):
        try:
            if how == "eval":
                answer = repr(plain(eval(compile(text, "test", "eval"), module.__dict__)))
            else:
                exec(compile(text, "test", "exec"), module.__dict__)
                answer = True
        except BaseException:  # sys.exit() in a program, too, is only the end of that test
            continue
        if process() != answering:  # a child that the program forked, and that came back out of it
            end(0)
        write(answers, dumps([secret, number, answer]).encode() + b"\n")


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
    given = json.loads(sys.stdin.buffer.read())
    give_up_rights(given)
    if "stdin" in given:
        become(given["program"], given["stdin"])
    else:
        answer_questions(given["program"], given["questions"], given["secret"])
