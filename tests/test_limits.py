"""Other people's code gets copies and limits that hold: whatever it does, the run goes on, or ends and names it."""

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy
import PIL.Image
import psutil
import pytest
import torch
from live import SMALL, Process, running, torchrun, trainer
from test_rewards import run, trajectory

from config import TrainConfig
from envs import ToolEnvironment
from envs.calls import call_environment
from envs.tools import Call, Toolbox, from_function
from plugins import load_function
from safety import limits, values, watchdog

HOSTILE = "tests/hostile.py"
LIMIT = 2  # seconds a call may take here
LATE = LIMIT + limits.MARGIN + 6  # seconds until a process that cannot be interrupted has ended, on a busy machine

# ---- copies ---------------------------------------------------------------------------------------------------------


def test_a_reward_may_change_all_it_gets(tmp_path):
    """Neither the data set, the trajectory nor the other functions see it."""
    image = object()  # as tensors and images are: handed on, not copied
    seen = []

    def changes(prompts, completions, completion_ids, tests, tags, trajectories, **_):
        prompts[0][0]["content"] = "changed"
        prompts[0].append("more")
        completions[0][0]["content"] = "changed"
        completion_ids[0][0] = -1
        tests[0]["cases"].append("changed")
        tags[0].clear()
        trajectories[0].row["prompt"].append("changed")
        trajectories[0].token_ids[0] = trajectories[0].loss_mask[0] = -1
        return [1.0]

    def looks(prompts, completions, completion_ids, tests, tags, trajectories, picture, **_):
        time.sleep(0.3)  # the other one has changed what it got
        seen.append((prompts, completions, completion_ids, tests, tags, trajectories[0].token_ids))
        return [float(picture[0] is image)]

    prompt = [{"role": "user", "content": "2 + 3 ="}]
    row = dict(prompt=prompt, tests={"cases": ["a"]}, tags=["x"], picture=image)
    given = trajectory("5", **row)
    given.info["messages"] = [{"role": "assistant", "content": "5"}]
    run([given], {"changes": changes, "looks": looks})
    expected = ([[{"role": "user", "content": "2 + 3 ="}]], [[{"role": "assistant", "content": "5"}]], [[10, 11, 12]])
    assert seen == [(*expected, [{"cases": ["a"]}], [["x"]], [10, 11, 12])]
    assert given.info["rewards"]["looks"] == 1
    assert given.row == {"prompt": [{"role": "user", "content": "2 + 3 ="}], "tests": {"cases": ["a"]}} | {
        "tags": ["x"],
        "picture": image,
    }
    assert given.info["messages"] == [{"role": "assistant", "content": "5"}] and given.token_ids == [10, 11, 12]


def test_a_tool_and_an_environment_may_change_what_they_get():
    row = {"prompt": "p", "options": [{"a": 1}]}

    def reset(row):
        row["options"][0]["a"] = 2
        row["options"].append(3)
        return row

    changed, error = asyncio.run(limits.run_limited(reset, {"row": row}, 5))
    assert error is None and changed["options"] == [{"a": 2}, 3] and row["options"] == [{"a": 1}]


def test_copies_are_cheap():
    """8 prompts x 8 completions of 4,000 tokens: 8 ms for a function, tensors and images not at all."""
    ids = [list(range(4000)) for _ in range(64)]
    chat = [[{"role": "user", "content": "word " * 4000}] for _ in range(64)]
    given = {"completions": chat, "prompts": chat, "completion_ids": ids, "images": [torch.zeros(3, 512, 512)] * 64}
    times = []
    for _ in range(15):
        start = time.thread_time()
        copies = limits.copied(given)
        times.append(time.thread_time() - start)
    print(f"{1000 * min(times):.2f} ms, median {1000 * sorted(times)[7]:.2f} ms")
    assert min(times) < 0.03
    assert copies == given and copies["completion_ids"][0] is not ids[0] and copies["images"][0] is given["images"][0]


# ---- the GIL held ---------------------------------------------------------------------------------------------------


def flags(folder: Path, *more: str) -> list[str]:
    given = f"{SMALL} --max_steps 3 --output_dir {folder} --reward_timeout {LIMIT} --tool_timeout {LIMIT}"
    return [*given.split(), *more]


def named(text: str, *words: str):
    for word in words:
        assert word in text, (word, text[-4000:])


def started(run) -> float:
    """The moment at which the first step is under way."""
    run.until(lambda: "step 0" in run.text or "params" in run.text or "rows" in run.text)
    return time.monotonic()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "how, name",
    [
        (["--reward_funcs", f"{HOSTILE}:stuck"], "stuck (hostile.py:"),
        (["--env", f"{HOSTILE}:StuckGame", "--reward_funcs", "length"], "StuckGame.reset (hostile.py:"),
    ],
)
def test_code_that_holds_the_gil_ends_the_run_within_its_limit(tmp_path, how, name):
    with running(trainer(tmp_path / "log", *flags(tmp_path, *how))) as run:
        start = started(run)
        status = run.end(LATE + 20)
        print(f"ended with {status} {time.monotonic() - start:.1f} s after the start\n{run.text[-2500:]}")
        assert status != 0 and time.monotonic() - start < LATE + 10  # the first step's sampling comes on top
        named(run.text, name, "holds Python's lock (the GIL)", "own_process = True", "in backtrack", HOSTILE)


@pytest.mark.in_turn
def test_the_other_ranks_end_too(tmp_path):
    how = ["train_grpo.py", *flags(tmp_path, "--reward_funcs", f"{HOSTILE}:stuck_on_rank_1")]
    with running(torchrun(tmp_path / "log", *how)) as run:
        run.until(lambda: run.children())
        status = run.end(90)
        assert status == 1 and not run.children()
        named(run.text, "[rank 1] over its time limit", "stuck_on_rank_1 (hostile.py:")
        assert "[rank 0] stopped by SIGTERM" in run.text or "[rank 0] The ranks lost each other" in run.text


def script(folder: Path, body: str) -> Path:
    """A script that watches itself as train scripts do, without a model."""
    path = folder / "script.py"
    head = f"import asyncio, ctypes, sys, time\nsys.path[:0] = [{str(Path.cwd())!r}]\nimport utils\n"
    head += "from config import TrainConfig\nfrom envs.mcp_tools import get_tools\n"
    head += "from envs.tools import Call, Toolbox\nfrom safety import limits\n"
    path.write_text(f"{head}{body}", encoding="utf-8")
    return path


def test_a_tool_that_holds_the_gil_ends_the_run_within_its_limit(tmp_path):
    body = f"""
utils.watch_process()
cfg = TrainConfig(tools=["{HOSTILE}:stuck_tool"], tool_timeout={LIMIT})
toolbox = Toolbox(get_tools(cfg), cfg)
print("begins", flush=True)
asyncio.run(toolbox.run([Call("stuck_tool", {{"text": "a"}})], toolbox.tools))
"""
    with running(trainer(tmp_path / "log", script=str(script(tmp_path, body)))) as run:
        run.until(lambda: "begins" in run.text)
        start = time.monotonic()
        assert run.end(LATE + 20) == signal.SIGKILL
        assert limits.MARGIN < time.monotonic() - start < LATE
        named(run.text, "stuck_tool (hostile.py:", "in backtrack")


@pytest.mark.in_turn
def test_holding_the_gil_within_the_limit_or_outside_of_calls_is_no_fault(tmp_path):
    """14 s each, longer than the margin: a reward that loads something, and a phase in which no call runs."""
    body = """
utils.watch_process()
from plugins import load_function
reward = load_function("tests/hostile.py:holds_for_a_while")
hold = ctypes.PyDLL(None).sleep
print(asyncio.run(limits.run_limited(reward, {"completions": ["abc"]}, 60)), flush=True)
print(asyncio.run(limits.run_limited(time.sleep, {}, 5)), flush=True)
print(asyncio.run(limits.run_limited(lambda: time.sleep(60), {}, 0.1)), flush=True)  # given up, and still there
hold(14)
utils.end_process(0)
"""
    with running(trainer(tmp_path / "log", script=str(script(tmp_path, body)))) as run:
        assert run.end(90) == 0, run.text
        named(run.text, "([3.0], None)")
        assert "GIL" not in run.text


# ---- Ctrl-C and SIGTERM ---------------------------------------------------------------------------------------------


def signalled(tmp_path, reward: str, *signals: tuple[float, int]):
    """(status, seconds from the first signal to the end, what was printed) of a run in the reward that gets signals,
    each so many seconds after the one before."""
    reached = tmp_path / "reached"
    how = flags(tmp_path, "--reward_funcs", f"{HOSTILE}:{reward}", "--reward_timeout", "600")
    with running(trainer(tmp_path / "log", *how, REACHED=str(reached))) as run:
        run.until(reached.exists)
        time.sleep(0.5)
        start = time.monotonic()
        for after, number in signals:
            time.sleep(after)
            os.kill(run.members[0].pid, number)
        status = run.end(60)
        return status, time.monotonic() - start, run.text


@pytest.mark.parametrize("reward", ["waits", "stuck_at_once"])
def test_ctrl_c_ends_a_run_within_ten_seconds(tmp_path, reward):
    status, seconds, text = signalled(tmp_path, reward, (0, signal.SIGINT))
    print(f"{reward}: {status} after {seconds:.1f} s\n{text[-1500:]}")
    assert status == (130 if reward == "waits" else 9) and seconds < 12
    named(text, "interrupted")


def test_a_second_ctrl_c_ends_it_at_once_while_the_gil_is_held(tmp_path):
    status, seconds, text = signalled(tmp_path, "stuck_at_once", (0, signal.SIGINT), (1.5, signal.SIGINT))
    assert status == 9 and seconds < 5
    named(text, "interrupted twice", "stuck_at_once (hostile.py:")


@pytest.mark.parametrize("times, limit", [(1, 10), (2, 3)])
def test_ctrl_c_while_what_is_to_be_closed_hangs(tmp_path, times, limit):
    body = """
utils.watch_process()
try:
    print("begins", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    utils.end_process(130, lambda: time.sleep(100))
"""
    with running(trainer(tmp_path / "log", script=str(script(tmp_path, body)))) as run:
        run.until(lambda: "begins" in run.text)
        start = time.monotonic()
        for number in range(times):
            time.sleep(1.5 * number)
            os.kill(run.members[0].pid, signal.SIGINT)
        assert run.end(30) == 130 and time.monotonic() - start < limit
        if times == 1:
            named(run.text, "interrupted; what was to be closed did not end within 8 s")


def test_ctrl_c_while_a_rank_waits_for_another(tmp_path):
    """In a collective the main thread runs no Python, so that it does not see KeyboardInterrupt."""
    reached = tmp_path / "reached"
    how = flags(tmp_path, "--reward_funcs", f"{HOSTILE}:waits_on_rank_1", "--reward_timeout", "600")
    with running(trainer(tmp_path / "log", *how, ranks=2, REACHED=str(reached))) as run:
        run.until(reached.exists)
        time.sleep(3)  # rank 0 has scored its part
        start = time.monotonic()
        os.kill(run.members[0].pid, signal.SIGINT)
        assert run.members[0].wait(30) == 130 and time.monotonic() - start < 10
        named(run.text, "[rank 0] interrupted")


@pytest.mark.parametrize("reward", ["waits", "stuck_at_once"])
def test_sigterm_ends_a_run(tmp_path, reward):
    status, seconds, text = signalled(tmp_path, reward, (0, signal.SIGTERM))
    print(f"{reward}: {status} after {seconds:.1f} s\n{text[-1500:]}")
    assert status == (143 if reward == "waits" else 9) and seconds < 12
    named(text, "stopped by SIGTERM", *(["stuck_at_once (hostile.py:"] if reward != "waits" else []))


# ---- os._exit -------------------------------------------------------------------------------------------------------


def test_os_exit_in_a_reward_is_an_error_of_that_reward(tmp_path):
    with running(trainer(tmp_path / "log", *flags(tmp_path, "--reward_funcs", f"{HOSTILE}:leaves"))) as run:
        assert run.end() == 1
        named(run.text, "reward function 'leaves' raised", "os._exit(0)")


def test_a_process_that_c_code_ends_is_named(tmp_path):
    """Its status is out of reach, but something is said."""
    with running(trainer(tmp_path / "log", *flags(tmp_path, "--reward_funcs", f"{HOSTILE}:leaves_by_c"))) as run:
        run.end()
        deadline = time.monotonic() + 20  # the watchdog looks twice a second, when it gets a core
        while "ended without a word" not in run.text and time.monotonic() < deadline:
            time.sleep(0.1)
        named(run.text, "ended without a word", "leaves_by_c (hostile.py:")


def test_a_terminal_that_knows_no_emoji(tmp_path):
    """And that it may open more files than most shells allow: every request under way is one."""
    limit = "resource.getrlimit(resource.RLIMIT_NOFILE)"
    body = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1024, {limit}[1]))\n"
    body += f"utils.watch_process()\nprint('\\U0001f600', {limit}[0])\n"
    command = [sys.executable, str(script(tmp_path, body))]
    with running(Process(command, tmp_path / "log", PYTHONIOENCODING="ascii", PYTHONUTF8="0")) as run:
        assert run.end() == 0, run.text
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert int(run.text.split()[-1]) == (min(hard, 65536) if hard > 0 else 65536), run.text


def test_a_crash_in_c_says_where(tmp_path):
    body = "def bad():\n    ctypes.string_at(0)\nutils.watch_process()\nasyncio.run(limits.run_limited(bad, {}, 5))\n"
    with running(trainer(tmp_path / "log", script=str(script(tmp_path, body)))) as run:
        assert run.end() == signal.SIGSEGV
        named(run.text, "Segmentation fault", "in bad")


# ---- torchrun -------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn
def test_ranks_end_with_a_launcher_that_was_killed(tmp_path):
    """kill -9 leaves torchrun no time to end them."""
    body = "utils.watch_process()\nprint('watched', flush=True)\ntime.sleep(600)\n"
    with running(torchrun(tmp_path / "log", str(script(tmp_path, body)))) as run:
        run.until(lambda: run.text.count("watched") == 2)
        ranks = run.children()
        run.members[0].kill()
        _, left = psutil.wait_procs(ranks, timeout=10)
        for rank in left:
            rank.kill()
        assert len(ranks) >= 4 and not left  # each with its watchdog
        named(run.text, "[rank 0] stopped by SIGTERM", "[rank 1] stopped by SIGTERM", "or it was killed")


# ---- signal, and processes of their own -----------------------------------------------------------------------------


def call_tool(function: str, seconds: float = 10.0, count: int = 1, **arguments) -> list[tuple[str, dict]]:
    tool = from_function(load_function(f"{HOSTILE}:{function}"))
    toolbox = Toolbox({tool.name: tool}, TrainConfig(tool_timeout=seconds))
    calls = [Call(tool.name, arguments) for _ in range(count)]
    messages, events = asyncio.run(toolbox.run(calls, toolbox.tools))
    return [(message["content"], event) for message, event in zip(messages, events, strict=True)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_function_is_not_late_because_the_caller_is(asynchronous):
    """--generator hf samples on the event loop that waits for rewards, tools and environments, longer than a limit."""

    async def quick():
        return "in time"

    async def play():
        call = asyncio.create_task(limits.run_limited(quick if asynchronous else lambda: "in time", {}, 0.5))
        await asyncio.sleep(0)  # it is called
        time.sleep(1.0)
        return await call

    assert asyncio.run(play()) == ("in time", None)


def test_a_tool_with_an_alarm_works(caplog):
    """As in scripts written for the main thread: moved to a process at its first call, which is said once."""
    ((first, event),) = call_tool("lookup", name="gene")
    assert '"gene"' in first and not event["failed"] and str(os.getpid()) not in first
    assert "uses `signal`" in caplog.text and "lookup.own_process = True" in caplog.text
    caplog.clear()
    ((second, _), *_) = call_tool("lookup", name="gene", count=3)
    assert "gene" in second and "signal" not in caplog.text
    ((late, event),) = call_tool("lookup", name="gene", wait=30.0)
    assert "TimeoutError: took over 1 s" in late and event["failed"]  # its own limit


def test_a_reward_that_swallows_the_error_of_its_alarm_scores_rightly(caplog):
    given = run([trajectory("four"), trajectory("seven..")], load_function(f"{HOSTILE}:swallows"))
    assert [t.info["reward"] for t in given] == [4.0, 7.0]
    assert "swallows.own_process = True" in caplog.text


def test_what_cannot_move_to_a_process_says_why():
    def closure(completions):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [1.0]

    with pytest.raises(Exception, match="main thread.*own_process"):
        run([trajectory()], {"closure": closure})


def test_a_process_of_its_own_runs_the_function_in_a_main_thread_and_is_killed_when_late():
    answers = call_tool("alone", text="a", count=6)
    results = [eval(content.replace("true", "True")) for content, _ in answers]
    pids = {result["pid"] for result in results}
    assert len(pids) <= 2 and os.getpid() not in pids and all(result["main"] for result in results)
    before = threading.active_count()
    start = time.monotonic()
    late = call_tool("alone", seconds=1.5, text="a", then="stuck", count=2)
    assert time.monotonic() - start < 20
    assert all("gave no answer within 1.5 s" in content for content, _ in late)
    time.sleep(0.5)
    assert threading.active_count() <= before + 1
    assert not [p for p in psutil.Process().children() if p.cpu_percent(0.2) > 50], "nothing goes on computing"
    ((content, _),) = call_tool("alone", seconds=1.5, text="again")
    assert "again" in content, "the pool goes on"


def test_errors_and_endings_of_a_process_of_its_own():
    ((raised, event),) = call_tool("alone", text="a", then="raise")
    assert raised == "Error: KeyError: 'no such column'" and event["failed"]
    ((left, event),) = call_tool("alone", text="a", then="leave")
    assert "alone" in left and "ended" in left and event["failed"]


def test_a_reward_in_a_process_of_its_own_that_is_late_costs_its_call_only(tmp_path):
    how = ["--reward_funcs", f"{HOSTILE}:stuck_alone", "length", "--max_steps", "1"]
    with running(trainer(tmp_path / "log", *flags(tmp_path, *how))) as run:
        assert run.end() == 0, run.text[-3000:]
        named(run.text, "'stuck_alone' took over --reward_timeout=2 s")
        assert not run.children()


@pytest.mark.parametrize("how", ["multiprocessing", "session", "orphan"])
@pytest.mark.parametrize("then", ["wait", "leave", "exec"])
def test_what_a_process_of_its_own_has_started_ends_with_it(how, then, tmp_path):
    """Late, gone or become another program; in its group, in a session of its own, or without a parent."""
    start = time.monotonic()
    ((content, event),) = call_tool("family", seconds=2.5, how=how, at=str(tmp_path / "pids"), then=then)
    assert event["failed"] and time.monotonic() - start < 40  # its start counts; the waits are longer
    assert ("no answer within 2.5 s" if then == "wait" else "ended the process it ran in") in content
    (pid,) = map(int, (tmp_path / "pids").read_text(encoding="utf-8").split())
    deadline = time.monotonic() + 3
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_a_child_that_comes_back_out_of_a_function_does_not_answer_for_it(tmp_path):
    answers = [call_tool("family", how="fork", at=str(tmp_path / "pids"))[0][0] for _ in range(4)]
    assert answers == ["done"] * 4


def test_what_functions_have_started_ends_with_a_killed_trainer(tmp_path):
    body = f"""
from safety.workers import WorkerPool
from tests.hostile import family
pool = WorkerPool("{HOSTILE}:family", 1, 60)
print(pool.call(family, dict(how="orphan", at={str(tmp_path / "pids")!r})), flush=True)
time.sleep(100)
"""
    with running(Process([sys.executable, str(script(tmp_path, body))], tmp_path / "log")) as run:
        run.until(lambda: "done" in run.text)
        pids = [int((tmp_path / "pids").read_text(encoding="utf-8")), *(child.pid for child in run.children())]
        assert len(pids) >= 3  # the orphan, the worker and its keeper
        run.members[0].kill()
        deadline = time.monotonic() + 5
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(psutil.pid_exists, pids))


def test_a_function_that_becomes_another_program_is_an_error(tmp_path):
    body = f"""
utils.watch_process()
from plugins import load_function
for name in ("executes", "executes_by_posix"):
    reward = load_function("{HOSTILE}:" + name)
    print(name, asyncio.run(limits.run_limited(reward, {{"completions": ["abc"]}}, 60)), flush=True)
import subprocess
print(subprocess.check_output(["echo", "others may"]))
utils.end_process(7)
"""
    with running(trainer(tmp_path / "log", script=str(script(tmp_path, body)))) as run:
        assert run.end(90) == 7, run.text
        named(run.text, "executes (None, RuntimeError(", "executes_by_posix (None, Runtime", "/bin/true", "others may")


# ---- values that are code -------------------------------------------------------------------------------------------


class Hangs:
    """Every way of reading it takes longer than anyone waits."""

    def wait(self, *_):
        time.sleep(4)
        return 0

    __float__ = __int__ = __index__ = __bool__ = __len__ = __iter__ = __repr__ = __str__ = __eq__ = __hash__ = wait
    items = keys = tolist = item = __getitem__ = wait


class Leaves:
    def leave(self, *_):
        raise SystemExit("gone")

    __float__ = __str__ = __repr__ = __iter__ = __len__ = leave


class Endless(list):
    def __iter__(self):
        while True:
            yield 1.0


class EndlessDict(dict):
    def items(self):
        while True:
            yield "a", 1.0


class Shy(Exception):
    def __str__(self):
        time.sleep(4)

    __repr__ = __str__


def raises_shy():
    raise Shy


async def as_async(make):
    return make()


VALUES = {
    "hangs": Hangs,
    "hangs in a list": lambda: [Hangs()],
    "hangs in a dict": lambda: {"reward": Hangs()},
    "an error that hangs": raises_shy,
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "read", [values.numbers, values.plain, values.step, values.number, values.info_of, values.state]
)
@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_hangs_is_late(kind, read, asynchronous):
    """And nobody else: the event loop goes on meanwhile."""
    made = (lambda: as_async(VALUES[kind])) if asynchronous else VALUES[kind]

    async def both():
        call = asyncio.create_task(limits.run_limited(made, {}, 0.3, read))
        lags = []
        while not call.done():
            start = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - start)
        return await call, max(lags)

    start = time.monotonic()
    outcome, lag = asyncio.run(both())
    assert time.monotonic() - start < 2.5 and lag < 1
    if outcome is not None:  # refused before it was asked for anything: then with words
        assert isinstance(outcome[1], Exception) and str(outcome[1])


def test_values_without_end_have_an_end():
    for made, read in [(Endless, values.numbers), (lambda: [EndlessDict()], values.numbers)]:
        _, error = asyncio.run(limits.run_limited(made, {}, 5, read))
        assert isinstance(error, values.UnusableResult), error
    assert asyncio.run(limits.run_limited(lambda: {"a": Endless([1]), "b": EndlessDict(x=2)}, {}, 5)) == (
        {"a": [1], "b": {"x": 2}},
        None,
    )
    for much in (lambda: [0] * (values.MOST_VALUES + 1), lambda: ["x" * 2**20] * 100, lambda: torch.zeros(2**29)):
        _, error = asyncio.run(limits.run_limited(much, {}, 20))
        assert isinstance(error, values.UnusableResult) and "returned" in str(error), error


def test_leaving_while_a_value_is_read_is_an_error():
    for made in (lambda: [Leaves()], lambda: [1.0, {"reward": Leaves()}]):
        _, error = asyncio.run(limits.run_limited(made, {}, 5, values.numbers))
        assert isinstance(error, SystemExit)
    assert asyncio.run(limits.run_limited(Leaves, {}, 5)) == ("<Leaves>", None)


def test_plain_data_is_of_pythons_own_types():
    class Text(str):
        def __str__(self):
            raise KeyError

        __len__ = __hash__ = __str__

    class Number(float):
        __float__ = __repr__ = lambda self: 1 / 0

    picture, tensor = PIL.Image.new("RGB", (2, 2)), torch.ones(2)
    given = [
        Text("a"),
        Number(1.5),
        True,
        numpy.float32(0.5),
        numpy.int64(3),
        torch.tensor(2.0),
        Counter(a=1),
        Path("x"),
    ]
    plain = values.plain([*given, (1, {2}), picture, tensor, None, numpy.array([1, {"a": Number(2)}], dtype=object)])
    assert plain == ["a", 1.5, True, 0.5, 3, 2.0, {"a": 1}, Path("x"), (1, {2}), picture, tensor, None, [1, {"a": 2.0}]]
    assert [type(value) for value in plain[:8]] == [str, float, bool, float, int, float, dict, type(Path())]
    knot: list = [1]
    knot.append(knot)
    assert values.plain(knot) == [1, ["..."]]
    error = values.plain_error(Shy2(Text("x")))
    assert type(error).__name__ == "Shy2" and str(error) == "what it says"


class Shy2(ValueError):
    def __str__(self):
        return "what it says"


def test_defaults_of_torch_are_put_back(caplog):
    def careless():
        torch.set_default_dtype(torch.float64)
        return 1

    assert asyncio.run(limits.run_limited(careless, {}, 5)) == (1, None)
    assert torch.get_default_dtype() is torch.float32
    assert "careless" in caplog.text and "set_default_dtype" in caplog.text


def test_a_default_of_torch_stays_while_the_call_that_set_it_runs(caplog):
    is_set, go_on = threading.Event(), threading.Event()

    def builds():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        is_set.set()
        go_on.wait(10)
        layer = torch.nn.Linear(1, 1)
        torch.set_default_dtype(before)
        return str(layer.weight.dtype)

    async def both():
        first = asyncio.create_task(limits.run_limited(builds, {}, 20))
        await asyncio.to_thread(is_set.wait, 10)
        await limits.run_limited(lambda: 1, {}, 20)
        go_on.set()
        return await first

    assert asyncio.run(both()) == ("torch.float64", None)
    assert torch.get_default_dtype() is torch.float32 and "set_default_dtype" not in caplog.text


def test_pictures_in_results_stay_what_they_are():
    for source, kept in [(Path("a.png"), Path("a.png")), (bytearray(b"x"), b"x"), (memoryview(b"xy"), b"xy")]:
        made = [{"type": "image", "image": source}]
        (found,), error = asyncio.run(limits.run_limited(lambda made=made: made, {}, 5))
        assert error is None and found["image"] == kept and type(found["image"]) is type(kept)
    assert values.plain(Path("a.png")) == "a.png"


def test_a_state_is_plain_data():
    class Place:
        pass

    assert values.state((1, "a", frozenset({2.0}), None)) == (1, "a", frozenset({2.0}), None)
    for wrong in (Place(), (1, Place()), torch.ones(2)):
        with pytest.raises(values.UnusableResult, match="plain data instead, such as a tuple"):
            values.state(wrong)
    with pytest.raises(values.UnusableResult, match="hashable"):
        values.state([1])


def test_the_watchdog_suspects_a_rollout_only_if_no_other_call_runs(monkeypatch):
    monkeypatch.setattr(watchdog, "state", lambda process, thread: "S")
    rollout = dict(name="rollout", thread=2, rollout=True, given_up=False)
    late = dict(name="late", thread=3, rollout=False, given_up=False)
    assert watchdog.suspected({1: rollout, 2: late}, 1) == [late]
    assert watchdog.suspected({1: rollout}, 1) == [rollout]


# ---- the event loop of async functions ------------------------------------------------------------------------------


@pytest.fixture
def block():
    """A function that blocks until the test is over: what still runs then would count in the next one."""
    over = threading.Event()
    yield lambda: over.wait(30)
    over.set()
    while any("blocks" in call.name for call in list(limits.RUNNING.values())):
        time.sleep(0.01)


def test_what_has_not_begun_leaves_a_blocked_loop(block):
    """Nobody is late but those that block, and what stood before them in the queue has its result."""

    async def blocks():
        block()

    async def answers():
        return "fine"

    async def calls():
        chosen = [answers, blocks, answers, answers, blocks, answers]
        return await asyncio.gather(*(limits.run_limited(function, {}, 1.8) for function in chosen))

    fine = ("fine", None)
    assert asyncio.run(calls()) == [fine, None, fine, fine, None, fine]


def test_a_loop_that_was_blocked_ends_with_what_runs_there():
    """Each keeps a thread and three descriptors. Its open connections are closed: else a client that calls share, which
    is used on the next loop, would take them for usable ones."""
    loops, writers, over, tasks = [], [], threading.Event(), []

    async def blocks():
        loops.append(asyncio.get_running_loop())
        time.sleep(0.2)

    async def goes_on():
        loops.append(asyncio.get_running_loop())
        listener = await asyncio.start_server(lambda *given: None, "127.0.0.1", 0)
        writers.append((await asyncio.open_connection(*listener.sockets[0].getsockname()))[1])
        tasks.append(asyncio.create_task(asyncio.to_thread(over.wait, 30)))

    async def calls():
        functions = [goes_on, *[blocks] * 8]
        return await asyncio.gather(*(limits.run_limited(function, {}, 0.6) for function in functions))

    try:
        asyncio.run(calls())
        others = [loop for loop in dict.fromkeys(loops) if loop not in limits._loops and loop is not loops[0]]
        deadline = time.monotonic() + 10
        while not all(loop.is_closed() for loop in others) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert others and all(loop.is_closed() for loop in others) and not loops[0].is_closed()
    finally:
        over.set()
    while not loops[0].is_closed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loops[0].is_closed() and tasks[0].done() and writers[0].is_closing()
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count("async calls") <= 1, threads


def test_a_tool_that_blocks_its_loop_does_not_block_its_environment(block):
    async def blocks() -> str:
        """Blocks."""
        block()

    tool = from_function(blocks)
    cfg = TrainConfig(tool_timeout=1)
    environment = ToolEnvironment(Toolbox({tool.name: tool}, cfg), cfg)
    environment.tools = {tool.name: tool}
    text = '<tool_call>{"name": "blocks", "arguments": {}}</tool_call>'
    start = time.monotonic()
    step = limits.run_limited(environment.step, {"text": text}, environment.step_timeout)
    (messages, *_), error = asyncio.run(step)
    assert error is None and "no answer within 1 s" in messages[0]["content"] and time.monotonic() - start < 5


# ---- calls that were given up ---------------------------------------------------------------------------------------


def test_calls_given_up_are_counted_named_and_bounded(monkeypatch, caplog):
    monkeypatch.setattr(limits, "MAX_GIVEN_UP", 12)
    monkeypatch.setattr(limits, "GIVEN_UP_SECONDS", 0.2)
    monkeypatch.setattr(limits, "RUNNING", {})  # without what other tests left
    monkeypatch.setattr(limits, "_warn_at", 4)
    busy = load_function(f"{HOSTILE}:busy")

    async def calls(count):
        for _ in range(count):
            await limits.run_limited(busy, {"completions": ["a"]}, 0.05)

    with caplog.at_level(logging.WARNING):
        asyncio.run(calls(5))
    assert "4 calls" in caplog.text and "busy (hostile.py:" in caplog.text
    with pytest.raises(RuntimeError, match=r"12 calls.*busy \(hostile.py:\d+\) x 12.*own_process"):
        asyncio.run(calls(30))


def test_tools_that_never_end_end_the_run(monkeypatch, block):
    """They are called within a step of the environment of tools, whose errors cost their trajectory alone."""

    def blocks() -> str:
        """Blocks."""
        block()

    monkeypatch.setattr(limits, "MAX_GIVEN_UP", 1)
    monkeypatch.setattr(limits, "GIVEN_UP_SECONDS", -1.0)
    tool, cfg = from_function(blocks), TrainConfig(tool_timeout=0.1)
    environment = ToolEnvironment(Toolbox({tool.name: tool}, cfg), cfg)
    environment.tools = {tool.name: tool}
    text = '<tool_call>{"name": "blocks", "arguments": {}}</tool_call>'
    with pytest.raises(limits.TooManyGivenUp):
        asyncio.run(call_environment(environment, "step", {"prompt": "?"}, cfg, text=text))
