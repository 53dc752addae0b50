"""Rows for games: a seed each, held-out ones never met in training. What the prompt says is the environment's matter.

    python rollouts.py --env frozenlake --policy random            # play one first: no model, no server
    ... --env frozenlake --dataset_id examples/games.py:rows       # also sokoban, gymnasium?id=..., textarena?id=...

The reward is the environment's, turn by turn. Watch rewards/environment/success, valid and effective.
"""

import random

from envs import MOVES, moved


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: games have 'train' and 'test'.")
    first, count = (0, 2000) if split == "train" else (1_000_000, 100)
    return [{"prompt": f"game {n}", "seed": 10_000_019 * seed + n} for n in range(first, first + count)]


def demonstrate(row: dict, environment, answers: list) -> str:
    """A careless walker over the frozen lake: half of the moves are the best one, nine in ten of the others any."""
    chance = random.random()
    move = next_move(environment) if chance < 0.5 else random.choice(list(MOVES) if chance < 0.95 else ["Jump", "Stay"])
    return f"<answer>{move.capitalize()}</answer>"


def next_move(lake) -> str:
    """The first move of a shortest way to the goal, around the holes."""
    away, todo = {lake.goal: 0}, [lake.goal]
    for place in todo:
        for by in MOVES.values():
            near = moved(place, by)
            inside = all(0 <= x < lake.size for x in near)
            if inside and near not in away and lake.cells[near[0]][near[1]] != "O":
                away[near] = away[place] + 1
                todo.append(near)
    ways = [move for move, by in MOVES.items() if away.get(moved(lake.place, by), 99) < away[lake.place]]
    return random.choice(ways)
