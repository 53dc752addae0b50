"""A judge whose answers take lognormal times (sigma 1) of mean $SLOW seconds, for overlap.py."""

import asyncio
import os

import numpy as np

MEAN, SIGMA = float(os.environ["SLOW"]), 1.0
RANDOM = np.random.default_rng()


async def judge(completions, **columns) -> list[float]:
    """Chance: no group is silent, so that every step computes the same."""

    async def one() -> float:
        await asyncio.sleep(RANDOM.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA))
        return RANDOM.random()

    return await asyncio.gather(*(one() for _ in completions))
