"""What a weight push costs, phase by phase: the two ends of the real transfer in two processes, or a live server.

    python benchmarks/push.py --gigabytes 0.1 0.5 2           # without vLLM: what is received is checked and dropped
    python benchmarks/push.py --model models/SmolLM2-135M-Instruct     # a live vLLM server, which loads the weights

Each size is pushed whole over gloo and through shared memory, then `repetitions` times again after a share of the
weights was changed (`--changed`), whole and as changes only. Both ends are the ones that training uses (push_weights,
serving/pushing.py, serving/receiver.py); without vLLM a pipe takes the place of HTTP. Phases overlap, so they add up to
more than the whole.

gather    weight_buckets: walking the model
compare   with what was pushed last: rounding, packing and comparing this rank's part (changes only)
pack      rounding and packing what is sent, the look for nan and inf included (its part in `compare`, too)
checksum  at the trainer's end
send      from a bucket's announcement to the answer: all of the server's phases
receive   at the server's end: gloo's broadcast, or opening the memory; applying changes
check     at the server's end: checksums
load      at the server's end: the look for nan and inf, and vLLM's loaders
finish    of a live server: coverage, the last layers, resuming

The rates to compare with, measured beside it: `copy`, from memory to memory (both touched before, 64 MiB at a time,
all threads), and `gloo`, a bare broadcast between the same two processes.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pipe_server  # noqa: E402

import train_grpo as script  # noqa: E402
from serving import pushing, wire  # noqa: E402
from serving.changes import Changes  # noqa: E402
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


def timed_buckets(*args):
    """weight_buckets, timed."""
    buckets = WEIGHT_BUCKETS(*args)
    next_bucket = timed("gather", lambda: next(buckets, None))
    while (bucket := next_bucket()) is not None:
        yield bucket


WEIGHT_BUCKETS, script.weight_buckets = script.weight_buckets, timed_buckets
for module, phase, name in (
    (wire, "pack", "pack"),
    (pushing, "pack", "pack"),
    (wire, "pack", "not_finite"),
    (pushing, "pack", "not_finite"),
    (pushing, "checksum", "checksums"),
    (Changes, "compare", "find"),
    (VLLMClient, "send", "_step"),
    (VLLMClient, "finish", "finish_push"),
):
    setattr(module, name, timed(phase, getattr(module, name)))


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
    """Bytes a second of a bare broadcast to the other process, into memory that is fresh there."""
    bucket, best = torch.ones(256 << 20, dtype=torch.uint8), 1e9
    for _ in range(3):
        pipe.send(("rate", len(bucket)))
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
    start = time.perf_counter()
    script.push_weights(model, client, version, bucket_mb)
    return {"total": time.perf_counter() - start, "bytes": client.sent_bytes} | dict(SECONDS) | client.server_seconds


def measure(model: nn.Module, make_client, args, name: str, weight_bytes: float) -> list[dict]:
    """The first push of each way, in which memory is fresh, and the median of those that follow."""
    results = []
    for over, changes_only in itertools.product(args.over, (False, True)):
        client = make_client(over=over, changes_only=changes_only)
        client.connect_weights("cpu")
        first = push(model, client, 1, args.push_bucket_mb)
        pushes = []
        for repetition in range(args.repetitions):
            disturb(model, args.changed)
            pushes.append(push(model, client, 2 + repetition, args.push_bucket_mb))
        client.close()
        label = {"weights": name, "over": over, "push": "changes" if changes_only else "whole"}
        for what, row in (("first", first), ("median", sorted(pushes, key=lambda row: row["total"])[len(pushes) // 2])):
            results.append(label | {"which": what, "weight_bytes": weight_bytes} | row)
            print(json.dumps(results[-1], default=float), flush=True)
    return results


PHASES = ["total", "gather", "compare", "pack", "checksum", "send", "receive", "check", "load", "finish"]


def table(results: list[dict], rates: dict) -> str:
    lines = [f"| weights | over | push | MB sent | {' | '.join(PHASES)} | GB/s | of copy | of gloo |"]
    lines += ["|---" * (len(PHASES) + 7) + "|"]
    for row in results:
        seconds = " | ".join(f"{row[phase]:.3f}" if row.get(phase) else "" for phase in PHASES)
        rate = row["weight_bytes"] / row["total"]
        shares = " | ".join(f"{rate / rates[key]:.0%}" if key in rates else "" for key in ("copy", "gloo"))
        label = f"{row['weights']} | {row['over']} | {row['push']}, {row['which']} | {row['bytes'] / 1e6:.1f}"
        lines.append(f"| {label} | {seconds} | {rate / 1e9:.2f} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 0.5, 2.0], help="of bfloat16 weights")
    parser.add_argument("--model", help="a folder: push it to a live vLLM server instead")
    parser.add_argument("--over", nargs="+", default=["gloo", "memory"])
    parser.add_argument("--changed", type=float, default=0.01, help="share of the weights that change between pushes")
    parser.add_argument("--push_bucket_mb", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    rates, results = {"copy": copy_rate()}, []
    if args.model:
        from server_fixture import start_server
        from transformers import AutoModelForCausalLM

        live = start_server(args.model, "--dtype", "bfloat16", "--max-model-len", "512").wait()
        try:
            holder = nn.Module()  # as `Policy` holds it
            holder.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
            size = 2 * sum(p.numel() for p in holder.parameters())
            make = lambda **options: VLLMClient([live.url], live.token, **options)  # noqa: E731
            results = measure(holder, make, args, Path(args.model).name, size)
        finally:
            live.stop()
    else:
        pipe = pipe_server.start()
        probe = pipe_server.PipeClient(pipe)
        probe.connect_weights("cpu")
        rates["gloo"] = gloo_rate(probe, pipe)
        for gigabytes in args.gigabytes:
            make = lambda **options: pipe_server.PipeClient(pipe, **options)  # noqa: E731
            results += measure(make_model(gigabytes), make, args, f"{gigabytes:g} GB", gigabytes * 1e9)
    print(", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items()), f"; {os.cpu_count()} cores\n")
    print(table(results, rates))


if __name__ == "__main__":
    main()
