"""The server's end of the wire in a process of its own, without vLLM: a pipe takes the place of HTTP."""

import contextlib
import multiprocessing
from types import SimpleNamespace

import torch

from serving import shared, wire
from serving.receiver import Receiver
from serving.rendezvous import Joined
from vllm_client import VLLMClient


def other_end(pipe) -> None:
    """A server's worker without a server. On "kept" it sends the buckets that it keeps, on "rate" it receives one."""
    receiver = sums = None
    with contextlib.suppress(EOFError):  # the other process has ended
        while True:
            path, body = pipe.recv()
            answer = {"policy_version": 0, "instance": "pipe"}
            if path == "/init_weight_transfer_engine":
                info = body["init_info"]
                store = Joined(info["secret"], info["address"], info["port"], info["timeout"])
                mine = wire.local_address(info["address"], info["port"])
                group = wire.open_group(store, info["secret"], 1, 2, "gloo", info["timeout"], mine)
                if info["probe"] is not None:
                    wire.all_equal(group, 2, shared.read(info["probe"]), info["timeout"])
                receiver = Receiver(group, info["timeout"], torch.device("cpu"), info["keep"])
            elif path == "/start_weight_update":
                receiver.start()
                sums = []
            elif path == "/update_weights":
                receiver.receive(SimpleNamespace(**body["update_info"]))
                sums += body["update_info"]["checksums"]
            elif path == "/finish_weight_update":
                receiver.finish()
                answer = {"policy_version": body["weight_version"], "checksum": wire.fold(sums)}
                answer["seconds"] = dict(receiver.seconds)
            elif path == "kept":
                answer = [(what, bucket.numpy().tobytes()) for what, bucket in receiver.kept]
            elif path == "rate":
                wire.wait_for(wire.broadcast(receiver.group, torch.empty(body, dtype=torch.uint8)), 60, "the trainer")
            pipe.send(answer)


class PipeClient(VLLMClient):
    """VLLMClient that talks through a pipe in place of HTTP."""

    def __init__(self, pipe, **options):
        super().__init__(["http://127.0.0.1:1"], "token", **options)
        self.pipe = pipe

    def server_info(self) -> list[dict]:
        where = {"server": "pipe", "device": "cpu", "devices": ["cpu"]}
        return [where | {"vocab_size": 1, "world_size": 1, "dtype": "bfloat16"}]

    def _call(self, url, method, path, body=None, timeout=None) -> dict:
        self.pipe.send((path, body))
        return self.pipe.recv()


def start():
    """The pipe to such a process, which ends with this one."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    multiprocessing.get_context("spawn").Process(target=other_end, args=(there,), daemon=True).start()
    return here
