"""A step at the size it is used, without a GPU: benchmarks/simulate.py against memory.py, and what a micro-batch takes.

Four layers of each, so that it does not take minutes; at full depth: benchmarks/results/simulate.md.
"""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import simulate  # noqa: E402

from config import load_config  # noqa: E402

WORDS = "--layers 4 --prompt 500 --completion 4000 --max_prompt_length 500 --max_completion_length 4000"


@cache
def run(words: str) -> tuple[simulate.Result, dict]:
    cfg = load_config(simulate.SimulateConfig, f"{words} {WORDS}".split())
    if dist.is_initialized():  # by a test before, in this process
        dist.destroy_process_group()
    found = simulate.simulate(cfg)
    return found, simulate.errors(found, simulate.predicted(cfg))


CASES = ["--model qwen2.5-7b --gpus 8", "--model qwen2.5-7b --gpus 16 --hsdp --rank 15"]
CASES += ["--model qwen3-30b-a3b --gpus 8"]
SHARDS = "--model qwen2.5-7b --gpus 8 --dtype bfloat16 --use_peft --load_in 4bit"
LIMITS = {CASES[2]: 0.1, SHARDS: 0.1}  # of few layers the peak is one of the output layer, of all it is within .05


@pytest.mark.parametrize("words", CASES)
def test_bytes_are_those_that_memory_py_says(words):
    _, sizes = run(words)
    wrong = {what: f"{said / real - 1:+.1%}" for what, (real, said) in sizes.items()}
    bad = [what for what, (real, said) in sizes.items() if abs(said / real - 1) > LIMITS.get(words, 0.05)]
    assert not bad, wrong


LORA = "--model qwen2.5-7b --gpus 1 --strategy ddp --dtype bfloat16 --use_peft"


@pytest.mark.parametrize("words", [LORA, LORA + " --load_in 4bit", SHARDS])
def test_adapters(words):
    """Autocast rounds what reaches them, and no float32 copy of it is kept (PEFT made one of each layer's input: 2.3
    GiB of this update). A base in 4 bits is bitsandbytes' own, and its adapters travel alone."""
    found, sizes = run(words)
    kept, update, push = (said / real - 1 for real, said in sizes.values())
    assert abs(kept) <= 0.05 and abs(update) <= LIMITS.get(words, 0.05), sizes
    assert abs(push) <= (0.05 if "4bit" in words else 0.12), sizes  # folded, of few layers
    flops = [run(each)[0].phases["middle pass"].flops for each in (LORA, words)]
    assert flops[1] == pytest.approx(flops[0], rel=0.01)
    if words == LORA + " --load_in 4bit":
        layers = 4 * 233e6  # parameters of four layers of the 7B
        assert run(LORA)[1]["kept"][0] - sizes["kept"][0] == pytest.approx(layers * (2 - 0.516), rel=0.01)


def test_pictures_come_with_the_prompts(monkeypatch):
    """Two layers of the tower, which waits for lengths in each of them, as transformers wrote it."""
    monkeypatch.setitem(simulate.TOWER, "depth", 2)
    found, sizes = run("--model qwen2.5-vl-3b --gpus 8")
    assert all(abs(said / real - 1) <= 0.05 for real, said in sizes.values()), sizes
    middle, text = found.phases["middle pass"], run(CASES[0])[0].phases["middle pass"]
    assert middle.waits.total() > text.waits.total()  # the tower runs


@pytest.mark.parametrize("words", CASES)
def test_a_micro_batch_gathers_and_reduces_no_more_than_it_must(words):
    """Each layer once forward and once backward; embeddings, output layer and the last norm forward alone; all are
    reduced once. Between copies nothing travels before the last micro-batch."""
    phases = run(words)[0].phases
    for name in simulate.PASSES:
        seen = {kind: n for (kind, where), n in phases[name].collectives.items() if "gloo" not in where}
        assert seen.pop("allgather") == 4 + 4 + 3 - (name == "first pass"), (name, seen)
        assert seen.pop("reduce_scatter") == 4 + 3
        assert seen == ({"allreduce": 4 + 3} if "--hsdp" in words and name == "last pass" else {})


@pytest.mark.parametrize("words", CASES)
def test_the_host_waits_only_where_it_is_known_to(words):
    """For lengths and the table of segments on the CPU; in no layer."""
    waits = run(words)[0].phases["middle pass"].waits
    assert waits.total() <= 4 and {place.partition(":")[0] for place in waits} <= {
        "batch.py", "train_grpo.py", "inputs/packing.py", "inputs/attention.py"
    }  # fmt: skip


def test_an_update_begins_and_ends_with_few_reads():
    phases = run(CASES[0])[0].phases
    assert phases["optimizer"].waits.total() <= 3  # the norm, the statistics, whether all is finite
    assert phases["optimizer"].collectives["allreduce", "within one"] == 1
