"""What a weight push costs beside a live vLLM server.

    python benchmarks/push.py --model models/SmolLM2-135M-Instruct [--push_bucket_mb 256] [--repetitions 5]

pack       rounding and laying out, at the trainer's end
broadcast  from the announcement of a bucket until its bytes have left
load       until the server has put it in place
whole      all of a push: pausing, reloading and resuming, too
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from torch import nn
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from server_fixture import start_server  # noqa: E402

import train_grpo as script  # noqa: E402
from serving import wire  # noqa: E402
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--push_bucket_mb", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    wire.pack, wire.broadcast = timed("pack", wire.pack), timed("broadcast", wire.broadcast)
    VLLMClient.send_bucket = timed("load", VLLMClient.send_bucket)
    live = start_server(Path(args.model).resolve(), "--dtype", "bfloat16", "--max-model-len", "512").wait(600)
    try:
        holder, rows = nn.Module(), []  # as `Policy` holds it
        holder.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        client = VLLMClient([live.url], live.token, run="push")
        client.connect_weights("cpu")
        for version in range(args.repetitions):
            SECONDS.clear()
            start = time.perf_counter()
            script.push_weights(holder, client, version, args.push_bucket_mb)
            row = {"whole": time.perf_counter() - start} | SECONDS
            row["load"] -= row["pack"] + row["broadcast"]
            rows.append({name: round(seconds, 3) for name, seconds in row.items()})
            print(json.dumps(rows[-1]), flush=True)
        size = 2 * sum(p.numel() for p in holder.parameters())
        print(f"{size / 1e6:.0f} MB, median of {len(rows)}: {median(row['whole'] for row in rows):.3f} s")
        client.close()
    finally:
        live.stop()


if __name__ == "__main__":
    main()
