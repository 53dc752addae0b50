"""An environment whose answers take lognormal times of mean .5 s (sigma 1), for benchmarks/overlap.py --mode tails."""

import asyncio

import numpy as np

from envs import Environment

MEAN, SIGMA, TURNS = 0.5, 1.0, 3


class Slow(Environment):
    def reset(self, row, seed):
        self.random, self.left = np.random.default_rng([seed, id(self) % 997]), TURNS
        return row["prompt"]

    async def step(self, text):
        self.left -= 1
        await asyncio.sleep(self.random.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA))
        return ("And once more.", 0.0, False, {}) if self.left else ("", float(len(text) % 2), True, {})
