"""Calls of other people's code (safety/calls.py): whatever it does, the run goes on or says who stopped it."""

import asyncio
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from ranks import on_ranks

import utils
from config import load_function
from envs.base import read_state, read_step
from rewards import floats, get_reward_function
from safety import calls
from safety.calls import run_limited
from safety.results import UnusableResult, as_it_is, plain

ROOT = Path(__file__).parent.parent
NEVER = 60  # seconds: longer than any test waits


def outcome(function, seconds=0.3, read=plain, **kwargs):
    return asyncio.run(run_limited(function, kwargs, seconds, read))


# Functions for processes of their own stand in a file; this one would import torch in each.
OWN = """
import os
import subprocess
from pathlib import Path

from safety.results import UnusableResult


def squares(numbers, **others):
    return [float(n) ** 2 for n in numbers]


def hangs_with_a_child(path):
    child = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(str(child.pid))
    while True:
        pass


def leaves(numbers):
    return os._exit(3) if numbers else "there again"


def stops(numbers):
    raise UnusableResult("returned nothing", 1)


squares.own_process = leaves.own_process = 1
hangs_with_a_child.own_process = stops.own_process = True
"""


# ---- time ----


def test_a_call_that_hangs_is_given_up_in_time():
    async def hangs():
        await asyncio.sleep(NEVER)

    async def blocks():
        time.sleep(5)

    async def quick():
        return 1

    def many():
        return asyncio.run(asyncio.wait_for(together(), 30))

    async def together():
        late = [run_limited(one, {}, 0.3) for one in (lambda: time.sleep(5), hangs, blocks)]
        return await asyncio.gather(*late)

    assert many() == [None, None, None]
    assert outcome(quick, 5) == (1, None), "the loop that is blocked is left to who blocks it"
    assert outcome(lambda: 2) == (2, None)


def test_a_shared_client_stays_on_its_loop():
    """Of all calls that behave: an HTTP client of a module keeps its connections from step to step."""
    loops = []

    async def notes():
        loops.append(asyncio.get_running_loop())

    assert [outcome(notes, 5) for _ in range(2)] == [(None, None)] * 2 and loops[0] is loops[1]


def test_calls_that_never_end_end_the_run(monkeypatch, caplog):
    monkeypatch.setattr(calls, "MAX_GIVEN_UP", 2)
    monkeypatch.setattr(calls, "GIVEN_UP_SECONDS", 0.0)
    monkeypatch.setattr(calls, "FIRST_WARNING", 1)
    monkeypatch.setattr(calls, "RUNNING", set())  # without those of other tests
    over = threading.Event()

    def stubborn():
        over.wait(NEVER)

    try:
        assert outcome(stubborn, 0.1) is None and "stubborn (test_calls.py" in caplog.text
        with pytest.raises(calls.TooManyGivenUp, match=r"stubborn \(test_calls.py:\d+\) x 2.*own_process"):
            for _ in range(2):
                outcome(stubborn, 0.1)
    finally:
        over.set()


HOLDS_THE_GIL = """
import asyncio, re, sys
sys.path.insert(0, {root!r})
from safety import calls
calls.MARGIN = 1.0

def backtracks():
    re.match("(a+)+$", "a" * 60 + "b")

print(asyncio.run(calls.run_limited(lambda: 1, {{}}, 0.5)), flush=True)
asyncio.run(calls.run_limited(backtracks, {{}}, 0.5))
"""


def test_who_holds_the_gil_ends_the_process_and_is_shown():
    program = HOLDS_THE_GIL.format(root=str(ROOT))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and ended.stdout == "(1, None)\n"
    assert "Timeout" in ended.stderr and "in backtracks" in ended.stderr


def test_a_process_of_its_own_is_killed_with_what_it_started_and_started_again(tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    names = ("squares", "hangs_with_a_child", "leaves", "stops")
    squares, hangs, leaves, stops = (load_function(f"{tmp_path}/own.py:{name}") for name in names)
    assert outcome(squares, 20, numbers=[1, 2], log=lambda: 0) == ([1.0, 4.0], None)
    assert outcome(hangs, 3.0, path=str(tmp_path / "pid")) is None
    child, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
        assert time.monotonic() < deadline, "the child of a killed process still runs"
        time.sleep(0.05)
    for function, error in ((leaves, "status 3"), (stops, "returned nothing")):
        result, raised = outcome(function, 20, numbers=[1])
        assert result is None and error in str(raised)
    assert raised.index == 1 and "in stops" in raised.__notes__[0]
    assert outcome(leaves, 20, numbers=[]) == ("there again", None)
    result, raised = outcome(squares, 20, numbers=[lambda: 1])
    assert "argument 'numbers' cannot be sent" in str(raised)


def test_a_scorer_on_a_pathological_text():
    texts = ["$10^{10^{10}}$", "(" * 100_000, "9" * 5000, "\ud800\0", "$3$"]
    rows = dict(completions=texts, prompts=["q"] * 5, answer=["3"] * 5)
    scores = get_reward_function("math")(**rows)
    assert scores[-1] == 1.0 and all(score in (0.0, None) or score["reward"] == 0 for score in scores[:-1])


# ---- what is given, and what comes back ----


def test_a_function_gets_copies_and_its_errors_are_its_own():
    row = {"a": [1, {"b": 2}]}

    def changes(row):
        row["a"][1]["b"] = row["c"] = 3
        sys.exit(4)

    result, error = outcome(changes, row=row)
    assert isinstance(error, SystemExit) and row == {"a": [1, {"b": 2}]}

    def alarm():
        import signal

        signal.signal(signal.SIGALRM, lambda *_: None)

    _, error = outcome(alarm)
    assert "own_process" in error.__notes__[0]


class Slow:
    def __float__(self):
        time.sleep(5)


def test_rewards_are_floats():
    given = [1, True, None, np.float32(0.5), torch.tensor(2.0), {"a": torch.tensor(1), "turns": (1, 2), "b": None}]
    wanted = [(1.0, {}, None), (1.0, {}, None), (None, {}, None), (0.5, {}, None), (2.0, {}, None)]
    read = partial(floats, turns=[2] * 6)
    assert outcome(lambda: given, read=read) == ([*wanted, (3.0, {"a": 1.0}, [1.0, 2.0])], None)
    read = partial(floats, turns=[1] * 2)
    assert outcome(lambda: torch.tensor([1, 2]), read=read) == ([(1.0, {}, None), (2.0, {}, None)], None)
    for wrong, said in ((3, "returned 3, a int"), ({1, 2}, "a set"), ([1, object()], "a object, for completion 1")):
        _, error = outcome(lambda wrong=wrong: wrong, read=read)
        assert isinstance(error, UnusableResult) and said in str(error), (wrong, error)
    one = partial(floats, turns=[1])
    assert outcome(lambda: [Slow()], read=one) is None, "what it returns is read within its time"


def test_tools_and_environments_give_plain_data():
    array, odd = np.ones(2), object()
    assert plain({1: (np.int64(2), [odd]), "a": array}) == {1: (2, [str(odd)]), "a": array}
    assert read_step(([{"role": "user"}], torch.tensor(1.5), np.True_, {"x": np.float64(1)})) == (
        [{"role": "user"}],
        1.5,
        True,
        {"x": 1.0},
    )
    for wrong, fault in (("1", "text is not a number"), (float("nan"), "finite")):
        with pytest.raises((TypeError, ValueError), match=fault):
            read_step(([], wrong, True, {}))
    assert read_state((1, ("a", np.int64(2)))) == (1, ("a", 2)) and as_it_is(odd) is odd
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        read_state((1, []))


# ---- ranks ----


def come_late():
    utils.wait_for_ranks(60)
    if utils.dist.get_rank() == 1:
        time.sleep(3)
    try:
        utils.wait_for_ranks(1)
    except RuntimeError as error:
        return str(error)


def test_a_rank_that_does_not_come_is_named():
    told, _ = on_ranks(2, come_late)
    assert "Ranks 1 failed to pass monitoredBarrier in 1000 ms" in told
