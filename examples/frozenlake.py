"""FrozenLake: across a lake with holes, one move a turn, by a compass that says how far the goal is.

python examples/run.py frozenlake      # warm start, three seeds beside a live server
"""

import random

from games import MOVES, FrozenLake, careless, distances, moved


def demonstrate(row: dict, lake: FrozenLake, answers: list) -> str:
    return careless(next_step, lake)


def next_step(lake: FrozenLake) -> str:
    """The first move of a shortest way to the goal, around the holes."""
    away = distances(lake.cells, lake.goal)
    ways = [move for move, by in MOVES.items() if away.get(moved(lake.place, by), 99) < away[lake.place]]
    return random.choice(ways)
