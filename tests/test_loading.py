"""No rank but the first holds a whole model while it is loaded; small changes reach the server; dropout is off; where
adapters are."""

import ctypes
import zlib
from pathlib import Path

import pytest
import torch
from families import model_of
from peft.utils import transformers_weight_conversion as conversion
from ranks import on_ranks
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import train_grpo as script
from config import TrainConfig
from modeling.loading import add_lora
from modeling.model import dithered_weight, is_lora, lora_layers

CPU = torch.device("cpu")

LAYERS, HIDDEN, INNER = 10, 512, 1536
PARAMETERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER + 2 * HIDDEN) + 4096 * HIDDEN + HIDDEN
WHOLE = PARAMETERS * 4 / 2**20  # MiB in float32


def made(folder: Path, layers: int) -> int:
    """A model with tied embeddings in bfloat16, in a folder; its number of parameters."""
    torch.manual_seed(0)
    shape = dict(hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=8)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **shape)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model.num_parameters()


def config(folder: str, strategy: str, **settings) -> TrainConfig:
    return TrainConfig(model_id=folder, strategy=strategy, **dict(compute_dtype="float32") | settings)


def values(folder: str) -> dict[str, torch.Tensor]:
    model = script.load_hf_model(config(folder, "ddp"), torch.float32)
    return {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def peak_memory() -> float:
    """Highest resident memory in MiB since the last call to `reset_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def loaded(folder: str, strategy: str) -> dict:
    """MiB by which loading raises the peak, and what differs from what was saved."""
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD, bytes: what is freed goes back at once, so a peak is one
    expected = values(folder)
    script.load_policy(config(folder, "ddp"), CPU)  # imports, and what torch keeps
    reset_peak()
    before = peak_memory()
    policy = script.load_policy(config(folder, strategy), CPU)
    inner = script.unwrapped(policy)
    grown = peak_memory() - before
    model = inner.hf_model
    # FSDP1 has one view of a tied weight, and its other place has none until it runs.
    tied = strategy == "fsdp" or model.get_output_embeddings().weight is model.get_input_embeddings().weight
    got = {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in model.named_buffers()}
    for bucket in script.weight_buckets(policy, 2**20, torch.float32):
        got |= {name: tensor.clone() for name, tensor in bucket}
    return dict(grown=grown, tied=tied, wrong=[n for n, t in expected.items() if not torch.equal(got[n], t)])


def folded(folder: str, strategy: str) -> dict:
    """Weights in bfloat16 with adapters that add the same 6e-6 everywhere, a tenth of what rounding to the nearest
    keeps: their checksum, and the mean of what was added to the layers, by what should be."""
    expected = values(folder)
    policy = script.load_policy(config(folder, strategy, use_peft=True), CPU)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            getattr(parameter.data, "_local_tensor", parameter.data).fill_(3e-4)
    got = {}
    for bucket in script.weight_buckets(policy, 2**20, torch.bfloat16):
        got |= {name: tensor.to(torch.bfloat16) for name, tensor in bucket}
    sums = {name: zlib.crc32(tensor.contiguous().view(torch.uint8).numpy()) for name, tensor in sorted(got.items())}
    added = [(got[name].float() - expected[name]).mean() for name in got if "proj" in name]
    return dict(sums=sums, added=float(sum(added) / len(added) / (64 * 3e-4**2)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_only_the_first_rank_ever_holds_the_model_whole(strategy, tmp_path):
    assert made(tmp_path, LAYERS) == PARAMETERS
    first, second = on_ranks(2, loaded, str(tmp_path), strategy)
    assert first["tied"] and second["tied"] and first["wrong"] == second["wrong"] == []
    assert first["grown"] < 1.7 * WHOLE  # with the pages of the file that it reads, which are no copy
    assert second["grown"] < (1.2 if strategy == "ddp" else 0.8) * WHOLE  # half of it, a layer, a tensor under way


def test_a_change_smaller_than_the_servers_precision_reaches_it(tmp_path):
    """In the mean of the weights, as LoRA is folded in; and in the same bytes under every sharding."""
    made(tmp_path, 2)
    (whole,) = on_ranks(1, folded, str(tmp_path), "ddp")
    assert whole["added"] == pytest.approx(1, abs=0.05)
    for strategy in ("fsdp", "fsdp2"):
        assert on_ranks(2, folded, str(tmp_path), strategy) == [whole] * 2


@pytest.mark.parametrize("dtype, step", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_weights_between_two_numbers(dtype, step):
    """Up as often as they are near to it; what is such a number stays; a part of the rows is treated as the whole."""
    torch.manual_seed(0)
    base = torch.randn(400, 300).to(dtype).float()
    assert torch.equal(dithered_weight(base, base, dtype).float(), base)
    for share in (0.01, 0.3, 0.5, 0.9):
        weight = base + share * step * 2 ** base.abs().log2().floor() * 2
        got = dithered_weight(weight, base, dtype)
        moved = ((got.float() - base) / (weight - base)).mean()
        assert moved == pytest.approx(1, rel=0.03 if share > 0.1 else 0.2)
        parts = [dithered_weight(w, b, dtype) for w, b in zip(weight.split(130), base.split(130), strict=True)]
        assert torch.equal(torch.cat(parts), got)
    assert torch.equal(dithered_weight(weight, base, torch.float32), weight)
    weight[0, :3] = torch.tensor([2**31 - 1, 0x7F800000, -1], dtype=torch.int32).view(torch.float32)  # a GPU's nan; inf
    finite = dithered_weight(weight, base, dtype).isfinite()
    assert not finite[0, :3].any() and finite[1:].all(), "a push has to find them"


TINY = dict(vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
DROPPING = {  # families that call the function `dropout`, by rates in their config; opt leaves out layers, too
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.3, layerdrop=0.5),
    "gpt_bigcode": dict(n_embd=32, attn_pdrop=0.3),
    "seed_oss": dict(intermediate_size=64, head_dim=16, num_key_value_heads=2, residual_dropout=0.3),
}


@pytest.mark.parametrize("family", DROPPING)
def test_dropout_is_off_in_training(family, tmp_path):
    """Two passes in train mode agree; as the model was saved, they would not."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY | DROPPING[family])).save_pretrained(tmp_path)
    ids = torch.arange(40)[None]
    torch.manual_seed(0)
    given = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert not torch.equal(given(ids).logits, given(ids).logits)
    loaded = script.load_hf_model(TrainConfig(model_id=str(tmp_path)), torch.float32).train()
    assert torch.equal(loaded(ids).logits, loaded(ids).logits)


def test_a_mixture_has_adapters_on_its_linear_layers():
    model, cfg, of_peft = model_of("qwen2_moe"), TrainConfig(), conversion.convert_peft_config_for_transformers
    expected = lora_layers(model, cfg)
    add_lora(model, cfg)
    assert "model.layers.0.mlp.shared_expert.gate_proj" in expected
    assert sorted(name for name, module in model.named_modules() if is_lora(module)) == expected
    # Whatever else this process loads with PEFT is converted as PEFT thinks right.
    assert conversion.convert_peft_config_for_transformers is of_peft
