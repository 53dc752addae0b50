"""Settings: what the parser makes of them, which one wins, and that mistakes are answered at once and in full."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import config
from config import PRESETS, ConfigError, TrainConfig, check, flags, load_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def parse(line: str = "", cls=TrainConfig):
    return load_config(cls, line.split())


def error(line: str, cls=TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(line, cls)
    return str(caught.value)


# ---- one value ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--model_id=a=b", "model_id", "a=b"),
        ("--max_steps none", "max_steps", None),
        ("--group_mean_bounds -inf -1e-3", "group_mean_bounds", [float("-inf"), -0.001]),
        ("--use_peft --no-use_peft", "use_peft", False),
        ("--scale_rewards none", "scale_rewards", "none"),  # a choice of that name, not "unset"
        ("--lora_targets q_proj v_proj", "lora_targets", ["q_proj", "v_proj"]),
    ],
)
def test_values_of_every_type(line, name, value, tmp_path):
    found = getattr(parse(line), name)
    assert found == value and type(found) is type(value)
    (tmp_path / "run.yaml").write_text(json.dumps({name: value}), encoding="utf-8")  # JSON is YAML
    found = getattr(parse(f"--config {tmp_path}/run.yaml"), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max_steps 1.5", "--max_steps=1.5"),
        ("--strategy fsdp3", "'fsdp3'; known are ddp, fsdp, fsdp2. Did you mean 'fsdp'?"),
        ("--learnig_rate 1", "'--learnig_rate'. Did you mean --learning_rate?"),
        ("--server_token a", "'--server_token'"),  # ps shows flags
        ("--Learning_Rate 1", "'--Learning_Rate'. Did you mean --learning_rate?"),
        ("--model 1", "Did you mean --model_id?"),  # no silent abbreviations
    ],
)
def test_mistakes_on_the_command_line(line, says):
    assert says in error(line)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("learnig_rate: 1", "Did you mean 'learning_rate'?"),
        ("seed: [1", "run.yaml"),
    ],
)
def test_mistakes_in_a_config_file(tmp_path, content, says):
    (tmp_path / "run.yaml").write_text(content, encoding="utf-8")
    assert says in error(f"--config {tmp_path}/run.yaml")
    assert "none.yaml" in error(f"--config {tmp_path}/none.yaml")


def test_defaults_then_preset_then_file_then_command_line(tmp_path):
    file, later = tmp_path / "run.yaml", tmp_path / "later.yaml"
    file.write_text("preset: grpo\nepsilon: 0.3\nlearning_rate: 1e-5\nlora_targets: [q_proj]\n", encoding="utf-8")
    later.write_text("epsilon: 0.1\n", encoding="utf-8")
    cfg = parse(f"--config {file} --learning_rate 2e-5")
    assert cfg.beta == PRESETS["grpo"]["beta"] != TrainConfig().beta  # the preset
    assert cfg.epsilon == 0.3 and cfg.lora_targets == ["q_proj"]  # the file, over the preset
    assert cfg.learning_rate == 2e-5  # the command line, over the file
    assert cfg.temperature == TrainConfig().temperature
    assert parse(f"--config {file} --preset none").beta == TrainConfig().beta
    assert parse(f"--config {file} --config {later}").epsilon == 0.1
    assert parse("--preset grpo --beta 0").beta == 0, "a flag given its default is given"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_valid(name):
    cfg = parse(f"--preset {name}")
    assert all(getattr(cfg, key) == value for key, value in PRESETS[name].items())


# ---- several --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "given", "remedy"),
    [
        ("--num_minibatches 3", "--prompts_per_step=32 is not divisible by 1 rank(s) x 3", "use 30 or 33"),
        ("--offload", "--offload", "add --strategy fsdp2"),
        ("--max_staleness 1", "--max_staleness", "train_async.py"),
        ("--reward_funcs a b --reward_weights 1", "1 values for 2 --reward_funcs (a, b)", "give one each"),
        ("--resume", "--resume", "needs --run_name"),
        ("--colocate --push_steps 2", "--colocate", "without --push_steps"),
        ("--colocate --strategy fsdp2", "--colocate", "fsdp2 --offload"),
        ("--colocate --strategy fsdp", "--colocate", "fsdp2 --offload"),
        ("--use_peft --load_in 4bit --push_lora folded", "--load_in 4bit", "leave out --push_lora folded"),
        ("--use_peft --load_in 4bit --colocate", "--colocate", "without --push_steps and --load_in"),
    ],
)
def test_what_cannot_work_says_what_was_given_and_what_to_do(line, given, remedy):
    message = error(line)
    assert given in message and remedy in message


def test_the_number_of_ranks_counts(monkeypatch):
    check(TrainConfig(prompts_per_step=32), world_size=8)
    with pytest.raises(ConfigError, match=r"32 is not divisible by 5 rank\(s\) x 1 minibatch\(es\); use 30 or 35"):
        check(TrainConfig(prompts_per_step=32), world_size=5)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "Start one rank" in error("--colocate --prompts_per_step 30")
    assert "divisible by 3 rank(s) x 2 minibatch(es); use 30 or 36" in error("--num_minibatches 2")


# ---- help, and knobs of one's own -----------------------------------------------------------------------------------


def test_help_shows_every_flag_with_its_default_and_choices_and_first_what_one_needs_first():
    text = config.build_parser(TrainConfig, page="all").format_help()
    missing = [field.name for field in flags(TrainConfig) if not re.search(rf"^  --{field.name}\b", text, re.M)]
    assert not missing and "--strategy {ddp,fsdp,fsdp2}" in text and "[1e-06]" in text
    short = re.findall(r"^  --(\w+)", config.build_parser(TrainConfig, page="").format_help(), re.M)
    assert {"model_id", "dataset_id", "reward_funcs", "learning_rate"} < {*short} and len(short) < 25


# ---- the scripts as they are started --------------------------------------------------------------------------------


def run(script: Path, *arguments: str, **env) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    for name in ("VLLM_SERVER_TOKEN", "VLLM_SERVER_TOKEN_FILE"):
        environment.pop(name, None)
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, encoding="utf-8")


@pytest.fixture
def no_torch(tmp_path):
    """A PYTHONPATH on which `import torch` ends the process."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    return f"{tmp_path}:{ROOT}"


COMMANDS = "train_grpo.py train_ppo.py train_async.py train_minimal.py plan.py vllm_server.py look.py "
COMMANDS += "scripts/check.py scripts/warm_start.py scripts/from_trl.py"


def test_help_and_mistakes_answer_at_once(no_torch):
    """Without torch, whose import takes seconds; where it is needed the trap closes."""
    for command in COMMANDS.split():
        done = run(ROOT / command, "--help", PYTHONPATH=no_torch)
        assert done.returncode == 0 and done.stdout, (command, done.stderr)
    done = run(ROOT / "train_grpo.py", "--offload", PYTHONPATH=no_torch)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"train_grpo\.py: error: .+\n", done.stderr)
    assert "torch was imported" in run(ROOT / "train_grpo.py", "--generator", "hf", PYTHONPATH=no_torch).stderr


def test_only_rank_0_speaks():
    done = [run(ROOT / "train_grpo.py", "--prompts_per_step", "3", WORLD_SIZE="2", RANK=rank) for rank in "01"]
    assert [process.returncode for process in done] == [2, 2]
    assert ["3 is not divisible by 2 rank(s)" in process.stderr for process in done] == [True, False]


def test_a_copied_script_with_its_own_knob(tmp_path, no_torch):
    """As README writes it, without a decorator; by a script that builds on the copy, without running the copy."""
    source = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    knob = "class TrainConfig(TrainConfig):\n    my_coef: float = 0.1  # weight of my idea\n\n\n"
    where = source.index("CONFIG = parse_args(")
    (tmp_path / "my_grpo.py").write_text(source[:where] + knob + source[where:], encoding="utf-8")
    shown = run(tmp_path / "my_grpo.py", "--help", PYTHONPATH=no_torch).stdout
    assert re.search(r"--my_coef FLOAT +weight of my idea \[0\.1\]", shown)
    assert "Did you mean --my_coef?" in run(tmp_path / "my_grpo.py", "--my_coeff", "1", PYTHONPATH=no_torch).stderr
    asks = "from config import knobs_of, parse_args\nprint(parse_args(knobs_of('my_grpo')).my_coef)\n"
    (tmp_path / "asks.py").write_text(asks, encoding="utf-8")
    assert run(tmp_path / "asks.py", "--my_coef", "0.5", "--generator", "hf", PYTHONPATH=no_torch).stdout == "0.5\n"


def test_without_arguments_and_server_a_script_says_what_to_type():
    done = run(ROOT / "train_grpo.py")
    assert done.returncode == 2 and done.stdout == ""
    demo, made, in_process = re.findall(r"^  (?:bash|python) (.+?)(?:  # .*)?$", done.stderr, re.M)
    assert demo == "scripts/demo.sh" and made.startswith("scripts/make_models.py ")
    name, *given = in_process.split()
    assert name == "train_grpo.py" and load_config(importlib.import_module("train_grpo").TrainConfig, given)
