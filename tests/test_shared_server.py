"""Several runs on one server: each has an adapter and numbers of its own, none ends or starves another, and who holds
a name or the weights is said to whom it is refused."""

import asyncio
import os
import signal
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from live import EVEN, running, trainer
from server_fixture import make_tiny, start_server
from test_adapters_alone import PROMPT, Trainer

import utils
from config import ConfigError, TrainConfig, load_config
from runlog import checkpoints
from runlog.reading import read_metrics
from serving.door import Door
from vllm_client import ServerError, VLLMClient

ONE, OTHER = "1" * 32, "2" * 32  # runs


# ---- the door -------------------------------------------------------------------------------------------------------


def test_runs_take_turns_at_the_door():
    """One has asked for 100 completions when another asks for 10: from then on each has half of the places."""
    order: list[str] = []

    async def ask(door: Door, run: str, number: int):
        async with door.passing(run, 1, f"{run}{number}"):
            order.append(run)
            assert door.inside.total() <= 4
            await asyncio.sleep(0.001)

    async def both():
        door = Door(4)
        greedy = [asyncio.create_task(ask(door, "greedy", n)) for n in range(100)]
        await asyncio.sleep(0)
        await asyncio.gather(*(ask(door, "modest", n) for n in range(10)))
        done = len(order)
        await asyncio.gather(*greedy)
        assert not door.inside.total() and not any(door.waiting.values())
        return done

    done = asyncio.run(both())
    assert done < 35 and Counter(order) == {"greedy": 100, "modest": 10}


def test_who_leaves_the_door_leaves_no_place_taken():
    """Cancelled before and after its turn, turned away, failed inside; one that is larger than the door goes alone."""

    async def play():
        door = Door(2)

        async def stay(run: str, size: int = 1, seconds: float = 9.0):
            async with door.passing(run, size, f"{run}{size}"):
                await asyncio.sleep(seconds)
                raise ValueError("inside")

        tasks = [asyncio.create_task(stay("a", 1)), asyncio.create_task(stay("a", 1))]
        waiting = [
            asyncio.create_task(stay("b", 1)),
            asyncio.create_task(stay("b", 2)),
            asyncio.create_task(stay("c", 7)),
        ]
        await asyncio.sleep(0.01)
        used = {"tokens": 0, "sampling_seconds": 0, "waited_seconds": 0}
        assert door.describe("a") == {"under_way": 2, "waiting": 0} | used
        assert door.describe("b")["waiting"] == 3
        waiting[0].cancel()
        door.turn_away(KeyError("gone"), lambda ticket: ticket.request_id == "b2")
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.01)
        assert door.inside == {"a": 0, "c": 7}
        waiting[2].cancel()
        found = await asyncio.gather(*tasks, *waiting, return_exceptions=True)
        assert [type(each).__name__ for each in found] == [*["CancelledError"] * 3, "KeyError", "CancelledError"]
        with pytest.raises(ValueError, match="inside"):
            await stay("d", seconds=0)
        assert not door.inside.total()

    asyncio.run(play())


# ---- live servers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live():
    found = start_server(
        make_tiny(), "--dtype", "float32", "--max-model-len", "512", "--enable-lora", "--max-num-seqs", "8"
    )
    try:
        yield found.wait(600)
    finally:
        found.stop()


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    utils.init_distributed(60)


def run_of(server, name: str, owner: str, seed: int = 0) -> Trainer:
    """One that holds the name of its adapter."""
    made = Trainer(server, name, seed, owner)
    made.learn()
    return made


def runs(server) -> dict:
    return server.request("GET", "/server_info").json()["runs"]


@pytest.fixture
def two(live):
    made = run_of(live, "first", ONE, 1), run_of(live, "second", OTHER, 2)
    yield made
    for run in made:
        run.client.close()


def test_each_run_gets_its_own_numbers(live, two):
    """While both push, at different versions, both are sampled at once."""
    first, second = two
    for version in (1, 2, 3):
        first.push(version)
        second.push(10 * version)

        async def both():
            asked = [run.client.generate(PROMPT, n=4, max_tokens=24) for run in two for _ in range(4)]
            return await asyncio.gather(*asked)

        found = asyncio.run(both())
        for run, own, number in ((first, found[:4], version), (second, found[4:], 10 * version)):
            completions = sum(own, [])
            assert run.difference(completions) < 1e-4
            assert {c.policy_version for c in completions} == {number}
        assert first.difference(sum(found[4:], [])) > 1e-2
        first.learn()
    told = runs(live)
    assert told["first"]["held"] and told["first"]["versions"] == [3] and told["second"]["versions"] == [30]


def test_a_push_that_breaks_off_is_nobody_elses(live, two):
    """One stops in mid-push, with a bucket sent; the other samples, pushes and goes on."""
    first, second = two
    first.push(1)
    second.push(1)
    first.client.begin_push()
    first.client.send_bucket(first.parts()[:3])
    first.client._settle()
    second.learn()
    second.push(2)
    assert second.difference(second.sample()) < 1e-4 and runs(live)["first"]["pushing"]
    first.client.abort_push()
    assert {c.policy_version for c in first.sample()} == {1}
    assert second.difference(second.sample()) < 1e-4
    first.push(3)
    assert first.difference(first.sample()) < 1e-4


def test_a_name_has_one_run(live, two):
    first, _ = two
    first.push(1)
    rival = VLLMClient([live.url], live.token, timeout=20)
    rival.adapter, rival.owner = "first", OTHER
    with pytest.raises(ServerError, match="adapter first belongs to another run.*--adapter"):
        rival.connect_weights("cpu")
    rival.owner = None
    with pytest.raises(ServerError, match="belongs to another run"):
        rival.connect_weights("cpu")
    first.push(2)  # it was not disturbed
    again = run_of(live, "first", ONE, 5)  # the same run, resumed
    again.push(3)
    assert again.difference(again.sample()) < 1e-4
    again.client.close()
    assert not runs(live)["first"]["held"]
    rival.owner = OTHER
    rival.connect_weights("cpu")
    rival.close()


def test_whole_weights_are_refused_while_adapters_live(live, two):
    first, second = two
    first.push(1)
    whole = VLLMClient([live.url], live.token, timeout=20)
    with pytest.raises(ServerError, match="shared by adapters of first, second.*a server of its own"):
        whole.connect_weights("cpu")
    first.client.close()
    second.client.close()
    whole.connect_weights("cpu")  # nobody is there any more
    late = run_of(live, "late", ONE)
    with pytest.raises(ServerError, match="shared by adapters of late"):
        whole.begin_push()
    late.push(1)
    assert late.difference(late.sample()) < 1e-4
    late.client.close()
    whole.close()


def test_a_run_that_asks_for_much_starves_no_other(live, two):
    """One asks for 200 completions, then the other for 8: these come long before those have."""
    for run in two:
        run.push(1)

    async def both():
        ended: list[str] = []

        async def ask(run, name: str, n: int):
            await run.client.generate(PROMPT, n=n, max_tokens=100)
            ended.extend([name] * n)

        greedy = [asyncio.create_task(ask(two[0], "greedy", 4)) for _ in range(50)]
        await asyncio.sleep(0.3)
        told = runs(live)["first"]
        assert told["under_way"] <= 16 and told["waiting"] > 100
        await asyncio.gather(*(ask(two[1], "modest", 4) for _ in range(2)))
        before = ended.count("greedy")
        await asyncio.gather(*greedy)
        return before

    assert asyncio.run(both()) < 60


def test_what_each_run_used_is_told_to_it_and_to_who_asks(live, two):
    first, second = two
    for run in two:
        run.push(1)
    before = dict(first.client.used), dict(second.client.used)
    sampled = sum(len(one.token_ids) for one in first.sample(n=4))
    body = {"model": str(live.model_dir), "prompt": "x", "max_tokens": 5, "min_tokens": 5, "stream": True}
    for run in two:
        run.push(2)
    assert live.request("POST", "/v1/completions", json=body).status_code == 200  # of the newest: second
    second.push(3)
    own = utils.server_usage(first.client, before[0])
    assert own["server/tokens"] == sampled and own["server/sampling_seconds"] > 0 <= own["server/waited_seconds"]
    assert utils.server_usage(second.client, before[1])["server/tokens"] == 5
    assert runs(live)["first"]["tokens"] == first.client.used["tokens"]


def test_runs_that_have_no_slots_left_are_refused_at_start(live, two):
    """Four slots: two runs with one each, one for what arrives, so one more run with one, and none with two."""
    wide = VLLMClient([live.url], live.token, timeout=20)
    wide.adapter, wide.owner, wide.versions = "wide", "4" * 32, 2
    with pytest.raises(ServerError, match=r"wide needs 2 slots, beside first \(1\), second \(1\).*--max-loras 5"):
        wide.connect_weights("cpu")
    assert "wide" not in runs(live)
    wide.versions = 1
    wide.connect_weights("cpu")
    wide.close()


def test_a_run_is_heard_of(live, two, monkeypatch):
    """From its own thread, whatever it is busy with; and is free as soon as it says so."""
    monkeypatch.setattr("serving.pushing.BEAT_SECONDS", 0.1)
    third = run_of(live, "third", "3" * 32)
    time.sleep(1)
    assert runs(live)["third"]["heard_seconds_ago"] < 0.7 < runs(live)["first"]["heard_seconds_ago"]
    third.client.close()
    assert not runs(live)["third"]["held"]


def test_a_run_that_is_gone_frees_its_name_and_its_adapter():
    from serving.adapters import LEASE, Adapter, Adapters, LoRARequest, Pushes, Version

    config = SimpleNamespace(lora_config=None, scheduler_config=SimpleNamespace(max_num_seqs=8))
    adapters, asked = Adapters(SimpleNamespace(vllm_config=config, generate=None, abort=None), Pushes()), []

    async def ask(step, *args):
        asked.append((step, *args))

    adapters.ask = ask

    async def play():
        for number, name in enumerate(("here", "gone"), 1):
            adapter = adapters.named[name] = Adapter(name)
            adapter.take(ONE)
            version = Version(7, LoRARequest(f"{name}/7", number, "memory"), adapter, "")
            adapter.newest = adapters.newest = adapters.versions[number] = version
        gone = adapters.named["gone"]
        gone.heard -= LEASE - 1
        with pytest.raises(HTTPException, match="another run, heard of 59 s ago"):
            gone.take(OTHER)
        await adapters.sweep()
        assert set(adapters.named) == {"here", "gone"}
        gone.heard -= LEASE + 2
        await adapters.sweep()
        await asyncio.sleep(0.01)
        assert adapters.newest.adapter.name == "here" and adapters.served() == {"here": [7]}
        assert asked == [("abort", "gone"), ("drop", 2)] and not gone.held
        gone.take(OTHER)

    asyncio.run(play())


def test_a_lapsed_lease_is_taken_up_again_if_nothing_else_needs_the_room():
    """Its slots count in the sum of others as before, and it takes neither slots nor weights from who has them."""
    from serving.adapters import LEASE, Adapter, Adapters, Pushes

    lora, scheduler = SimpleNamespace(max_loras=4), SimpleNamespace(max_num_seqs=8)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=lora, scheduler_config=scheduler))
    engine.generate = engine.abort = None
    adapters = Adapters(engine, Pushes())
    for name, owner in (("stopped", ONE), ("here", OTHER)):
        adapters.named[name] = Adapter(name)
        adapters.named[name].take(owner)
    stopped = adapters.named["stopped"]
    with pytest.raises(HTTPException, match=r"stopped \(1\)"):
        adapters.check_slots("new", 2)
    stopped.heard -= LEASE + 5
    adapters.check_slots("new", 2)  # it does not count
    adapters.renew(stopped)
    assert stopped.held
    with pytest.raises(HTTPException, match=r"stopped \(1\)"):
        adapters.check_slots("new", 2)  # it does again
    stopped.heard -= LEASE + 5
    adapters.named["here"].slots = 3
    with pytest.raises(HTTPException, match="not heard of for 65 s.*stopped needs 1 slots, beside here .3.*5"):
        adapters.renew(stopped)
    assert not stopped.held
    adapters.named["here"].slots, adapters.pushes.replaced, adapters.pushes.run = 1, True, "whole"
    with pytest.raises(HTTPException, match="pushed to it, by run whole"):
        adapters.renew(stopped)
    adapters.check_slots("new", 2)  # refused, it holds nothing


def test_two_trainers_at_once_and_one_is_killed_in_mid_push(live, tmp_path):
    """Processes on one server. Who would take a name or the weights is refused; the one that is left, which samples
    beside its updates, goes on with numbers of its own; the one that was killed has its name back when it is resumed,
    and does not notice that the other ends by Ctrl-C."""
    (tmp_path / "even.py").write_text(EVEN, encoding="utf-8")
    flags = "--model_id models/tiny --compute_dtype float32 --dataset_id examples/sums.py:rows --prompts_per_step 4 "
    flags += "--num_generations 4 --max_prompt_length 64 --max_completion_length 8 --print_samples_every 0 "
    flags += f"--server_urls {live.url} --reward_funcs {tmp_path}/even.py:even --output_dir {tmp_path} --max_steps 5000"

    def start(name: str, *more: str, script: str = "train_grpo.py"):
        words = [*flags.split(), "--run_name", name, *more]
        return trainer(tmp_path / f"{name}.log", *words, script=script, VLLM_SERVER_TOKEN=live.token)

    def steps(name: str) -> list[dict]:
        return [line for line in read_metrics(tmp_path / name) if "sampling/logprob_diff_mean" in line]

    with (
        running(start("killed", "--use_peft", "--save_steps", "2")) as one,
        running(start("left", "--use_peft", "--max_staleness", "1", script="train_async.py")) as two,
    ):
        one.until(lambda: checkpoints.steps_saved(tmp_path / "killed"))
        two.until(lambda: "step 1/" in two.text)
        with running(start("rival", "--use_peft", "--adapter", "left")) as rival, running(start("whole")) as whole:
            assert rival.end() == whole.end() == 1
        assert "adapter left belongs to another run" in rival.text
        assert "shared by adapters of killed, left" in whole.text
        one.until(lambda: runs(live)["killed"]["pushing"])
        one.kill()
        done = len(steps("left"))
        two.until(lambda: len(steps("left")) >= done + 5)
        until = str(checkpoints.last_step(tmp_path / "killed") + 2)
        with running(start("killed", "--use_peft", "--resume", "--max_steps", until)) as again:
            again.until(lambda: "step " in again.text)
            os.kill(two.members[0].pid, signal.SIGINT)
            assert two.end() == 130 and again.end() == 0, (two.text, again.text)
        assert not runs(live)["left"]["under_way"]  # what it had asked for is taken back
    assert max(line["sampling/logprob_diff_mean"] for line in steps("killed")) < 1e-5
    stale = [line["staleness/max"] for line in steps("left")]
    assert max(stale) == 1, stale


@pytest.mark.parametrize("flags", ["", "--use_peft --generator hf", "--use_peft --push_lora folded"])
def test_a_name_without_an_adapter_that_travels_is_refused(flags):
    with pytest.raises(ConfigError, match="--adapter=mine"):
        load_config(TrainConfig, f"--adapter mine --reward_funcs length {flags}".split())


def test_names_of_runs_become_names_of_adapters():
    assert utils.adapter_name(TrainConfig(run_name="My run: 1e-5, é")) == "My-run--1e-5---"
    assert utils.adapter_name(TrainConfig(run_name="x" * 200)) == "x" * 64
    assert utils.adapter_name(TrainConfig(run_name="a", adapter="b")) == "b"
