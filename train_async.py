"""Generation and training at the same time, on top of train_grpo.py.

    CUDA_VISIBLE_DEVICES=0 python vllm_server.py --model Qwen/Qwen2.5-1.5B-Instruct
    CUDA_VISIBLE_DEVICES=1,2,3,4 torchrun --nproc_per_node=4 train_async.py --model_id Qwen/Qwen2.5-1.5B-Instruct

The server samples while the trainer updates. It samples groups, the completions of a prompt: --in_flight groups are
under way, and a step takes the first `prompts_per_step` that have ended, from the oldest on. It does not wait for older
groups that are still under way:

    server    | a a a a a a | d d d d d d d |           two groups a step, --in_flight 3: b and c end before a, and
              | b b | e e e e e e | g g ...             make step 0; step 1 takes a and e
              | c c c c | f f f f f f f |
    trainer              step 0: b c      step 1: a e

A push does not end sequences that are under way: they continue with the new weights (if LoRA adapters are pushed alone,
--push_lora, with the old ones). A group may begin up to `max_staleness` versions before the version that it is trained
with. An older group is cancelled and not trained on: `async/dropped` counts these. Its prompt begins once more;
`async/never_trained` is the share of prompts that were dropped again. These are the slow prompts, and docs/async.md
describes the effect on learning. The ratio of trainer and sampling policy is corrected for each token, by the log-probs
of sampling (--correction).

Rewards, tools and environments also run in the background. Checkpoints keep the prompts of groups under way, and a
resumed run begins each of them again. With --max_staleness 0 steps are those of train_grpo.py. To use it with a copy of
train_grpo.py, copy this file as well, and replace `train_grpo` in it by the copy's name.
"""

# ruff: noqa: E402 - the command line is parsed before torch is imported, so that a wrong flag is reported at once

from config import ConfigError, knobs_of, parse_args


class TrainConfig(knobs_of("train_grpo")):  # includes any knobs that you add there
    first_run = f"{knobs_of('train_grpo').first_run} --max_staleness 0"

    # --- overlap ---
    max_staleness: int = 4  # most policy versions between a group's first token and its training; 0: no overlap
    in_flight: int | None = None  # groups under way, over all ranks; unset: 2 x prompts_per_step, one step ahead


CONFIG = parse_args(TrainConfig, description=__doc__.split("\n")[0]) if __name__ == "__main__" else None

import asyncio
import concurrent.futures
import threading
import time
from collections import Counter
from dataclasses import dataclass

import train_grpo
import utils
from inputs.trajectory import Trajectory, version_spans
from train_grpo import Collector, Run, collect, last_token, sample_rows, settings_at


def check(cfg: TrainConfig) -> None:
    """ConfigError, before anything is loaded, for settings that allow no overlap."""
    if cfg.max_staleness and cfg.generator == "hf":
        remedy = "start vllm_server.py and take --generator vllm, or --max_staleness 0"
        raise ConfigError(f"--generator hf samples in the trainer's own process, so nothing can overlap; {remedy}.")
    if cfg.colocate:
        raise ConfigError("--colocate has server and trainer take turns, so nothing can overlap; use train_grpo.py.")
    fewest, most = cfg.prompts_per_step, cfg.prompts_per_step * (1 + cfg.max_staleness)
    if not fewest <= (cfg.in_flight or fewest) <= most:
        raise ConfigError(f"--in_flight={cfg.in_flight}: give a number from --prompts_per_step={fewest} to {most}.")
    if cfg.max_staleness + 1 < cfg.push_steps:
        age = cfg.push_steps - 1
        why = f"the weights that sample are up to {age} steps old; allow that with --max_staleness {age} or more"
        raise ConfigError(f"--push_steps={cfg.push_steps} --max_staleness={cfg.max_staleness}: {why}.")


@dataclass(eq=False)
class Group:
    """The completions of a prompt, under way or ended, and not yet trained on."""

    drawn: tuple[int, list[int], bool]  # row number, possible replacements (--dynamic_sampling), whether dropped before
    born: int  # version of the weights when it began
    begun: float  # by time.perf_counter()
    future: concurrent.futures.Future


class Ahead(Collector):
    """Keeps groups under way, on an event loop in the background."""

    def __init__(self, run: Run, cfg: TrainConfig):
        super().__init__(run, cfg)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="sampling ahead", daemon=True).start()
        self.share = run.sampler.share
        in_flight = cfg.in_flight or 2 * cfg.prompts_per_step
        self.most = in_flight * self.share // cfg.prompts_per_step  # groups of this rank
        self.groups: list[Group] = []  # not yet trained on, oldest first
        memory = run.memory.get("train_async") or {"draw": run.first, "waiting": [], "dropped": [], "trained": 0}
        self.draw = memory["draw"]  # how often prompts were drawn: once a step, but for dropped groups
        self.waiting = [tuple(drawn) for drawn in memory["waiting"]]  # prompts that have not begun
        self.dropped, self.trained = set(memory["dropped"]), memory["trained"]
        if utils.is_main():
            print(f"  overlap                {in_flight} groups under way, at most {cfg.max_staleness} pushes old")
        self.last_end, self.idle = time.perf_counter(), 0.0  # of any group; seconds without any under way

    def begin(self, version: int, cfg: TrainConfig) -> None:
        """Begin to sample the next prompt's completions, from these weights or later ones."""
        run = self.run
        if not self.waiting:
            numbers = list(run.sampler.next(self.draw))
            replacements = run.sampler.extra(self.draw, numbers, cfg.resample_rounds * len(numbers))
            self.waiting = [(number, replacements[n :: len(numbers)], False) for n, number in enumerate(numbers)]
            self.draw += 1
        number, replacements, _ = drawn = self.waiting.pop(0)
        versions = range(version, version + cfg.max_staleness + 1)
        args = run.rows, [number], replacements, run.generator, run.reward_functions, cfg, versions, version
        if all(group.future.done() for group in self.groups):
            self.idle += time.perf_counter() - self.last_end
        future = asyncio.run_coroutine_threadsafe(self.sampled(*args), self.loop)
        self.groups.append(Group(drawn, version, time.perf_counter(), future))

    async def sampled(self, *args) -> tuple[list, dict]:
        try:
            return await sample_rows(*args)
        finally:
            self.last_end = time.perf_counter()

    def fill(self, version: int, cfg: TrainConfig) -> None:
        """Begin groups until --in_flight are under way; also at the end of a run, so that the last step does not wait
        for slow groups."""
        while len(self.groups) < self.most:
            self.begin(version, cfg)
        waiting = [group.drawn for group in self.groups] + self.waiting  # for a resumed run to begin
        self.run.memory["train_async"] = {"draw": self.draw, "waiting": waiting, "dropped": sorted(self.dropped)}
        self.run.memory["train_async"]["trained"] = self.trained

    def pushed(self, version: int, cfg: TrainConfig) -> None:
        if settings_at(version, cfg).temperature != settings_at(version + cfg.max_staleness, cfg).temperature:
            raise ConfigError("settings_at: a temperature that changes by step needs --max_staleness 0.")
        self.fill(version, cfg)

    def take(self, step: int, version: int, cfg: TrainConfig) -> tuple[list[Trajectory], dict]:
        """The first groups that have ended, once there are enough. An error in any group is raised at once."""
        ready = [group for group in self.groups if group.future.done()]
        group_counts = {"async/groups_under_way": len(self.groups) - len(ready), "async/groups_ready": len(ready)}
        start, stale_groups = time.perf_counter(), [g for g in self.groups if g.born < step - cfg.max_staleness]
        for group in stale_groups:
            group.future.cancel()
            self.groups.remove(group)
            number, replacements, was_dropped = group.drawn
            if was_dropped:
                self.dropped.add(number)
            else:  # a second chance, with the newest weights
                self.waiting.insert(0, (number, replacements, True))
        self.fill(version, cfg)
        while True:
            ready = [group for group in self.groups if group.future.done()]
            for group in ready:
                group.future.result()  # raises an error of its reward or tool
            if len(ready) >= self.share:
                break
            time.sleep(0.002)
        wait = time.perf_counter() - start
        sampled, counts, seconds = [], {}, []
        for group in ready[: self.share]:
            members, tally = group.future.result()
            seconds.append(last_token(members) - group.begun)
            self.groups.remove(group)
            self.dropped.discard(group.drawn[0])
            sampled, counts = sampled + members, {name: n + counts.get(name, 0) for name, n in tally.items()}
        self.trained += self.share
        trajectories, metrics = collect(self.run.rows, sampled, counts, cfg)
        idle, self.idle = self.idle, 0.0
        metrics |= {"async/generate_seconds": max(seconds), "async/generator_waited": idle} | group_counts
        # Sampling and scoring cost this step only the wait: the rest ran during updates.
        metrics |= {"async/trainer_waited": wait, "time/generate": wait, "time/score": 0.0}
        sums = {"async/dropped_sum": (len(stale_groups), 1), "async/never_trained": (len(self.dropped), self.trained)}
        metrics |= utils.over_ranks(sums)
        metrics["async/dropped"] = int(metrics.pop("async/dropped_sum"))
        lag = staleness(trajectories, step)
        return trajectories, metrics | lag | {"policy_lag": lag["staleness/max"]}

    def close(self) -> None:
        """Cancel the groups under way, which will not be trained on."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=5) if tasks else None

        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(end(), self.loop)], timeout=10)
        self.loop.call_soon_threadsafe(self.loop.stop)


def staleness(trajectories: list[Trajectory], step: int) -> dict[str, float]:
    """By how many versions the weights that sampled a token lag behind those that it trains: mean, largest, and the
    share of sampled tokens by lag, over all ranks."""
    tokens: Counter = Counter()
    for t in trajectories:
        for version, first, end in version_spans(t):
            tokens[step - version] += sum(t.loss_mask[first:end])
    tokens = sum(utils.gather_objects(tokens), Counter())
    total = max(sum(tokens.values()), 1)
    shares = {f"staleness/tokens_{lag}": count / total for lag, count in sorted(tokens.items())}
    mean = sum(lag * count for lag, count in tokens.items()) / total
    return {"staleness/mean": mean, "staleness/max": max(tokens, default=0)} | shares


def make_collector(run: Run, cfg: TrainConfig) -> Collector:
    """Ahead, or train_grpo.py's Collector if nothing can overlap."""
    return (Ahead if cfg.max_staleness and not cfg.eval_only else Collector)(run, cfg)


make_collector.check = check


if __name__ == "__main__":
    train_grpo.main(CONFIG, make_collector=make_collector)
