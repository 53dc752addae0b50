"""Every example trains two steps with its own settings, and examples/run.py starts what its file says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_vlms
import yaml
from live import running, trainer
from server_fixture import make_tiny

from config import TrainConfig, load_config, load_function
from runlog.reading import read_metrics

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
from warm_start import WarmConfig  # noqa: E402

EXAMPLES = {p.stem: yaml.safe_load(p.read_text(encoding="utf-8")) for p in sorted((ROOT / "examples").glob("*.yaml"))}
MORE = {  # what is tried beside the file's settings
    "arithmetic": "--reward_funcs examples/arithmetic.py:right tool_use few_turns",
    "coding": "--allow_uncontained",
    "frozenlake": "--env frozenlake?slippery=true",
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
    flags = f"--config examples/{name}.yaml {SMALL} {MORE.get(name, '')} --output_dir {tmp_path} --run_name run".split()
    if "domains" not in settings:  # each of those has a length of its own
        flags += ["--max_completion_length", "96"]
    with running(trainer(tmp_path / "log", *flags, "--model_id", model)) as run:
        assert run.end() == 0, run.text
    lines = [line for line in read_metrics(tmp_path / "run") if "reward" in line]
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
    task, flags_of = (load_function(f"{ROOT}/examples/run.py:flags_of").__globals__[n] for n in ("TASK", "flags_of"))
    for name, settings in EXAMPLES.items():
        load_config(TrainConfig, ["--config", f"examples/{name}.yaml", "--generator", "hf"])
        assert settings["example"]["shown"]
        if warm := settings["example"].get("warm_start"):
            known = {key: settings[key] for key in task.split() if key in settings}
            cfg = load_config(WarmConfig, flags_of(known | warm))
            assert cfg.max_steps == warm["max_steps"] and cfg.demonstrations == warm["demonstrations"]
