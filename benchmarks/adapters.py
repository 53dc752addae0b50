"""What a push of LoRA costs, and sampling after it: adapters alone against LoRA folded into the weights.

    python benchmarks/adapters.py [--model models/SmolLM2-135M-Instruct] [--lora_r 32]     # 5 minutes

Two live servers side by side, in bfloat16, one of them with --enable-lora, take turns: after a push each samples the
same requests, so what else the machine does meets both. Printed: bytes and seconds of a push (median), sampled tokens
for a second of the server's CPU time and of wall time, and the mean |log-prob difference| between server and trainer
(float32) over the sampled tokens. Results: benchmarks/results/adapters.json.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from push_worker import difference, script_tokenizer  # noqa: E402
from server_fixture import start_server  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402

PROMPTS, SAMPLES, TOKENS = 4, 8, 24  # of a batch of requests
CFG = TrainConfig(use_peft=True, compute_dtype="float32", num_generations=SAMPLES, max_completion_length=TOKENS)


def cpu_seconds(server) -> float:
    process = psutil.Process(server.process.pid)
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))


def sample(generator, tokenizer, server) -> dict:
    """Sampled tokens, wall seconds and CPU seconds of one batch of requests."""
    questions = (f"What is {n} + {n + 7}? Answer with just the number." for n in range(PROMPTS))
    prompts = [tokenizer(question)["input_ids"] for question in questions]

    async def ask():
        how = dict(n=SAMPLES, max_tokens=TOKENS, min_tokens=TOKENS)
        return await asyncio.gather(*(generator.generate(prompt, **how) for prompt in prompts))

    began, cpu = time.perf_counter(), cpu_seconds(server)
    groups = asyncio.run(ask())
    tokens = sum(len(one.token_ids) for group in groups for one in group)
    return {"tokens": tokens, "wall": time.perf_counter() - began, "cpu": cpu_seconds(server) - cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--lora_r", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    utils.init_distributed(60)
    flags = ["--dtype", "bfloat16", "--max-model-len", "512"]
    servers = {"folded": start_server(args.model, *flags)}
    servers["adapters"] = start_server(args.model, *flags, "--enable-lora")
    try:
        cfg = replace(CFG, model_id=args.model, max_prompt_length=128, lora_r=args.lora_r)
        policy, inner = script.load_policy(cfg, torch.device("cpu"))
        tokenizer, generators = script_tokenizer(args.model), {}
        for how, server in servers.items():
            server.wait(900)
            own = replace(cfg, push_lora=how, server_urls=[server.url])
            own.server_token = server.token
            generators[how] = script.make_generator(own, inner.hf_model, tokenizer, torch.device("cpu"))
        rows: dict[str, list[dict]] = {how: [] for how in servers}
        for number in range(args.rounds + 1):  # the first round fills caches and allocates
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    if "lora_B" in name:  # about what a step of Adam does
                        parameter.add_(torch.randn_like(parameter).sign() * 3e-4)
            for how, generator in generators.items():
                began = time.perf_counter()
                script.push_weights(policy, generator, number, cfg.push_bucket_mb)
                row = {"push": time.perf_counter() - began, "bytes": generator.sent_bytes}
                row |= sample(generator, tokenizer, servers[how])
                row["difference"] = difference(policy, cfg, generator)[0]
                rows[how].append(row)
                print(number, how, {key: round(value, 4) for key, value in row.items()}, flush=True)
    finally:
        for server in servers.values():
            server.stop()
    result = {"model": Path(args.model).name, "lora_r": args.lora_r, "rounds": args.rounds}
    for how, found in rows.items():
        middle = {key: statistics.median(row[key] for row in found[1:]) for key in found[0]}
        result[how] = {
            "push_seconds": middle["push"],
            "push_bytes": middle["bytes"],
            "tokens_per_second": statistics.median(row["tokens"] / row["wall"] for row in found[1:]),
            "tokens_per_cpu_second": statistics.median(row["tokens"] / row["cpu"] for row in found[1:]),
            "logprob_difference": middle["difference"],
        }
    print(json.dumps(result, indent=1))
    (ROOT / "benchmarks" / "results" / "adapters.json").write_text(
        json.dumps(result, indent=1) + "\n", encoding="utf-8"
    )
    utils.end_process(0)


if __name__ == "__main__":
    main()
