"""The other end of sessions.py: a process that imports a train script, and forks of it that answer the page's questions
with the training's own functions.

    python -m looking.bench SCRIPT FD

FD is a socket: for each message on it, which brings a socket and a pipe, a fork answers the lines of that socket,
{"action", "given"}, each by one line, {"value"} or {"raised", "traceback"}. The pipe takes what is printed.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch

from cli import ConfigError
from looking.answers import rewards, rows, settings, tools
from looking.answers.settings import Script
from safety import credentials
from safety.orphans import end_with
from safety.storable import text_of

ACTIONS = {"form": settings.form, "check": settings.check, "fit": settings.fit, "rows": rows.rows, "row": rows.row}
ACTIONS |= {"score": rewards.score, "tools": tools.tools, "call": tools.call, "play": tools.play, "say": tools.say}


def apart(script: Script, action: str, given: dict) -> bool:
    """Whether an action is done in a fork of the session's process, so that a crash costs no more than its answer. Not
    where there are tools: servers and threads of the session's process are not in a fork."""
    if action in ("form", "check", "fit"):
        return True
    return action == "score" and all(own.rollout != "multi_turn" for own in rows.read(script, given)["cfg"].by_domain())


def main(script: str, control: socket.socket) -> None:
    loaded = Script(script)
    files = [getattr(module, "__file__", None) for module in sys.modules.values()]
    here = [file for file in files if file and Path(file).is_relative_to(Path.cwd()) and ".venv" not in file]
    control.sendall(json.dumps({"files": here}).encode())
    forks = set()
    while True:
        message, fds, *_ = socket.recv_fds(control, 100, 2)
        forks -= {pid for pid in forks if ended(pid)}
        if not message:  # the page is gone
            for pid in forks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            session(loaded, *fds)
        forks.add(pid)
        for fd in fds:
            os.close(fd)


def ended(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


def session(script: Script, channel: int, output: int) -> None:
    """Answer until the channel ends."""
    os.setsid()  # so that it ends with all that it started
    end_with(os.getppid())
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("700")  # where memory runs out it is this, not a training
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    channel = socket.socket(fileno=channel)
    channel.sendall(f"{os.getpid()}\n".encode())
    for line in channel.makefile("rb"):
        asked = json.loads(line)
        action, given = asked["action"], asked["given"]
        answer = answered(apart, script, action, given)  # what it reads is kept for the next question
        if "raised" in answer:
            channel.sendall(json.dumps(answer).encode() + b"\n")
        elif answer["value"]:
            pid = os.fork()
            if pid == 0:
                end_with(os.getppid())
                script.forget()
                channel.sendall(json.dumps(answered(ACTIONS[action], script, given)).encode() + b"\n")
                sys.stdout.flush()
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            if status:
                how = signal.Signals(status & 127).name if status & 127 else f"status {status >> 8}"
                channel.sendall(json.dumps({"raised": f"its process has crashed: {how}"}).encode() + b"\n")
        else:
            channel.sendall(json.dumps(answered(ACTIONS[action], script, given)).encode() + b"\n")
            gc.collect()
            torch.cuda.empty_cache()  # of a model that sampled here: the session may stay for long, beside a training
    os._exit(0)


def answered(function, *about) -> dict:
    try:
        value = function(*about)
        return json.loads(json.dumps({"value": value}, default=text_of))
    except BaseException as error:  # SystemExit of a user's file, too
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(Path.cwd())]
        if not isinstance(error, ConfigError) and frames:
            text += f" ({os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno}: {frames[-1].line})"
        return {
            "raised": credentials.mask(text)[:20_000],
            "traceback": credentials.mask(traceback.format_exc()[-20_000:]),
        }
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
