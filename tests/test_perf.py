"""perf/tflops: the operations of an update, counted another way."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runlog.gpu import sizes, update_flops

pytestmark = pytest.mark.quick

SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
SHAPE |= dict(vocab_size=100, head_dim=16)


def made(family: str, **more):
    config = AutoConfig.for_model(family, **SHAPE, **more)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("tied", [True, False])
def test_against_a_count_of_every_product(tied):
    """torch counts the products of a forward and a backward pass over one row, with later tokens in its attention."""
    from torch.utils.flop_counter import FlopCounterMode

    model, n = made("qwen3", tie_word_embeddings=tied), 24
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(n)[None], use_cache=False).logits.sum().backward()
    parameters, trained, width = sizes(model)
    assert parameters == trained and width == 3 * 64
    ours = update_flops((parameters, trained, width), [(10, [14])], True)
    ours += 12 * width * n * (n - 1) / 2  # pairs with later tokens
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_prompts_adapters_and_experts():
    size = (1000.0, 1000.0, 0)
    assert update_flops(size, [(10, [5, 7]), (4, [3])], True) == 6 * 1000 * (10 + 5 + 7 + 4 + 3)
    assert update_flops(size, [(10, [5, 7]), (4, [3])], False) == 6 * 1000 * (15 + 17 + 7)
    assert update_flops((1000.0, 10.0, 0), [(10, [5])], True) == 15 * (4 * 1000 + 2 * 10)
    assert update_flops((0.0, 0.0, 1), [(2, [2])], True) == 12 * (1 + 2 + 3 + 4)
    mixture = made("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    experts = sum(p.numel() for name, p in mixture.named_parameters() if ".experts." in name)
    others = sum(p.numel() for p in mixture.parameters()) - experts - 100 * 64  # the input embedding, looked up
    assert sizes(mixture)[0] == others + experts / 4 and experts == 3 * 8 * 3 * 64 * 32
