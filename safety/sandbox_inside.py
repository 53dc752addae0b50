"""Runs inside the sandbox: sandbox.py starts this file as a program.

It reports that it is ready, reads a job from its input, and gives up rights that the job does not need. Then it either
replaces itself by the job's program, or runs that program here and returns the values of expressions and tests.
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
    limits = {
        resource.RLIMIT_AS: job["memory_mb"] * 2**20,
        resource.RLIMIT_FSIZE: job["disk_mb"] * 2**20,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
    }
    if job["processes"] is not None:  # otherwise the kernel counts all processes of this user
        limits[resource.RLIMIT_NPROC] = job["processes"]
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def become(program: str, stdin: str) -> None:
    for name, text in ((PROGRAM, program.encode("utf-8", "surrogatepass")), ("input", stdin.encode("latin-1"))):
        with open(name, "wb") as file:
            file.write(text)
    os.dup2(os.open("input", os.O_RDONLY), 0)
    os.remove("input")
    os.execv(sys.executable, [sys.executable, "-I", PROGRAM])


def answer_questions(program: str, questions: list, secret: str) -> None:
    """Run the program, then answer each question: the literal of an expression, or whether a test raises nothing."""
    answers, devnull = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(devnull, fd)
    # Run as by an import, since code under `if __name__ == "__main__"` would read an input that does not exist, or
    # exit. The module is entered under both names, so that its classes can be pickled and unittest.main() finds its
    # tests.
    module = sys.modules["program"] = sys.modules["__main__"] = types.ModuleType("program")
    main_pid, getpid, exit_now, write, dumps = os.getpid(), os.getpid, os._exit, os.write, json.dumps
    try:
        exec(compile(program, PROGRAM, "exec"), module.__dict__)
    except SystemExit as ended:  # like a normal end: its definitions up to here are there
        if ended.code not in (None, 0):
            return
    except EOFError:  # the program read its input, which is empty
        pass
    for number, (kind, text) in enumerate(questions):
        try:
            if kind == "eval":
                answer = repr(plain(eval(compile(text, "test", "eval"), module.__dict__)))
            else:
                exec(compile(text, "test", "exec"), module.__dict__)
                answer = True
        except BaseException:  # even sys.exit() ends only this test
            continue
        if getpid() != main_pid:  # a child that the program forked, and that returned from it
            exit_now(0)
        write(answers, dumps([secret, number, answer]).encode() + b"\n")


def plain(value):
    """A value with a literal: a subclass's value becomes one of Python's own types, and so do numbers of numpy and
    torch."""
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
    job = json.loads(sys.stdin.buffer.read())
    give_up_rights(job)
    if "stdin" in job:
        become(job["program"], job["stdin"])
    else:
        answer_questions(job["program"], job["questions"], job["secret"])
