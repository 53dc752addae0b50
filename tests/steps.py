"""A step's trajectories, as the training loop gets them."""

import asyncio

import train_grpo as script


async def sampled(rows, sampler, step, generator, reward_functions, cfg):
    first = sampler.next(step)
    further = sampler.extra(step, first, cfg.resample_rounds * len(first))
    versions = range(step, step + 1)
    return await script.sample_rows(rows, first, further, generator, reward_functions, cfg, versions, step)


def collected(rows, sampler, step, generator, reward_functions, cfg):
    return script.collect(rows, *asyncio.run(sampled(rows, sampler, step, generator, reward_functions, cfg)), cfg)


def groups_of(rows, generator, reward_functions, cfg):
    """Every row's trajectories."""

    async def all_rows():
        return await asyncio.gather(*(script.rollout(row, generator, reward_functions, cfg) for row in rows))

    return asyncio.run(all_rows())
