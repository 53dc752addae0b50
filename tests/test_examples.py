"""Every example trains a step with both scripts, and examples/run.py starts what its file says."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny_vlms
import yaml
from live import running, trainer
from server_fixture import make_tiny

from cli import ConfigError
from config import TrainConfig, load_config
from runlog.reading import held_out, read_metrics

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "scripts"), str(ROOT / "examples")]
import geometry  # noqa: E402
from warm_start import WarmConfig  # noqa: E402

EXAMPLES = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*.yaml"))
}
MORE = {  # what is tried beside the file's settings
    "arithmetic": "--reward_funcs examples/arithmetic.py:right tool_use few_turns",
    "coding": "--allow_uncontained",
    "frozenlake": "--env frozenlake?slippery=true",
    "programs": "--allow_uncontained",
    "sokoban": "--env sokoban",
    "three_domains": "--allow_uncontained",
}
SMALL = "--generator hf --compute_dtype float32 --prompts_per_step 4 --num_generations 4 --max_steps 1 "
SMALL += "--max_prompt_length 512 --max_completion_length 96 --max_turn_length 16 --max_turns 3 --no-use_peft "
SMALL += "--eval_steps none --print_samples_every 0"
SCRIPTS = {"train_grpo.py": "", "train_ppo.py": "--num_generations 1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """(script, example) -> future of its run's folder, status and text, of those that were asked for (-k). Two at a
    time: one leaves a core idle."""
    folder = tmp_path_factory.mktemp("examples")
    models = {False: str(make_tiny()), True: str(tiny_vlms.make("idefics3", folder / "vlm"))}

    def train(script: str, example: str):
        name, sees = f"{script} {example}", EXAMPLES[example]["model_id"] == "models/tiny-vlm"
        small = SMALL
        if "domains" in EXAMPLES[example]:  # each has a length of its own: one for all is refused
            small = small.replace("--max_completion_length 96", "")
        flags = f"--config examples/{example}.yaml {small} {SCRIPTS[script]} {MORE.get(example, '')}"
        flags = [*flags.split(), "--model_id", models[sees], "--output_dir", str(folder), "--run_name", name]
        with running(trainer(folder / f"{name}.log", *flags, script=script)) as run:
            return folder / name, run.end(), run.text

    with ThreadPoolExecutor(2) as pool:
        asked = [item.callspec.params for item in request.session.items if item.originalname == "test_trains"]
        yield {(p["script"], p["example"]): pool.submit(train, p["script"], p["example"]) for p in asked}


@pytest.mark.in_turn
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_trains(runs, script, example):
    folder, status, text = runs[script, example].result()
    assert status == 0, text
    (line,), settings = read_metrics(folder), EXAMPLES[example]
    domains = [own for own in settings.get("domains", ()) if line.get(f"{own['name']}/prompts")]  # one step has few
    several = any({"tools", "env", "mcp_config"} & set(part) for part in [settings, *domains])
    assert "reward" in line and ("turns/mean" in line) == several


# ---- examples/run.py ------------------------------------------------------------------------------------------------

# In place of every script that run.py starts: writes down how it was called, and leaves the files that are looked for.
STAND_IN = """
import json, os, pathlib, sys, time
path, given = os.path.relpath(sys.argv[0]), sys.argv[1:]
value = lambda name: given[given.index(name) + 1]
print(json.dumps([path, *given]), file=open("calls", "a"))
if "vllm_server" in path:
    time.sleep(60)
elif "--eval_only" in given:
    print("loading\\nevaluation after step 0: reward 0.5, rows 4")
elif "--run_name" in given:
    folder = pathlib.Path("runs", value("--run_name"))
    (folder / "checkpoints" / f"step_{value('--max_steps') if 'warm' in path else 60}").mkdir(parents=True)
    metrics = {"eval/reward": 0.1, "eval/mean@4": 0.2, "eval/rewards/grounding/iou/mean": 0.3}
    metrics["eval/rewards/environment/success/mean"] = 0.4
    lines = [{"step": 0} | metrics | {"eval/rewards/environment/valid/mean": 0.9}, {"step": 9} | metrics]
    (folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, lines)))
    sys.exit("--max_steps=13" in given)
"""
STARTED = "train_grpo.py vllm_server.py benchmarks/unmasked.py scripts/warm_start.py scripts/make_models.py "
STARTED += "scripts/make_tiny_vlm.py"


@pytest.fixture
def runner(tmp_path):
    """(words) -> outcome of examples/run.py, and what it started. The servers' calls are left out."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    for folder in ("examples", "inputs", "runlog", "safety", "scripts", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for script in STARTED.split():
        (tmp_path / script).write_text(STAND_IN, encoding="utf-8")

    def run(*words: str, python: tuple = (sys.executable,), **env: str):
        (tmp_path / "calls").write_text("", encoding="utf-8")
        command = [*python, "examples/run.py", *words]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"SEEDS": "0"} | env,
            capture_output=True,
            text=True,
            timeout=120,
            encoding="utf-8",
        )
        calls = map(json.loads, (tmp_path / "calls").read_text(encoding="utf-8").splitlines())
        return done, [call for call in calls if call[0] != "vllm_server.py"]

    run.folder = tmp_path
    return run


def settings(call: list[str], folder: Path, monkeypatch) -> TrainConfig:
    """What the script would make of its command line."""
    monkeypatch.chdir(folder)
    return load_config(WarmConfig if "warm" in call[0] else TrainConfig, call[1:])


def measured(image) -> tuple[int, int]:
    """Width and height, in squares, of the figure on squared paper: whatever is darker than the lines of the paper."""
    rows, columns = (np.asarray(image.convert("RGB")).min(2) < 150).nonzero()
    return tuple(round((at.max() - at.min()) / geometry.SIDE) for at in (columns, rows))


def test_geometry_can_be_measured():
    formulas = {
        "area of the rectangle": lambda a, b: a * b,
        "perimeter of the rectangle": lambda a, b: 2 * (a + b),
        "twice the area of the right": lambda a, b: a * b,
        "square of the longest side": lambda a, b: a**2 + b**2,
        "diameter of the circle": lambda a, b: a,
        "area of the circle is pi times": lambda a, b: a * b / 4,
    }
    answered = set()
    for row in geometry.rows("test", 42):
        (asked,) = [words for words in formulas if words in row["prompt"]]
        assert float(row["answer"]) == formulas[asked](*measured(row["image"])), row["prompt"]
        answered.add(asked)
    assert answered == set(formulas)


def test_another_script(runner):
    (runner.folder / "train_async.py").write_text(STAND_IN, encoding="utf-8")
    done, calls = runner("counting", "--max_steps", "3", SCRIPT="train_async.py")
    assert done.returncode == 0 and "train_async.py" in [call[0] for call in calls], done.stderr


@pytest.mark.in_turn
@pytest.mark.parametrize("example", EXAMPLES)
def test_what_is_started(runner, monkeypatch, example):
    done, calls = runner(example, "--max_steps", "12")
    assert done.returncode == 0, done.stderr
    around = EXAMPLES[example]["example"]
    before, then, after = (list(around.get(part, ())) for part in ("before", "then", "after"))
    warm = ["scripts/warm_start.py"] if "warm_start" in around else []
    assert [call[0] for call in calls[1:]] == warm + ["train_grpo.py"] * len(before) + ["train_grpo.py"] + [
        around["then"][name].get("script", "train_grpo.py") for name in then
    ] + ["train_grpo.py"] * len(after)
    maker, model = calls[0][0], calls[0][-1]
    assert maker in ("scripts/make_models.py", "scripts/make_tiny_vlm.py") and model == EXAMPLES[example]["model_id"]
    for call in calls[1:]:  # every command line is one that the script takes
        cfg = settings(call, runner.folder, monkeypatch)
        if "--eval_only" in call:
            continue
        assert cfg.max_steps == (around["warm_start"]["max_steps"] if call[0] in warm else 12)
        assert cfg.model_id == model if call[0] in warm else cfg.seed == 0
        if warm and call[0] not in warm:
            assert cfg.model_id == f"runs/warm-{example}/checkpoints/step_{around['warm_start']['max_steps']}"
    assert "held-out rows, before -> after\n  runs/" in done.stdout


@pytest.mark.parametrize(("example", "flags"), [("shop", []), ("counting", ["--generator", "hf"])])
def test_without_a_server(runner, monkeypatch, example, flags):
    done, calls = runner(example, "--max_steps", "12", *flags)
    assert done.returncode == 0, done.stderr
    assert not list((runner.folder / "runs").glob("*-server.log")) and "held-out rows, before" in done.stdout
    cfg = settings(calls[-1], runner.folder, monkeypatch)
    assert (cfg.generator, cfg.max_steps, cfg.seed) == ("hf", 12, 0) and cfg.run_name.endswith("-seed0")


@pytest.mark.parametrize("flag", ["--output_dir", "--run_name"])
def test_the_place_of_its_runs_is_its_own(runner, flag):
    """It reads them there at the end."""
    done, calls = runner("counting", flag, "elsewhere")
    assert done.returncode == 2 and not calls and f"{flag}: its runs lie in runs/" in done.stderr


def test_evaluations_and_table(runner):
    done, calls = runner("grounding")
    (trained,) = (path.name for path in (runner.folder / "runs").glob("grounding-*-seed0"))
    assert "models/tiny-vlm, test_reasoning: reward 0.5, rows 4" in done.stdout
    assert f"runs/{trained}/checkpoints/step_60, test_reasoning: reward 0.5" in done.stdout
    assert f"runs/{trained}: eval/rewards/grounding/iou/mean 0.300 -> 0.300" in done.stdout


def test_a_metric_that_one_evaluation_lacks(runner):
    done, _ = runner("frozenlake")
    assert "eval/rewards/environment/valid/mean 0.900 -> -" in done.stdout
    assert "rewards/environment/valid/mean: 0.900 -> -" in done.stdout  # scripts/serve_and_train.sh
    (run_dir,) = (runner.folder / "runs").glob("frozenlake-*-slippery")
    assert held_out(run_dir)["eval/rewards/environment/valid/mean"] == ["0.900", "-"]


def test_the_warm_start_is_made_once(runner):
    count = [sum("warm_start" in call[0] for call in runner("arithmetic")[1]) for _ in range(2)]
    assert count == [1, 0]


def test_a_failure_ends_it(runner):
    done, calls = runner("search", "--max_steps=13")
    assert done.returncode == 1 and "the trainer ended with status 1" in done.stderr
    assert [call[0] for call in calls].count("benchmarks/unmasked.py") == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_turns:", "max_turn:", "unknown name 'max_turn'; known are"),
        ("  shown:", "  show:", "arithmetic.yaml, example: unknown name 'show'; known are"),
        ("demonstrations:", "demonstration:", "warm_start: unknown name 'demonstration'"),
        ("max_steps: 30", "lr_schedule: cosine", "warm_start: max_steps must be given"),
        ("eval_generations: 2\n  shown", "eval_generation: 2\n  shown", "before, without warm start and tool: unknown"),
        ('shown: ["eval/mean@*"]', "seeds: some", "--seeds=some: expected a whole number"),
        ('shown: ["eval/mean@*"]', "after: some", "after: expected `name: value` lines, found 'some'"),
        ("example:", "exampel:", "unknown name 'exampel'"),
    ],
)
def test_a_wrong_name_is_an_error(runner, old, new, message):
    path = runner.folder / "examples/arithmetic.yaml"
    assert old in path.read_text(encoding="utf-8")
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    done, calls = runner("arithmetic")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not calls


def test_unknown_examples_and_flags(runner):
    done, _ = runner("arithmetics")
    assert done.returncode == 2 and "Did you mean 'arithmetic'?" in done.stderr
    done, calls = runner("arithmetic", "--max_step", "3")
    assert done.returncode == 2 and "Did you mean --max_steps?" in done.stderr and not calls
    done, _ = runner()
    assert done.returncode == 0 and all(name in done.stdout for name in EXAMPLES)


def test_the_section_is_a_mapping(tmp_path):
    (tmp_path / "wrong.yaml").write_text("example: 3", encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown name 'example'"):
        load_config(argv=["--config", str(tmp_path / "wrong.yaml")])


def test_a_bare_machine_is_installed_first(runner):
    (runner.folder / "scripts/install.sh").write_text(
        "mkdir -p .venv/bin; printf '#!/bin/sh\\necho in .venv: \"$@\"' >.venv/bin/python; chmod +x .venv/bin/python",
        encoding="utf-8",
    )
    done, _ = runner("sums", "--max_steps", "3", python=(sys.executable, "-S", "-I"))  # without site-packages
    assert done.stdout == "in .venv: examples/run.py sums --max_steps 3\n", done.stderr
