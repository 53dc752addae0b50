"""Self-play: the policy has both seats of a game of Nim, TextArena's (requirements-optional.txt). The row's seed gives
the piles.

python examples/run.py self_play                     # warm start on random moves, two seeds
python examples/run.py self_play --advantage rae     # compares with the mean of a seat's scores, not of its group's

What a seat says is a trajectory with a reward of its own, in one group with the same seat of the row's other games.
Evaluations are games against the start, frozen: eval/mean@all is the share that the policy wins. As --env, which the
warm start takes, a seat plays against random moves.
"""

import asyncio
import functools
import math
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch
from textarena import ObservationType
from textarena.envs.Nim.env import NimEnv

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_grpo
from envs.base import Environment
from envs.turns import play
from hf_generator import HFGenerator


class Table:
    """One game. turns: of each seat an event, set while it may speak and when the game is over. chance: a seat that
    makes random moves."""

    def __init__(self, seed: int, chance: int | None = None):
        self.game = NimEnv(piles=random.Random(seed).choices(range(1, 4), k=3))
        self.game.reset(num_players=2)
        self.turns, self.rewards, self.chance = (threading.Event(), threading.Event()), None, chance
        self.say(None)

    def say(self, text: str | None) -> None:
        """The words of the seat whose turn it is; None: the game begins."""
        if text is not None and self.game.step(text)[0]:
            self.rewards = self.game.close()[0]
        seat = self.game.state.current_player_id
        for number, turn in enumerate(self.turns):
            turn.set() if self.rewards or number == seat else turn.clear()
        if seat == self.chance and not self.rewards:
            self.say(random_move(self.game))


class Seat(Environment):
    step_timeout = math.inf  # a step ends when it is this seat's turn again; the other's turn has limits of its own

    def __init__(self, table: Table | None = None, number: int = 0):
        self.table, self.number = table, number

    def reset(self, row, seed):
        if self.table is None:
            self.table, self.number = Table(seed, chance=1 - seed % 2), seed % 2
        return self.news()

    def news(self) -> str:
        """What the game has said since this seat was asked last, without its own words."""
        own, (_, said) = (self.number, ObservationType.PLAYER_ACTION), self.table.game.get_observation()
        return "\n".join(text for sender, text, kind in said if (sender, kind) != own)

    def step(self, text):
        self.table.say(text)
        self.table.turns[self.number].wait()
        return [] if self.table.rewards else self.news(), 0.0, self.table.rewards is not None, {}

    def score(self):  # before the end where a turn was cut by its length: then this seat has lost
        return float((self.table.rewards or {self.number: -1})[self.number])


def random_move(game: NimEnv) -> str:
    piles = game.state.game_state["piles"]
    pile = random.choice([number for number, size in enumerate(piles) if size])
    return f"[{pile} {random.randint(1, piles[pile])}]"


def demonstrate(row: dict, seat: Seat, answers: list) -> str:
    return random_move(seat.table.game)


@functools.cache
def frozen(model_id: str) -> HFGenerator:
    model = train_grpo.load_hf_model(train_grpo.TrainConfig(model_id=model_id), torch.float32)
    return HFGenerator(model, train_grpo.load_processor(model_id))


async def self_play(rows: list[dict], generator, cfg: train_grpo.TrainConfig) -> list:
    """Of a row --num_generations trajectories, two a game; outside training one a game, against the frozen start."""

    async def sit(table: Table, number: int, player):
        await asyncio.to_thread(table.turns[number].wait)
        if not table.rewards:
            try:
                return await play(rows[0] | {"role": f"seat {number}"}, 0, Seat(table, number), player, cfg)
            finally:
                table.rewards = table.rewards or {number: -1, 1 - number: 1}
                table.turns[1 - number].set()

    async def game(players: list) -> list:
        table = Table(rows[0]["seed"])
        played = await asyncio.gather(*(sit(table, number, player) for number, player in enumerate(players)))
        return [t for t, player in zip(played, players, strict=True) if t and player is generator]

    pairs = [[generator, generator]] * (cfg.num_generations // 2)
    if cfg.purpose != "train":
        pairs = [[generator, frozen(cfg.model_id)][:: (-1) ** n] for n in range(cfg.num_generations)]
    return sum(await asyncio.gather(*map(game, pairs)), [])


self_play.any_number = True  # a game may be over before the second seat's first turn


def by_seat(trajectories: list, memory: dict, step: int, cfg: train_grpo.TrainConfig) -> list:
    return [replace(t, group=2 * t.group + (t.row.get("role") == "seat 1")) for t in trajectories]


if __name__ == "__main__":
    train_grpo.ROLLOUTS["self_play"], train_grpo.after_rollout = self_play, by_seat
    train_grpo.main(replace(train_grpo.parse_args(description=__doc__.split("\n")[0]), rollout="self_play"))
