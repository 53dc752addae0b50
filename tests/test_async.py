"""train_async.py: what is sampled ahead, within its bound; without overlap the same as train_grpo.py."""

import asyncio
import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import ROOT, SMALL, trained

import train_async
from config import ConfigError
from train_async import Ahead, TrainConfig


def steps_of(folder, script, flags, run, **how):
    lines = trained(folder, f"{SMALL} --max_steps 4 {flags}", run, script=script, **how)
    ours, lines = ("time/", "async/", "staleness/"), [line for line in lines if "reward" in line]
    return [{k: v for k, v in line.items() if not k.startswith(ours)} for line in lines], lines


def test_without_overlap_it_is_train_grpo(tmp_path):
    both = [
        steps_of(tmp_path, script, flags, script[:-3], ranks=2)[0]
        for script, flags in (("train_grpo.py", ""), ("train_async.py", "--max_staleness 0"))
    ]
    assert both[0] == both[1] and len(both[0]) == 4


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(max_staleness=1, generator="hf"), "nothing can overlap"),
        (dict(max_staleness=0, colocate=True), "--colocate"),
        (dict(max_staleness=1, push_steps=4), "--max_staleness 3 or more"),
        (dict(max_staleness=1, in_flight=4), "from --prompts_per_step=32"),
        (dict(max_staleness=1, in_flight=65), "to 64"),
    ],
)
def test_settings_that_cannot_overlap(flags, message):
    with pytest.raises(ConfigError, match=message):
        train_async.check(TrainConfig(**flags))


# ---- the order of events --------------------------------------------------------------------------------------------


class Fake:
    """Runs without model and server: a group knows the weights in the generator when it began and ended, and takes what
    time the test says of its prompt. Of a step's prompts the numbers are those of the draw."""

    def __init__(self, latencies, share=1, version=0, fails=None):
        self.version, self.latencies, self.share, self.fails, self.begun = version, latencies, share, fails, []

    def next(self, draw):
        return range(draw * self.share, (draw + 1) * self.share)

    def extra(self, draw, numbers, count):
        return [0] * count

    async def sample_rows(self, rows, first, further, generator, functions, cfg, versions, step):
        (number,) = first
        self.begun.append(number)
        born = self.version
        await asyncio.sleep(self.latencies[number % len(self.latencies)])
        if number == self.fails:
            raise RuntimeError("a reward raised")
        assert born in versions and self.version in versions
        one = SimpleNamespace(
            policy_version=born,
            policy_version_last=self.version,
            token_ids=[1],
            loss_mask=[1],
            number=number,
            info={"sampled_at": 0.0},
        )
        return [[one]], {"prompts": 1}


def ahead(fake, cfg, first=0, memory=None):
    sampler = SimpleNamespace(share=fake.share, next=fake.next, extra=fake.extra)
    given = dict(rows=[], sampler=sampler, generator=None, reward_functions={}, first=first)
    collector = Ahead(SimpleNamespace(**given, memory={} if memory is None else memory), cfg)
    collector.pushed(first, cfg)
    return collector


def loop(fake, cfg, first, last, updates, trained, memory=None):
    collector = ahead(fake, cfg, first, memory)
    for step in range(first, last):
        trajectories, metrics = collector.take(step, fake.version, cfg)
        trained += [(step, t) for t in trajectories]
        time.sleep(updates[step % len(updates)])
        fake.version = step + 1
        collector.pushed(step + 1, cfg)
    collector.close()
    return metrics


@pytest.fixture
def faked(monkeypatch):
    """Whose `fake` samples."""
    this = SimpleNamespace()
    monkeypatch.setattr(train_async, "sample_rows", lambda *given: this.fake.sample_rows(*given))
    monkeypatch.setattr(train_async, "collect", lambda rows, found, counts, cfg: (sum(found, []), {}))
    return this


SECONDS = st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.02]), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SECONDS, SECONDS, st.integers(1, 4), st.integers(1, 9), st.integers(0, 9), st.integers(1, 3), st.integers(0, 4))
def test_bounded_and_each_once_across_a_resume(faked, latencies, updates, staleness, steps, stop, share, more):
    """Each prompt that was drawn is trained on once or dropped; within the bound; each step has its groups."""
    in_flight = min(share + more, share * (1 + staleness))
    cfg = TrainConfig(max_staleness=staleness, max_steps=steps, prompts_per_step=share, in_flight=in_flight)
    memory, trained, begun = {}, [], []
    for first, last in ((0, min(stop, steps)), (min(stop, steps), steps)):  # a run, and the one that resumes it
        faked.fake = Fake(latencies, share, version=first)
        memory = json.loads(json.dumps(memory))
        if last > first:
            loop(faked.fake, cfg, first, last, updates, trained, memory)
        begun += faked.fake.begun
    numbers = [t.number for _, t in trained]
    assert len(numbers) == len(set(numbers)) == steps * share
    waiting = {number for number, *_ in memory["train_async"]["waiting"]}
    dropped = set(memory["train_async"]["dropped"])
    assert not dropped & {*numbers} and waiting | dropped | {*numbers} == set(
        range(memory["train_async"]["draw"] * share)
    )
    assert all(0 <= step - t.policy_version <= staleness for step, t in trained)
    assert all(t.policy_version <= t.policy_version_last <= step for step, t in trained)


def test_what_has_ended_is_taken_and_what_gets_too_old_is_dropped(faked):
    """Of two prompts a step every sixth takes 2 s, an update .1 s: no step waits for one. Each has two chances."""
    cfg, trained = TrainConfig(max_staleness=2, in_flight=6, max_steps=9, prompts_per_step=2), []
    faked.fake, start = Fake([2.0, 0.0, 0.0, 0.0, 0.0, 0.0], share=2), time.perf_counter()
    metrics = loop(faked.fake, cfg, 0, 9, [0.1], trained)
    assert time.perf_counter() - start < 1.9
    numbers = [t.number for _, t in trained]
    assert len(numbers) == 18 and not any(number % 6 == 0 for number in numbers)
    assert faked.fake.begun.count(0) == 2 and max(map(faked.fake.begun.count, numbers)) == 1
    assert metrics["async/never_trained"] > 0


def test_prompts_are_drawn_where_after_rollout_runs():
    """Not on the thread that samples: `next` reads the memory that after_rollout writes to."""
    fake, drawn = Fake([0.0]), []
    fake.next = lambda draw: drawn.append((draw, threading.current_thread())) or [draw]
    collector = ahead(fake, TrainConfig(in_flight=3, max_steps=9, prompts_per_step=1))
    assert drawn == [(draw, threading.current_thread()) for draw in range(3)]
    collector.close()


def test_an_error_in_the_background_is_raised_at_once(faked):
    """Not when the group's turn comes, which may be minutes later."""
    faked.fake = fake = Fake([5.0, 0.0], fails=1)
    cfg = TrainConfig(max_staleness=2, max_steps=5, prompts_per_step=1)
    collector, start = ahead(fake, cfg), time.perf_counter()
    with pytest.raises(RuntimeError, match="a reward raised"):
        collector.take(0, 0, cfg)
    assert time.perf_counter() - start < 2.5
    collector.close()


# ---- a real server --------------------------------------------------------------------------------------------------


def test_a_run_that_overlaps(server, tmp_path):
    """Two ranks on a live server, stopped half-way and resumed: within the bound, and what was waited for is said."""
    flags = f"--generator vllm --server_urls {server.url} --max_staleness 2 --in_flight 12 --save_steps 2 "
    flags += "--logprob_diff_limit 1 "
    env = {"VLLM_SERVER_TOKEN": server.token}
    _, first = steps_of(tmp_path, "train_async.py", flags + "--max_steps 4", "run", ranks=2, **env)
    _, lines = steps_of(tmp_path, "train_async.py", flags + "--max_steps 7 --resume", "run", ranks=2, **env)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    lags = [line["staleness/max"] for line in lines]
    assert [line["policy_lag"] for line in lines] == lags
    assert max(lags) <= 2 and lags[0] == 0 and 2 in lags[2:], lags
    for line in lines:
        shares = [value for name, value in line.items() if name.startswith("staleness/tokens_")]
        assert sum(shares) == pytest.approx(1)
        assert {"async/trainer_waited", "async/generator_waited", "async/groups_ready", "sampling/ess"} <= line.keys()
    written = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    numbers = [json.loads(text)["step"] for text in written]
    assert numbers == sorted(numbers) and (tmp_path / "run/code/train_grpo.py").exists()
    assert "staleness 2" in (tmp_path / "run.log").read_text(encoding="utf-8")
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
