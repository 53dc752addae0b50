"""What a weight push costs, phase by phase: the two ends of the real transfer in two processes, or a live server.

    python benchmarks/push.py --gigabytes 0.1 0.5 2           # without vLLM: what is received is checked and dropped
    python benchmarks/push.py --model models/SmolLM2-135M-Instruct     # a live vLLM server, which loads the weights

Each size is pushed whole, then `repetitions` times again after a share of the weights was changed (`--changed`), whole
and as changes only. Both ends are the ones that training uses (VLLMClient, serving/wire.py), over gloo; without vLLM a
pipe takes the place of HTTP. Phases overlap, so they add up to more than the whole.

gather    weight_buckets: walking the model, rounding fp32 masters to bfloat16
pack      into the bucket, the look for nan and inf included
checksum  at the trainer's end; the server's takes as long
compare   with what was pushed last (changes only)
send      gloo's broadcast, from the announcement on; with a live server its checksum and loading, too
finish    of a live server: coverage, the last layers, resuming

The rates to compare with, measured beside it: `copy`, from memory to memory (both touched before, 64 MiB at a time,
all threads), and `gloo`, a bare broadcast between the same two processes.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import train_grpo as script  # noqa: E402
import vllm_client  # noqa: E402
from serving import wire  # noqa: E402
from serving.receiver import Receiver  # noqa: E402
from serving.rendezvous import Joined  # noqa: E402
from vllm_client import VLLMClient  # noqa: E402

SECONDS: dict[str, float] = defaultdict(float)


def timed(phase: str, function):
    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            SECONDS[phase] += time.perf_counter() - start

    return call


def other_end(pipe) -> None:
    """A server's worker without a server."""
    receiver = push = None
    while True:
        path, body = pipe.recv()
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            store = Joined(info["secret"], info["address"], info["port"], info["timeout"])
            group = wire.open_group(
                store, info["secret"], 1, 2, "gloo", info["timeout"], wire.local_address(info["address"], info["port"])
            )
            receiver = Receiver(group, info["timeout"], torch.device("cpu"), info["keep"])
        elif path == "/start_weight_update":
            receiver.start()
            push = []
        elif path == "/update_weights":
            receiver.receive(SimpleNamespace(**body["update_info"]))
            push += body["update_info"]["checksums"]
        elif path == "/finish_weight_update":
            receiver.finish()
            pipe.send({"policy_version": body["weight_version"], "checksum": wire.fold(push)})
            continue
        elif path == "broadcast":
            wire.wait_for(wire.broadcast(receiver.group, torch.empty(body, dtype=torch.uint8)), 60, "the trainer")
        pipe.send({"policy_version": 0, "instance": "benchmark"})


class PipeClient(VLLMClient):
    """VLLMClient that talks through a pipe in place of HTTP."""

    def __init__(self, pipe, **options):
        super().__init__(["http://127.0.0.1:1"], "token", **options)
        self.pipe = pipe

    def server_info(self) -> list[dict]:
        return [{"vocab_size": 1, "world_size": 1, "device": "cpu", "devices": ["cpu"], "dtype": "bfloat16"}]

    def _call(self, url, method, path, body=None, timeout=None) -> dict:
        self.pipe.send((path, body))
        return self.pipe.recv()


def copy_rate() -> float:
    """Bytes a second from memory to memory."""
    source, target = (torch.ones(256 << 20, dtype=torch.uint8) for _ in range(2))
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        for a, b in zip(source.split(64 << 20), target.split(64 << 20), strict=True):
            b.copy_(a)
        best = min(best, time.perf_counter() - start)
    return len(source) / best


def gloo_rate(client: VLLMClient, pipe) -> float:
    """Bytes a second of a bare broadcast to the other process; into memory that is fresh there, as a bucket's is."""
    bucket, best = torch.ones(256 << 20, dtype=torch.uint8), 1e9
    for _ in range(3):
        pipe.send(("broadcast", len(bucket)))
        start = time.perf_counter()
        wire.wait_for(wire.broadcast(client._links[0].group, bucket), 60, "the other end")
        best = min(best, time.perf_counter() - start)
        pipe.recv()
    return len(bucket) / best


def make_model(gigabytes: float) -> nn.Module:
    """fp32 masters of so many GB in bfloat16, in matrices of 2048 x 2048 as large models have them."""
    layers = max(1, round(gigabytes * 1e9 / 2 / 2048**2))
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(layers)])


@torch.no_grad()
def disturb(model: nn.Module, share: float) -> None:
    """Change about this share of the weights by a few per cent, so that bfloat16 sees it."""
    for p in model.parameters():
        flat = p.data.view(-1)
        places = torch.randint(len(flat), (int(len(flat) * share),))
        flat[places] = flat[places] * 1.1 + 1e-3


def push(model: nn.Module, client: VLLMClient, version: int, bucket_mb: int) -> dict:
    """Seconds by phase, and bytes."""
    SECONDS.clear()
    buckets, start = script.weight_buckets(model, bucket_mb << 20, torch.bfloat16), time.perf_counter()
    client.begin_push()
    SECONDS["begin"] = time.perf_counter() - start
    next_bucket = timed("gather", lambda: next(buckets, None))
    while (bucket := next_bucket()) is not None:
        client.send_bucket(bucket)
    client._settle()
    timed("finish", client.finish_push)(version)
    return {"total": time.perf_counter() - start, "bytes": client.sent_bytes} | dict(SECONDS)


def measure(model: nn.Module, make_client, args, name: str) -> list[dict]:
    results = []
    for changes_only in (False, True):
        client = make_client(changes_only)
        client._step = timed("send", client._step)
        client.connect_weights("cpu")
        first = push(model, client, 1, args.push_bucket_mb)
        pushes = []
        for repetition in range(args.repetitions):
            disturb(model, args.changed)
            pushes.append(push(model, client, 2 + repetition, args.push_bucket_mb))
        for what, row in (("first", first), ("median", sorted(pushes, key=lambda row: row["total"])[len(pushes) // 2])):
            results.append({"weights": name, "push": "changes" if changes_only else "whole", "which": what} | row)
            print(json.dumps(results[-1], default=float), flush=True)
        client.close()
    return results


PHASES = ["total", "begin", "gather", "pack", "checksum", "compare", "send", "finish"]


def table(results: list[dict], rates: dict) -> str:
    lines = [f"| weights | push | MB sent | {' | '.join(PHASES)} | GB/s | of copy | of gloo |"]
    lines += ["|---" * (len(PHASES) + 6) + "|"]
    for row in results:
        seconds = " | ".join(f"{row.get(phase, 0):.3f}" for phase in PHASES)
        sent, rate = f"{row['bytes'] / 1e6:.1f}", row["weight_bytes"] / row["total"]
        shares = " | ".join(f"{rate / rates[key]:.0%}" if key in rates else "" for key in ("copy", "gloo"))
        label = f"{row['push']}, {row['which']}"
        lines.append(f"| {row['weights']} | {label} | {sent} | {seconds} | {rate / 1e9:.2f} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 0.5, 2.0], help="of bfloat16 weights")
    parser.add_argument("--model", help="a folder: push it to a live vLLM server instead")
    parser.add_argument("--changed", type=float, default=0.01, help="share of the weights that change between pushes")
    parser.add_argument("--push_bucket_mb", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    for phase, name in (("pack", "pack"), ("pack", "not_finite"), ("checksum", "checksums")):
        setattr(vllm_client, name, timed(phase, getattr(vllm_client, name)))
    wire.changes = timed("compare", wire.changes)
    rates, results = {"copy": copy_rate()}, []
    if args.model:
        from server_fixture import start_server
        from transformers import AutoModelForCausalLM

        live = start_server(args.model, "--dtype", "bfloat16", "--max-model-len", "512").wait()
        try:
            holder = nn.Module()  # as `Policy` holds it
            holder.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
            size = 2 * sum(p.numel() for p in holder.parameters())
            make = lambda only: VLLMClient([live.url], live.token, changes_only=only)  # noqa: E731
            results = measure(holder, make, args, Path(args.model).name)
            results = [row | {"weight_bytes": size} for row in results]
        finally:
            live.stop()
    else:
        here, there = multiprocessing.get_context("spawn").Pipe()
        multiprocessing.get_context("spawn").Process(target=other_end, args=(there,), daemon=True).start()
        probe = PipeClient(here)
        probe.connect_weights("cpu")
        rates["gloo"] = gloo_rate(probe, here)
        for gigabytes in args.gigabytes:
            model = make_model(gigabytes)
            found = measure(model, lambda only: PipeClient(here, changes_only=only), args, f"{gigabytes:g} GB")
            results += [row | {"weight_bytes": gigabytes * 1e9} for row in found]
    print(", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items()), f"; {os.cpu_count()} cores\n")
    print(table(results, rates))


if __name__ == "__main__":
    main()
