"""Transfers that get stuck, in this process: what must happen, in which order, and after how long.

NCCL cannot run here. Where its behaviour matters - a broadcast that never ends leaves a kernel on the GPU, for which
every synchronisation waits - a group stands in whose broadcast ends by nothing but `abort`. All else is real.
"""

import asyncio
import os
import secrets
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from vllm.utils import nccl

import vllm_server
from serving import gate, transfer
from serving.receiver import Receiver
from serving.rendezvous import Joined, Rendezvous
from serving.wire import broadcast, in_thread, open_group

BUCKET = {"names": ["w"], "dtypes": ["float32"], "shapes": [[4]], "checksums": [0]}


class Stuck:
    """A process group with a broadcast under way that nobody completes."""

    def __init__(self, events: list):
        self.events, self.aborted = events, threading.Event()

    def broadcast(self, tensors, options):
        self.events.append("broadcast")
        return SimpleNamespace(is_completed=self.aborted.is_set, wait=lambda: None)

    def abort(self):
        self.events.append("abort")
        self.aborted.set()


def engine_with(group, backend: str, timeout: float = 0.3):
    """A worker's transfer engine in mid-push."""
    engine = transfer.TorchTransferEngine.__new__(transfer.TorchTransferEngine)
    engine.device, engine.connection, engine.push = torch.device("cpu"), None, transfer.Push()
    if group is not None:
        receiver = Receiver(group, timeout, engine.device, keep=False)
        engine.connection = transfer.Connection(SimpleNamespace(close=lambda: None), backend, receiver)
    return engine


def receive(engine):
    engine.receive_weights(transfer.UpdateInfo(**BUCKET))


def test_the_group_is_aborted_before_anything_synchronises():
    """The push breaks off on the worker, the HTTP process pauses the engine, and pausing synchronises the GPU."""
    events: list[str] = []
    group = Stuck(events)
    engine = engine_with(group, "nccl")

    async def restore(method):
        assert method == "abort_weight_update"
        events.append("restore")

    async def pause_generation(mode, clear_cache):
        events.append("synchronize")
        await asyncio.to_thread(group.aborted.wait, 5)
        events.append("paused")

    async def push_step():
        pushes = transfer.Pushes()
        pushes.session, pushes.active, pushes.timeout = "s", True, 30
        start = time.monotonic()
        with pytest.raises(transfer.HTTPException, match="waited 0.3 s for the trainer"):
            served = SimpleNamespace(collective_rpc=restore, pause_generation=pause_generation)
            async with transfer.PushStep(served, pushes, "s", True):
                await asyncio.to_thread(receive, engine)
        assert not pushes.lock.locked() and pushes.settled.is_set() and time.monotonic() - start < 3
        return pushes.broken

    assert "push all weights again" in asyncio.run(push_step())
    assert events == ["broadcast", "abort", "restore", "synchronize", "paused"] and engine.connection is None


async def hang(*_, **__):
    await asyncio.sleep(60)


async def die(*_, **__):
    raise RuntimeError("EngineCore encountered an issue")


async def do_it(*_, **__):
    pass


@pytest.mark.parametrize("restore, pause", [(do_it, hang), (hang, do_it), (die, do_it), (do_it, die)])
def test_an_engine_that_cannot_be_stopped_holds_neither_the_lock_nor_requests(restore, pause):
    async def push_step():
        pushes = transfer.Pushes()
        pushes.session, pushes.active, pushes.timeout = "s", True, 0.3
        pushes.settled.clear()
        engine = SimpleNamespace(collective_rpc=restore, pause_generation=pause)
        with pytest.raises(transfer.HTTPException, match="a damaged bucket"):
            async with transfer.PushStep(engine, pushes, "s", True):
                raise ValueError("a damaged bucket")
        assert not pushes.lock.locked() and pushes.settled.is_set()
        return pushes.broken

    start = time.monotonic()
    assert "start this server anew" in asyncio.run(push_step()) and time.monotonic() - start < 5


def test_generating_waits_for_pushes_and_asks_the_engine_only_after_a_pause():
    async def looked():
        pushes, asked = transfer.Pushes(), []

        async def is_paused():
            asked.append(pushes.version)
            if len(asked) == 1:  # a push begins while the engine answers
                pushes.settled.clear()
                asyncio.get_running_loop().call_later(0.05, end_push)
            return pushes.version == 0

        def end_push():
            pushes.version = 1
            pushes.settled.set()

        engine = SimpleNamespace(is_paused=is_paused)
        assert await vllm_server.not_sampling(engine, pushes) is None and not asked
        pushes.may_be_paused = True
        assert await vllm_server.not_sampling(engine, pushes) is None and asked == [0, 1]
        pushes.version = 0
        assert (await vllm_server.not_sampling(engine, pushes)).status_code == 503
        pushes.broken = "a weight push did not complete"
        return await vllm_server.not_sampling(engine, pushes)

    assert asyncio.run(looked()).status_code == 503


def test_the_gate_remembers_pauses():
    async def app(scope, receive, send):
        pass

    pushes = transfer.Pushes()

    def post(path):
        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"authorization", b"Bearer t")]}
        asyncio.run(gate.Gate(app, "t", pushes)(scope, None, None))
        return pushes.may_be_paused

    assert [post(path) for path in ("/abort_requests", "/pause", "/abort_requests", "/resume")] == [0, 1, 1, 0]


def join(store, secret, rank, world, timeout):
    return open_group(store, secret, rank, world, "gloo", timeout, "127.0.0.1")


def test_after_a_lost_bucket_a_new_group_works():
    """Real gloo groups: the trainer's end is silent, the worker gives the group up, and both connect again."""
    engine = None
    for attempt in range(2):
        secret = secrets.token_hex(8)
        store = Rendezvous(secret, "127.0.0.1", 10)
        joined = Joined(secret, "127.0.0.1", store.port, 10)
        trainer = in_thread(join, store, secret, 0, 2, 10)
        engine = engine_with(join(joined, secret, 1, 2, 10), "gloo", timeout=1)
        if attempt == 0:
            with pytest.raises(TimeoutError, match="the trainer to send"):
                receive(engine)
            assert engine.connection is None
            trainer.result(10)
    tensor = torch.arange(4.0)
    sent = broadcast(trainer.result(10), tensor)
    broadcast(engine.connection.receiver.group, arrived := torch.zeros(4)).wait()
    sent.wait()
    assert arrived.tolist() == tensor.tolist()


class Silent(Rendezvous):
    """A store in which set-up waits as NCCL's does for its members: without a limit."""

    def wait(self, keys, timeout=None):
        self.over.wait(60)
        raise TimeoutError

    over = threading.Event()
    get = wait


def test_setting_up_a_group_has_a_limit():
    store, start = Silent("s", "127.0.0.1", 60), time.monotonic()
    done = in_thread(join, store, "s", 0, 2, 0.5)
    with pytest.raises(TimeoutError, match="gloo group of 2 members to be set up"):
        done.result(20)
    assert time.monotonic() - start < 15
    store.over.set()
    store.close()


def test_what_vllm_pins_for_itself_does_not_reach_the_transfer(monkeypatch):
    """VLLM_BATCH_INVARIANT sets NCCL variables in the workers alone; ends of one communicator must have the same."""
    seen = []
    monkeypatch.setattr(nccl, "_unpinned_env", {"NCCL_ALGO": None})
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    monkeypatch.setattr(transfer, "open_group", lambda *_: seen.append(os.environ.get("NCCL_ALGO")))
    engine = engine_with(None, "nccl")
    engine.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    store = Rendezvous("s", "127.0.0.1", 10)
    address = dict(secret="s", address="127.0.0.1", port=store.port, backend="nccl", world_size=2, timeout=5.0)
    engine.init_transfer_engine(transfer.InitInfo(**address))
    assert seen == [None] and os.environ["NCCL_ALGO"] == "allreduce:tree"
    engine.connection.store.close()
    store.close()
