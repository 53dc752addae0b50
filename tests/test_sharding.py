"""Shards, copies of shards, compiled layers and activations in CPU memory: the gradient stays that of one process, and
ranks say no more to each other than they must."""

import pytest
import sharding_worker
import torch
from collectives import Collectives
from ragged import gradients, relative_difference
from ranks import on_ranks
from transformers import LlamaConfig, LlamaForCausalLM

import train_grpo as script
import utils
from config import ConfigError, TrainConfig, check, load_config

SLOW = pytest.mark.slow


def found(*flags: str) -> dict:
    return sharding_worker.found(list(flags), *utils.init_distributed(60))


@pytest.fixture(scope="module")
def one():
    """One process, plainly: of all weights, and of adapters."""
    return {peft: on_ranks(1, found, *["--use_peft"] * peft)[0] for peft in (False, True)}


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (2, "--strategy fsdp2 --offload_activations"),
        (4, "--strategy fsdp2 --shard_size 2"),
        pytest.param(4, "--strategy fsdp --shard_size 2", marks=SLOW),
        pytest.param(2, "--strategy fsdp --offload_activations", marks=SLOW),
        pytest.param(1, "--strategy ddp --compile", marks=SLOW),
        pytest.param(2, "--strategy fsdp2 --compile --use_peft", marks=SLOW),
    ],
)
def test_the_gradient_is_that_of_one_process(one, ranks, flags):
    ours, expected = on_ranks(ranks, found, *flags.split())[0], one["--use_peft" in flags]
    assert relative_difference(ours["gradient"], expected["gradient"]) < 1e-5
    assert ours["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert ours["sent"] == expected["sent"], "a push would send other weights"
    assert bool(ours["graphs"]) == ("--compile" in flags)


@pytest.mark.parametrize(
    "flags, ranks",
    [
        ("--shard_size 2", 4),
        ("--compile --strategy fsdp", 2),
        ("--offload_activations --no-gradient_checkpointing", 2),
    ],
)
def test_what_does_not_go_together_is_refused(flags, ranks):
    with pytest.raises(ConfigError, match="--"):
        check(load_config(TrainConfig, flags.split()), ranks)


# ---- collectives ----------------------------------------------------------------------------------------------------


def llama(tied: bool) -> torch.nn.Module:
    """Six layers, biases, and rows that the ranks cannot share evenly."""
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=97, num_hidden_layers=6, num_attention_heads=4, attention_bias=True)
    return LlamaForCausalLM(LlamaConfig(vocab_size=1001, tie_word_embeddings=tied, **shape))


def counted(tied: bool, *flags: str) -> dict:
    """The gradient of an update, the weights of a push, and the collectives of both."""
    base = ["--compute_dtype", "float32", "--tokens_per_microbatch", "40", "--logprob_chunk", "4"]
    cfg = load_config(TrainConfig, [*base, "--prompts_per_step", "12", *flags])
    rank, world, device = utils.init_distributed(60)
    script.load_hf_model = lambda cfg, dtype, **_: llama(tied).to(dtype)
    policy, inner = script.load_policy(cfg, device)
    batch = sharding_worker.batch_of(rank, world, device)
    micro = max(utils.gather_objects(len(script.micro_batches(batch, cfg))))
    with Collectives() as update:
        gradient = gradients(policy, inner, batch, cfg)
    named = [(script.clean_name(name), p.detach()) for name, p in policy.named_parameters()]
    whole = {name: script.rounded(script.full(p), torch.bfloat16) for name, p in named}
    with Collectives() as push:
        buckets = list(script.weight_buckets(policy, 300_000, torch.bfloat16))
        pushed = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
    found = dict(gradient=gradient, update=update.seen, micro=micro, whole=whole)
    return found | dict(push=push.seen, pushed=pushed, buckets=len(buckets))


@pytest.mark.parametrize(
    "ranks, tied, more",
    [(2, False, ""), *(pytest.param(*case, marks=SLOW) for case in [(4, False, "--shard_size 2"), (2, True, "")])],
)
def test_ranks_say_no_more_than_they_must(ranks, tied, more):
    """Each micro-batch gathers embeddings and output layer once, whatever the number of chunks, and layers twice; all
    gradients are reduced once, and added up between copies in the last micro-batch alone. A push gathers each of 81
    parameters once, matrices and vectors, of rows that the ranks cannot share evenly."""
    (alone,) = on_ranks(1, counted, tied, "--strategy", "ddp")
    found = on_ranks(ranks, counted, tied, "--strategy", "fsdp2", *more.split())[0]
    assert relative_difference(found["gradient"], alone["gradient"]) < 1e-5
    seen = [(operation, size) for operation, size, _ in found["update"] if "_base_" in operation]
    micro, embedding, layer = found["micro"], 501 * 64 * 4, 71040  # bytes of a rank's half
    gathers = [size for operation, size in seen if operation.startswith("_allgather")]
    reduces = [size for operation, size in seen if operation.startswith("_reduce")]
    ends = [size for size in gathers if size not in (layer, 128)]
    if tied:  # in one unit with the last norm
        assert ends == [embedding + 128] * micro and len(gathers) == 13 * micro and len(reduces) == 7 * micro
    else:
        assert sorted(ends) == [embedding] * micro + [embedding + 128] * micro  # the output layer: with the last norm
        assert len(gathers) == 14 * micro and len(reduces) == 8 * micro
    between = [size for operation, size, _ in found["update"] if operation == "allreduce_" and size > 16]
    assert len(between) == 8 * ("shard_size" in more)
    pushed, whole = found["pushed"], found["whole"]
    assert pushed.keys() == whole.keys() and len(pushed) >= 80 and 1 < found["buckets"] < 4
    assert all(pushed[name].dtype == t.dtype and torch.equal(pushed[name], t) for name, t in whole.items())
    gathered = [size for operation, size, _ in found["push"] if operation.startswith("all_gather")]
    assert len(gathered) == len(whole)
