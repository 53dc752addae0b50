"""Generation and training at the same time: what it adds to train_grpo.py, which has the rest.

    CUDA_VISIBLE_DEVICES=0 python vllm_server.py --model Qwen/Qwen2.5-1.5B-Instruct
    CUDA_VISIBLE_DEVICES=1,2,3,4 torchrun --nproc_per_node=4 train_async.py --model_id Qwen/Qwen2.5-1.5B-Instruct

The server samples the next steps' completions while the trainer updates. Step t learns from the prompts it would
have without this script, in the same order, and each once; only they may begin up to --max_staleness pushes earlier.
So up to 1 + max_staleness steps' completions are in the server at a time:

    server    | step 0 | step 1 | step 2     | step 3 |            --max_staleness 1: while the trainer updates on
    trainer            | upd. 0 | upd. 1 |   | upd. 2 | upd. 3     step t, step t + 1 is sampled

A push does not end what is under way: those sequences go on with the new weights. So a completion may begin up to
`max_staleness` versions before the one it is trained with, and end with a later one (where LoRA adapters travel alone,
--push_lora, with the one it began with). It can never be older: a step begins only once the bound is guaranteed. Slow
completions are waited for; dropping them would bias towards short ones. The ratio of trainer and sampling policy is
corrected token by token, by the log-probs of sampling (--correction).

Rewards, tools and environments run in the background, too. The step number is the only state needed to resume: what was
under way is sampled again. A `PromptSampler.next` that reads `memory` is asked for a step up to max_staleness steps
early. To use it with a copy of train_grpo.py, copy this file, too, and write the copy's name wherever `train_grpo`
stands in it.
"""

# ruff: noqa: E402 - the command line is parsed before torch is imported, so that a wrong flag is reported at once

from config import ConfigError, knobs_of, parse_args


class TrainConfig(knobs_of("train_grpo")):  # so that a knob of your own there is one here, too
    first_run = f"{knobs_of('train_grpo').first_run} --max_staleness 0"

    # --- overlap ---
    max_staleness: int = 1  # most policy versions between a completion's first token and its training; 0: no overlap


CONFIG = parse_args(TrainConfig, description=__doc__.split("\n")[0]) if __name__ == "__main__" else None

import asyncio
import concurrent.futures
import threading
import time
from collections import Counter

import train_grpo
import utils
from inputs.trajectory import Trajectory
from train_grpo import Collector, Run, collect, sample_step


def check(cfg: TrainConfig) -> None:
    """ConfigError for settings that cannot overlap, before anything is loaded."""
    if cfg.max_staleness < 0:
        raise ConfigError(f"--max_staleness={cfg.max_staleness}: give 0 (no overlap), 1 or a few.")
    if cfg.max_staleness and cfg.generator == "hf":
        raise ConfigError(
            f"--max_staleness={cfg.max_staleness} --generator hf: the trainer's own process samples, so nothing can "
            "overlap. Start vllm_server.py and use --generator vllm, or --max_staleness 0."
        )
    if cfg.colocate:
        raise ConfigError(
            "--colocate has the server sleep while the trainer updates, so nothing can overlap; use train_grpo.py, or "
            "give the server a GPU of its own."
        )
    if cfg.max_staleness + 1 < cfg.push_steps:
        raise ConfigError(
            f"--push_steps={cfg.push_steps} --max_staleness={cfg.max_staleness}: the weights that sample are up to "
            f"{cfg.push_steps - 1} steps old; allow that with --max_staleness {cfg.push_steps - 1} or more."
        )


class Ahead(Collector):
    """Samples up to `max_staleness` steps ahead, on an event loop in the background."""

    check = staticmethod(check)

    def __init__(self, run: Run, cfg: TrainConfig):
        super().__init__(run, cfg)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="sampling ahead", daemon=True).start()
        self.steps: dict[int, asyncio.Future] = {}  # begun and not trained on, oldest first
        self.next = run.first  # the first step that has not begun
        if utils.is_main() and cfg.max_staleness and not cfg.eval_only:
            print(f"  overlap                completions begin up to {cfg.max_staleness} pushes before their step")
        self.idle_since, self.idle, self.lock = time.perf_counter(), 0.0, threading.Lock()

    def begin(self, step: int, version: int, cfg: TrainConfig) -> None:
        """Let a step's completions be sampled, from these weights or later ones."""
        # At most from those that are pushed before the trainer takes this step; --push_steps may leave older ones.
        run, versions = self.run, range(version, max(version + cfg.max_staleness, step) + 1)
        sampled = sample_step(run.rows, run.sampler, step, run.generator, run.reward_functions, cfg, versions)
        with self.lock:
            if self.idle_since is not None:
                self.idle, self.idle_since = self.idle + time.perf_counter() - self.idle_since, None
            self.steps[step] = asyncio.run_coroutine_threadsafe(sampled, self.loop)
        self.steps[step].add_done_callback(self.ended)  # takes the lock, at once if the step has ended
        self.next = step + 1

    def ended(self, _) -> None:
        with self.lock:
            if all(future.done() for future in self.steps.values()):
                self.idle_since = time.perf_counter()

    def pushed(self, version: int, cfg: TrainConfig) -> None:
        """Begin every step that stays within the bound."""
        ahead = cfg.max_staleness and not cfg.eval_only
        while ahead and self.next <= min(version + cfg.max_staleness, cfg.max_steps - 1):
            self.begin(self.next, version, cfg)

    def take(self, step: int, version: int, cfg: TrainConfig) -> tuple[list[Trajectory], dict]:
        """A step's trajectories, once they have ended; an error in any step that is under way is raised at once."""
        if step == self.next:
            self.begin(step, version, cfg)
        under_way = sum(not future.done() for future in self.steps.values())
        ready = len(self.steps) - under_way
        start = time.perf_counter()
        while True:
            for future in list(self.steps.values()):
                if future.done():
                    future.result()  # raises what a later step's reward or tool raised
            if self.steps[step].done():
                break
            time.sleep(0.002)
        waited = time.perf_counter() - start
        trajectories, metrics = collect(self.run.rows, *self.steps.pop(step).result(), cfg)
        with self.lock:
            idle, self.idle = self.idle, 0.0
        metrics |= {"async/generate_seconds": metrics["time/generate"], "async/generator_waited": idle}
        # Of this step's time the wait is all that sampling and scoring took: the rest was hidden behind updates.
        metrics |= {"async/trainer_waited": waited, "time/generate": waited, "time/score": 0.0}
        share = self.run.sampler.share
        metrics |= {"async/groups_under_way": under_way * share, "async/groups_ready": ready * share}
        lag = staleness(trajectories, step)
        return trajectories, metrics | lag | {"policy_lag": lag["staleness/max"]}

    def close(self) -> None:
        """End what is under way, which nobody will train on."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=5) if tasks else None

        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(end(), self.loop)], timeout=10)
        self.loop.call_soon_threadsafe(self.loop.stop)


def staleness(trajectories: list[Trajectory], step: int) -> dict[str, float]:
    """How many versions the weights that began a turn are behind those trained with it: mean, largest, and the share of
    sampled tokens by lag, over all ranks. A completion of one request is one turn."""
    tokens: Counter = Counter()
    for t in trajectories:
        once = [{"tokens": sum(t.loss_mask), "versions": (t.policy_version, t.policy_version_last)}]
        for turn in t.info.get("turns") or once:
            tokens[step - turn["versions"][0]] += turn["tokens"]
    tokens = sum(utils.gather_objects(tokens), Counter())
    total = max(sum(tokens.values()), 1)
    shares = {f"staleness/tokens_{lag}": count / total for lag, count in sorted(tokens.items())}
    mean = sum(lag * count for lag, count in tokens.items()) / total
    return {"staleness/mean": mean, "staleness/max": max(tokens, default=0)} | shares


if __name__ == "__main__":
    train_grpo.main(CONFIG, make_collector=Ahead)
