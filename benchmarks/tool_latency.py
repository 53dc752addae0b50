"""What waiting for tools costs: 64 trajectories of three calls each, scheduled in four ways.  No GPU, no server.

    python benchmarks/tool_latency.py               # 12 minutes, nearly all of it the sequential runs asleep

Sampling a turn and running a call take lognormal times of mean .5 s and sigma 1, slept away; all else is real: the
trajectory builder, parser, tool limits and tokenizer of a training run (rollouts.play). The same draws for

    sequential     one trajectory after another, as a for loop around an agent does it
    lock-step      all sample, all call, all sample: each phase waits for its slowest, as batched rollouts do
    ours           no trajectory waits for another
    ours, cached   --tool_cache; the 8 members of a group make the same calls

Written to benchmarks/results/tool_latency.md and .svg.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from config import TrainConfig  # noqa: E402
from envs import ToolEnvironment  # noqa: E402
from envs.tools import Toolbox, from_function  # noqa: E402
from inputs.processor import load_processor  # noqa: E402
from rollouts import play  # noqa: E402
from vllm_client import Completion  # noqa: E402

TRAJECTORIES, GROUP, CALLS = 64, 8, 3
MEAN, SIGMA = 0.5, 1.0  # seconds; of the logarithm
SYSTEMS = ("sequential", "lock-step", "ours", "ours, cached")


class Work:
    """The same times for every system: samplings [TRAJECTORIES, CALLS + 1], calls [TRAJECTORIES, CALLS], in seconds."""

    def __init__(self, seed: int, lock_step: bool):
        chance = np.random.default_rng(seed)
        draw = lambda *shape: chance.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, shape)  # noqa: E731
        self.samplings, self.calls = draw(TRAJECTORIES, CALLS + 1), draw(TRAJECTORIES, CALLS)
        # One for each event loop: async tools have their own.
        self.sampled, self.called = [asyncio.Barrier(TRAJECTORIES) if lock_step else None for _ in range(2)]
        self.made = dict.fromkeys(((g, c) for g in range(TRAJECTORIES // GROUP) for c in range(CALLS)), 0)

    async def wait(self, seconds: float, barrier: asyncio.Barrier | None) -> None:
        await asyncio.sleep(seconds)
        if barrier:
            await barrier.wait()

    async def lookup(self, group: int, number: int) -> str:
        """Looks something up.

        Args:
            group: whose
            number: which
        """
        member = self.made[group, number]
        self.made[group, number] += 1
        await self.wait(self.calls[group * GROUP + member, number], self.called)
        return f"Of {group} the {number}th: {'a line of text. ' * 8}"


class Sampler:
    """Says for one trajectory what a model would: calls, then an answer."""

    rope_index = None

    def __init__(self, tokenizer, work: Work, index: int):
        self.tokenizer, self.work, self.index, self.turn = tokenizer, work, index, 0

    async def generate(self, sent, *, n, max_tokens, **options) -> list[Completion]:
        await self.work.wait(self.work.samplings[self.index, self.turn], self.work.sampled)
        arguments = f'{{"group": {self.index // GROUP}, "number": {self.turn}}}'
        call = f'<tool_call>{{"name": "lookup", "arguments": {arguments}}}</tool_call>'
        text, self.turn = call if self.turn < CALLS else "That is all.", self.turn + 1
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return [Completion(ids, [-1.0] * len(ids), "stop", 0, list(sent))]


async def timed(system: str, seed: int, tokenizer, cfg: TrainConfig) -> list[float]:
    """Seconds after which each trajectory had ended, in order."""
    work, ended = Work(seed, system == "lock-step"), []
    toolbox = Toolbox({"lookup": from_function(work.lookup)}, cfg)
    one_at_a_time = asyncio.Lock() if system == "sequential" else contextlib.nullcontext()
    start = time.perf_counter()

    async def one(index: int) -> None:
        async with one_at_a_time:
            row = {"prompt": f"Look up what there is about {index // GROUP}."}
            sampler = Sampler(tokenizer, work, index)
            trajectory = await play(row, index // GROUP, ToolEnvironment(toolbox, cfg), sampler, cfg)
            assert trajectory.turns == CALLS + 1 and trajectory.info["completion"].startswith("That is all")
        ended.append(time.perf_counter() - start)

    await asyncio.gather(*map(one, range(TRAJECTORIES)))
    return ended


def table(seconds: dict[str, list[float]]) -> str:
    lines = ["| | seconds, by seed | times as fast as sequential | as lock-step |", "|---|---|---|---|"]
    for system, all_seeds in seconds.items():
        ratios = [
            statistics.median(theirs / ours for theirs, ours in zip(seconds[other], all_seeds, strict=True))
            for other in ("sequential", "lock-step")
        ]
        shown = " / ".join(f"{s:.1f}" for s in all_seeds)
        lines.append(f"| {system} | {shown} | {ratios[0]:.1f} | {ratios[1]:.2f} |")
    return "\n".join(lines) + "\n"


def plot(ended: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for system, seconds in ended.items():
        axes.step([0.1, *seconds], range(len(seconds) + 1), where="post", label=system)
    axes.set(xscale="log", xlabel="seconds", ylabel="trajectories that have ended", xlim=(0.5, None))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--model_id", default=str(ROOT / "models" / "tiny"), help="for its tokenizer")
    args = parser.parse_args()
    tokenizer = load_processor(args.model_id)
    ended: dict[str, list[list[float]]] = {}
    for system in args.systems:
        cached = system == "ours, cached"
        cfg = TrainConfig(model_id=args.model_id, tools=["calculator"], tool_cache=cached, max_turns=CALLS + 1)
        for seed in args.seeds:
            times = asyncio.run(timed(system, seed, tokenizer, cfg))
            ended.setdefault(system, []).append(times)
            print(f"{system}, seed {seed}: {times[-1]:.1f} s", flush=True)
    if len(args.systems) == len(SYSTEMS):
        text = table({system: [times[-1] for times in runs] for system, runs in ended.items()})
        results = ROOT / "benchmarks" / "results"
        (results / "tool_latency.md").write_text(f"`{' '.join(['python', *sys.argv])}`\n\n{text}", encoding="utf-8")
        plot({system: runs[0] for system, runs in ended.items()}, results / "tool_latency.svg")
        print(text)


if __name__ == "__main__":
    main()
