"""No rank but the first holds a whole model while it is loaded; all ranks write checkpoints while training goes on."""

import json

import pytest
import torch
from live import running, trainer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import train_grpo as script
from config import TrainConfig
from inputs.lora import dithered

LAYERS, HIDDEN, INNER = 10, 512, 1536
PARAMETERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER + 2 * HIDDEN) + 4096 * HIDDEN + HIDDEN
WHOLE = PARAMETERS * 4 / 2**20  # MiB in float32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Tied embeddings, bfloat16."""
    torch.manual_seed(0)
    shape = dict(hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=8)
    made = LlamaForCausalLM(LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **shape)).to(torch.bfloat16)
    assert made.num_parameters() == PARAMETERS
    made.save_pretrained(folder := tmp_path_factory.mktemp("model"))
    return folder


@pytest.fixture(scope="module")
def ranks(model, tmp_path_factory):
    """What tests/loading_worker.py found, by rank; `folder` is where it saved."""
    out = tmp_path_factory.mktemp("loading") / "out.json"
    with running(
        trainer(out.with_suffix(".log"), str(model), str(out), ranks=2, script="tests/loading_worker.py")
    ) as w:
        assert w.end() == 0, w.text
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.in_turn
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_only_the_first_rank_ever_holds_the_model_whole(ranks, strategy):
    first, second = (rank[strategy] for rank in ranks)
    assert first["tied"] and second["tied"] and first["wrong"] == second["wrong"] == []
    assert first["grown"] < 1.7 * WHOLE  # with the pages of the file that it reads, which are no copy
    assert second["grown"] < (1.2 if strategy == "ddp" else 0.8) * WHOLE  # half of it, a layer, a tensor under way


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_adapters_alone_have_gradients(ranks, strategy, dtype):
    trained = LAYERS * 4 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))  # r (inputs + outputs) of each linear layer
    for rank in ranks:
        found = rank[f"lora {strategy} {dtype}"]
        assert (found["kept"], found["reduced"]) == (trained // 2, trained)
        assert found["adapters"] == ["torch.float32"] and f"torch.{dtype}" in found["all"]


def test_a_change_smaller_than_the_servers_precision_reaches_it(ranks):
    """In the mean of the weights, as LoRA is folded in; and in the same bytes under every sharding."""
    for rank in ranks:
        whole = rank["folded"]["ddp"]
        assert whole["added"] == pytest.approx(1, abs=0.05)
        assert rank["folded"]["fsdp"] == rank["folded"]["fsdp2"] == whole


@pytest.mark.parametrize("dtype, step", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_weights_between_two_numbers(dtype, step):
    """Up as often as they are near to it; what is such a number stays; a part of the rows is treated as the whole."""
    torch.manual_seed(0)
    base = torch.randn(400, 300).to(dtype).float()
    assert torch.equal(dithered(base, base, dtype).float(), base)
    for share in (0.01, 0.3, 0.5, 0.9):
        weight = base + share * step * 2 ** base.abs().log2().floor() * 2
        got = dithered(weight, base, dtype)
        moved = ((got.float() - base) / (weight - base)).mean()
        assert moved == pytest.approx(1, rel=0.03 if share > 0.1 else 0.2)
        parts = [dithered(w, b, dtype) for w, b in zip(weight.split(130), base.split(130), strict=True)]
        assert torch.equal(torch.cat(parts), got)
    assert torch.equal(dithered(weight, base, torch.float32), weight)
    weight[0, :3] = torch.tensor([2**31 - 1, 0x7F800000, -1], dtype=torch.int32).view(torch.float32)  # a GPU's nan; inf
    finite = dithered(weight, base, dtype).isfinite()
    assert not finite[0, :3].any() and finite[1:].all(), "a push has to find them"


def test_a_checkpoint_is_written_by_all_ranks_while_training_goes_on(ranks, model, tmp_path_factory):
    run = next(tmp_path_factory.getbasetemp().glob("loading*/run"))
    step = run / "checkpoints" / "step_1"
    for rank in ranks:
        found = rank["saved"]
        assert (
            found["seen"] == [] and found["asked"] > 3 and found["longest"] < 2 and found["a"] == 1 and found["intact"]
        )
        assert (
            found["grown"] < 1.1 * WHOLE
        )  # half of the weights twice, in float32 and as served, and what is under way
        assert found["unasked"] == [1, 2]  # complete before anybody asked
    assert not list(step.glob("written*"))
    index = json.loads((step / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert len(set(index["weight_map"].values())) == len(list(step.glob("model-*.safetensors"))) > 2
    again, original = (AutoModelForCausalLM.from_pretrained(path) for path in (step, model))
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), original.parameters(), strict=True))


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
