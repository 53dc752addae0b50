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
from pathlib import Path

import pytest
import tiny_vlms
from PIL import Image
from server_fixture import make_tiny
from test_turns import Scripted, tokenizer_of

import rewards
import train_grpo as script
from config import ConfigError, TrainConfig
from data import load_rows
from envs.adapters import check_rows, environment_maker, get_environment, plain_text
from hf_generator import HFGenerator
from rollouts import check_rollout, play
from runlog.reading import read_metrics
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


gymnasium.register("Big-v0", Big)
gymnasium.register("Small-v0", Small)
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
    (tmp_path / "big_envs.py").write_text(BIG)
    monkeypatch.syspath_prepend(tmp_path)
    for spec, message in (
        ("gymnasium?id=FrozenLak-v1", "Did you mean: `FrozenLake`"),
        ("gymnasium?id=FrozenLake-v1&slip=1", "unexpected keyword argument 'slip'"),
        ("gymnasium?id=FrozenLake-v1&map_name=9x9", "KeyError: '9x9'"),
        ("gymnasium?id=Pendulum-v1", r"Box\(.*allowed are Discrete \(a number\) and Text"),
        ("gymnasium?id=big_envs:Big-v0", "observations are 27,648 numbers; allowed are 1,000 at most"),
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
        [sys.executable, str(ROOT / "rollouts.py"), "--env", "gymnasium?id=Taxi-v9"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and "It provides versioned" in done.stderr


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
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 2 and "needs word lists of NLTK" in done.stderr and "Traceback" not in done.stderr
    words = ["crane", "plant", "stone", "house", "table", "river", "cloud", "light"]
    (nltk / "corpora" / "words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (nltk / "corpora" / "words" / name).write_text("\n".join(words) + "\n")
    tagger = nltk / "taggers" / "averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True)
    for part, content in (("weights", {}), ("tagdict", dict.fromkeys(words, "NN")), ("classes", ["NN"])):
        (tagger / f"averaged_perceptron_tagger_eng.{part}.json").write_text(json.dumps(content))
    code = "from envs.adapters import get_environment as g; e = g('textarena?id=Wordle-v0')\n"
    code += "for seed in (1, 1, 2, 3, 4, 5): w = e(); w.reset({}, seed); print('SECRET', w.game.state.game_state"
    code += "['secret_word']); print('SAID', w.step('[crane]')[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
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
    (tmp_path / "task.py").write_text(TRL_CLASSES)
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
    (tmp_path / "servers.json").write_text(json.dumps(served))
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
    (tmp_path / "clash.py").write_text('def double() -> int:\n    "Doubles."\n    return 2\n')
    with pytest.raises(ConfigError, match="both have a tool 'double'"):
        started(f"{trl}:Counter", tools=[f"{tmp_path}/clash.py:double"])


def test_prompts_that_the_environment_makes(trl, tmp_path):
    """Rows of a column `environment` alone, or of nothing but seeds, as where TRL has no train_dataset."""
    (tmp_path / "rows.jsonl").write_text('{"environment": "plain", "word": "Rome"}\n{"environment": "counter"}\n')
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
    (tmp_path / "pictures.py").write_text(PICTURES)
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
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    (code,) = re.findall(rf"```python\n(# {name}\n.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL)
    (folder / name).write_text(code)
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
    (tmp_path / "my_interaction.py").write_text(INTERACTION)
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


def test_an_environment_of_verifiers(tmp_path, monkeypatch):
    (tmp_path / "my_env.py").write_text(VERIFIERS)
    monkeypatch.syspath_prepend(tmp_path)
    path = bridge("from_verifiers.py", tmp_path)
    (row,) = load_rows(f"{path}:rows")
    trajectory = played(f"{path}:FromVerifiers", ["5?", "7?"], row)
    assert trajectory.turns == 2 and score(trajectory, "environment")["environment"] == pytest.approx(1 / 3)
    assert trajectory.info["turns"][0]["observation"] == [{"role": "user", "content": "No. Hint 1."}]
    assert played(f"{path}:FromVerifiers", ["5?"], row, max_turns=5).turns == 2  # it ends after its second hint


@pytest.mark.parametrize("name", ["coming-from-trl.md", "environments.md"])
def test_flags_in_the_docs_are_there(name):
    known = {field.name for field in dataclasses.fields(TrainConfig)} | {"policy", "max_staleness"}
    flags = set(re.findall(r"--(\w+)", (ROOT / "docs" / name).read_text()))
    assert flags and not flags - known
