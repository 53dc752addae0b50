"""Sokoban: a box is pushed onto its target, one move a turn; in a corner it is stuck for good.

python examples/run.py sokoban      # warm start, two seeds
"""

import random

from games import MOVES, Sokoban, careless, moved


def demonstrate(row: dict, game: Sokoban, answers: list) -> str:
    return careless(next_push, game)


def next_push(game: Sokoban) -> str:
    """The first move of a shortest solution; any, where a box is stuck for good."""
    here = (game.place, frozenset(game.boxes))
    first, todo = {here: None}, [here]
    for place, boxes in todo:
        if boxes == game.targets:
            return first[place, boxes]
        for move in random.sample(list(MOVES), len(MOVES)):
            ahead, beyond = moved(place, MOVES[move]), moved(place, MOVES[move], 2)
            after = boxes - {ahead} | {beyond} if ahead in boxes else boxes
            blocked = not game.open(ahead) or (ahead in boxes and (beyond in boxes or not game.open(beyond)))
            if not blocked and (ahead, after) not in first:
                first[ahead, after] = first[place, boxes] or move
                todo.append((ahead, after))
    return random.choice(list(MOVES))
