"""FrozenLake: across a lake with holes, one move a turn, by a compass that says how far the goal is.

python examples/run.py frozenlake      # warm start, three seeds beside a live server
"""

import random

from games import MOVES, FrozenLake, careless, moved


def demonstrate(row: dict, lake: FrozenLake, answers: list) -> str:
    return careless(next_step, lake)


def next_step(lake: FrozenLake) -> str:
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
