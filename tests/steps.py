"""A step's trajectories, as the training loop gets them."""

import asyncio

import train_grpo as script


def collected(rows, sampler, step, generator, reward_functions, cfg):
    sampled = asyncio.run(script.sample_step(rows, sampler, step, generator, reward_functions, cfg))
    return script.collect(rows, *sampled, cfg)
