"""A run in one process needs torch, transformers, peft, numpy, safetensors, pillow, pyyaml and what these pull."""

import json
import subprocess
import sys
from pathlib import Path

from server_fixture import make_tiny

ROOT = Path(__file__).parent.parent

WITHOUT = "vllm pydantic jsonschema datasets mcp requests urllib3 pyarrow pandas matplotlib math_verify fastapi uvicorn"

# Runs the script in an interpreter that finds none of these.
START = """import runpy, sys
from importlib.machinery import PathFinder

def without(name, *rest, find_spec=PathFinder.find_spec):
    return None if name.partition(".")[0] in {without} else find_spec(name, *rest)

PathFinder.find_spec = staticmethod(without)
sys.path.insert(0, {root!r})
runpy.run_path({script!r}, run_name="__main__")
"""


def test_two_steps_without_what_only_some_runs_need(tmp_path):
    start, rows, reward = tmp_path / "start.py", tmp_path / "rows.json", tmp_path / "even.py"
    start.write_text(START.format(without=WITHOUT.split(), root=str(ROOT), script=f"{ROOT}/train_grpo.py"), "utf-8")
    rows.write_text(json.dumps([{"prompt": f"Count to {n}:"} for n in range(8)]), "utf-8")
    reward.write_text("def even(completion_ids, **_):\n    return [float(ids[0] % 2 == 0) for ids in completion_ids]\n")
    words = f"--model_id {make_tiny()} --dataset_id {rows} --reward_funcs {reward}:even --generator hf --max_steps 2 "
    words += "--prompts_per_step 2 --num_generations 2 --max_completion_length 4 --save_steps 2 --no-log_completions "
    words += f"--output_dir {tmp_path} --run_name bare"
    run = subprocess.run([sys.executable, start, *words.split()], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in (tmp_path / "bare" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2]
    assert (tmp_path / "bare" / "checkpoints" / "step_2" / "config.json").exists()
