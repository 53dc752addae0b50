"""Run folders of any size, as a training would have left them: for tests of the page, without a model.

A `fault` is a run that went wrong in one of the ways that the page should help to find.
"""

import json
import os
import random
import socket
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FAULTS = ("length", "unmasked", "stale", "entropy", "domain")
DOMAINS = ("sums", "search", "code")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = "we add the two numbers first then check that answer is so it must be right again step by of and carry one"
BYTES = ["é".encode()[:1], "é".encode()[1:], b"\xff", "\u202e".encode(), "\u200b".encode(), b"\n", b"."]
PIECES = (
    [w.encode() for w in SPECIAL] + BYTES + [f" {w}".encode() for w in WORDS.split()] + [b" %d" % n for n in range(100)]
)
BEGUN = time.time() - 9000  # of every run
END, FIRST_WORD = 2, len(SPECIAL) + len(BYTES)


def vocabulary(folder: Path) -> None:
    special = [n < len(SPECIAL) for n in range(len(PIECES))]
    ids = pa.array(range(len(PIECES)), pa.int32())
    table = pa.table({"id": ids, "piece": pa.array(PIECES, pa.binary()), "special": special})
    pq.write_table(table, folder / "vocabulary.parquet")


def metrics_line(step: int, steps: int, fault: str | None, rng: random.Random) -> dict:
    """What train_grpo.py logs of a step; `fault` shows from a third of the run on."""
    share = step / steps
    wrong = max(0.0, share - 1 / 3) * 1.5 if fault else 0.0
    reward = min(0.95, 0.1 + 0.8 * (1 - 2.718 ** (-4 * share))) + rng.gauss(0, 0.02)
    length, entropy, lag, difference = 120 + rng.gauss(0, 4), 0.9 - 0.4 * share + rng.gauss(0, 0.02), 0, 0.012
    if fault == "length":
        length, reward = 120 + 700 * wrong, reward + 0.3 * wrong
    if fault == "entropy":
        entropy, reward = 0.9 * 2.718 ** (-14 * share) + 0.004, min(reward, 0.35) + rng.gauss(0, 0.005)
    if fault == "stale" and wrong:
        lag, difference = int(step - steps / 3), 0.012 + 0.5 * wrong
    line = {"step": step, "reward": reward, "reward_std": 0.3}
    line["frac_reward_zero_std"] = 0.2 + (0.75 * wrong if fault == "entropy" else 0)
    line |= {"rewards/right/mean": reward, "rewards/format/mean": min(1.0, 0.4 + share), "entropy": max(entropy, 0.002)}
    lengths = {"mean": length, "max": 2 * length, "min": length / 3}
    line |= {f"completions/{name}_length": value for name, value in lengths.items()}
    line |= {"completions/clipped_ratio": 0.02 + (0.5 * wrong if fault == "length" else 0), "num_tokens": 9000.0 * step}
    line |= {"loss": rng.gauss(0, 0.001), "grad_norm": abs(rng.gauss(0.4, 0.05)), "lr": 1e-6, "kl": 0.02 * share}
    line |= {"sampling/logprob_diff_mean": difference, "sampling/logprob_diff_max": 20 * difference}
    line |= {"sampling/kl": difference / 9}
    line |= {"sampling/ratio_mean": 1.0, "sampling/ess": max(0.05, 0.999 - difference), "policy_lag": lag}
    line |= {"clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.001, "advantages/abs_mean": 0.6}
    for name in DOMAINS:
        broken = fault == "domain" and name == "code"
        line[f"{name}/reward"] = 0.0 if broken else reward + rng.gauss(0, 0.02)
        line[f"{name}/rewards/right/mean"] = line[f"{name}/reward"]
        line[f"{name}/completions/mean_length"] = length * (1 + len(name) / 20)
    line |= {"turns/mean": 2.0, "tools/call_frequency": 1.0, "tools/failure_frequency": 0.03}
    seconds = {"generate": 4.2, "score": 0.3, "logprobs": 0.8, "update": 2.9, "push": 0.4}
    line |= {f"time/{name}": value * (1 + rng.random() / 5) for name, value in seconds.items()}
    line |= {"time/step": 10.2, "time/unix": BEGUN + 10.2 * step, "time/tokens_per_second": 882.0 + rng.gauss(0, 20)}
    return {name: round(value, 6) for name, value in line.items()}


def evaluation_line(step: int, line: dict, fault: str | None) -> dict:
    solved = line["reward"] if fault != "length" else min(line["reward"], max(0.1, 0.6 - step / 4000))
    return (
        {"step": step, "eval/reward": solved, "eval/mean@4": solved, "eval/pass@4": min(1.0, solved + 0.1)}
        | {f"eval/{name}/mean@4": 0.0 if fault == "domain" and name == "code" else solved for name in DOMAINS}
        | {"eval/mean_length": line["completions/mean_length"], "eval/rows": 64, "time/unix": line["time/unix"] + 1}
    )


def completions_table(
    step: int,
    steps: int,
    rows: int,
    tokens: int,
    fault: str | None = None,
    group: int = 8,
    turns: bool = True,
    per_token: bool = True,
) -> pa.Table:
    """Completions of a step with their tokens, in groups of `group`; two turns each with a tool's answer between."""
    rng = np.random.default_rng(step)
    wrong = fault is not None and step > steps / 3
    lengths = rng.integers(max(8, tokens // 2), tokens + 1, rows) if tokens > 16 else np.full(rows, tokens)
    if fault is None and not turns:
        lengths = np.full(rows, tokens)
    if fault == "entropy" and wrong:
        lengths = np.full(rows, tokens)
    reward = rng.random(rows).round(3)
    if fault == "length" and wrong:
        reward = (lengths / tokens).round(3)
    domains = [DOMAINS[(n // group) % len(DOMAINS)] for n in range(rows)]
    if fault == "domain":
        reward = np.where(np.array(domains) == "code", 0.0, reward)
    if fault == "entropy" and wrong:
        reward = np.repeat(rng.random(-(-rows // group)).round(1), group)[:rows]
    advantage = reward - np.repeat([reward[i : i + group].mean() for i in range(0, rows, group)], group)[:rows]
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    total = int(offsets[-1])
    place = np.arange(total) - np.repeat(offsets[:-1], lengths)
    ids = rng.integers(FIRST_WORD - 3, len(PIECES), total).astype(np.int32)
    if fault == "entropy" and wrong:
        ids = (FIRST_WORD + place % 9).astype(np.int32)
    ids[offsets[1:] - 1] = END
    first, third = (lengths * 0.4).astype(int), (lengths * 0.6).astype(int)
    observed = (place >= np.repeat(first, lengths)) & (place < np.repeat(third, lengths)) & turns
    pieces = [piece.decode("utf-8", "replace") for piece in PIECES]
    texts, all_turns = [], []
    for n in range(rows):
        part = [pieces[i] for i in ids[offsets[n] : offsets[n + 1]]]
        texts.append("".join(part[third[n] if turns else 0 : -1]))
        call = {"name": "calculator", "arguments": '{"expression": "12 + 30"}', "result": "42"}
        call |= {"seconds": 0.02 * (n % 5), "failed": n % 11 == 0}
        asked = {"text": "".join(part[: first[n]]), "observation": ["".join(part[first[n] : third[n]])], "reward": 0.0}
        asked |= {"calls": [call], "start": 0, "end": int(first[n]), "state": f"n={n}"}
        said = {"text": texts[-1], "observation": [], "reward": float(reward[n])}
        said |= {"calls": [], "start": int(third[n]), "end": int(lengths[n]), "state": None}
        all_turns.append([asked, said])
    version = step - 1 - (int(step - steps / 3) if fault == "stale" and wrong else 0)
    asks = [f"What is {10 + n // group} + {step % 40}? <b>" for n in range(rows)]
    prompt = [json.dumps([{"role": "user", "content": text}]) for text in asks]
    columns = {"prompt": prompt, "completion": texts, "reward": reward, "advantage": advantage}
    columns |= {"finish_reason": ["length" if n % 17 == 0 else "stop" for n in range(rows)]}
    columns |= {"row_number": [n // group + (step * 7) % 50 for n in range(rows)]}
    columns |= {"rewards/right": (reward > 0.5).astype(float), "rewards/format": reward / 2}
    if turns:
        columns["turns"] = all_turns
    if not per_token:
        return pa.table(columns)
    columns |= {"group": np.arange(rows) // group, "domain": domains, "length": pa.array(lengths, pa.int32())}
    columns["policy_version"] = pa.array([version] * rows, pa.int32())
    columns["prompt_ids"] = pa.array([[1, FIRST_WORD, FIRST_WORD + 1, 2]] * rows, pa.list_(pa.int32()))

    def listed(values: np.ndarray, kind) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))

    logprob = -np.abs(rng.normal(0, 0.6, total))
    drift = 0.5 if fault == "stale" and wrong else 0.01
    spread = np.repeat(advantage, lengths) * ~observed
    trained = np.ones(total, bool) if fault == "unmasked" else ~observed
    columns["token_ids"] = listed(ids, pa.int32())
    columns["tokens/trained"] = listed(trained, pa.bool_())
    sampled = np.where(observed, np.nan, logprob + rng.normal(0, drift, total))
    entropy = np.abs(rng.normal(0.6, 0.3, total)) * (1 / 60 if fault == "entropy" and wrong else 1)
    per = {"advantage": spread, "weight": spread * (np.abs(spread) < 0.45), "logprob": logprob, "entropy": entropy}
    per["sampler_logprob"] = sampled
    for name, values in per.items():
        columns[f"tokens/{name}"] = listed(values.astype(np.float16), pa.float16())
    columns["tokens/version"] = listed(np.full(total, version, np.int32), pa.int32())
    return pa.table(columns)


def make_run(
    folder: Path,
    steps: int = 40,
    files: int = 2,
    rows: int = 16,
    tokens: int = 60,
    seed: int = 0,
    fault: str | None = None,
    state: str | None = "finished",
    evaluate: int = 10,
    **config,
) -> Path:
    """A run of so many `steps`, with the completions of the last `files` steps."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model_id": "models/SmolLM2-135M-Instruct", "dataset_id": "examples/sums.py:rows", "push_steps": 1}
    settings |= {"advantage": "grpo", "policy_loss": "ppo", "seed": seed, "run_name": folder.name, "max_steps": steps}
    settings |= {"output_dir": "runs", "learning_rate": 3e-4, "num_generations": 8, "max_completion_length": 1024}
    settings["domains"] = [{"name": name, "weight": 1.0} for name in DOMAINS]
    (folder / "config.json").write_text(json.dumps(settings | config, indent=2), encoding="utf-8")
    (folder / "command.txt").write_text("python train_grpo.py --config examples/sums.yaml\n", encoding="utf-8")
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            line = metrics_line(step, steps, fault, rng)
            file.write(json.dumps(line) + "\n")
            if step % evaluate == 0:
                file.write(json.dumps(evaluation_line(step, line, fault)) + "\n")
    if state:
        told = {"state": state, "step": steps, "num_steps": steps, "pid": os.getpid(), "host": socket.gethostname()}
        told |= {"started": BEGUN, "updated": time.time()}
        told["why"] = "CUDA out of memory <b>" if state == "failed" else None
        (folder / "state.json").write_text(json.dumps(told), encoding="utf-8")
    (folder / "lock").touch()
    vocabulary(folder)
    for step in range(steps - files + 1, steps + 1):
        table = completions_table(step, steps, rows, tokens, fault)
        write_step(folder / "completions" / f"step_{step:06d}.parquet", table)
    for step in range(evaluate, steps + 1, evaluate * max(1, steps // evaluate // 8)):
        table = completions_table(step, steps, 8, min(tokens, 60), group=1, turns=False, per_token=False)
        table = table.set_column(table.schema.get_field_index("row_number"), "row_number", pa.array(range(8)))
        table = table.set_column(0, "prompt", pa.array([f"What is {n} + 2?" for n in range(8)]))
        write_step(folder / "evaluations" / f"step_{step:06d}.parquet", table)
    return folder


def write_step(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path)
