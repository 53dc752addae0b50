"""To take a feature out of a copy is to delete its import and each line with its name and a dot: the rest trains."""

import re
import sys
from types import ModuleType

import pytest
from live import ROOT

from config import TrainConfig, load_config
from runfiles.reading import read_metrics

TOY = ROOT / "benchmarks" / "toy.py"
MOST = {"teachers": 8, "colocate": 5, "gpu": 4, "agreement": 3, "router_replay": 7}  # lines: the import, one of text


def trained(name: str, without: str | None, folder) -> list[dict]:
    """Two steps of a copy of the script; the metrics that have no time in them."""
    lines = (ROOT / "train_grpo.py").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not (without and re.search(rf"\b{without}\.|import {without}$", line))]
    assert without is None or 2 <= len(lines) - len(kept) <= MOST[without]
    copy = sys.modules[name] = ModuleType(name)
    exec(compile("\n".join(kept), f"{name}.py", "exec"), vars(copy))
    flags = (
        f"--model_id {ROOT}/models/tiny --generator hf --compute_dtype float32 --dataset_id {TOY}:rows --max_steps 2 "
    )
    flags += f"--reward_funcs {TOY}:tens --max_prompt_length 64 --max_completion_length 8 --prompts_per_step 2 "
    flags += "--num_generations 4 --log_steps 1 --eval_steps none --print_samples_every 0"
    copy.train(load_config(TrainConfig, f"{flags} --output_dir {folder} --run_name {name}".split()))
    timed = re.compile("time/|tokens_per|/s$|memory/|perf/")
    return [{k: v for k, v in line.items() if not timed.search(k)} for line in read_metrics(folder / name)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained("copy_whole", None, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("feature", MOST)
def test_a_feature_is_its_lines(feature, whole, tmp_path):
    found = trained(f"copy_without_{feature}", feature, tmp_path)
    assert [line["step"] for line in found] == [1, 2]
    for before, after in zip(whole, found, strict=True):
        assert {k: after.get(k) for k in before} == pytest.approx(before, rel=1e-6, nan_ok=True)
