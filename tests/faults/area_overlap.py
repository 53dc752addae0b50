"""train_async.py: what goes wrong while the server samples ahead of the trainer."""

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
from case import BASE, ROOT, Ended, Seen, alive, goes_on, named, wait_until
from live import SMALL
from server_fixture import TINY, start_server

LONG = "--max_completion_length 300 --min_completion_length 300 --prompts_per_step 2 --num_generations 2 "
MANY = "--max_completion_length 400 --min_completion_length 400 --prompts_per_step 64 --num_generations 4 "


def _ahead(at, flags: str, patch: str = "", server=None, **how):
    """train_async.py on a live server, after lines of the fault's own."""
    server = server or at.server
    code = f"import runpy, sys, time\nfrom pathlib import Path\nsys.path.insert(0, {str(ROOT)!r})\n{patch}\n"
    code += f"sys.argv[0] = {str(ROOT / 'train_async.py')!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    script = str(at.file(f"ahead_{len(at.started)}.py", code))
    flags = f"--generator vllm --server_urls {server.url} --max_staleness 2 --logprob_diff_limit 9 {flags}"
    return at.start(flags, script=script, VLLM_SERVER_TOKEN=server.token, **how)


def _held(file: Path, number: int) -> str:
    """A patch: push `number`, 1 before the first step, stops after its first bucket until FILE.go is there."""
    return f"""
from vllm_client import VLLMClient
begin, send, seen = VLLMClient.begin_push, VLLMClient.send_bucket, [0]
def begin_push(self):
    seen[0] += 1
    begin(self)
def send_bucket(self, named):
    send(self, named)
    if seen[0] == {number}:
        Path({str(file)!r} + ".reached").touch()
        while not Path({str(file)!r} + ".go").exists():
            time.sleep(0.01)
VLLMClient.begin_push, VLLMClient.send_bucket = begin_push, send_bucket
"""


def _within(end: Ended, bound: int, steps: int) -> str | None:
    """What is wrong with the steps of a run that went on."""
    numbers = [step["step"] for step in end.steps]
    late = [step["staleness/max"] for step in end.steps if step["staleness/max"] > bound]
    return f"steps {numbers}, staleness {late}" if numbers != list(range(1, steps + 1)) or late else None


def server_killed_in_mid_push(at, doomed, limit=150):
    """kill -9 of the server in mid-push with sequences under way; a new one, --resume -> named: then each step is there
    once"""
    held, flags = at.folder / "held", LONG + "--max_steps 6 --save_steps 1 --push_bucket_mb 1 "
    run = _ahead(at, flags, _held(held, 3))
    if not wait_until(Path(f"{held}.reached").exists, 60):
        return Seen("broken", run.text[-300:])
    for process in at.family():
        process.kill()
    Path(f"{held}.go").touch()
    seen = named(at.ended(run, 30), "is gone", "start it again|resume")
    if seen.verdict != "named":
        return seen
    again = start_server(TINY, "--dtype", "float32", "--max-model-len", "512")
    at.stack.callback(shutil.rmtree, again.log.parent)
    at.stack.callback(again.stop)
    end = at.ended(_ahead(at, flags + "--resume ", server=again.wait()))
    wrong = goes_on(end, _within(end, 2, 6))
    return seen if wrong.verdict == "survived" else wrong


def server_killed(at, doomed):
    """kill -9 of the server while it samples ahead -> named"""
    run = _ahead(at, LONG + "--max_steps 50 ")
    if not at.reached(run, "step 2/"):
        return Seen("broken", run.text[-300:])
    for process in at.family():
        process.kill()
    return named(at.ended(run, 30), "is gone", "start it again|resume")


def rank_killed(at, server):
    """kill -9 of one of two ranks while the server samples ahead for both -> named: and no rank lives on"""
    flags = f"{SMALL} {BASE}--generator vllm --server_urls {server.url} --output_dir {at.runs} --run_name run "
    flags += f"--max_staleness 2 --logprob_diff_limit 9 {LONG}--max_steps 50"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = at.command(*launch, "train_async.py", *flags.split())
    if not at.reached(run, "step 2/"):
        return Seen("broken", run.text[-300:])
    ranks = [p for p in run.children() if "train_async.py" in p.cmdline() and "LOCAL_RANK" in p.environ()]
    next(p for p in ranks if p.environ()["RANK"] == "1").kill()
    end = at.ended(run, 40)
    left = [p for p in ranks if alive(p)]
    return Seen("leaked", f"{len(left)} ranks live on") if left else named(end, "SIGKILL|Signal 9", "--resume")


def reward_raises(at, server):
    """a reward raises for a step that is sampled ahead -> named: at once, with its row"""
    rewards = at.file("fails.py", "calls = []\ndef fails(completions, **_):\n    calls.append(1)\n"
                      "    if len(calls) == 9:\n        raise KeyError('no such column')\n"
                      "    return [float(len(c)) for c in completions]\n")  # fmt: skip
    run = _ahead(at, f"--max_steps 50 --reward_funcs {rewards}:fails ")
    return named(at.ended(run, 40), "reward function 'fails' raised KeyError", "row:")


def environment_never_answers(at, server):
    """an environment's reset never returns for one trajectory sampled ahead -> survived: left out, within its limit"""
    env = at.file("stuck.py", """
import asyncio
from envs import Environment
class Stuck(Environment):
    count = 0
    async def reset(self, row, seed):
        Stuck.count += 1
        if Stuck.count == 30:
            await asyncio.Event().wait()
        return [{"role": "user", "content": "go"}]
    def step(self, text):
        return [], 1.0, True, {}
""")  # fmt: skip
    flags = (
        f"--env {env}:Stuck --reward_funcs environment --max_turns 2 --max_turn_length 6 --max_completion_length 100 "
    )
    end = at.ended(_ahead(at, flags + "--tool_timeout 2 --max_steps 5 --tokenization_check off "))
    failed = sum(step["rollout/failed"] for step in end.steps)
    return goes_on(end, _within(end, 2, 5) or (None if failed == 1 else f"{failed:g} trajectories left out"))


def pushes_slower_than_generation(at, server):
    """each push takes 1.5 s, a step's generation a fraction of that -> survived: within the bound"""
    patch = "from vllm_client import VLLMClient\nfinish = VLLMClient.finish_push\n"
    patch += "VLLMClient.finish_push = lambda self, version: (time.sleep(1.5), finish(self, version))\n"
    end = at.ended(_ahead(at, "--max_steps 5 ", patch))
    return goes_on(end, _within(end, 2, 5))


def _many_under_way(at, end_it, status: str, limit: float) -> Seen:
    run = _ahead(at, MANY + "--max_staleness 1 --max_steps 50 ")
    if not at.reached(run, "before the first step|waiting up to"):
        return Seen("broken", run.text[-300:])
    wait_until(lambda: (at.runs / "run" / "config.json").exists(), 30)
    time.sleep(3)  # the second step's requests are there, too: 128 with 4 samples each
    start = time.monotonic()
    end_it(run)
    end = at.ended(run, limit)
    seconds = time.monotonic() - start
    if end.status is None or not re.search(status, f"status {end.status} {end.text}", re.DOTALL):
        return Seen("hung" if end.status is None else "ended", f"{end.status} after {seconds:.1f} s: {end.tail}")
    start = time.monotonic()
    wrong = at.generates()  # behind all that is still sampled, if anything is
    freed = time.monotonic() - start
    if wrong or freed > 5:
        return Seen("leaked", wrong or f"the server answered after {freed:.1f} s: it went on sampling for nobody")
    return Seen("survived", f"ended after {seconds:.1f} s, the server free after {freed:.1f} s more")


def interrupted_with_500_under_way(at, server):
    """Ctrl-C with 512 sequences under way -> survived: it ends within 10 s, and the server is free for others"""
    interrupt = lambda run: os.kill(run.members[0].pid, signal.SIGINT)  # noqa: E731
    return _many_under_way(at, interrupt, "status 130 .*interrupted", 10)


def killed_with_500_under_way(at, server):
    """kill -9 of the trainer with 512 sequences under way -> survived: the server is free for others"""
    return _many_under_way(at, lambda run: psutil.Process(run.members[0].pid).kill(), "status 9", 10)
