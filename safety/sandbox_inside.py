"""What runs inside the sandbox: sandbox.py starts this file as a program, and it becomes the code or tests it.

It says "ready", reads one job from its input, gives up what the job does not need, and then either replaces itself by
the job's program or runs that program here and answers questions about it. Nothing in this process is a secret.

The end of input is the end: the trainer's side holds the other end of the pipe.
"""

import json
import os
import resource
import sys
import types

READY = b"ready\n"
PROGRAM = "program.py"


def frame(message: dict) -> bytes:
    """A message as it travels: 8 bytes of length, then JSON."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(8, "big") + body


def receive(descriptor: int) -> dict:
    length = int.from_bytes(read_exactly(descriptor, 8), "big")
    return json.loads(read_exactly(descriptor, length))


def read_exactly(descriptor: int, count: int) -> bytes:
    """Without a buffer: what follows in the pipe is the input of the program."""
    parts = []
    while count:
        part = os.read(descriptor, min(count, 2**20))
        if not part:
            os._exit(0)  # nobody asks any more
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def give_up_rights(job: dict) -> None:
    if job["user"] is not None:
        os.setgroups([])
        os.setresgid(job["user"], job["user"], job["user"])
        os.setresuid(job["user"], job["user"], job["user"])
    if job["dies_with_parent"]:  # bubblewrap sees to it otherwise
        import ctypes

        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL; after setuid, which resets it
    seconds = max(1, int(job["seconds"] + 0.999))
    limits = [
        (resource.RLIMIT_AS, job["memory_mb"] * 2**20),
        (resource.RLIMIT_FSIZE, job["disk_mb"] * 2**20),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_CORE, 0),
    ]
    if job["processes"] is not None:
        limits.append((resource.RLIMIT_NPROC, job["processes"]))
    for what, limit in limits:
        resource.setrlimit(what, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU first: it tells why


def become(program: str) -> None:
    with open(PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(program)
    os.execv(sys.executable, [sys.executable, "-I", PROGRAM])


def answer_questions(program: str) -> None:
    """Run the program, then what is asked: "value" of an expression, or whether a "test" raises nothing. Each answer
    repeats the question's number, which is random: one that was written before the question does not fit."""

    questions, answers, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    # As an import runs it: what stands under `if __name__ == "__main__"` reads an input that is not there, or leaves.
    # In both places, so that its classes can be pickled and unittest.main() finds its tests.
    module = sys.modules["program"] = sys.modules["__main__"] = types.ModuleType("program")

    answering, process, end = os.getpid(), os.getpid, os._exit

    def run(job: dict) -> None:
        try:
            exec(compile(job["test"], job["name"], "exec"), module.__dict__)
        except (SystemExit, EOFError) as ended:
            # A program may leave as if all went well, or at the end of an input that it does not have: what it has
            # defined until then is there, and nothing is passed by that. A test may not.
            if job["name"] != PROGRAM or (isinstance(ended, SystemExit) and ended.code not in (None, 0)):
                raise

    def answer(job: dict) -> None:
        try:
            if "value" in job:
                found = canonical(eval(compile(job["value"], "test", "eval"), module.__dict__))
            else:
                run(job)
                found = "passed"
        except BaseException as error:  # sys.exit() in a program, too, is only the end of that test
            found = f"raised {type(error).__name__}"
        if process() != answering:  # a child that the program forked, and that came back out of it
            end(0)
        left = memoryview(answer_line(job["number"], found))
        while left:
            left = left[os.write(answers, left) :]

    answer({"number": "", "test": program, "name": PROGRAM})
    while True:
        answer(receive(questions))


def answer_line(number: str, found: str) -> bytes:
    return f"{number} {json.dumps(found)}\n".encode()


def canonical(value) -> str:
    """A text that is equal for equal values of python's own types, so that they can be compared in another process
    without being read there. Values of other types get a text that is equal to none of those."""
    if getattr(value, "shape", None) == ():  # a number of numpy or torch
        value = value.item()
    if value is None:
        return "None"
    if isinstance(value, (bool, int)):
        return hex(int(value))  # True == 1; decimal digits would take quadratic time
    if isinstance(value, float):
        return hex(int(value)) if value.is_integer() else repr(float(value))
    if isinstance(value, complex):
        return repr(complex(value)) if value.imag else canonical(value.real)
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, (bytes, bytearray)):
        return repr(bytes(value))
    if isinstance(value, list):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(canonical, value))},)"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(canonical, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{canonical(key)}: {canonical(value[key])}' for key in value))}:}}"
    return f"<{type(value).__name__}>"


if __name__ == "__main__":
    os.write(1, READY)
    given = receive(0)
    give_up_rights(given)
    if given["tests"]:
        answer_questions(given["program"])
    else:
        become(given["program"])
