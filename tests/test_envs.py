"""Environments of ours and of others: rules, seeds, and a training run with a class written for TRL."""

import asyncio
import http.server
import json
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from server_fixture import make_tiny

import train_grpo as script
import train_ppo
from config import ConfigError, TrainConfig
from envs.adapters import environment_maker, get_environment
from envs.games import MOVES, Sokoban
from runlog.reading import read_metrics

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "examples"))
import sokoban  # noqa: E402
import visual_crop  # noqa: E402


def step(environment, text):
    result = environment.step(text)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def solution(level: Sokoban) -> list[str] | None:
    """The shortest way, by breadth-first search over (player, boxes)."""
    start = (level.place, frozenset(level.boxes))
    came, todo = {start: []}, deque([start])
    while todo:
        state = todo.popleft()
        if state[1] == level.targets:
            return came[state]
        for name in MOVES:
            level.place, level.boxes = state[0], set(state[1])
            step(level, f"<answer>{name}</answer>")
            after = (level.place, frozenset(level.boxes))
            if after not in came:
                came[after] = [*came[state], name]
                todo.append(after)
    return None


@pytest.mark.parametrize("boxes", [1, 2])
def test_every_sokoban_can_be_solved(boxes):
    lengths = []
    for seed in range(25):
        level = Sokoban(boxes=boxes)
        assert level.reset({}, seed) == Sokoban(boxes=boxes).reset({}, seed)
        moves = solution(level)
        level.reset({}, seed)
        total = 0.0
        for number, move in enumerate(moves, 1):
            _, reward, done, info = step(level, f"I go <answer>{move.capitalize()}</answer>")
            total += reward
            assert info == {"valid": 1.0, "effective": 1.0} and done == (number == len(moves))
        assert total == pytest.approx(10 + boxes - 0.1 * len(moves)) and level.metrics() == {"success": 1.0}
        lengths.append(len(moves))
        level.reset({}, seed)  # the example's player finds a way as short
        for number in range(len(moves)):
            done = step(level, f"<answer>{sokoban.next_push(level)}</answer>")[2]
            assert done == (number + 1 == len(moves))
    assert min(lengths) >= 1 and sorted(lengths)[12] >= 5


def test_sokoban_costs():
    level = Sokoban()
    level.reset({}, 0)
    before = level.picture()
    messages, reward, done, info = step(level, "up")
    assert (reward, done, info["valid"]) == (-0.1, False, 0.0) and level.picture() == before
    level.place, level.boxes, level.targets, level.blocked = (2, 2), {(2, 3)}, {(2, 3)}, set()
    assert step(level, "<answer>right</answer>")[1] == pytest.approx(-1.1)  # off its target
    assert level.boxes == {(2, 4)} and step(level, "<answer>right</answer>")[3]["effective"] == 0.0  # a wall behind it


def test_the_compass_says_what_the_map_shows():
    level = Sokoban(compass=True)
    level.reset({}, 0)
    level.place, level.boxes, level.targets = (1, 1), {(3, 2), (4, 4)}, {(2, 4), (4, 4)}
    assert level.picture().splitlines()[level.size :] == ["To B: 2 Down, 1 Right. From B to T: 1 Up, 2 Right."]


def test_gymnasium():
    make = get_environment("gymnasium?id=CliffWalking-v1&hint=Walk+to+the+goal.")
    first, second = make(), make()
    assert first.reset({}, 5) == second.reset({}, 5)
    assert "Walk to the goal. Answer each time with an action from 0 to 3" in first.reset({}, 5)[0]["content"]
    assert step(first, "<answer>7</answer>")[1:] == (-0.1, False, {"valid": 0.0})
    messages, reward, done, info = step(first, "I go <answer>0</answer>")
    assert (reward, done, info) == (-1.0, False, {"valid": 1.0}) and "o" in messages[0]["content"]
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


@pytest.fixture
def model_url():
    """A real HTTP server that plays the user: impatient once, then content."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = "And now?" if len(asked) == 1 else "DONE"
            body = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args): ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    server.shutdown()


def test_a_simulated_user(model_url):
    url, asked = model_url
    user = get_environment(f"user?url={url}&model=any")()
    user.reset({"prompt": "My screen is dark.", "user": "someone whose plug is loose"}, 0)
    assert step(user, "Is it on?")[::2] == ([{"role": "user", "content": "And now?"}], False)
    assert step(user, "Check the plug.")[2] is True
    assert "loose" in asked[1]["messages"][0]["content"] and "Check the plug." in asked[1]["messages"][0]["content"]
    assert asked[0]["model"] == "any" and asked[0]["max_tokens"] == 200
    assert "User: My screen is dark.\nAssistant: Is it on?" in asked[0]["messages"][0]["content"]
    with pytest.raises(ConfigError, match="has no column `user`"):
        user.reset({"prompt": "Hello."}, 0)


# ---- a class and a reward function as TRL's users write them ---------------------------------------------------------

TRL_FILE = '''
class Counter:
    """As TRL's environment_factory takes it: no base class, public methods are tools."""

    def __init__(self):
        self.count = 0

    def reset(self, start: int = 0, **kwargs) -> str | None:
        self.count = start
        return f" The counter is at {start}."

    def increment(self, by: int) -> int:
        """
        Raise the counter.

        Args:
            by: by how much

        Returns:
            The counter afterwards.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


def is_ten(completions, environments, **kwargs):
    return [float(environment.count == 10) for environment in environments]


def rows(split, seed):
    for n in range(8):
        yield {"prompt": [{"role": "user", "content": "Count to ten."}], "start": n}
'''


def test_a_class_written_for_trl(tmp_path):
    """Its methods are tools, its reset adds to the prompt, get_reward and reward functions see its state; both scripts
    train it as it is."""
    (tmp_path / "task.py").write_text(TRL_FILE, encoding="utf-8")
    spec = f"{tmp_path}/task.py:Counter"
    environment = environment_maker(TrainConfig(env=spec))()
    messages = environment.reset({"prompt": [{"role": "user", "content": "Count to ten."}], "start": 4}, 0)
    assert messages[-1]["content"] == "Count to ten. The counter is at 4." and list(environment.tools) == ["increment"]
    call = '<tool_call>{"name": "increment", "arguments": {"by": 6}}</tool_call>'
    answers, reward, done, _ = step(environment, call)
    assert (answers[0]["content"], reward, done, environment.score()) == ("10", 0.0, False, 10.0)

    (tmp_path / "named.py").write_text(TRL_FILE.replace("increment", "step"), encoding="utf-8")  # a tool like any other
    named = environment_maker(TrainConfig(env=f"{tmp_path}/named.py:Counter"))()
    named.reset({"prompt": "Count to ten."}, 0)
    assert list(named.tools) == ["step"] and step(named, call.replace("increment", "step"))[0][0]["content"] == "6"

    settings = dict(
        model_id=str(make_tiny()),
        env=spec,
        dataset_id=f"{tmp_path}/task.py:rows",
        reward_funcs=["environment", f"{tmp_path}/task.py:is_ten"],
        generator="hf",
        compute_dtype="float32",
        prompts_per_step=4,
        num_generations=4,
        max_completion_length=40,
        max_turn_length=20,
        max_steps=1,
        output_dir=str(tmp_path),
    )
    script.train(TrainConfig(**settings, run_name="grpo"))
    critic = train_ppo.CriticTrainer
    script.train(train_ppo.TrainConfig(**settings | {"advantage": "gae"}, run_name="ppo"), critic)
    for name in ("grpo", "ppo"):
        (line,) = [line for line in read_metrics(tmp_path / name) if "reward" in line]
        assert line["rewards/environment/mean"] > 0 and line["rewards/is_ten/mean"] == 0 and line["turns/mean"] == 1
        assert line["reward"] == pytest.approx(line["rewards/environment/mean"])


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


def test_a_new_environment_fits_a_page():
    """A class of the examples; the shop's, with several kinds of pages, takes two."""
    for path, most in (("visual_crop.py", 40), ("shop.py", 80)):
        _, _, text = (ROOT / "examples" / path).read_text(encoding="utf-8").partition("(Environment):")
        assert 0 < len(text.partition("\n\n\ndef ")[0].splitlines()) <= most, path


def test_a_closer_look_shows_the_part_that_was_asked_for():
    row = visual_crop.rows("test", 42)[0]
    environment = visual_crop.Crop()
    (told,) = environment.reset(row, 0)
    assert [part["type"] for part in told["content"]] == ["image", "text"]
    ((message,), reward, done, _) = step(environment, json.dumps({"bbox": row["box"]}))
    part, (x, y, *_) = message["content"][0]["image"], row["box"]
    assert (reward, done, environment.shown) == (0.0, False, row["box"])
    assert np.array_equal(part, row["image"].crop((32 * x, 32 * y, 32 * x + 64, 32 * y + 64)))
    assert visual_crop.PLACES[x // 2 + 3 * (y // 2)] in row["prompt"]
    for box in ("[9, 9, 9, 9]", "[5, 5, 2, 2]", "[1, 2]", "[1, 2, 3]", "[1, null, 3, 4]", "[x]"):
        message, reward, done, _ = step(environment, '{"bbox": ' + box + "}")
        assert message[0]["content"] == "That is no box in the picture." and not done, box
    assert step(environment, row["answer"])[1:3] == (1.0, True)
    assert step(environment, "no idea")[1:3] == (0.0, True)


@pytest.mark.in_turn
def test_played_from_the_command_line(tmp_path):
    """Seconds, without torch, model or server; mistakes are explained."""
    command = [sys.executable, str(ROOT / "rollouts.py"), "--env"]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "frozenlake", "--policy", "random", "--episodes", "3"],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0 and "mean reward of 3 trajectories" in done.stdout and time.perf_counter() - start < 10
    (tmp_path / "rows.jsonl").write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n', encoding="utf-8")
    flags = ["--tools", "calculator", "--tool_parser", "tags", "--dataset_id", f"{tmp_path}/rows.jsonl"]
    done = subprocess.run([*command[:-1], *flags, "--episodes", "2"], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and "[user] One?" in done.stdout and "[user] Two?" in done.stdout, done.stderr
    (tmp_path / "look.py").write_text(
        "class Look:\n    def reset(self, **row):\n        return 'Look.'\n\n"
        "    def look(self) -> str:\n        'Looks around.'\n        return 'a red door'\n",
        encoding="utf-8",
    )
    flags = [f"{tmp_path}/look.py:Look", "--policy", "hand"]  # without get_reward(), as where TRL has reward functions
    said = '<tool_call>{"name": "look", "arguments": {}}</tool_call>\nA door.\n'
    done = subprocess.run([*command, *flags], input=said, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and "[tool] a red door" in done.stdout, done.stderr
    assert "reward of the trajectory none" in done.stdout and "mean reward of 1 trajectories: none" in done.stdout
    code = "import sys, rollouts; assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    for wrong, message in (("frozenlak", "Did you mean 'frozenlake'"), ("frozenlake?sise=3", "unknown name 'sise'")):
        done = subprocess.run([*command, wrong], capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 2 and message in done.stderr
    with pytest.raises(ConfigError, match="has no reset"):
        get_environment(f"{ROOT}/examples/counting.py:rows")
