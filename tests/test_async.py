"""train_async.py: what is sampled ahead, within its bound; without overlap the same as train_grpo.py."""

import asyncio
import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live import EVEN, ROOT, SMALL, running, trainer

import train_async
from config import ConfigError
from runlog.reading import read_metrics
from train_async import Ahead, TrainConfig


def steps_of(folder, script, flags, run, **how):
    (folder / "even.py").write_text(EVEN, encoding="utf-8")
    flags = f"{SMALL} --reward_funcs {folder}/even.py:even --max_steps 4 --output_dir {folder} --run_name {run} {flags}"
    with running(trainer(folder / f"{run}.log", *flags.split(), script=script, **how)) as process:
        assert process.end() == 0, process.text[-3000:]
    ours = ("time/", "async/", "staleness/")
    lines = [line for line in read_metrics(folder / run) if "reward" in line]
    return [{k: v for k, v in line.items() if not k.startswith(ours)} for line in lines], lines


@pytest.mark.parametrize("ranks", [2])
def test_without_overlap_it_is_train_grpo(tmp_path, ranks):
    both = [
        steps_of(tmp_path, script, flags, script[:-3], ranks=ranks)[0]
        for script, flags in (("train_grpo.py", ""), ("train_async.py", "--max_staleness 0"))
    ]
    assert both[0] == both[1] and len(both[0]) == 4


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(max_staleness=1, generator="hf"), "nothing can overlap"),
        (dict(max_staleness=-1), "give 0"),
        (dict(max_staleness=1, push_steps=4), "--max_staleness 3 or more"),
    ],
)
def test_settings_that_cannot_overlap(flags, message):
    with pytest.raises(ConfigError, match=message):
        train_async.check(TrainConfig(**flags))


# ---- the order of events --------------------------------------------------------------------------------------------


class Fake:
    """Runs without model and server: a step's trajectories know the weights in the generator when they began and ended,
    and take what time the test says."""

    def __init__(self, latencies, fails=None):
        self.version, self.latencies, self.fails, self.begun = 0, latencies, fails, []

    async def sample_step(self, rows, sampler, step, generator, functions, cfg, versions):
        self.begun.append(step)
        first = self.version
        await asyncio.sleep(self.latencies[step % len(self.latencies)])
        if step == self.fails:
            raise RuntimeError("a reward raised")
        assert first in versions and self.version in versions
        one = SimpleNamespace(
            policy_version=first, policy_version_last=self.version, loss_mask=[1], number=step, info={}
        )
        return [one], {}


def ahead(fake, cfg, first=0):
    run = SimpleNamespace(rows=[], sampler=SimpleNamespace(share=1), generator=None, reward_functions={}, first=first)
    collector = Ahead(run, cfg)
    collector.pushed(first, cfg)
    return collector


def loop(fake, cfg, first, last, updates, trained):
    collector = ahead(fake, cfg, first)
    for step in range(first, last):
        trajectories, metrics = collector.take(step, fake.version, cfg)
        trained += [(step, t) for t in trajectories]
        time.sleep(updates[step % len(updates)])
        fake.version = step + 1
        collector.pushed(step + 1, cfg)
    collector.close()
    return metrics


def run_ranks(trained, latencies, cfg, first, last, updates):
    """As many ranks as `trained` has lists, each with a fake of its own."""
    local = threading.local()
    train_async.sample_step = lambda *arguments: local.fake.sample_step(*arguments)

    def rank(mine):
        local.fake = Fake(latencies)
        local.fake.version = first
        if last > first:
            loop(local.fake, cfg, first, last, updates, mine)

    threads = [threading.Thread(target=rank, args=(mine,), daemon=True) for mine in trained]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "deadlock"


SECONDS = st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.02]), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(SECONDS, SECONDS, st.integers(0, 4), st.integers(1, 9), st.integers(0, 9), st.integers(1, 4))
def test_bounded_in_order_each_once_across_a_resume(latencies, updates, staleness, steps, stop, ranks):
    cfg = TrainConfig(max_staleness=staleness, max_steps=steps)
    original = train_async.sample_step, train_async.collect
    train_async.collect = lambda rows, sampled, counts, cfg: (sampled, {"time/generate": 0.0})
    try:
        parts = [(0, min(stop, steps)), (min(stop, steps), steps)]  # a run, and the one that resumes it
        trained = [[] for _ in range(ranks)]
        for first, last in parts:
            run_ranks(trained, latencies, cfg, first, last, updates)
        for one in trained:
            assert [t.number for _, t in one] == list(range(steps))  # each once, oldest first
            assert all(0 <= step - t.policy_version <= staleness for step, t in one)
            assert all(t.policy_version <= t.policy_version_last <= step for step, t in one)
    finally:
        train_async.sample_step, train_async.collect = original


def test_prompts_are_drawn_where_after_rollout_runs():
    """Not on the thread that samples: `next` reads the memory that after_rollout writes to."""
    drawn = []
    sampler = SimpleNamespace(share=1, next=lambda step: drawn.append((step, threading.current_thread())) or [])
    cfg = TrainConfig(max_staleness=2, max_steps=9)
    run = SimpleNamespace(rows=[], sampler=sampler, generator=None, reward_functions={}, first=0)
    collector = Ahead(run, cfg)
    collector.pushed(0, cfg)
    assert drawn == [(step, threading.current_thread()) for step in range(3)]
    assert collector.steps[2].result(5)[0] == []
    collector.close()


def test_an_error_in_the_background_is_raised_at_once(monkeypatch):
    """Not when its step's turn comes, which may be minutes later."""
    fake = Fake([5.0, 0.0], fails=1)
    monkeypatch.setattr(train_async, "sample_step", fake.sample_step)
    cfg = TrainConfig(max_staleness=2, max_steps=5)
    collector, start = ahead(fake, cfg), time.perf_counter()
    with pytest.raises(RuntimeError, match="a reward raised"):
        collector.take(0, 0, cfg)
    assert time.perf_counter() - start < 2.5
    while fake.begun != [0, 1, 2] and time.perf_counter() - start < 5:  # the last may begin after the error
        time.sleep(0.01)
    assert fake.begun == [0, 1, 2]
    collector.close()


# ---- a real server --------------------------------------------------------------------------------------------------


def test_a_run_that_overlaps(server, tmp_path):
    """Two ranks on a live server, stopped half-way and resumed: within the bound, and what was waited for is said."""
    flags = f"--generator vllm --server_urls {server.url} --max_staleness 2 --save_steps 2 --logprob_diff_limit 1 "
    env = {"VLLM_SERVER_TOKEN": server.token}
    _, first = steps_of(tmp_path, "train_async.py", flags + "--max_steps 4", "run", ranks=2, **env)
    _, lines = steps_of(tmp_path, "train_async.py", flags + "--max_steps 7 --resume", "run", ranks=2, **env)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    lags = [line["staleness/max"] for line in lines]
    assert max(lags) <= 2 and lags[0] == 0 and 2 in lags[2:], lags
    for line in lines:
        shares = [value for name, value in line.items() if name.startswith("staleness/tokens_")]
        assert sum(shares) == pytest.approx(1)
        assert {"async/trainer_waited", "async/generator_waited", "async/groups_ready", "sampling/ess"} <= line.keys()
    numbers = [
        json.loads(text)["step"]
        for text in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert numbers == sorted(numbers)
    assert (
        "staleness 2" in (tmp_path / "run.log").read_text(encoding="utf-8")
        and (tmp_path / "run/code/train_grpo.py").exists()
    )
    assert all(1 <= line["ranks/tokens_after"] <= line["ranks/tokens_before"] for line in lines)


@pytest.mark.slow
def test_a_critic_too(server, tmp_path):
    """The file in docs/async.md."""
    (code,) = re.findall(
        r"(?s)```python\n(import train_async.*?)```", (ROOT / "docs" / "async.md").read_text(encoding="utf-8")
    )
    (tmp_path / "my_ppo_async.py").write_text(code, encoding="utf-8")
    flags = f"--generator vllm --server_urls {server.url} --max_staleness 1 --logprob_diff_limit 1 --max_steps 3 "
    script, env = str(tmp_path / "my_ppo_async.py"), {"VLLM_SERVER_TOKEN": server.token, "PYTHONPATH": str(ROOT)}
    _, lines = steps_of(tmp_path, script, flags, "run", **env)
    assert [line["staleness/max"] for line in lines] == [0, 1, 1]
    assert all("value/loss" in line for line in lines)
