"""Run folders of any size, as a training would have left them: for tests of the page, without a model."""

import json
import os
import random
import socket
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DOMAINS = ("sums", "search", "code")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = "we add the two numbers first then check that answer is so it must be right again step by of and carry one"
BYTES = ["é".encode()[:1], "é".encode()[1:], b"\xff", "\u202e".encode(), "\u200b".encode(), b"\n", b"."]
PIECES = (
    [w.encode() for w in SPECIAL] + BYTES + [f" {w}".encode() for w in WORDS.split()] + [b" %d" % n for n in range(100)]
)
BEGUN = time.time() - 9000  # of every run
END, FIRST_WORD = 2, len(SPECIAL) + len(BYTES)
SECONDS = {"generate": 4.2, "score": 0.3, "logprobs": 0.8, "update": 2.9, "push": 0.4}


def vocabulary(folder: Path) -> None:
    special = [n < len(SPECIAL) for n in range(len(PIECES))]
    ids, pieces = pa.array(range(len(PIECES)), pa.int32()), pa.array(PIECES, pa.binary())
    pq.write_table(pa.table({"id": ids, "piece": pieces, "special": special}), folder / "vocabulary.parquet")


def metrics_line(step: int, steps: int, rng: random.Random) -> dict:
    """What train_grpo.py logs of a step."""
    share = step / steps
    reward = min(0.95, 0.1 + 0.8 * (1 - 2.718 ** (-4 * share))) + rng.gauss(0, 0.02)
    length = 120 + rng.gauss(0, 4)
    line = {
        "step": step, "reward": reward, "reward_std": 0.3, "frac_reward_zero_std": 0.2,
        "rewards/right/mean": reward, "rewards/format/mean": min(1.0, 0.4 + share),
        "entropy": 0.9 - 0.4 * share + rng.gauss(0, 0.02), "completions/mean_length": length,
        "completions/max_length": length * 2, "completions/min_length": length / 3, "completions/clipped_ratio": 0.02,
        "num_tokens": 9000.0 * step, "loss": rng.gauss(0, 0.001), "grad_norm": abs(rng.gauss(0.4, 0.05)), "lr": 1e-6,
        "kl": 0.02 * share, "sampling/logprob_diff_mean": 0.012, "sampling/logprob_diff_max": 0.24,
        "sampling/kl": 0.0013, "sampling/ratio_mean": 1.0, "sampling/ess": 0.99, "policy_lag": 0,
        "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.001, "advantages/abs_mean": 0.6,
        "turns/mean": 2.0, "tools/call_frequency": 1.0, "tools/failure_frequency": 0.03,
        "time/step": 10.2, "time/unix": BEGUN + 10.2 * step, "time/tokens_per_second": 882.0 + rng.gauss(0, 20),
    }  # fmt: skip
    for name in DOMAINS:
        line[f"{name}/reward"] = line[f"{name}/rewards/right/mean"] = reward + rng.gauss(0, 0.02)
        line[f"{name}/completions/mean_length"] = length * (1 + len(name) / 20)
    line |= {f"time/{name}": value * (1 + rng.random() / 5) for name, value in SECONDS.items()}
    return {name: round(value, 6) for name, value in line.items()}


def evaluation_line(step: int, line: dict) -> dict:
    solved = line["reward"]
    shares = {"eval/reward": solved, "eval/mean@4": solved, "eval/pass@4": min(1.0, solved + 0.1)}
    shares |= {f"eval/{name}/mean@4": solved for name in DOMAINS}
    return {"step": step, "eval/mean_length": 120.0, "eval/rows": 64, "time/unix": line["time/unix"] + 1} | shares


def completions_table(step: int, rows: int, tokens: int, kept: bool = True) -> pa.Table:
    """Completions of a step with their tokens, in groups of 8; two turns each with a tool's answer between. kept: the
    tokens; without them, an evaluation, of one turn each."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(max(8, tokens // 2), tokens + 1, rows)
    reward, group = rng.random(rows).round(3), np.arange(rows) // 8
    advantage = reward - np.array([reward[group == number].mean() for number in group])
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    total, place = int(offsets[-1]), np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    ids = rng.integers(FIRST_WORD - 3, len(PIECES), total).astype(np.int32)
    ids[offsets[1:] - 1] = END
    first, third = (lengths * 0.4).astype(int), (lengths * 0.6).astype(int)
    observed = (place >= np.repeat(first, lengths)) & (place < np.repeat(third, lengths))
    pieces = [piece.decode("utf-8", "replace") for piece in PIECES]
    texts, turns = [], []
    for n in range(rows):
        part = [pieces[i] for i in ids[offsets[n] : offsets[n + 1]]]
        asked, answer, said = ("".join(p) for p in (part[: first[n]], part[first[n] : third[n]], part[third[n] : -1]))
        call = {"name": "calculator", "arguments": '{"expression": "12 + 30"}', "result": "42"}
        call |= {"seconds": 0.02 * (n % 5), "failed": n % 11 == 0}
        one = {"text": asked, "observation": [answer], "calls": [call], "reward": 0.0, "start": 0, "end": int(first[n])}
        two = {"text": said, "observation": [], "calls": [], "reward": float(reward[n]), "start": int(third[n])}
        turns.append([one | {"state": f"n={n}"}, two | {"end": int(lengths[n]), "state": None}])
        texts.append(said)
    asked = [f"What is {10 + n // 8} + {step % 40}? <b>" for n in range(rows)]
    columns = {
        "prompt": [json.dumps([{"role": "user", "content": text}]) for text in asked], "completion": texts,
        "reward": reward, "advantage": advantage,
        "finish_reason": ["stop" if n % 17 else "length" for n in range(rows)],
        "row_number": group if kept else np.arange(rows), "group": group if kept else np.arange(rows),
        "rewards/right": (reward > 0.5).astype(float), "rewards/format": reward / 2,
    }  # fmt: skip
    if not kept:
        return pa.table(columns)

    def listed(values: np.ndarray, kind) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))

    logprob, spread = -np.abs(rng.normal(0, 0.6, total)), np.repeat(advantage, lengths) * ~observed
    numbers = {
        "advantage": spread, "weight": spread * (np.abs(spread) < 0.45), "logprob": logprob,
        "entropy": np.abs(rng.normal(0.6, 0.3, total)),
        "sampler_logprob": np.where(observed, np.nan, logprob + rng.normal(0, 0.01, total)),
    }  # fmt: skip
    columns |= {
        "turns": turns, "domain": [DOMAINS[number % len(DOMAINS)] for number in group],
        "policy_version": pa.array([step - 1] * rows, pa.int32()), "length": pa.array(lengths, pa.int32()),
        "prompt_ids": pa.array([[1, FIRST_WORD, FIRST_WORD + 1, 2]] * rows, pa.list_(pa.int32())),
        "token_ids": listed(ids, pa.int32()), "tokens/trained": listed(~observed, pa.bool_()),
        **{f"tokens/{name}": listed(values.astype(np.float16), pa.float16()) for name, values in numbers.items()},
        "tokens/version": listed(np.full(total, step - 1, np.int32), pa.int32()),
    }  # fmt: skip
    return pa.table(columns)


def make_run(
    folder: Path, steps=40, files=2, rows=16, tokens=60, seed=0, state="finished", evaluate=10, **config
) -> Path:
    """A run of so many `steps`, with the completions of the last `files` steps."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_id": "models/SmolLM2-135M-Instruct", "dataset_id": "examples/sums.py:rows", "advantage": "grpo",
        "policy_loss": "ppo", "seed": seed, "run_name": folder.name, "learning_rate": 3e-4, "max_steps": steps,
        "domains": [{"name": name, "weight": 1.0} for name in DOMAINS],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings | config, indent=2), encoding="utf-8")
    (folder / "command.txt").write_text("python train_grpo.py --config examples/sums.yaml\n", encoding="utf-8")
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            line = metrics_line(step, steps, rng)
            file.write(json.dumps(line) + "\n")
            if step % evaluate == 0:
                file.write(json.dumps(evaluation_line(step, line)) + "\n")
    told = {"state": state, "step": steps, "num_steps": steps, "pid": os.getpid(), "host": socket.gethostname()}
    told |= {"updated": time.time(), "why": "CUDA out of memory <b>" if state == "failed" else ""}
    (folder / "state.json").write_text(json.dumps(told), encoding="utf-8")
    (folder / "lock").touch()
    vocabulary(folder)
    for step in range(steps - files + 1, steps + 1):
        write_step(folder / "completions" / f"step_{step:06d}.parquet", completions_table(step, rows, tokens))
    for step in range(evaluate, steps + 1, evaluate * max(1, steps // evaluate // 8)):
        table = completions_table(step, 8, min(tokens, 60), kept=False)
        write_step(folder / "evaluations" / f"step_{step:06d}.parquet", table)
    return folder


def write_step(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path)
