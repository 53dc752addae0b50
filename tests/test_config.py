"""Settings: what the parser makes of them, which one wins, and that every mistake is answered at once and in full."""

import ast
import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest

import cli
import config
from cli import field_help, flags
from config import PRESETS, ConfigError, TrainConfig, check, convert, load_config
from plugins import with_arguments

pytestmark = pytest.mark.quick

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


# ---- types ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--model_id a/b", "model_id", "a/b"),
        ("--model_id=a=b", "model_id", "a=b"),
        ("--max_steps 7", "max_steps", 7),
        ("--max_steps 1e3", "max_steps", 1000),
        ("--max_steps none", "max_steps", None),
        ("--max_steps None", "max_steps", None),
        ("--learning_rate 3e-6", "learning_rate", 3e-6),
        ("--learning_rate 1", "learning_rate", 1.0),
        ("--reward_on_timeout -1", "reward_on_timeout", -1.0),
        ("--reward_on_timeout -0.5", "reward_on_timeout", -0.5),
        ("--group_mean_min -1e-3", "group_mean_min", -0.001),
        ("--group_mean_min -inf", "group_mean_min", -math.inf),
        ("--top_p 0.9", "top_p", 0.9),
        ("--system_prompt none", "system_prompt", None),
        ("--use_peft", "use_peft", True),
        ("--no-use_peft", "use_peft", False),
        ("--use_peft --no-use_peft", "use_peft", False),
        ("--no-hub_private", "hub_private", False),
        ("--no_apply_chat_template", "no_apply_chat_template", True),
        ("--no-no_apply_chat_template", "no_apply_chat_template", False),
        ("--strategy fsdp2", "strategy", "fsdp2"),
        ("--scale_rewards none", "scale_rewards", "none"),  # a choice of that name, not "unset"
        ("--lora_targets q_proj v_proj", "lora_targets", ["q_proj", "v_proj"]),
        ("--report_to none", "report_to", []),
        ("--report_to", "report_to", []),
        ("--reward_weights 2", "reward_weights", [2.0]),
        ("--reward_weights -2", "reward_weights", [-2.0]),
        ("--reward_weights none", "reward_weights", None),
        ("--preset none", "preset", None),
    ],
)
def test_values_of_every_type(line, name, value):
    found = getattr(parse(line), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max_steps 1.5", "--max_steps=1.5: expected a whole number"),
        ("--max_steps inf", "--max_steps=inf: expected a whole number"),
        ("--seed abc", "--seed=abc: expected a whole number"),
        ("--seed none", "--seed: cannot be unset"),
        ("--model_id none", "--model_id: cannot be unset"),
        ("--learning_rate fast", "--learning_rate=fast: expected a number"),
        ("--learning_rate nan", "expected a number"),
        ("--reward_weights 1 x", "--reward_weights=x: expected a number"),
        ("--strategy fsdp3", "'fsdp3'; known are ddp, fsdp, fsdp2. Did you mean 'fsdp'?"),
        ("--strategy 7", "known are ddp, fsdp, fsdp2"),
        ("--learnig_rate 1", "'--learnig_rate'. Did you mean --learning_rate?"),
        ("--learning-rate=1", "Did you mean --learning_rate?"),
        ("--Seed 1", "Did you mean --seed?"),
        ("--no_use_peft", "Did you mean --no-use_peft?"),
        ("--xyzzyx 1", "unknown argument '--xyzzyx'. See --help all"),
        ("--search.weight 1", "unknown argument '--search.weight'. Settings of a domain stand in the list"),
        ("--model 1", "Did you mean --model_id?"),  # no silent abbreviations
        ("--use_peft true", "Switches take no value"),
        ("--seed", "--seed: expected one argument. See --help"),
        ("--strategy fsdp --freeze_vision --ref_sync_steps 1 --beta 0.1", "take fsdp2 or ddp"),
    ],
)
def test_mistakes_on_the_command_line(line, says):
    assert says in error(line)


def test_yaml_values_are_as_strict_as_the_command_line():
    assert convert("x", int, 3) == 3 and convert("x", float, 3) == 3.0 and convert("x", float, "1e-6") == 1e-6
    assert convert("x", bool, True) is True and convert("x", str, 5) == "5"
    assert convert("x", list[str], "one") == ["one"] and convert("x", list[float] | None, None) is None
    assert convert("x", Literal["none", "all"], "none") == "none"
    wrong = [(int, True), (int, 1.5), (float, True), (float, [1]), (str, ["a"]), (str, {"a": 1}), (bool, 1)]
    for kind, value in [*wrong, (bool, "yes"), (list[int], [1, None]), (Literal["a"], 3), (int, None)]:
        with pytest.raises(ConfigError, match="--x"):
            convert("x", kind, value)


# ---- which value wins ------------------------------------------------------------------------------------------------


def test_defaults_then_preset_then_file_then_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "preset: grpo\nepsilon: 0.3\nlearning_rate: 1e-5\nlora_targets: [q_proj]\nuse_peft: yes\n", encoding="utf-8"
    )
    cfg = parse(f"--config {file} --learning_rate 2e-5")
    assert cfg.beta == PRESETS["grpo"]["beta"] != TrainConfig().beta  # the preset
    assert cfg.epsilon == 0.3 and cfg.use_peft and cfg.lora_targets == ["q_proj"]  # the file, over the preset
    assert cfg.learning_rate == 2e-5  # the command line, over the file
    assert cfg.temperature == TrainConfig().temperature
    assert parse(f"--config {file} --preset none").beta == TrainConfig().beta
    assert parse(f"--config {file} --preset dr_grpo").advantage == "dr_grpo"
    own = tmp_path / "own.yaml"
    own.write_text("epsilon: 0.1\nseed: 3\n", encoding="utf-8")
    cfg = parse(f"--config {file} --config {own} --seed 4")
    assert cfg.epsilon == 0.1 and cfg.use_peft and cfg.seed == 4  # the later file, over the earlier


def test_a_flag_given_its_default_wins_over_the_preset():
    assert parse("--preset grpo --beta 0").beta == 0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_valid(name):
    cfg = parse(f"--preset {name}")
    assert all(getattr(cfg, key) == value for key, value in PRESETS[name].items())


def test_an_unknown_preset_is_answered_with_the_known():
    message = error("--preset dr-grpo")
    assert "known are cispo, clip_cov, dapo, dr_grpo" in message and "Did you mean 'dr_grpo'" in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("learnig_rate: 1", "unknown name 'learnig_rate'"),
        ("learnig_rate: 1", "Did you mean 'learning_rate'?"),
        ("1: 2", "unknown name 1"),
        ("- a\n- b", "expected `flag: value` lines, found a list"),
        ("a: [1", "not YAML"),
        ("epsilon: [1, 2]", "--epsilon=[1, 2]: expected a number"),
        ("config: other.yaml", "unknown name 'config'"),
    ],
)
def test_mistakes_in_a_config_file_name_file_and_flag(tmp_path, content, says):
    file = tmp_path / "run.yaml"
    file.write_text(content, encoding="utf-8")
    message = error(f"--config {file}")
    assert says in message and (str(file) in message or "--epsilon" in message)


def test_config_files_that_cannot_be_read(tmp_path):
    assert "No such file" in error(f"--config {tmp_path}/none.yaml")
    assert "Is a directory" in error(f"--config {tmp_path}")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "it is a named pipe; give a YAML file" in error(f"--config {tmp_path}/pipe.yaml")
    assert "it is a device" in error("--config /dev/zero")
    (tmp_path / "large.yaml").write_text("#" * 2**21, encoding="utf-8")
    assert "is larger than 1 MiB" in error(f"--config {tmp_path}/large.yaml")
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    assert parse(f"--config {tmp_path}/empty.yaml") == TrainConfig()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("seed: 1\nbeta: 0\nseed: 2", "line 3, column 1: `seed` stands there twice, first on line 1"),
        (
            "domains:\n  - name: a\n    env: x\n    env: y",
            "line 4, column 5: `env` stands there twice, first on line 3",
        ),
        ("eval_steps: " + "[" * 5000, "line 1, column 112: lists in lists deeper than 100"),
        ("eval_steps: " + "{a: " * 101 + "}" * 101, "deeper than 100"),
        (b"run_name: caf\xe9", "line 1: not UTF-8: byte 0xe9"),
        ("seed: 1".encode("utf-16"), "line 1: not UTF-8: byte 0xff"),
        ("seed: 12:30", "--seed=12:30: expected a whole number"),
        ("learning_rate: 0b11", "--learning_rate=0b11: expected a number"),
        ("seed: " + "9" * 5000, "line 1, column 7: a number of 5000 characters"),
        ("use_peft: on off", "expected true or false"),
        ("run_name: [a", "line 1, column 13"),
        ("run_name: true", "--run_name=true: expected text; write it in quotes"),
        ("lora_targets: &a [*a]", "holds itself"),
        ("\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(9)), "100,000"),
        ("seed: 1\n---\nseed: 2", "single document"),
    ],
)
def test_what_a_config_file_must_not_hold_is_said_with_its_place(tmp_path, content, says):
    file = tmp_path / "run.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = error(f"--config {file}")
    assert says in message and len(message) < 500, message


@pytest.mark.parametrize("written", ["010", "12:30", "off", "No", "3.10", "1e3", "1_000", "2024-01-01", "0x1F", "0o17"])
def test_texts_in_a_config_file_stay_as_they_are_written(tmp_path, written):
    """YAML 1.1 makes 8, 750, False, 3.1, 1000 and a date of some."""
    file = tmp_path / "run.yaml"
    file.write_text(
        f"run_name: {written}\nreward_funcs: [{written}]\ndomains: [{{name: a, env: {written}}}]", encoding="utf-8"
    )
    cfg = parse(f"--config {file}")
    assert (cfg.run_name, cfg.reward_funcs, cfg.by_domain()[0].env) == (written, [written], written)


def test_numbers_and_switches_in_a_config_file_are_those_of_yaml_1_2(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "seed: 010\nmax_steps: 1e3\nlora_r: 0x10\nlearning_rate: 1e-5\nbeta: .5\nadam_beta1: 0.90\n", encoding="utf-8"
    )
    cfg = parse(f"--config {file}")
    assert (cfg.seed, cfg.max_steps, cfg.lora_r, cfg.learning_rate, cfg.beta) == (10, 1000, 16, 1e-5, 0.5)
    assert {type(value) for value in vars(cfg).values()} <= {int, float, str, bool, list, type(None)}
    for word, wanted in {"true": True, "yes": True, "on": True, "False": False, "off": False, "no": False}.items():
        file.write_text(f"log_completions: {word}", encoding="utf-8")
        assert parse(f"--config {file}").log_completions is wanted
    file.write_text("chat_template_kwargs: {enable_thinking: off}", encoding="utf-8")
    with pytest.raises(ConfigError, match="--chat_template_kwargs: off in it may be a switch or a text; write true or"):
        parse(f"--config {file}")
    file.write_text("strategy: [fsdp2]", encoding="utf-8")
    with pytest.raises(ConfigError, match="--strategy: .'fsdp2'. is a list or a map; give one of ddp, fsdp, fsdp2"):
        parse(f"--config {file}")
    file.write_text("domains:\n  - &first {name: a, env: x}\n  - {<<: *first, name: b}", encoding="utf-8")
    assert [own.env for own in parse(f"--config {file}").by_domain()] == ["x", "x"]


# ---- checks across fields -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "given", "allowed_or_remedy"),
    [
        ("--prompts_per_step 0", "--prompts_per_step=0", "above 0"),
        ("--dist_timeout inf", "--dist_timeout=inf", "at most 2,000,000 seconds"),
        ("--server_timeout 1e300", "--server_timeout=1e+300", "at most 2,000,000 seconds"),
        ("--request_timeout inf", "--request_timeout=inf", "at most 2,000,000 seconds"),
        ("--teacher_timeout inf", "--teacher_timeout=inf", "at most 2,000,000 seconds"),
        ("--temperature 0", "--temperature=0.0", "above 0"),
        ("--num_generations 0 --advantage mine", "--num_generations=0", "at least"),
        ("--num_minibatches 3", "--prompts_per_step=32 is not divisible by 1 rank(s) x 3", "use 30 or 33"),
        ("--prompts_per_step 2 --num_minibatches 4", "--prompts_per_step=2", "use 4"),
        ("--offload", "--offload", "add --strategy fsdp2"),
        ("--spare_prompts 4", "--spare_prompts=4", "add --dynamic_sampling"),
        ("--spare_prompts 9 --dynamic_sampling --generator hf", "--spare_prompts=9", "use --generator vllm"),
        ("--spare_prompts 9 --dynamic_sampling --resample_rounds 0", "--spare_prompts=9", "raise --resample_rounds"),
        ("--max_staleness 1", "--max_staleness", "train_async.py"),
        ("--lam 0.9", "--lam", "train_ppo.py"),
        ("--critic_warmup 2", "--critic_warmup", "train_ppo.py"),
        ("--offload --strategy fsdp", "--offload", "last micro-batch alone; use --strategy fsdp2"),
        ("--dual_clip 1", "--dual_clip=1.0", "above 1 (DAPO uses 10)"),
        ("--warmup_ratio 2", "--warmup_ratio=2.0", "between 0 and 1"),
        ("--top_p 1.5", "--top_p=1.5", "between 0 and 1"),
        ("--shard_size 0 --strategy fsdp2", "--shard_size=0", "at least 1"),
        ("--num_epochs inf", "--num_epochs=inf", "--max_steps N"),
        ("--use_peft --lora_alpha 0", "--lora_alpha=0.0", "above 0"),
        ("--min_pixels 100 --max_pixels 10", "--min_pixels=100", "above --max_pixels=10"),
        ("--max_steps 0", "--max_steps=0", "at least 1"),
        ("--save_steps 0", "--save_steps=0", "leave it out, or give none"),
        ("--eval_steps -1", "--eval_steps=-1", "at least 1"),
        ("--seed -1", "--seed=-1", "between 0 and"),
        ("--beta -0.1", "--beta=-0.1", "0 or more"),
        (
            "--min_completion_length 9 --max_completion_length 8",
            "--min_completion_length=9",
            "lower the first or raise",
        ),
        ("--reward_funcs a b --reward_weights 1", "1 values for 2 --reward_funcs (a, b)", "give one each"),
        ("--reward_funcs", "--reward_funcs is empty", "give at least one"),
        ("--server_urls none", "--server_urls is empty", "--generator hf"),
        ("--report_to wandbb", "'wandbb'", "known are tensorboard, trackio, wandb. Did you mean 'wandb'?"),
        ("--push_to_hub", "--push_to_hub", "add --hub_repo_id"),
        ("--resume", "--resume", "needs --run_name"),
    ],
)
def test_what_cannot_work_says_what_was_given_and_what_to_do(line, given, allowed_or_remedy):
    message = error(line)
    assert given in message and allowed_or_remedy in message


def test_a_list_that_is_given_twice_is_said(capsys, monkeypatch):
    """The last one counts, as with every flag; of a list one may think that both do."""
    assert parse("--tools calculator --tools python").tools == ["python"]
    said = capsys.readouterr().err
    assert "--tools is given twice; the last counts: python." in said and said.endswith("--tools calculator python\n")
    parse("--tools python --tools python --learning_rate 1 --learning_rate 2")
    monkeypatch.setenv("RANK", "1")
    parse("--tools calculator --tools python")
    assert capsys.readouterr().err == ""


def test_the_number_of_ranks_counts(monkeypatch):
    check(TrainConfig(prompts_per_step=32), world_size=8)
    with pytest.raises(ConfigError, match=r"32 is not divisible by 5 rank\(s\) x 1 minibatch\(es\); use 30 or 35"):
        check(TrainConfig(prompts_per_step=32), world_size=5)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "divisible by 3 rank(s) x 2 minibatch(es); use 30 or 36" in error("--num_minibatches 2")
    assert "4 is not divisible by 3 rank(s) x 2 minibatch(es); use 6." in error(
        "--num_minibatches 2 --prompts_per_step 4"
    )
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE=two in the environment must be a whole number; torchrun sets it" in error("")


def test_one_generation_is_fine_where_nothing_is_compared():
    assert parse("--num_generations 1 --advantage reinforce_plus_plus").num_generations == 1


# ---- help -----------------------------------------------------------------------------------------------------------


def test_every_field_has_a_help_text_and_a_group():
    helps = field_help(TrainConfig)
    for field in flags(TrainConfig):
        group, text = helps[field.name]
        assert len(text) > 3 and group != "of this script", field.name


def test_help_shows_every_flag_with_its_default_and_choices():
    text = config.build_parser(TrainConfig).format_help()
    for field in flags(TrainConfig):
        assert f"--{field.name}" in text
    assert "--strategy {ddp,fsdp,fsdp2}" in text and "--no-use_peft" in text
    assert "[1e-06]" in text and "[None]" not in text and "[]" not in text and "[['" not in text


def test_help_shows_first_what_one_needs_first():
    """`first_flags` names flags that there are, none twice, and about twenty."""
    first = [name for names in TrainConfig.first_flags.values() for name in names.split()]
    assert set(first) <= {field.name for field in flags(TrainConfig)} and len(first) == len(set(first)) <= 20
    assert list(cli.help_page(TrainConfig, "")) == first
    text = config.build_parser(TrainConfig, page="").format_help()
    assert re.findall(r"^  --(\w+)", text, re.M) == ["help", "config", *first]
    assert f"{len(flags(TrainConfig)) - len(first)} more flags: --help all" in text


@pytest.mark.parametrize(
    "word, found", [("lora", "push_lora"), ("--Lora-r", "lora_r"), ("hub id", "model_id"), ("DAPO", "dynamic_sampling")]
)
def test_help_with_a_word(word, found, capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(argv=["--help=" + word])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and f"--{found}" in text and "--seed" not in text
    assert len(cli.help_page(TrainConfig, word)) < 20


def test_help_with_a_word_that_no_flag_has():
    assert "no flag has it" in error("--help xyzzy")


def test_scripts_show_what_they_add():
    assert cli.help_page(Extended, "")["my_coef"] == "of this script" and "beta" not in cli.help_page(Extended, "")
    for script, added in (("train_async", "max_staleness"), ("train_ppo", "value_clip"), ("train_minimal", "epsilon")):
        cls = vars(importlib.import_module(script)).get("Settings") or importlib.import_module(script).TrainConfig
        page = cli.help_page(cls, "")
        assert page[added] == "of this script" and page["model_id"] == "your task"


@dataclasses.dataclass
class Extended(TrainConfig):
    """A docstring with a line that looks like a field:
    fake: int = 3  # not one
    """

    # --- my idea ---
    learning_rate: float = 5e-6
    my_coef: float = 0.1  # weight of my idea, 100 % mine
    my_words: list[str] = dataclasses.field(
        default_factory=lambda: ["#1"],  # words with a # in them
    )


def test_a_subclass_adds_fields_and_changes_defaults():
    cfg = parse("--my_coef 0.5", Extended)
    assert cfg.my_coef == 0.5 and cfg.learning_rate == 5e-6 and cfg.my_words == ["#1"]
    helps = field_help(Extended)
    assert helps["my_coef"] == ("my idea", "weight of my idea, 100 % mine")
    assert helps["my_words"] == ("my idea", "words with a # in them") and "fake" not in helps
    assert helps["learning_rate"][1] == field_help(TrainConfig)["learning_rate"][1]  # inherited
    assert "100 % mine [0.1]" in config.build_parser(Extended).format_help()
    assert "Did you mean --my_coef?" in error("--my_coeff 1", Extended)


@pytest.mark.parametrize(
    "file, others",
    [
        ("config.py", {"cli", "domains", "safety"}),
        ("domains.py", {"cli"}),
        ("safety/credentials.py", {"cli"}),
        ("cli.py", {"yaml"}),
    ],
)
def test_config_and_command_line_import_neither_torch_nor_anything_of_ours(file, others):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names} == others


# ---- the script as it is started -------------------------------------------------------------------------------------


def run(script: Path, *arguments: str, **env) -> subprocess.CompletedProcess:
    command = [sys.executable, str(script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, encoding="utf-8")


@pytest.mark.parametrize("arguments", [["--help"], ["--learnig_rate", "1"], ["--prompts_per_step", "0"]])
def test_help_and_mistakes_answer_at_once(arguments):
    """Best of two, as the machine may be busy; the limit is a second above what is promised for the same reason."""
    seconds = []
    for _ in range(2):
        start = time.monotonic()
        done = run(ROOT / "train_grpo.py", *arguments)
        seconds.append(time.monotonic() - start)
    assert done.returncode == (0 if arguments == ["--help"] else 2)
    assert min(seconds) < 3
    if arguments != ["--help"]:
        assert done.stdout == "" and re.fullmatch(r"train_grpo\.py: error: .+\n", done.stderr)


COMMANDS = ["train_grpo.py", "train_ppo.py", "train_async.py", "train_minimal.py", "plan.py", "vllm_server.py"]
COMMANDS += [
    "look.py",
    "rollouts.py",
    *(f"scripts/{name}.py" for name in "check gpu_check warm_start from_trl".split()),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_torch_to_say_what_it_takes(command, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    done = run(ROOT / command, "--help", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0 and done.stdout and "torch was imported" not in done.stderr


def test_a_knob_of_a_copy_is_one_of_what_builds_on_it_without_running_the_copy(tmp_path):
    """What stands above the line CONFIG = ... is run, and nothing below it; without that line all is."""
    above = "from config import TrainConfig\nclass TrainConfig(TrainConfig):\n    my_coef: float = 0.1  # of my idea\n"
    (tmp_path / "mine.py").write_text(f"{above}CONFIG = None\nraise SystemExit('was run')\n", encoding="utf-8")
    (tmp_path / "whole.py").write_text(above, encoding="utf-8")
    for name in ("mine", "whole"):
        script = tmp_path / "asks.py"
        text = f"from config import knobs_of, parse_args\nprint(parse_args(knobs_of('{name}')).my_coef)\n"
        script.write_text(text, encoding="utf-8")
        assert run(script, "--my_coef", "0.5", PYTHONPATH=ROOT, VLLM_SERVER_TOKEN="a secret").stdout == "0.5\n"
        assert re.search(r"--my_coef FLOAT +of my idea \[0\.1\]", run(script, "--help", PYTHONPATH=ROOT).stdout)


def test_help_and_mistakes_import_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    path = f"{tmp_path}:{ROOT}"
    for arguments, status in ((["--help"], 0), (["--nonsense"], 2), (["--offload"], 2)):
        done = run(ROOT / "train_grpo.py", *arguments, PYTHONPATH=path)
        assert done.returncode == status and "torch was imported" not in done.stderr
    done = run(ROOT / "train_grpo.py", PYTHONPATH=path, VLLM_SERVER_TOKEN="a secret of the server")
    assert "torch was imported" in done.stderr  # the trap works


@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py", "train_async.py", "train_minimal.py"])
def test_without_arguments_and_server_a_script_says_what_to_type(script, monkeypatch):
    monkeypatch.delenv("VLLM_SERVER_TOKEN", raising=False)
    monkeypatch.delenv("VLLM_SERVER_TOKEN_FILE", raising=False)
    done = run(ROOT / script)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 6 and max(map(len, done.stderr.splitlines())) <= 120
    demo, made, in_process = re.findall(r"^  (?:bash|python) (.+?)(?:  # .*)?$", done.stderr, re.M)
    assert demo == "scripts/demo.sh" and made.startswith("scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct")
    name, *flags = in_process.split()
    module = importlib.import_module(script.removesuffix(".py"))
    cfg = load_config(module.Settings if script == "train_minimal.py" else module.TrainConfig, flags)
    assert name == script and cfg.generator == "hf" and cfg.model_id == "models/SmolLM2-135M-Instruct"


def test_only_rank_0_speaks():
    for rank in "01":
        done = run(ROOT / "train_grpo.py", "--prompts_per_step", "3", WORLD_SIZE="2", RANK=rank)
        assert done.returncode == 2 and done.stdout == ""
        assert ("3 is not divisible by 2 rank(s)" in done.stderr) == (rank == "0")


@pytest.mark.slow
@pytest.mark.parametrize("decorator", ["", "@dataclass\n"])
def test_a_copied_script_with_its_own_knob(tmp_path, decorator):
    """The line that the script itself suggests, with and without the decorator."""
    script, source = tmp_path / "my_grpo.py", (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    knob = f"from dataclasses import dataclass\n{decorator}class TrainConfig(TrainConfig):\n"
    knob += "    my_coef: float = 0.1  # weight of my idea\n    my_mode: str | None = None\n"
    where = source.index("CONFIG = parse_args(")
    end = source.index("\n\n", where)
    show = "\nif CONFIG is not None:\n    import json\n    print(json.dumps(vars(CONFIG)))\n    raise SystemExit\n"
    script.write_text(source[:where] + knob + source[where:end] + show + source[end:], encoding="utf-8")
    assert re.search(r"--my_coef FLOAT +weight of my idea \[0\.1\]", run(script, "--help").stdout)
    text = run(script, "--help", "all").stdout
    assert re.search(r"--my_coef FLOAT +weight of my idea \[0\.1\]", text) and "my_grpo.py" in text
    assert "distinct prompts per step" in text  # the inherited ones are still there
    shown = json.loads(run(script, "--my_coef", "0.5", "--my_mode", "x", "--preset", "grpo").stdout)
    assert (shown["my_coef"], shown["my_mode"], shown["beta"]) == (0.5, "x", PRESETS["grpo"]["beta"])
    assert "Did you mean --my_coef?" in run(script, "--my_coeff", "1").stderr


def test_arguments_behind_a_name_are_not_lost():
    assert with_arguments("rows.py:rows?source=a%2Bb.jsonl&hint=&say=Go+on&n=1&on=true") == (
        "rows.py:rows",
        {"source": "a+b.jsonl", "hint": "", "say": "Go on", "n": 1, "on": True},
    )
    wrong = {"frozenlake?slippery": "'slippery' is no key=value; .* slippery=true", "x?n=1&n=2": "n is given twice"}
    for spec, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            with_arguments(spec)


def test_a_flag_is_not_found_in_the_text_of_domains():
    given = ["--domains", '{"name": "a", "dataset_id": "seeds:10"}', '{"name": "b", "dataset_id": "seeds:9"}']
    assert load_config(TrainConfig, [*given, "--seed", "5", "--generator", "hf"]).seed == 5
