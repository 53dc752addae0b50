"""Environments of gymnasium, TextArena, TRL, veRL and verifiers, run as docs/environments.md says."""

import asyncio
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests
import tiny_vlms
from PIL import Image
from server_fixture import free_port, make_tiny
from test_turns import Scripted, tokenizer_of

import rewards
import train_grpo as script
from config import ConfigError, TrainConfig
from data import load_rows
from envs.adapters import check_rows, environment_maker, get_environment, plain_text
from envs.calls import put_away
from hf_generator import HFGenerator
from plugins import load_function
from rollouts import TrajectoryError, check_rollout, multi_turn, play
from runlog.reading import read_metrics
from safety import sandbox
from train_grpo import load_hf_model

ROOT = Path(__file__).parent.parent


def act(environment, method, *arguments):
    result = getattr(environment, method)(*arguments)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def played(spec, turns, row=None, **settings):
    """A trajectory with a sampler that says these turns."""
    settings = dict(max_completion_length=4000, max_prompt_length=4000, num_generations=1) | settings
    cfg = TrainConfig(env=spec, **settings)
    row = {"prompt": "Play.", "seed": 8} | (row or {})
    return asyncio.run(play(row, 0, environment_maker(cfg)(row), Scripted(tokenizer_of("qwen2_5"), turns), cfg))


def started(spec, **settings):
    """What the scripts check before anything else starts."""
    check_rollout(TrainConfig(env=spec, **settings))


# ---- gymnasium ------------------------------------------------------------------------------------------------------


def test_gymnasium_takes_its_own_arguments():
    lake = get_environment("gymnasium?id=FrozenLake-v1&is_slippery=false&map_name=8x8")()
    (message,) = lake.reset({}, 3)
    assert message["content"].count("\n") == 9 and "\n[S]FFFFFFF\n" in message["content"] and lake.state() == 0
    (message,), reward, done, info = act(lake, "step", "down it is: <answer>1</answer>")
    assert "\n[F]FFFFFFF\n" in message["content"] and (reward, done, lake.state()) == (0.0, False, 8)
    for wrong in ("4", "-1", "9" * 5000, "one", "²"):
        (message,), reward, _, info = act(lake, "step", f"<answer>{wrong}</answer>")
        assert (reward, info, lake.state()) == (-0.1, {"valid": 0.0}, 8) and len(message["content"]) < 150


def test_gymnasium_drawings_have_no_terminal_codes():
    taxi = get_environment("gymnasium?id=Taxi-v4")()
    text = taxi.reset({}, 3)[0]["content"] + act(taxi, "step", "0")[0][0]["content"]
    assert "\x1b" not in text and "[blue:R]" in text and "[magenta:Y]" in text and "[yellow: ]" in text
    assert isinstance(taxi.state(), int) and taxi.state() != get_environment("gymnasium?id=Taxi-v4")().reset({}, 3)
    one = "S\x1b[41mF\x1b[0mF \x1b[1;1H\x1b]0;title\x07\x1b[?25lG\x1b[38;5;196m\x1b[m\x1b"
    assert plain_text(one) == "S[F]F G"
    assert plain_text("\x1b[34;1mR\x1b[0m\x1b[35mG\x1b[39m\x1b[34;1m\x1b[43mB\x1b[0m\x1b[0m") == (
        "[blue bold:R][magenta:G][blue bold yellow:B]".replace(" bold", "")
    )


BIG = """
import gymnasium
import numpy as np


class Big(gymnasium.Env):
    metadata = {"render_modes": []}
    observation_space = gymnasium.spaces.Box(0, 255, (96, 96, 3))
    action_space = gymnasium.spaces.Discrete(3, start=-1)


class Small(Big):
    observation_space = gymnasium.spaces.Discrete(9)

    def reset(self, seed=None, options=None):
        return 4, {}

    def step(self, action):
        return 4 + int(action), float(action), True, False, {}


class Bits(Small):
    observation_space = gymnasium.spaces.MultiBinary(3)

    def reset(self, seed=None, options=None):
        return np.array([1, 0, 1], np.int8), {}


class Parts(Small):
    observation_space = gymnasium.spaces.Dict(
        map=gymnasium.spaces.Box(0, 9, (25, 30), int), bag=gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(9)])
    )

    def seen(self):
        return {"map": np.arange(750).reshape(25, 30) % 10, "bag": (np.int64(4),), "told": "Go on."}

    def reset(self, seed=None, options=None):
        return self.seen(), {}

    def step(self, action):
        return self.seen(), 0.0, False, False, {}


class ManyParts(Parts):
    observation_space = gymnasium.spaces.Dict(
        map=gymnasium.spaces.Box(0, 9, (25, 30)), own=gymnasium.spaces.Tuple([gymnasium.spaces.Box(0, 9, (300,))])
    )


class MoreThanSaid(Small):
    # Its observations are larger than its space says.

    def step(self, action):
        return np.arange(1500), 0.0, False, False, {}

    observation_space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(9))


class FourValues(Small):
    def step(self, action):
        return 4, 0.0, False, {}


class OldReset(Small):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32)  # unpacked, it would be an observation and an info


class Switches(Small):
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])


for given in (Big, Small, Bits, Parts, ManyParts, MoreThanSaid, FourValues, OldReset, Switches):
    gymnasium.register(f"{given.__name__}-v0", given, disable_env_checker=True)
"""


@pytest.mark.parametrize(
    "spec, message",
    [
        ("sokoban?walls=2", r"walls=2\b.*from 0 to .3"),
        ("sokoban?size=4", r"size=4\b.*at least 5"),
        ("sokoban?size=5&boxes=5", r"boxes=5\b.*from 1 to 2"),
        ("frozenlake?size=1", r"size=1\b.*at least 2"),
        ("frozenlake?frozen=0", r"frozen=0\b.*above 0"),
    ],
)
def test_games_refuse_sizes_of_which_no_level_can_be_made(spec, message):
    with pytest.raises(ConfigError, match=f"--env {spec.split('?')[0]}.*{message}"):
        started(spec)


def test_gymnasium_refuses_at_start_what_cannot_work(tmp_path, monkeypatch):
    (tmp_path / "big_envs.py").write_text(BIG, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for spec, message in (
        ("gymnasium?id=FrozenLak-v1", "Did you mean: `FrozenLake`"),
        ("gymnasium?id=FrozenLake-v1&slip=1", "unexpected keyword argument 'slip'"),
        ("gymnasium?id=FrozenLake-v1&map_name=9x9", "KeyError: '9x9'"),
        ("gymnasium?id=Pendulum-v1", r"Box\(.*allowed are Discrete \(a number\) and Text"),
        ("gymnasium?id=big_envs:Big-v0", "observations are 27,648 numbers; allowed are 1,000 at most"),
        ("gymnasium?id=big_envs:ManyParts-v0", "observations are 1,050 numbers; allowed are 1,000 at most"),
        ("gymnasium?id=big_envs:FourValues-v0", r"form of gym, from before.*step\(action\) that returns"),
        ("gymnasium?id=big_envs:OldReset-v0", "form of gym, from before gymnasium.*gymnasium.Env of your own"),
        ("gymnasium?id=big_envs:Switches-v0", r"its actions are MultiDiscrete\(\[2 3\]\); allowed are Discrete"),
        ("gymnasium?id=MiniGrid-Empty-5x5-v0", "named with their module: id=minigrid:MiniGrid-Empty-5x5-v0"),
        ("gymnasium", "missing a required argument: 'id'"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            started(spec)
        assert "\n" not in str(caught.value)
    small = get_environment("gymnasium?id=big_envs:Small-v0")()
    assert "an action from -1 to 1" in small.reset({}, 0)[0]["content"]
    assert small.actions() == ["<answer>-1</answer>", "<answer>0</answer>", "<answer>1</answer>"]
    assert act(small, "step", "-1")[1:3] == (-1.0, True) and small.state() == 3
    done = subprocess.run(
        [sys.executable, str(ROOT / "rollouts.py"), "--env", "gymnasium?id=Taxi-v9"],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and "It provides versioned" in done.stderr


def test_gymnasium_shows_observations_whole(tmp_path, monkeypatch, caplog):
    """Of several parts, too: every number is there, and none is called np.int64(4)."""
    (tmp_path / "big_envs.py").write_text(BIG, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    parts = get_environment("gymnasium?id=big_envs:Parts-v0")()
    text = parts.reset({}, 0)[0]["content"].split("\n", 1)[1]
    assert text.startswith("map: [[0 1 2 3") and text.endswith("bag: (4)\ntold: Go on.")
    assert len(re.findall(r"\d", text)) == 751 and "..." not in text
    bits = get_environment("gymnasium?id=big_envs:Bits-v0")()
    assert "1 0 1" in bits.reset({}, 0)[0]["content"]
    more = get_environment("gymnasium?id=big_envs:MoreThanSaid-v0")()
    more.reset({}, 0)
    (message,), *_ = more.step("0")
    assert len(re.findall(r"\d+", message["content"])) == 1500 and "..." not in message["content"]
    seen = played("gymnasium?id=big_envs:MoreThanSaid-v0", ["0", "1"], max_turns=2, max_completion_length=9000)
    assert " more characters)" in seen.info["turns"][0]["observation"][0]["content"]
    assert "Gymnasium.step() gave a message over --max_tool_result 4000 characters" in caplog.text


# ---- TextArena ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "game, turns, most",
    [
        ("GuessTheNumber-v0", ["I guess [1]", "I guess [2]", "I guess [3]", "I guess [4]"], 40),
        ("2048-v0", ["I go [up]", "I go [left]", "I go [up]", "I go [left]"], 330),
        ("Minesweeper-v0", ["I take [0 0]", "I take [7 7]"], 260),
    ],
)
def test_textarena_says_only_what_is_new(game, turns, most):
    """Observed tokens of a whole game grow with its turns, not with their square."""
    trajectory = played(f"textarena?id={game}", turns, max_turns=len(turns))
    (rules,) = trajectory.info["shown"]
    answers = [turn["observation"][0]["content"] for turn in trajectory.info["turns"] if turn["observation"]]
    assert answers and all(answers)
    for answer, turn in zip(answers, turns, strict=False):
        assert rules["content"].splitlines()[0] not in answer and turn not in answer and "[GAME]" not in answer
    assert len(set(map(len, answers[:2]))) <= 2
    per_turn = [len(tokenizer_of("qwen2_5")(answer)["input_ids"]) for answer in answers]
    assert max(per_turn) <= most, per_turn


def story(spec: str, seed: int, moves: list[str]) -> list:
    game = get_environment(spec)()
    told = [game.reset({}, seed)]
    for move in moves:
        told.append(act(game, "step", move)[:3])
        if told[-1][2]:
            break
    game.close()
    return told


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "game, moves",
    [
        ("RushHour-v0", ["[X+]", "[X-]"]),
        ("GuessTheNumber-v0", ["[10]", "[5]", "[15]"]),
        ("2048-v0", ["[up]", "[left]"] * 4),
    ],
)
def test_textarena_keeps_its_seed_in_any_thread(game, moves):
    """python's one generator is shared by all threads; a game's draws, those of its moves too, are its own."""
    spec, told = f"textarena?id={game}", []
    threads = [threading.Thread(target=lambda: told.append(story(spec, 5, moves))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 12 and all(one == told[0] for one in told)
    assert len({str(story(spec, seed, moves)) for seed in range(8)}) > 3
    random.seed(77)
    expected = random.Random(77).random()
    story(spec, 5, moves)
    assert random.random() == expected


INVALID = ["", "nonsense", "[1]", "[0 0]", "[up]", "[A 5]", "[99 99 99]", "[", "é", "[-1]", "[1 2 3 4]"]


def test_textarena_goes_on_where_textarena_does(monkeypatch):
    """Every game for one player, asked of the package: with the same moves, most of them invalid, it ends after the
    same one, with the same reward, as when it is played without us, and always has something to say."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    monkeypatch.setattr("nltk.download", lambda *args, **kwargs: False)  # no network: games of words are left out
    played = 0
    for game in (name for name in ENV_REGISTRY if name.endswith("-v0")):
        try:
            ours = get_environment(f"textarena?id={game}")()
        except ConfigError:  # for several players, or not playable here
            continue
        random.seed(3)
        plain = textarena.make(game)
        random.seed(3)
        plain.reset(num_players=1, seed=3)
        theirs, done, number = random.getstate(), False, 0
        assert ours.reset({}, 3)[0]["content"]
        while not done and number < 2 * len(INVALID):
            move, number = INVALID[number % len(INVALID)], number + 1
            random.setstate(theirs)
            plain.get_observation()
            done, theirs = plain.step(move)[0], random.getstate()
            answers, reward, ended, info = ours.step(move)
            assert ended == done, (game, move)
            assert done or answers[0]["content"].strip(), (game, move)
            assert done or "nonsense" not in answers[0]["content"], (game, move)  # its own move is not said again
        if done:
            (given, notes), played = plain.close(), played + 1
            # Where a game gives a text as its reward, TextArena's own reward of an invalid move stands.
            assert reward == (-1.0 if isinstance(given[0], str) else given[0]), game
            assert info["invalid"] == notes[0]["invalid_move"], game
    assert played > 10


def test_textarena_games_are_used_again():
    make = get_environment("textarena?id=LightsOut-v0")
    first = make()
    first.reset({}, 1)
    game, shown = first.game, first.reset({}, 2)
    first.close()
    second = make()
    assert second.game is game and second.reset({}, 2) == shown
    second.busy = True  # as while a step runs, which its time limit has given up
    second.close()
    assert make().game is not game


def test_textarena_refuses_at_start_what_cannot_work():
    for game, message in (
        ("Wordel-v0", "no such game. Did you mean 'Wordle-v0'"),
        ("ConnectFour-v0", "The number of players has to be 2"),
        ("QuantumTicTacToe-v0", "a game for several players"),
        ("GuessTheNumber-v0&turns=3", "unexpected keyword argument 'turns'"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            started(f"textarena?id={game}")
        assert "\n" not in str(caught.value)
    assert (
        "within 3 turns" in get_environment("textarena?id=GuessTheNumber-v0&max_turns=3")().reset({}, 1)[0]["content"]
    )


def test_wordle_needs_word_lists(tmp_path):
    """Without them one line says what to do; with them (here a few words) the seed chooses the word."""
    nltk = tmp_path / "nltk_data"
    code = "import rollouts, sys; sys.argv[1:] = ['--env', 'textarena?id=Wordle-v0', '--max_turns', '2'] + sys.argv[1:]"
    command = [sys.executable, "-c", f"{code}; rollouts.main()"]
    environment = os.environ | {"NLTK_DATA": str(nltk), "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, encoding="utf-8")
    assert done.returncode == 2 and "needs word lists of NLTK" in done.stderr and "Traceback" not in done.stderr
    words = ["crane", "plant", "stone", "house", "table", "river", "cloud", "light"]
    (nltk / "corpora" / "words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (nltk / "corpora" / "words" / name).write_text("\n".join(words) + "\n", encoding="utf-8")
    tagger = nltk / "taggers" / "averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True)
    for part, content in (("weights", {}), ("tagdict", dict.fromkeys(words, "NN")), ("classes", ["NN"])):
        (tagger / f"averaged_perceptron_tagger_eng.{part}.json").write_text(json.dumps(content), encoding="utf-8")
    code = "from envs.adapters import get_environment as g; e = g('textarena?id=Wordle-v0')\n"
    code += "for seed in (1, 1, 2, 3, 4, 5): w = e(); w.reset({}, seed); print('SECRET', w.game.state.game_state"
    code += "['secret_word']); print('SAID', w.step('[crane]')[0])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, encoding="utf-8"
    )
    secrets = re.findall(r"SECRET (\w+)", done.stdout)
    assert len(secrets) == 6 and secrets[0] == secrets[1] and len(set(secrets)) > 2, done.stdout + done.stderr
    assert "C R A N E" in done.stdout and "You are Playing" not in done.stdout


# ---- classes as TRL's environment_factory takes them ----------------------------------------------------------------

TRL_CLASSES = '''
import functools
import threading


class Counter:
    """Keeps its count; every call is slow enough for two at once to lose one."""

    built = 0

    def __init__(self, start=0):
        self.start = start
        type(self).built += 1

    @property
    def expensive(self):
        raise RuntimeError("a property was computed")

    async def reset(self, **kwargs):
        self.count, self.seen, self.thread = self.start, kwargs, threading.current_thread()
        return " The counter is ready."

    async def increment(self, by: int) -> int:
        """Raises the counter.

        Args:
            by: by how much
        """
        return self._add(by)

    def double(self) -> int:
        """Doubles the counter."""
        return self._add(self.count)

    def _add(self, by):
        import time

        count = self.count
        time.sleep(0.05)
        self.count = count + by
        return self.count

    async def get_reward(self):
        return float(self.count)

    async def close(self):
        self.closed = True


class Plain:
    """Without a reward."""

    def reset(self, word="none", **kwargs):
        self.word = word
        return [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"Say {word}."}]

    def look(self) -> str:
        """Looks around."""
        return self.word


class Sometimes(Plain):
    def get_reward(self):
        return None if self.word == "none" else 1.0


def make_counter():
    return Counter(start=3)


five = functools.partial(Counter, start=5)
FACTORIES = {"counter": Counter, "plain": Plain, "five": five, "made": lambda: Counter(start=7)}
SCORED = {"counter": Counter, "five": five}


def seen_environments(environments, prompts, completions, **kwargs):
    assert len(environments) == len(prompts) == len(completions)
    return [float(type(environment).__name__ == "Counter") for environment in environments]


async def nothing():
    return Counter()
'''
INCREMENT = '<tool_call>{"name": "increment", "arguments": {"by": 4}}</tool_call>'
DOUBLE = '<tool_call>{"name": "double", "arguments": {}}</tool_call>'


@pytest.fixture
def trl(tmp_path):
    (tmp_path / "task.py").write_text(TRL_CLASSES, encoding="utf-8")
    return f"{tmp_path}/task.py"


def score(trajectory, *functions, **settings):
    cfg = TrainConfig(env="x", reward_funcs=list(functions), **settings)
    asyncio.run(rewards.score([trajectory], rewards.get_reward_functions(cfg), cfg))
    return trajectory.info["rewards"]


def test_async_methods_and_calls_in_order(trl):
    """reset, tools and get_reward may be async; the calls of a turn change one object, so they run one by one."""
    trajectory = played(f"{trl}:Counter", [INCREMENT + DOUBLE + INCREMENT, "Done."], tool_cache=True)
    assert trajectory.info["shown"][-1]["content"].endswith("Play. The counter is ready.")
    answers = [message["content"] for message in trajectory.info["turns"][0]["observation"]]
    assert answers == ["4", "8", "12"] and trajectory.turns == 2  # the second 4 is no cached 4
    counter = trajectory.info["object"]
    environment = environment_maker(TrainConfig(env=f"{trl}:Counter"))()
    act(environment, "close")
    assert environment.inner.closed and "close" not in environment.methods
    assert counter.count == 12 and counter.seen["seed"] == 8 and score(trajectory, "environment")["environment"] == 12


def test_each_closes_in_a_thread_of_its_own(tmp_path):
    """As many at once as end at once, and none keeps the program from its end: an executor has few threads, and an exit
    waits for them."""
    (tmp_path / "slow.py").write_text(
        "import threading\n\n"
        "class Slow:\n"
        "    closed_in, all_there = [], threading.Barrier(40)\n\n"
        "    def reset(self):\n        pass\n\n"
        "    def close(self):\n"
        "        self.all_there.wait(10)\n"
        "        self.closed_in.append(threading.current_thread())\n",
        encoding="utf-8",
    )
    cfg = TrainConfig(env=f"{tmp_path}/slow.py:Slow", reward_funcs=["length"])
    environments = [environment_maker(cfg)() for _ in range(40)]

    async def end():
        await asyncio.gather(*(put_away(environment, {}, False, cfg) for environment in environments))

    asyncio.run(end())
    threads = type(environments[0].inner).closed_in
    assert len(set(threads)) == 40 and all(thread.daemon for thread in threads)


def test_methods_that_run_a_models_code_are_looked_at(tmp_path, monkeypatch):
    (tmp_path / "runs.py").write_text(
        "class Runs:\n    def reset(self):\n        pass\n\n"
        "    def run(self, code: str):\n"
        '        """Runs it.\n\n        Args:\n            code: what\n        """\n\n'
        "    run.executes_code = True\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(sandbox, "why_not_contained", lambda: "there is no bubblewrap")
    with pytest.raises(ConfigError, match="run would run code that the model writes"):
        get_environment(f"{tmp_path}/runs.py:Runs", TrainConfig())
    get_environment(f"{tmp_path}/runs.py:Runs", TrainConfig(allow_uncontained=True))


@pytest.mark.parametrize("name, start", [("make_counter", 3), ("five", 5)])
def test_factories_that_are_no_classes(trl, name, start):
    trajectory = played(f"{trl}:{name}", [INCREMENT, "Done."])
    assert trajectory.info["object"].count == start + 4
    assert sorted(environment_maker(TrainConfig(env=f"{trl}:{name}"))().methods) == ["double", "increment"]


def test_environments_chosen_by_a_column(trl):
    settings = dict(reward_funcs=["environment", f"{trl}:seen_environments"])
    for name, start in (("counter", 0), ("five", 5), ("made", 7)):
        trajectory = played(f"{trl}:FACTORIES", [INCREMENT, "Done."], {"environment": name}, **settings)
        assert trajectory.info["object"].count == start + 4 and "environment" not in trajectory.info["object"].seen
        assert score(trajectory, *settings["reward_funcs"]) == {"environment": start + 4, "seen_environments": 1}
    trajectory = played(f"{trl}:FACTORIES", ["Done."], {"environment": "plain", "word": "Oslo"}, **settings)
    assert [m["content"] for m in trajectory.info["shown"]][-1] == "Say Oslo."
    scored = score(trajectory, *settings["reward_funcs"])
    assert scored["environment"] != scored["environment"] and scored["seen_environments"] == 0  # nan: does not apply
    cfg = TrainConfig(env=f"{trl}:FACTORIES", **settings)
    check_rows([{"environment": "plain"}, {"environment": "five"}], cfg)
    for row in ({"environment": "fife"}, {"prompt": "?"}):
        with pytest.raises(ConfigError, match="column `environment` of the row .*known are counter, five, made, plain"):
            check_rows([{"environment": "plain"}, row], cfg)


def test_mistakes_in_factories(trl):
    for name, message in (
        ("FACTORIES", "Plain has no get_reward"),
        ("SCORED?start=1", "takes no start; put it into a functools.partial"),
        ("five?sise=1", "unknown name 'sise'"),
        ("nothing", "allowed are a class, or a plain function"),
    ):
        with pytest.raises(ConfigError, match=message):
            started(f"{trl}:{name}")
    with pytest.raises(ConfigError, match="answers text itself and brings its own tools"):
        started("frozenlake", tools=["calculator"])


def test_an_error_names_the_class_that_was_given(tmp_path):
    (tmp_path / "task.py").write_text(
        "class Client:\n    def reset(self, **row):\n        raise OSError('refused')\n", encoding="utf-8"
    )
    with pytest.raises(TrajectoryError, match=r"Client.reset\(\) raised OSError\('refused'\)"):
        played(f"{tmp_path}/task.py:Client", ["Done."], reward_funcs=["length"])


def test_a_reward_that_does_not_count_is_said(trl, caplog):
    started(f"{trl}:Counter", reward_funcs=["length"])
    assert "get_reward() of Counter does not count; name `environment` among --reward_funcs" in caplog.text


@pytest.mark.parametrize("word, expected", [("none", None), ("yes", 1.0)])
def test_a_reward_of_none_does_not_apply(trl, word, expected):
    trajectory = played(f"{trl}:Sometimes", ["Done."], {"word": word})
    value = score(trajectory, "environment")["environment"]
    assert (None if value != value else value) == expected and trajectory.info["unrewarded"] == (expected is None)


def test_methods_and_tools_together(trl, tmp_path):
    """--tools and --mcp_config stand beside the methods, under their limits; the column `tools` chooses among them."""
    served = {"mcpServers": {"files": {"command": sys.executable, "args": [str(ROOT / "tests" / "mcp_server.py")]}}}
    (tmp_path / "servers.json").write_text(json.dumps(served), encoding="utf-8")
    settings = dict(tools=["calculator"], mcp_config=str(tmp_path / "servers.json"))
    cfg = TrainConfig(env=f"{trl}:Counter", **settings)
    environment = environment_maker(cfg)()
    asyncio.run(environment.reset({"prompt": "?"}, 0))
    assert {"increment", "double", "calculator"} < environment.tools.keys() and "calculator" in environment.instructions
    asyncio.run(environment.reset({"prompt": "?", "tools": ["calculator"]}, 0))
    assert list(environment.tools) == ["double", "increment", "calculator"]
    assert environment_maker(cfg)().toolbox is environment.toolbox
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    trajectory = played(f"{trl}:Counter", [INCREMENT + call, "Done."], **settings)
    assert [m["content"] for m in trajectory.info["turns"][0]["observation"]] == ["4", "42"]
    (tmp_path / "clash.py").write_text('def double() -> int:\n    "Doubles."\n    return 2\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="both have a tool 'double'"):
        started(f"{trl}:Counter", tools=[f"{tmp_path}/clash.py:double"])


def test_prompts_that_the_environment_makes(trl, tmp_path):
    """Rows of a column `environment` alone, or of nothing but seeds, as where TRL has no train_dataset."""
    (tmp_path / "rows.jsonl").write_text(
        '{"environment": "plain", "word": "Rome"}\n{"environment": "counter"}\n', encoding="utf-8"
    )
    rows = load_rows(f"{tmp_path}/rows.jsonl", own_prompts=False)
    shown = [
        played(f"{trl}:FACTORIES", ["Done."], row, reward_funcs=["length"]).info["shown"][-1]["content"] for row in rows
    ]
    assert shown == ["Say Rome.", " The counter is ready."]
    with pytest.raises(ConfigError, match="no column `prompt`"):
        load_rows(f"{tmp_path}/rows.jsonl")
    assert TrainConfig(env=f"{trl}:Counter").dataset_id == "seeds:2000"
    train, test = (load_rows("seeds:20", split=split) for split in ("train", "test"))
    assert len(train) == 20 and not {row["seed"] for row in train} & {row["seed"] for row in test}
    with pytest.raises(ConfigError, match="such as seeds:2000"):
        load_rows("seeds:many")


PICTURES = """
from PIL import Image


class Painter:
    def reset(self, color="red", **kwargs):
        image = Image.new("RGB", (64, 64), color)
        return [{"type": "image", "image": image}, {"type": "text", "text": " What colour is it?"}]

    def get_reward(self):
        return 1.0


class Words(Painter):
    def reset(self, **kwargs):
        return [{"type": "text", "text": " What colour"}, {"type": "text", "text": " is it?"}]
"""


def test_a_prompt_with_pictures_of_the_environment(tmp_path):
    (tmp_path / "pictures.py").write_text(PICTURES, encoding="utf-8")
    folder = tiny_vlms.make("qwen2_5_vl", tmp_path / "vlm")
    cfg = TrainConfig(env=f"{tmp_path}/pictures.py:Painter", model_id=str(folder), compute_dtype="float32")
    processor = script.load_processor(cfg.model_id)
    generator = HFGenerator(load_hf_model(cfg, script.torch.float32), processor)
    environment = environment_maker(cfg)()
    (message,) = environment.reset({"prompt": "Look."}, 0)
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["text", "image", "text"] and isinstance(message["content"][1]["image"], Image.Image)
    trajectory = asyncio.run(play({"prompt": "Look.", "seed": 1}, 0, environment, generator, cfg))
    assert len(trajectory.images) == 1 and "pixel_values" in trajectory.info["model_inputs"]
    words = environment_maker(TrainConfig(env=f"{tmp_path}/pictures.py:Words"))()
    assert words.reset({"prompt": "Look."}, 0)[-1]["content"] == "Look. What colour is it?"


def test_trained_with_a_dict_of_environments(trl, tmp_path):
    """Rewards may ask for `environments` of ours, too; both kinds of rows stand in one step."""
    rows = [{"environment": name} for name in ("counter", "plain", "five", "made")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = dict(
        model_id=str(make_tiny()),
        generator="hf",
        compute_dtype="float32",
        prompts_per_step=4,
        num_generations=2,
        max_completion_length=30,
        max_steps=1,
        output_dir=str(tmp_path),
    )
    names = ["environment", f"{trl}:seen_environments"]
    chosen = dict(env=f"{trl}:FACTORIES", tools=["calculator"], dataset_id=f"{tmp_path}/rows.jsonl")
    script.train(TrainConfig(**settings, **chosen, reward_funcs=names, run_name="dict"))
    (line,) = [line for line in read_metrics(tmp_path / "dict") if "reward" in line]
    assert line["rewards/environment/mean"] == pytest.approx((0 + 5 + 7) / 3)  # no call: where each began
    assert line["rewards/seen_environments/mean"] == pytest.approx(3 / 4) and line["unrewarded"] == 0
    script.train(TrainConfig(**settings, env="frozenlake", reward_funcs=names, run_name="ours"))
    (line,) = [line for line in read_metrics(tmp_path / "ours") if "reward" in line]
    assert line["rewards/seen_environments/mean"] == 0


# ---- veRL's interactions, verifiers' environments: the files in docs/environments.md --------------------------------


def bridge(name: str, folder: Path) -> str:
    """A file as docs/environments.md has it."""
    (code,) = re.findall(
        rf"```python\n(# {name}\n.*?)```", (ROOT / "docs" / "environments.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (folder / name).write_text(code, encoding="utf-8")
    return str(folder / name)


INTERACTION = '''
class MyInteraction:
    """Called as veRL calls one: async, an id for each trajectory, the conversation so far."""

    def __init__(self, config):
        self.name, self.open = config["name"], {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        instance_id = instance_id or f"id {len(self.open)}"
        self.open[instance_id] = {"truth": ground_truth, "tries": 0}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.open[instance_id]["tries"] += 1
        assert len(messages) == 2 * self.open[instance_id]["tries"]
        score = await self.calculate_score(instance_id, messages[-1]["content"])
        return score == 1.0, "Right." if score else "No. Try again.", score, {"tries": 1}

    async def calculate_score(self, instance_id, said):
        return float(self.open[instance_id]["truth"] in said)

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.open[instance_id]
'''


def test_an_interaction_of_verl(tmp_path, monkeypatch):
    (tmp_path / "my_interaction.py").write_text(INTERACTION, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    spec = f"{bridge('from_verl.py', tmp_path)}:FromVeRL"
    prompt = [{"role": "user", "content": "What is 6 * 7?"}]
    row = {"prompt": prompt, "extra_info": {"interaction_kwargs": {"name": "mine", "ground_truth": "42"}}}
    trajectory = played(spec, ["41", "It is 42."], row)
    assert [turn["reward"] for turn in trajectory.info["turns"]] == [0.0, 1.0] and trajectory.turns == 2
    assert trajectory.info["turns"][0]["observation"] == [{"role": "user", "content": "No. Try again."}]
    environment = get_environment(spec)()
    act(environment, "close")  # nothing begun
    act(environment, "reset", row, 0)
    interaction = sys.modules[type(environment).__module__].interaction
    assert environment.id in interaction.open
    act(environment, "close")
    assert environment.id not in interaction.open


OPENENV = '''
import sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.tools.local_python_executor import PyExecutor


class CodeAction(Action):
    code: str


class CodeObservation(Observation):
    stdout: str = ""
    stderr: str = ""


class Coding(Environment):
    """As coding_env: it keeps what the code defines, and its server admits one session."""

    state = State()

    def reset(self, **kwargs):
        self.executor = PyExecutor()
        return CodeObservation()

    def step(self, action, **kwargs):
        result = self.executor.run(action.code)
        return CodeObservation(stdout=result.stdout, stderr=result.stderr, reward=0.1 - result.exit_code)


def echo_message(message: str) -> str:
    return message


class Echo(MCPEnvironment):
    """As echo_env: its actions are tools of MCP."""

    SUPPORTS_CONCURRENT_SESSIONS, state = True, State()

    def __init__(self):
        tools = FastMCP("echo")
        tools.tool(echo_message)
        super().__init__(tools)

    def reset(self, **kwargs):
        return Observation()

    def _step_impl(self, action, **kwargs):
        return Observation()


apps = {
    "coding": lambda: create_app(Coding, CodeAction, CodeObservation, env_name="coding"),
    "echo": lambda: create_app(Echo, CallToolAction, CallToolObservation, env_name="echo", max_concurrent_envs=16),
}
uvicorn.run(apps[sys.argv[1]](), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
'''


def test_environments_of_openenv(tmp_path, monkeypatch):
    """Real servers of OpenEnv, the file in the docs, and more trajectories at once than a server admits sessions."""
    for name in ("openenv", "fastmcp", "smolagents"):
        pytest.importorskip(name)
    (tmp_path / "serve.py").write_text(OPENENV, encoding="utf-8")
    ports = {name: free_port() for name in ("coding", "echo")}
    servers = [subprocess.Popen([sys.executable, tmp_path / "serve.py", name, str(p)]) for name, p in ports.items()]
    monkeypatch.setenv("CODING_URLS", f"http://127.0.0.1:{ports['coding']}")
    monkeypatch.setenv("ECHO_URL", f"http://127.0.0.1:{ports['echo']}")
    path = bridge("from_openenv.py", tmp_path)
    settings = dict(env=f"{path}:FACTORIES", reward_funcs=[f"{path}:last_reward"], max_completion_length=2000)
    cfg = TrainConfig(**settings, max_prompt_length=2000, num_generations=4, tool_timeout=30)
    try:
        for name, port in ports.items():
            deadline = time.monotonic() + 60
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert time.monotonic() < deadline, f"the OpenEnv server {name} is not there after 60 s"
                time.sleep(0.2)
        for name, tool, arguments, said, reward in (
            ("coding", "run", {"code": "x = 41\nprint(x + 1)"}, "42\n", 0.1),
            ("coding", "run", {"code": "import os"}, "Import of os is not allowed", -0.9),
            ("echo", "echo", {"message": "hello"}, "hello", 1.0),
        ):
            call = f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"
            rows = [{"prompt": f"{said} {number}", "environment": name} for number in range(3)]

            class EachForItself(Scripted):
                async def generate(self, sent, call=call, **options):
                    says = [call] if "<tool_response>" not in self.tokenizer.decode(sent) else ["Done."]
                    return await Scripted(self.tokenizer, says).generate(sent, **options)

            trajectories = asyncio.run(multi_turn(rows, EachForItself(tokenizer_of("qwen2_5"), []), cfg))
            asyncio.run(rewards.score(trajectories, rewards.get_reward_functions(cfg), cfg))
            assert len(trajectories) == 12
            for trajectory in trajectories:
                (message,) = trajectory.info["turns"][0]["observation"]
                assert said in message["content"] and trajectory.info["rewards"]["last_reward"] == pytest.approx(reward)
    finally:
        for server in servers:
            server.terminate()
            server.wait(10)


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.ConnectionError:
        return False


TASKSET = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward
    async def short(self, task, trace) -> float:
        assert "+" in trace.transcript and task is self.data
        return 0.5 * (len(trace.last_reply) < 20)


class MyTasksetConfig(vf.TasksetConfig):
    id: str = "sums"


class MyTaskset(vf.Taskset[Sum, MyTasksetConfig]):
    def load(self):
        for n in range(6):
            yield Sum(Data(prompt=f"{n} + {n}?", system_prompt="Be short.", answer=str(2 * n)))
"""


def test_tasks_of_verifiers_1(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    (tmp_path / "my_taskset.py").write_text(TASKSET, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = bridge("from_verifiers.py", tmp_path)
    rows = load_rows(f"{path}:rows")
    assert len(rows) == 6 and rows[2]["prompt"][1] == {"role": "user", "content": "2 + 2?"}
    given = [[{"role": "assistant", "content": text}] for text in ("It is 4.", "It may be 4, or 5, or 6.", "Hm.")]
    values = load_function(f"{path}:reward")([rows[2]["prompt"]] * 3, given, [2] * 3)
    assert asyncio.run(values) == [2.5, 2.0, 0.5]


VERIFIERS = '''
from types import SimpleNamespace


class Rubric:
    async def score_rollout(self, prompt, completion, answer, state, task="default", info=None, **kwargs):
        assert completion[0]["role"] == "assistant" and prompt[0]["role"] == "user"
        state["timing"]["total_ms"] += 1.0
        return SimpleNamespace(reward=float(state["guessed"]) / len(completion), metrics={})


class GuessEnv:
    """Called as verifiers calls a MultiTurnEnv: message lists and a dict of state."""

    def __init__(self):
        self.rubric = Rubric()

    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": "Guess."}], "answer": "7", "task": "default", "info": {}}]

    async def setup_state(self, state):
        return state | {"guessed": False, "hints": 0}

    async def is_completed(self, messages, state, **kwargs):
        state["guessed"] = messages[-1]["role"] == "assistant" and state["answer"] in messages[-1]["content"]
        return state["guessed"] or state["hints"] >= 2

    async def env_response(self, messages, state, **kwargs):
        state["hints"] += 1
        return [{"role": "user", "content": f"No. Hint {state['hints']}."}], state


def load_environment():
    return GuessEnv()
'''


def test_an_environment_of_verifiers_0(tmp_path, monkeypatch):
    (tmp_path / "my_env.py").write_text(VERIFIERS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = bridge("from_old_verifiers.py", tmp_path)
    (row,) = load_rows(f"{path}:rows")
    trajectory = played(f"{path}:FromVerifiers", ["5?", "7?"], row)
    assert trajectory.turns == 2 and score(trajectory, "environment")["environment"] == pytest.approx(1 / 3)
    assert trajectory.info["turns"][0]["observation"] == [{"role": "user", "content": "No. Hint 1."}]
    assert played(f"{path}:FromVerifiers", ["5?"], row, max_turns=5).turns == 2  # it ends after its second hint


@pytest.mark.parametrize("name", ["coming-from-trl.md", "environments.md"])
def test_flags_in_the_docs_are_there(name):
    known = {field.name for field in dataclasses.fields(TrainConfig)} | {"policy", "max_staleness", "write_tables"}
    flags = set(re.findall(r"--(\w+)(?![\w-])", (ROOT / "docs" / name).read_text(encoding="utf-8")))
    assert flags and not flags - known
