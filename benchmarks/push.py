"""What a weight push costs beside a live vLLM server.

    python benchmarks/push.py --model models/SmolLM2-135M-Instruct [--push_bucket_mb 256] [--repetitions 10]

begin_push   pausing the server, and its start of a reload
send_bucket  packing, travelling and loading, at the same time
finish_push  the reload's end, and resuming
whole        all of it, and walking through the model
"""

import argparse
import json
import os
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
from vllm_client import VLLMClient  # noqa: E402

PHASES = ("begin_push", "send_bucket", "finish_push")
SECONDS: dict[str, float] = defaultdict(float)


def timed(phase: str):
    method = getattr(VLLMClient, phase)

    def call(*args):
        start = time.perf_counter()
        try:
            return method(*args)
        finally:
            SECONDS[phase] += time.perf_counter() - start

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--push_bucket_mb", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    for phase in PHASES:
        setattr(VLLMClient, phase, timed(phase))
    live = start_server(Path(args.model).resolve(), "--dtype", "bfloat16", "--max-model-len", "512").wait(600)
    try:
        holder, rows = nn.Module(), []  # as `Policy` holds it
        holder.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        client = VLLMClient([live.url], live.token, run="push")
        client.connect_weights("cpu")
        for version in range(args.repetitions + 1):
            SECONDS.clear()
            start = time.perf_counter()
            script.push_weights(holder, client, version, args.push_bucket_mb)
            row = {"whole": time.perf_counter() - start} | SECONDS
            rows.append({name: round(seconds, 3) for name, seconds in row.items()})
            print(json.dumps(rows[-1]), flush=True)
        size, whole = 2 * sum(p.numel() for p in holder.parameters()), [row["whole"] for row in rows[1:]]
        said = f"{size / 1e6:.0f} MB, {len(whole)} pushes behind the first: median {median(whole):.3f} s"
        print(f"{said}, minimum {min(whole):.3f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        client.close()
    finally:
        live.stop()


if __name__ == "__main__":
    main()
