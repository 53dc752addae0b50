"""FrozenLake and Sokoban, made from a seed and always solvable, and rows for games: a seed each, held-out ones never
met in training. What the prompt says is the environment's matter.

    python scripts/try.py --model_id models/tiny --env frozenlake --hand     # play one first
    ... --env frozenlake --dataset_id examples/games.py:rows       # also sokoban, gymnasium?id=..., textarena?id=...

The reward is the environment's, turn by turn. Watch rewards/environment/success, valid and effective. frozenlake.py and
sokoban.py are played from start to end.
"""

import math
import random
import re

from config import ConfigError
from envs.base import Environment

FROZEN = 0.8  # share of a lake's cells
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def allowed(game: str, name: str, value: float, right: bool, what: str) -> None:
    if not right:  # else making a level would never end
        raise ConfigError(f"--env {game}: {name}={value}; allowed is {what}.")


class Board(Environment):
    """What both games share: a move a turn, <answer>Left</answer>; one that cannot be read costs `penalty`."""

    penalty = 0.1

    async def step(self, text):
        found, before = re.findall(r"<answer>\s*(\w+)\s*</answer>", text), self.place
        if not found or found[-1].lower() not in MOVES:
            message = f"That is no move. Answer with <answer>Left</answer>, Down, Right or Up.\n{self.picture()}"
            return [{"role": "user", "content": message}], -self.penalty, False, {"valid": 0.0, "effective": 0.0}
        reward, done = self.move(MOVES[found[-1].lower()])
        info = {"valid": 1.0, "effective": float(self.place != before)}
        return [{"role": "user", "content": self.picture()}], reward, done, info


class FrozenLake(Board):
    """Walk over a frozen lake to the goal without falling into a hole (gymnasium's toy text game).

    The map comes from the seed and always has a way. An invalid action costs `penalty` and does not move. Reaching the
    goal earns 1. `compass` adds how far the goal is and which way: small models read no maps.
    """

    def __init__(self, size: int = 4, compass: bool = False):
        allowed("frozenlake", "size", size, size >= 2, "at least 2")
        self.size, self.compass = size, compass

    def reset(self, row, seed):
        chance = random.Random(seed)
        while True:
            cells = [["." if chance.random() < FROZEN else "O" for _ in range(self.size)] for _ in range(self.size)]
            start, goal = chance.sample([(r, c) for r in range(self.size) for c in range(self.size)], 2)
            cells[start[0]][start[1]], cells[goal[0]][goal[1]] = ".", "G"
            if start in distances(cells, goal):
                break
        self.cells, self.place, self.goal = cells, start, goal
        rules = "P is you, G the goal, O a hole, . ice. Answer each time with one move: <answer>Left</answer>, "
        rules += "<answer>Down</answer>, <answer>Right</answer> or <answer>Up</answer>."
        return [{"role": "user", "content": f"Walk to G without falling into a hole. {rules}\n{self.picture()}"}]

    def picture(self) -> str:
        shown = [row[:] for row in self.cells]
        shown[self.place[0]][self.place[1]] = "P"
        lines = [" ".join(row) for row in shown]
        if self.compass:
            lines.append(f"To G: {way(self.place, self.goal)}.")
        return "\n".join(lines)

    def move(self, by):
        ahead = moved(self.place, by)
        self.place = ahead if all(0 <= x < self.size for x in ahead) else self.place
        won, lost = self.place == self.goal, self.cells[self.place[0]][self.place[1]] == "O"
        return float(won), won or lost

    def state(self):
        return self.place

    def metrics(self):
        return {"success": float(self.place == self.goal)}


def distances(cells: list[list[str]], goal: tuple[int, int]) -> dict[tuple[int, int], int]:
    """How many moves it is to the goal, from everywhere that a way over ice leads there."""
    away, todo = {goal: 0}, [goal]
    for place in todo:
        for by in MOVES.values():
            near = moved(place, by)
            inside = all(0 <= x < len(cells) for x in near)
            if inside and near not in away and cells[near[0]][near[1]] != "O":
                away[near] = away[place] + 1
                todo.append(near)
    return away


class Sokoban(Board):
    """Push every box onto a target, on a grid with walls all around; boxes are pushed one at a time, never pulled.

    -0.1 a step, +1 and -1 for a box pushed onto and off a target, +10 when all are on one; an invalid action costs as
    a step does. The level comes from the seed, made by pulling boxes off their targets, so that it can be solved.
    `compass` says of each box where it is and where the nearest free target, as FrozenLake's.
    """

    def __init__(self, size: int = 6, boxes: int = 1, walls: float = 0.1, pulls: int = 12, compass: bool = False):
        most = size // 2  # of more, few levels have all boxes off their targets
        allowed("sokoban", "size", size, size >= 5, "at least 5, the walls around it included")
        allowed("sokoban", "boxes", boxes, 1 <= boxes <= most, f"from 1 to {most} at size {size}")
        allowed("sokoban", "walls", walls, 0 <= walls <= 0.3, "from 0 to .3, the share of cells that are walls")
        self.size, self.count, self.walls, self.pulls, self.compass = size, boxes, walls, pulls, compass

    def reset(self, row, seed):
        chance = random.Random(seed)
        inner = [(r, c) for r in range(1, self.size - 1) for c in range(1, self.size - 1)]
        while True:
            self.blocked = {place for place in inner if chance.random() < self.walls}
            free = [place for place in inner if place not in self.blocked]
            if len(free) > 2 * self.count + 1:
                self.targets = set(chance.sample(free, self.count))
                self.boxes = set(self.targets)
                self.place = chance.choice([place for place in free if place not in self.boxes])
                self.scramble(chance)
                if not self.boxes & self.targets:
                    break
        rules = (
            "# is a wall, P you, B a box, T a target, * a box on a target. Push every box onto a target. Answer each "
        )
        rules += "time with one move: <answer>Left</answer>, <answer>Down</answer>, <answer>Right</answer> or "
        return [{"role": "user", "content": f"{rules}<answer>Up</answer>.\n{self.picture()}"}]

    def open(self, place) -> bool:
        return all(0 < x < self.size - 1 for x in place) and place not in self.blocked

    def free(self, place) -> bool:
        return self.open(place) and place not in self.boxes

    def scramble(self, chance) -> None:
        """Walk about at random, pulling a box along whenever one is behind."""
        pulled = 0
        for _ in range(400):
            by = chance.choice(list(MOVES.values()))
            ahead, behind = moved(self.place, by), moved(self.place, by, -1)
            if not self.free(ahead):
                continue
            if behind in self.boxes:
                self.boxes = self.boxes - {behind} | {self.place}
                pulled += 1
            self.place = ahead
            if pulled >= self.pulls and not self.boxes & self.targets:
                return

    def picture(self) -> str:
        def cell(place):
            if place == self.place:
                return "P"
            if place in self.boxes:
                return "*" if place in self.targets else "B"
            return "#" if not self.open(place) else "T" if place in self.targets else "."

        lines = [" ".join(cell((r, c)) for c in range(self.size)) for r in range(self.size)]
        for box in sorted(self.boxes - self.targets) if self.compass else ():
            target = min(self.targets - self.boxes, key=lambda target: math.dist(box, target))
            lines.append(f"To B: {way(self.place, box)}. From B to T: {way(box, target)}.")
        return "\n".join(lines)

    def move(self, by):
        ahead, beyond, reward = moved(self.place, by), moved(self.place, by, 2), -0.1
        if ahead in self.boxes and self.free(beyond):
            self.boxes = self.boxes - {ahead} | {beyond}
            reward += (beyond in self.targets) - (ahead in self.targets)
        if self.free(ahead):
            self.place = ahead
        done = self.boxes == self.targets
        return reward + 10.0 * done, done

    def state(self):
        return self.place, frozenset(self.boxes)

    def metrics(self):
        return {"success": float(self.boxes == self.targets)}


def moved(place: tuple[int, int], by: tuple[int, int], times: int = 1) -> tuple[int, int]:
    return place[0] + times * by[0], place[1] + times * by[1]


def way(start: tuple[int, int], goal: tuple[int, int]) -> str:
    """Such as "2 Down, 1 Left"."""
    steps = zip(start, goal, (("Up", "Down"), ("Left", "Right")), strict=True)
    return ", ".join(f"{abs(b - a)} {names[b > a]}" for a, b, names in steps if a != b)


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
