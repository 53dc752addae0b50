"""Rows for games: a seed each, held-out ones never met in training. What the prompt says is the environment's matter.

    python rollouts.py --env frozenlake --policy random            # play one first: no model, no server
    ... --env frozenlake --dataset_id examples/games.py:rows       # also sokoban, gymnasium?id=..., textarena?id=...

The reward is the environment's, turn by turn. Watch rewards/environment/success, valid and effective. frozenlake.py and
sokoban.py are played from start to end.
"""

import random

from envs.games import MOVES


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: games have 'train' and 'test'.")
    first, count = (0, 2000) if split == "train" else (1_000_000, 100)
    return [{"prompt": f"game {n}", "seed": 10_000_019 * seed + n} for n in range(first, first + count)]


def careless(best, environment) -> str:
    """What a careless player says: half of the moves are best(environment), nine in ten of the others any."""
    chance = random.random()
    move = best(environment) if chance < 0.5 else random.choice(list(MOVES) if chance < 0.95 else ["Jump", "Stay"])
    return f"<answer>{move.capitalize()}</answer>"
