"""Environments of ours and of others: rules, seeds, and play without a model."""

import asyncio
import random
from pathlib import Path

import pytest

from config import ConfigError, TrainConfig
from envs.adapters import environment_maker, get_environment
from examples.games import MOVES, FrozenLake

ROOT = Path(__file__).parent.parent


def step(environment, text):
    result = environment.step(text)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


# ---- games of ours --------------------------------------------------------------------------------------------------


def test_frozen_lake():
    """The way is walked, holes and the goal end it, an invalid action costs and stays; the seed decides the map."""
    lake = FrozenLake(compass=True)
    first = lake.reset({}, 7)[0]["content"]
    assert (
        first
        == FrozenLake(compass=True).reset({}, 7)[0]["content"]
        != FrozenLake(compass=True).reset({}, 8)[0]["content"]
    )
    (row, column), (goal_row, goal_column) = lake.place, lake.goal
    ways = [("Down", goal_row - row), ("Up", row - goal_row), ("Right", goal_column - column)]
    ways = [f"{n} {way}" for way, n in [*ways, ("Left", column - goal_column)] if n > 0]
    assert lake.picture().splitlines()[-1] == f"To G: {', '.join(ways)}."
    _, reward, done, info = step(lake, "I go left")
    assert (reward, done, info["valid"]) == (-0.1, False, 0.0)
    outcomes = set()
    for seed in range(30):
        lake = FrozenLake()
        lake.reset({}, seed)
        choose, done = random.Random(seed), False
        while not done:
            place = lake.place
            _, reward, done, info = step(lake, f"<answer>{choose.choice(list(MOVES))}</answer>")
            assert info["valid"] == 1.0 and info["effective"] == float(lake.place != place)
        assert reward == lake.metrics()["success"] == float(lake.place == lake.goal)
        outcomes.add(reward)
    assert outcomes == {0.0, 1.0}
    assert get_environment("frozenlake?compass=true&size=6")().size == 6
    with pytest.raises(ConfigError, match="unknown name 'frozenlak'.*Did you mean 'frozenlake'"):
        get_environment("frozenlak")


# ---- other people's -------------------------------------------------------------------------------------------------


def test_gymnasium():
    make = get_environment("gymnasium?id=CliffWalking-v1&hint=Walk+to+the+goal.")
    first, second = make(), make()
    assert first.reset({}, 5) == second.reset({}, 5)
    assert "Walk to the goal. Answer each time with an action from 0 to 3" in first.reset({}, 5)
    assert step(first, "<answer>7</answer>")[1:] == (-0.1, False, {"valid": 0.0})
    text, reward, done, info = step(first, "I go <answer>0</answer>")
    assert (reward, done, info) == (-1.0, False, {"valid": 1.0}) and "o" in text
    assert step(first, "1")[1] == -1.0


def test_textarena():
    game = get_environment("textarena?id=GuessTheNumber-v0")()
    assert "number between 1 and 20" in game.reset({}, 1)[0]["content"]
    low, high = 1, 20
    for _ in range(10):
        guess = (low + high) // 2
        messages, reward, done, info = step(game, f"[{guess}]")
        if done:
            break
        if messages[0]["content"].rstrip().endswith("higher."):
            low = guess + 1
        else:
            high = guess - 1
    assert done and reward == 1.0 and info == {"invalid": 0.0}


def test_a_class_of_its_own_needs_reset_and_step_alone(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Guess:\n"
        "    def reset(self, row, seed):\n"
        "        return [{'role': 'user', 'content': 'Guess.'}]\n"
        "    async def step(self, text):\n"
        "        return [], 1.0, True, {}\n",
        encoding="utf-8",
    )
    mine = environment_maker(TrainConfig(env=f"{tmp_path}/mine.py:Guess"))()
    assert mine.reset({}, 0)[0]["content"] == "Guess." and step(mine, "7")[1:3] == (1.0, True)
    assert (mine.tools, mine.score(), mine.metrics(), mine.step_timeout) == ({}, 0.0, {}, None)
