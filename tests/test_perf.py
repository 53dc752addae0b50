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
