"""What a group of completions, typed or sampled, is worth: each reward function's numbers, and the advantages."""

import asyncio
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import rewards
import rollouts
import utils
from cli import ConfigError
from hf_generator import HFGenerator
from looking.answers.rows import own_row, read
from looking.answers.settings import Script
from looking.output import Tail
from runlog import samples
from runlog.log import completion_rows
from runlog.tokens import vocabulary_of
from safety import credentials
from vllm_client import Completion

MOST_COMPLETIONS = 64


class Typed:
    """A generator whose tokens somebody has typed: `generate` gives the next ones.

    texts: a list of {"text"}, or {"ids", "finish"} where the tokens themselves are known."""

    image_bytes, rope_index = 0, None

    def __init__(self, processor, texts: list[dict]):
        self.tokenizer, self.texts, self.place = processor, texts, 0

    def tokens(self, given: dict, most: int) -> tuple[list[int], str]:
        """(ids, as a policy would have sampled them, with the token that ends a turn; how it ended)."""
        tokenizer = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        ids, end = given.get("ids"), tokenizer.eos_token_id
        finish = given.get("finish") or "stop"
        if ids is None:
            ids = tokenizer(given["text"], add_special_tokens=False)["input_ids"]
            ids = ids if end is None or given.get("finish") == "length" else [*ids, end]
        return (ids, finish) if len(ids) <= most else (ids[:most], "length")

    async def generate(self, prompt_ids, *, n=1, max_tokens, **_) -> list[Completion]:
        made = []
        for _ in range(n):
            ids, finish = self.tokens(self.texts[min(self.place, len(self.texts) - 1)], max_tokens)
            self.place += 1
            made.append(Completion(ids, [0.0] * len(ids), finish, 0, list(prompt_ids)))
        return made


def checked_texts(given: dict) -> list[dict]:
    texts = given.get("completions")
    ok = isinstance(texts, list) and 0 < len(texts) <= MOST_COMPLETIONS
    if not ok or not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in texts):
        raise ConfigError(f"give 1 to {MOST_COMPLETIONS} completions.")
    return texts


def score(script: Script, given: dict) -> dict:
    """Completions of a row, typed or sampled now, scored as in training, and the advantages of the group."""
    known = read(script, given)
    script.forget()
    own, one = own_row(known, given)
    processor, notes = known["processor"], []
    sampling = given.get("sample")
    if sampling:
        size = number_of(sampling, "n", 1, MOST_COMPLETIONS)
        own = replace(own, temperature=float(sampling.get("temperature") or own.temperature))
        generator = sampler_of(script, own, processor)
    else:
        texts = checked_texts(given)
        size, generator = len(texts), Typed(processor, texts)
        if own.rollout == "multi_turn":
            own = replace(own, max_turns=1)
            notes.append("Typed completions are one turn; whole trajectories are played under Tools, or sampled.")
    own = replace(own, num_generations=size)
    begun_at = time.perf_counter()
    trajectories = asyncio.run(rollouts.call_rollout(one, generator, own))
    seconds = time.perf_counter() - begun_at
    failed = [t for t in trajectories if "failure" in t.info]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(trajectories)} failed: {failed[0].info['failure']}")
    for number, t in enumerate(trajectories):
        t.group = 0
        t.info["row_number"] = given.get("row", 0)
        t.info["number"] = number
    functions = all_scored(trajectories, own, processor)
    told = advantages(script, trajectories, own) if not any(f["error"] for f in functions) else {}
    batch = told.pop("batch", None)
    means = told.pop("means", [None] * size)
    totals = [sum(t.token_rewards) for t in trajectories]
    known_ids = vocabulary_of(processor)
    shown = completion_rows(trajectories, totals, means, batch, with_tokens=True)
    return {
        "functions": functions,
        "completions": [
            {
                "text": t.info["completion"],
                "ids": list(t.token_ids) if all(t.loss_mask) else None,
                "finish": t.finish_reason,
                "reward": total,
                "advantage": mean,
                "length": sum(t.loss_mask),
                "turns": samples.turns(row),
                "tokens": samples.token_view(arrays(row), known_ids),
            }
            for t, total, mean, row in zip(trajectories, totals, means, shown, strict=True)
        ],
        "notes": notes + told.get("notes", []),
        "advantage": own.advantage,
        "several": own.rollout == "multi_turn",
        "seconds": seconds,
    }


def arrays(row: dict) -> dict:
    return {name: np.asarray(value) if name.endswith("_ids") else value for name, value in row.items()}


def number_of(given: dict, name: str, low: int, high: int) -> int:
    value = given.get(name)
    if not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r:.40}; give a number from {low} to {high}.")
    return value


def sampler_of(script: Script, own, processor):
    """A generator of the model, as it is before training: a server, or a copy in this process."""
    if own.generator == "vllm":
        client = utils.reach_servers(replace(own, server_timeout=min(own.server_timeout, 20.0)))
        client.tokenizer, client.rope_index = processor, None
        return client
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # here nothing is forked after it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = script["load_hf_model"](own, getattr(torch, own.compute_dtype)).to(device)
    generator = HFGenerator(model, processor)
    generator.seed(time.time_ns() % 2**31)
    return generator


def all_scored(trajectories: list, own, processor) -> list[dict]:
    weights = own.reward_weights or [1.0] * len(own.reward_funcs)
    pairs = zip(own.reward_funcs, weights, strict=True)
    return [scored(spec, weight, trajectories, own, processor) for spec, weight in pairs]


def scored(spec: str, weight: float, trajectories: list, own, processor) -> dict:
    """One reward function on the group, alone: its values, seconds, what it printed, or what it raised, and where. What
    it is worth is added to the trajectories' rewards, as `rewards.score` does it for all."""
    one = replace(own, reward_funcs=[spec], reward_weights=[weight])
    told = {"name": spec, "weight": weight, "error": None, "where": None, "values": [], "components": []}
    before = [dict(t.info.get("rewards", {})) for t in trajectories]
    with printed() as said:
        start = time.perf_counter()
        try:
            columns = set(trajectories[0].row)
            functions = rewards.get_reward_functions(one, columns)
            start = time.perf_counter()  # without what it takes to import it
            asyncio.run(rewards.score(trajectories, functions, one, processor))
        except BaseException as error:
            whole = isinstance(error, ConfigError | rewards.RewardError)
            text = str(error) if whole else f"{type(error).__name__}: {error}"
            # A ConfigError is raised by a line of ours, which says nothing of the user's.
            told |= {"error": credentials.mask(text)}
            told |= {"where": None if isinstance(error, ConfigError) else place_of(error)}
        told["seconds"] = time.perf_counter() - start
    told["said"] = said()
    if not told["error"]:
        name = spec.rpartition(":")[2]
        for t, old in zip(trajectories, before, strict=True):
            found = t.info["rewards"]
            told["values"].append(found[name])
            told["components"].append({key.partition("/")[2]: v for key, v in found.items() if key != name})
            t.info["rewards"] = old | found
        told["late"] = trajectories[0].info["reward_timeouts"] > 0
    return told


class printed:
    """What is printed under this block, by this process or by what it starts: `said()` afterwards."""

    def __enter__(self):
        self.tail = Tail()
        sys.stdout.flush(), sys.stderr.flush()
        self.saved = os.dup(1), os.dup(2)
        for number in (1, 2):
            os.dup2(self.tail.writer, number)
        os.close(self.tail.writer)
        return lambda: self.text

    def __exit__(self, *_):
        sys.stdout.flush(), sys.stderr.flush()
        for number, saved in zip((1, 2), self.saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        self.tail.thread.join(0.1)  # it ends when nobody can write any more
        self.text = self.tail.since(0)[0]


def place_of(error: BaseException) -> dict | None:
    """The line of a user's file on which an error came up: {"file", "line", "text", "trace"}."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    here = [f for f in frames if Path(f.filename).is_relative_to(Path.cwd()) and ".venv" not in f.filename]
    if isinstance(error, SyntaxError) and error.filename:
        return {"file": error.filename, "line": error.lineno, "text": (error.text or "").strip(), "trace": ""}
    if not here:
        return None
    last = here[-1]
    file = os.path.relpath(last.filename)
    trace = "".join(traceback.format_list(here))[-4000:]
    return {"file": file, "line": last.lineno, "text": last.line, "trace": trace}


def advantages(script: Script, trajectories: list, own) -> dict:
    """{"batch", "means": the advantage of each, "notes"}: of this group alone."""
    notes = []
    if own.kl_in_reward:
        own, notes = replace(own, kl_in_reward=False), ["Without --kl_in_reward, which needs the model."]
    batch = script["collate"](trajectories, 0, torch.device("cpu"), 0, 0)
    try:
        script["shape_rewards"](batch, own, {})
        script["add_advantages"](batch, own)
    except Exception as error:
        return {"notes": [*notes, f"--advantage {own.advantage} needs more than one group's rewards: {error}"]}
    means = script["row_mean"](batch.advantages, batch.loss_mask)[:, 0].tolist()
    return {"batch": batch, "means": means, "notes": notes}
