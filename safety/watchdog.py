"""A small process beside each trainer that ends it when nothing inside it can. limits.py starts it: see docs/limits.md.

Code that holds Python's lock (the GIL), such as a regular expression that backtracks, stops every thread of its
process: time limits, Ctrl-C and SIGTERM are all handled by Python, which does not run. This process knows three things:

inbox     a socket pair that a thread of the trainer empties as soon as Python runs there. Signals' numbers get into it
          from C code, pings (0) from here while calls run. What stays unread tells for how long no Python has run.
messages  which calls of other people's code begin and end: lines of JSON on a pipe.
traces    a pipe on which faulthandler, in C, writes where every thread stands when it gets TRACE_SIGNAL.

Only light imports: it takes 10 MB and wakes up twice a second.
"""

import itertools
import json
import os
import select
import signal
import socket
import sys
import time
from collections import Counter

TRACE_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # schedulers use SIGUSR1 and 2 for their own purposes
TICK = 0.5  # seconds from one look to the next
MARGIN = 10.0  # seconds beyond its limit after which a call that lets nothing else run ends the process
GIVEN_UP_MARGIN = 60.0  # the same for a call that is no longer waited for: training may hold the GIL for a while, too
END_SECONDS = 8.0  # a process that got Ctrl-C or SIGTERM has to end by itself
WHOLE_TERMINAL = "\x1b7\x1b[r\x1b8"  # makes all of it scroll again; the panel (runlog/panel.py) keeps its last lines
TWICE_SECONDS = 1.0  # a second Ctrl-C counts from then on: launchers pass on the first one, so that it comes twice


def main(parent: int, messages: int, inbox: socket.socket, outbox: socket.socket, traces: int, label: str) -> None:
    calls: dict[int, dict] = {}  # those that run: name, deadline, thread, ident, rollout, given_up
    unread_since, end_by, last = None, None, time.monotonic()
    poll = select.poll()
    poll.register(messages, select.POLLIN)
    while os.getppid() == parent:
        poll.poll(TICK * 1000)
        time.sleep(0.05)  # many messages at once are read at once
        now = time.monotonic()
        said = read_messages(messages)
        if said is None:  # nobody can write any more: it has just ended, or is another program now
            time.sleep(TICK)
            if os.getppid() != parent or state(parent, parent) in ("Z", "X", None):
                break
            end(parent, "became another program (exec by C code), or closed all its files", label, [*calls.values()])
            return
        for what, *about in said:
            if what == "bye":
                return
            elif what == "ending":
                end_by = now + END_SECONDS + 2
            elif what == "begin":
                number, name, seconds, thread, ident, rollout = about
                calls[number] = dict(name=name, deadline=now + seconds, thread=thread, ident=ident)
                calls[number] |= dict(rollout=rollout, given_up=False)
            elif what == "given up" and about[0] in calls:
                calls[about[0]]["given_up"] = True
            elif what == "end":
                calls.pop(about[0], None)
        unread = peek(inbox)
        if not unread or now - last > 5 or state(parent, parent) in ("T", "t"):  # this process or that one was stopped
            unread_since = None
        if unread:
            unread_since = unread_since or now
        elif calls:
            outbox.send(b"\0")
        last = now
        silent = now - unread_since if unread_since else 0.0
        suspects = suspected(calls, parent)
        if why := reason(unread, silent, end_by is not None and now > end_by, suspects, now):
            end(parent, why, label, suspects, traces)
            return
    if sys.stderr.isatty():
        print(end=WHOLE_TERMINAL, file=sys.stderr, flush=True)
    if calls:
        print(
            f"\n{label}The training process ended without a word (a crash, an exit by C code, or kill -9) while these "
            f"calls ran: {names(calls.values())}.",
            file=sys.stderr,
            flush=True,
        )


def read_messages(descriptor: int) -> list[list] | None:
    """All that are there; None if there will be no others. The trainer writes a message at once, so none is cut."""
    text, over = b"", True
    try:
        while part := os.read(descriptor, 65536):
            text += part
    except BlockingIOError:
        over = False
    return None if over and not text else [json.loads(line) for line in text.splitlines()]


def peek(inbox: socket.socket) -> bytes:
    try:
        return inbox.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def state(process: int, thread: int) -> str | None:
    """R runs, S sleeps, T is stopped; None where the system does not tell."""
    try:
        with open(f"/proc/{process}/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return None


def suspected(calls: dict[int, dict], parent: int) -> list[dict]:
    """The calls that may hold the GIL: those whose threads compute. If there is none it is the main thread, if that
    one is at work, as when it loads a library; else any call that is waited for, a rollout only if there are no others:
    it waits for them itself, and its own limit is long."""
    computing = [call for call in calls.values() if state(parent, call["thread"]) == "R"]
    if computing or state(parent, parent) in ("R", "D"):
        return computing
    waited_for = [call for call in calls.values() if not call["given_up"]]
    return [call for call in waited_for if not call["rollout"]] or waited_for


def reason(unread: bytes, silent: float, overdue: bool, suspects: list[dict], now: float) -> str | None:
    """Why the process has to be ended, or None. silent: for how many seconds no Python has run in it."""
    if overdue:
        return "interrupted (Ctrl-C), and did not end by itself"
    if unread.count(signal.SIGINT) > 1 and silent > TWICE_SECONDS:
        return "interrupted twice (Ctrl-C)"
    if signal.SIGINT in unread and silent > END_SECONDS:
        return "interrupted (Ctrl-C)"
    if signal.SIGTERM in unread and silent > END_SECONDS / 2:
        return "stopped by SIGTERM"
    margins = [GIVEN_UP_MARGIN if call["given_up"] else MARGIN for call in suspects]
    late = [now > call["deadline"] + margin for call, margin in zip(suspects, margins, strict=True)]
    if late and all(late) and silent > max(margins):
        return f"over its time limit by {now - min(call['deadline'] for call in suspects):.0f} s"
    return None


def names(calls) -> str:
    return ", ".join(f"{name} x {n}" if n > 1 else name for name, n in Counter(c["name"] for c in calls).items())


def end(parent: int, why: str, label: str, suspects: list[dict], traces: int | None = None) -> None:
    """Say who runs and where, and kill: no signal but SIGKILL needs nothing of Python.  traces: None where none runs"""
    lines = [f"{label}{why}. No other Python code has been able to run in the process, so it was killed (SIGKILL)."]
    if traces is None:
        lines = [
            f"{label}The training process {why}, so it was killed (SIGKILL). Running: {names(suspects) or 'nothing'}."
        ]
    elif suspects:
        which = "It holds" if len(suspects) == 1 else "One of them holds"
        lines += [
            f"Running: {names(suspects)}. {which} Python's lock (the GIL) in one long operation, such as a regular "
            "expression that backtracks. Mend it, or, if it is a function of a file, write NAME.own_process = True "
            "below it: a process of its own can be ended alone (docs/limits.md)."
        ]
        where = where_threads_stand(parent, traces)
        threads = dict.fromkeys(call["ident"] for call in suspects if call["ident"] in where)
        lines += [where[thread] for thread in list(threads)[:4]]
    shown = WHOLE_TERMINAL if sys.stderr.isatty() else ""
    print(f"{shown}\n" + "\n".join(lines), file=sys.stderr, flush=True)
    os.kill(parent, signal.SIGKILL)


def where_threads_stand(parent: int, traces: int) -> dict[int, str]:
    """{identifier of a thread: its stack}, of all threads."""
    os.kill(parent, TRACE_SIGNAL)
    poll, text = select.poll(), b""
    poll.register(traces, select.POLLIN)
    while poll.poll(1000) and (part := os.read(traces, 65536)):
        text += part
    stacks = {}
    for stack in text.decode(errors="replace").split("\n\n"):
        head, *frames = stack.splitlines()
        frames = itertools.takewhile(lambda frame: not frame.endswith("in run_function"), frames)  # ours below it
        found = [word for word in head.split() if word.startswith("0x")]
        if found:
            stacks[int(found[0], 16)] = "Where it stands, most recent call first:\n" + "\n".join(frames)
    return stacks


if __name__ == "__main__":
    given = [int(number) for number in sys.argv[1:6]]
    inbox, outbox = socket.socket(fileno=given[2]), socket.socket(fileno=given[3])
    main(given[0], given[1], inbox, outbox, given[4], sys.argv[6])
