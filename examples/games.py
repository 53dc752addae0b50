"""Rows for games: a seed each, held-out ones never met in training. What the prompt says is the environment's matter.

    python rollouts.py --env frozenlake --policy random            # play one first: no model, no server
    ... --env frozenlake --dataset_id examples/games.py:rows       # also sokoban, gymnasium?id=..., textarena?id=...

The reward is the environment's, turn by turn. Watch rewards/environment/success, valid and effective.
"""

import random

from envs.games import MOVES, FrozenLake, Sokoban, moved


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: games have 'train' and 'test'.")
    first, count = (0, 2000) if split == "train" else (1_000_000, 100)
    return [{"prompt": f"game {n}", "seed": 10_000_019 * seed + n} for n in range(first, first + count)]


def demonstrate(row: dict, environment, answers: list) -> str:
    """A careless player: half of the moves are the best one, nine in ten of the others any."""
    chance = random.random()
    best = next_push if isinstance(environment, Sokoban) else next_step
    move = best(environment) if chance < 0.5 else random.choice(list(MOVES) if chance < 0.95 else ["Jump", "Stay"])
    return f"<answer>{move.capitalize()}</answer>"


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
