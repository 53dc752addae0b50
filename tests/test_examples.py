"""Every example trains two steps with its own settings, and examples/run.py starts what its file says."""

import asyncio
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_vlms
import yaml
from live import trained
from server_fixture import make_tiny
from transformers import AutoTokenizer

from config import TrainConfig, load_config, load_function, words_of
from vllm_client import Completion

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "scripts"), str(ROOT / "examples")]
import self_play  # noqa: E402
from warm_start import WarmConfig  # noqa: E402

EXAMPLES = {p.stem: yaml.safe_load(p.read_text(encoding="utf-8")) for p in sorted((ROOT / "examples").glob("*.yaml"))}
MORE = {  # what is tried beside the file's settings
    "arithmetic": "--reward_funcs examples/arithmetic.py:right tool_use few_turns",
    "coding": "--allow_uncontained",
    "frozenlake": "--env frozenlake?size=5",
    "three_domains": "--allow_uncontained",
}
SMALL = "--generator hf --compute_dtype float32 --prompts_per_step 4 --num_generations 4 --max_steps 2 "
SMALL += "--max_prompt_length 512 --max_turn_length 16 --max_turns 3 --no-use_peft --eval_steps none "
SMALL += "--save_steps none --print_samples_every 0"
CHEAP = ("arithmetic",)  # with a tool. Those with pictures, games, a search server and so on beside it


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow) for name in EXAMPLES]
)
def test_trains_two_steps(name, tmp_path):
    settings = EXAMPLES[name]
    sees = settings["model_id"] == "models/tiny-vlm"
    model = str(tiny_vlms.make("idefics3", tmp_path / "vlm") if sees else make_tiny())
    flags = f"--config examples/{name}.yaml {SMALL} {MORE.get(name, '')} --model_id {model} "
    if "domains" not in settings:  # each of those has a length of its own
        flags += "--max_completion_length 96"
    lines = trained(tmp_path, flags, script=settings["example"].get("script", "train_grpo.py"))
    lines = [line for line in lines if "reward" in line]
    several = {"tools", "env", "mcp_config"} & {*settings}
    assert len(lines) == 2 and ("turns/mean" in lines[0] or not several)


@pytest.mark.slow
def test_run_py_trains_and_compares_before_and_after():
    """The whole of it, in process. Its runs lie in runs/."""
    flags = "--generator hf --max_steps 1 --eval_steps 1 --prompts_per_step 1 --num_generations 4 --save_steps none"
    command = [sys.executable, "examples/run.py", "sums", *flags.split(), "--max_completion_length", "4"]
    env = os.environ | {"SEEDS": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    folders = {name for name in re.findall(r"runs/(sums-[\w-]+-seed7)", done.stdout) if (ROOT / "runs" / name).is_dir()}
    for name in folders:
        shutil.rmtree(ROOT / "runs" / name)
    assert done.returncode == 0 and len(folders) == 1, done.stderr[-3000:]
    assert re.search(r"(?m)^  runs/sums-\S+: eval/mean@\d+ [\d.]+ -> [\d.]+$", done.stdout), done.stdout[-1000:]


def test_what_the_files_say_is_taken(monkeypatch):
    """Settings of the train script, and those that run.py hands on to the warm start."""
    monkeypatch.chdir(ROOT)
    task = load_function(f"{ROOT}/examples/run.py:run").__globals__["TASK"]
    for name, settings in EXAMPLES.items():
        load_config(TrainConfig, ["--config", f"examples/{name}.yaml", "--generator", "hf"])
        assert settings["example"]["shown"]
        if warm := settings["example"].get("warm_start"):
            known = {key: settings[key] for key in task.split() if key in settings}
            cfg = load_config(WarmConfig, words_of(known | warm))
            assert cfg.max_steps == warm["max_steps"] and cfg.demonstrations == warm["demonstrations"]


# ---- self-play ------------------------------------------------------------------------------------------------------


class Player:
    """Says a legal move of Nim, found in what it is told; or `text`, if given."""

    rope_index = None

    def __init__(self, text: str | None = None):
        self.tokenizer, self.text, self.said = AutoTokenizer.from_pretrained(make_tiny()), text, []

    async def generate(self, sent, *, n, max_tokens, **options):
        told = self.tokenizer.decode(sent)
        pile, size = random.choice([pile for pile in re.findall(r"pile (\d): (\d)", told)[-3:] if pile[1] != "0"])
        ids = self.tokenizer(self.text or f"[{pile} {random.randint(1, int(size))}]")["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id][:max_tokens]
        self.said.append(ids)
        reason = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return [Completion(ids, [-0.5] * len(ids), reason, 3, list(sent))]


def games(player, **settings) -> list:
    """Trajectories of a row with num_generations 8."""
    settings = dict(num_generations=8, max_turns=8, max_turn_length=8, max_completion_length=1024) | settings
    cfg = TrainConfig(env="examples/self_play.py:Seat", rollout="self_play", **settings)
    return asyncio.run(self_play.self_play([{"prompt": "", "seed": 3}], player, cfg))


def earned(trajectory) -> float:
    return sum(turn["reward"] for turn in trajectory.info["turns"])


def test_self_play_both_seats_are_trajectories_with_rewards_and_groups_of_their_own():
    played = games(player := Player())
    assert [t.row["role"] for t in played] == ["seat 0", "seat 1"] * 4
    assert {(earned(a), earned(b)) for a, b in zip(played[::2], played[1::2], strict=True)} <= {(1, -1), (-1, 1)}
    assert sum(t.turns for t in played) == len(player.said)
    for t in played:
        text, seat, turns = player.tokenizer.decode(t.prompt_ids + t.token_ids), int(t.row["role"][-1]), t.info["turns"]
        assert f"Player {seat}!" in text and f"Player {1 - seat}!" not in text
        assert re.findall(r"Player (\d) removes", text).count(str(1 - seat)) >= t.turns - 1, "it is told all moves"
        own = {n for turn in turns for n in range(turn["start"], turn["end"])}
        assert t.loss_mask == [int(n in own) for n in range(len(t.token_ids))]
        assert all(t.token_ids[turn["start"] : turn["end"]] in player.said for turn in turns)
    grouped = self_play.by_seat(played, {}, 0, None)
    assert [t.group for t in grouped] == [0, 1] * 4


def test_self_play_a_cut_turn_loses_and_evaluations_are_against_the_start(monkeypatch):
    """A seat without a turn has no trajectory."""
    cut = games(Player(9 * "too many words "), num_generations=2)
    assert [(t.row["role"], t.finish_reason, earned(t)) for t in cut] == [("seat 0", "length", -1)]
    start = Player("[9 9]")
    monkeypatch.setattr(self_play, "frozen", lambda model_id: start)
    played = games(player := Player(), purpose="eval")
    assert [(t.row["role"], earned(t)) for t in played] == [("seat 0", 1)] * 4 and len(player.said) == 4
