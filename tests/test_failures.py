"""Nothing hangs: whatever is wrong or dies, the run ends within its limit and says what happened and what to do."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from live import EVEN, SMALL, Process, running, torchrun, trainer
from server_fixture import TINY, free_port, make_tiny, start_server

LIMIT = 60  # seconds from a failure to the end of the run; starting the script comes on top on a busy machine
SMALL_SERVED = SMALL.replace("--generator hf", "--generator vllm")
REWARDS = f"""
import threading
{EVEN}
def raises(completions, **_):
    raise KeyError("no such column")

def too_few(completions, **_):
    return [1.0]

def never(completions, **_):
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("failures")
    (path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def doomed():
    """A server that the last test kills. It loads while the first ones run; whoever needs it waits for it."""
    address = ("--port", str(free_port()), "--token", "secret")
    server = start_server(make_tiny(), *address, "--dtype", "float32", "--max-model-len", "512")
    server.url, server.token, server.again = f"http://127.0.0.1:{address[1]}", "secret", address
    yield server
    kill_server(server)


def kill_server(server):
    """kill -9, with its engine and workers: a machine that is switched off."""
    family = family_of(server)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait()
    psutil.wait_procs(family, timeout=10)


def family_of(server) -> list[psutil.Process]:
    if server.process.poll() is not None:  # its number may be another process's by now
        return []
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def run_all(cases: dict[str, str], folder: Path) -> dict[str, SimpleNamespace]:
    """Run a trainer for each {name: flags}, two at a time, as the imports are most of it. -> status, seconds, text

    seconds: beyond those of the quickest, which did little but importing.
    """

    def one(name: str) -> SimpleNamespace:
        env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"} if name == "port taken" else {}
        start = time.monotonic()
        with running(trainer(folder / name / "log", *cases[name].split(), **env, MASTER_PORT=str(taken_port))) as run:
            status = run.end(3 * LIMIT)  # measured, so that the test says by how much
            return SimpleNamespace(status=status, seconds=time.monotonic() - start, text=run.text)

    with socket.create_server(("0.0.0.0", 0)) as taken, ThreadPoolExecutor(2) as pool:
        taken_port = taken.getsockname()[1]
        endings = dict(zip(cases, pool.map(one, cases), strict=True))
    quickest = min(ending.seconds for ending in endings.values())
    for name, ending in endings.items():
        print(f"{name}: {ending.seconds:.1f} s in all")
        ending.seconds -= quickest
    return endings


def assert_ended(ending: SimpleNamespace, *words: str, status: int = 1):
    print(f"ended with {ending.status} after {ending.seconds:.1f} s")
    assert ending.status == status and ending.seconds < LIMIT, (ending.status, ending.seconds, ending.text[-3000:])
    for word in words:
        assert word in ending.text[-3000:], (word, ending.text[-3000:])


# ---- without a server ------------------------------------------------------------------------------------------------

REFUSED = ("unknown model", "not a model", "folder taken", "nothing to resume")  # to try again would not help
WITHOUT_SERVER = {
    "unknown model": ("--model_id models/none", ["--model_id=models/none: no such folder", "Give the folder"]),
    "not a model": ("--model_id tests", ["--model_id=tests: the folder holds no config.json"]),
    "folder taken": ("--run_name taken", ["taken holds a run already", "another name"]),
    "nothing to resume": ("--run_name absent --resume", ["no complete checkpoint in", "Is it the right --output_dir"]),
    "port taken": ("", ["EADDRINUSE", "Another run holds the port: torchrun --standalone"]),
    "no server": (
        "--generator vllm --server_timeout 5 --server_urls {closed}",
        ["was not ready within 5 s", "{closed}"],
    ),
    "reward raises": (
        "--reward_funcs {rewards}:raises",
        ["reward function 'raises' raised KeyError: 'no such column'", "row: {{", "completion 0:"],
    ),
    "reward returns too few": (
        "--reward_funcs {rewards}:too_few",
        ["'too_few' returned 1 values for 4 completions; return a list", "row: {{", "completion 0:"],
    ),
}


@pytest.fixture(scope="module")
def endings(folder):
    places = {"rewards": folder / "rewards.py", "closed": f"http://127.0.0.1:{free_port()}"}
    (folder / "taken").mkdir()
    (folder / "taken" / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    common = f"{SMALL} --reward_funcs length --max_steps 2 --output_dir {folder} "
    flags = {name: common + more.format(**places) for name, (more, _) in WITHOUT_SERVER.items()}
    flags["reward never returns"] = common + f"--reward_funcs {places['rewards']}:never length --reward_timeout 1"
    return run_all(flags, folder) | places


@pytest.mark.parametrize("name", WITHOUT_SERVER)
def test_ends_with_cause_and_remedy(endings, name):
    words = [word.format(closed=endings["closed"]) for word in WITHOUT_SERVER[name][1]]
    assert_ended(endings[name], *words, status=2 if name in REFUSED else 1)


def test_a_reward_that_never_returns_is_counted_and_the_run_goes_on(endings, folder):
    ending = endings["reward never returns"]
    assert ending.status == 0 and ending.seconds < LIMIT, ending.text[-3000:]
    assert "'never' took over --reward_timeout=1 s" in ending.text
    (path,) = folder.glob("tiny-grpo-*/checkpoints/step_2/../../metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [step["reward_timeouts"] for step in steps] == [16, 16]
    assert all(step["rewards/never/mean"] == 0 and step["rewards/length/mean"] != 0 for step in steps)


@pytest.mark.in_turn
def test_one_of_two_ranks_is_killed(folder):
    flags = f"{SMALL} --reward_funcs length --max_steps 500 --output_dir {folder} --run_name ranks"
    with running(torchrun(folder / "ranks.log", "train_grpo.py", *flags.split())) as run:
        run.until(lambda: "step 2/" in run.text)
        ranks = [p for p in run.children() if "train_grpo.py" in p.cmdline() and "LOCAL_RANK" in p.environ()]
        victim = next(p for p in ranks if p.environ()["RANK"] == "1")
        start = time.monotonic()
        victim.kill()
        status = run.end()
        ending = SimpleNamespace(status=status, seconds=time.monotonic() - start, text=run.text)
        assert not [p for p in ranks if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    words = ["Signal 9 (SIGKILL)", "[rank 0]", "Continue with --resume --run_name NAME"]
    ending.text = ending.text[ending.text.index("[rank 0]") :][:1000] + ending.text[-2000:]
    assert_ended(ending, *words)


# ---- with a server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_model(folder):
    """A model of another shape on the same tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(TINY, hidden_size=64, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "other")
    return folder / "other"


def test_what_does_not_fit_the_server_is_said_before_training(doomed, folder, other_model):
    server = doomed.wait()
    served = f"{SMALL_SERVED} --reward_funcs length --max_steps 2 --server_urls {server.url} --output_dir {folder} "
    flags = {
        "wrong token": served + "--server_token wrong",
        "wrong model": served + f"--server_token {server.token} --model_id {other_model}",
        "window": served + f"--server_token {server.token} --max_completion_length 500",
    }
    endings = run_all(flags, folder)
    assert_ended(endings["wrong token"], server.url, "refuses the token", "VLLM_SERVER_TOKEN")
    assert_ended(endings["wrong model"], f"{server.url} serves", "'hidden_size': 64", "--model_id as its --model")
    assert_ended(endings["window"], "window of 512 tokens", "need up to 564", "--max-model-len 564")


def served_flags(server, folder, name: str) -> list[str]:
    """Long completions, so that generating is nearly all of a step; several buckets a push; a checkpoint every step."""
    flags = f"{SMALL_SERVED} --reward_funcs {folder}/rewards.py:even --max_steps 50 --save_steps 1 --run_name {name} "
    flags += "--max_completion_length 400 --min_completion_length 400 --push_bucket_mb 1 "
    flags += "--prompts_per_step 1 --num_generations 2 "
    return [*flags.split(), "--server_urls", server.url, "--server_token", server.token, "--output_dir", str(folder)]


def wait_until_generating(server, run: Process, folder: Path, name: str, step: int):
    """There is a checkpoint of `step`, and a push has just ended: generation follows, which is most of a step."""
    run.until(lambda: (folder / name / "checkpoints" / f"step_{step}").exists(), limit=180)
    version = version_of(server)
    run.until(lambda: version_of(server) > version, limit=60)
    time.sleep(0.5)


def version_of(server) -> int:
    return server.request("GET", "/server_info").json()["policy_version"]


def instance_of(server) -> str:
    return server.request("POST", "/generate", json={"prompt_ids": [1], "max_tokens": 1}).json()["instance"]


def ending_of(run: Process, start: float) -> SimpleNamespace:
    return SimpleNamespace(status=run.end(3 * LIMIT), seconds=time.monotonic() - start, text=run.text)


@pytest.mark.in_turn
def test_a_frozen_server(doomed, folder):
    """It keeps its connections open and answers nothing, as a machine does that hangs."""
    server = doomed.wait()
    flags = [*served_flags(server, folder, "frozen"), "--server_timeout", "5"]
    with running(trainer(folder / "frozen.log", *flags)) as run:
        wait_until_generating(server, run, folder, "frozen", 1)
        family = family_of(server)
        try:
            for process in family:
                process.suspend()
            ending = ending_of(run, time.monotonic())
        finally:
            for process in family:
                process.resume()
    assert_ended(ending, f"{server.url} gave no answer to GET /health within 5 s", "Look at its terminal")


@pytest.mark.in_turn
def test_a_server_dies_comes_back_and_dies_again(doomed, folder):
    """Killed in mid-generation; started again, a resumed run takes it up; then killed in mid-push."""
    flags = served_flags(doomed, folder, "story")
    metrics = folder / "story" / "metrics.jsonl"
    doomed.wait()
    with running(trainer(folder / "story_1.log", *flags)) as run:
        wait_until_generating(doomed, run, folder, "story", 1)
        name = instance_of(doomed)
        start = time.monotonic()
        kill_server(doomed)
        ending = ending_of(run, start)
    assert_ended(ending, f"{doomed.url} is gone", "POST /generate failed", "start it again", "resume the run")
    steps = len(metrics.read_text(encoding="utf-8").splitlines())

    again = start_server(TINY, *doomed.again, "--dtype", "float32", "--max-model-len", "512")
    doomed.process, doomed.log = again.process, again.log  # so that the fixture ends this one
    doomed.wait()
    assert instance_of(doomed) != name  # by which a client knows, whatever version its weights have
    held = folder / "push"
    more = (str(held), "3", *flags, "--resume")
    with running(trainer(folder / "story_2.log", *more, script="tests/slow_push.py")) as run:
        run.until(held.with_suffix(".reached").exists, limit=180)
        family = family_of(doomed)
        for process in family[1:]:  # the worker takes nothing in any more: the bucket is stuck on its way ...
            process.suspend()
        held.with_suffix(".go").touch()
        time.sleep(1)
        start = time.monotonic()
        kill_server(doomed)  # ... when the server dies
        ending = ending_of(run, start)
    assert_ended(ending, f"{doomed.url} is gone", "start it again", "resume the run")
    lines = [json.loads(line)["step"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    # The first push brought the restarted server up to date. The last checkpoint may have been under way when it died.
    assert lines in (list(range(1, steps + 2)), list(range(1, steps + 1)))
