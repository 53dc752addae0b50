"""Logits as a model makes them of its last hidden states: scaled, capped, behind a layer of their own, as its own
forward says, whatever that is."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from inputs.backbone import backbone, text_model


class Given(tuple):
    """What a backbone returns, of which only the hidden states are known. Models read more, each of its own kind."""

    last_hidden_state = property(lambda self: self[0])

    def __getattr__(self, name: str) -> None:
        return None


def chunk_size(vocabulary: int, on_gpu: bool) -> int:
    """Tokens whose logits exist at a time, where --logprob_chunk leaves it to us. Each chunk's backward pass adds a
    gradient as large as the output layer to the sum of those before, in bfloat16: on GPUs few chunks are faster and
    closer, as far as memory goes (.6 GiB of float32 logits, several times that in a pass). On a CPU 256, 1,024 and
    2,048 of 2,048 tokens take as long (SmolLM2, one core, measured: 8.9, 8.0, 9.3 s; in bfloat16 5.0, 5.4, 6.0)."""
    return min(max(160_000_000 // vocabulary // 256 * 256, 256), 4096) if on_gpu else 256


@contextlib.contextmanager
def replaced(module: nn.Module, **methods) -> Iterator[None]:
    """For so long these of its attributes are others, for this module alone."""
    before = {name: module.__dict__.get(name) for name in methods}
    module.__dict__.update(methods)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = old


def logits_of(hf_model: nn.Module, hidden: Tensor, float32: bool = False) -> Tensor:
    """What `hf_model` answers for tokens with these last hidden states; float32: the output layer's product in it, not
    a cast behind it.  [n, H] -> [n, V]

    Its own forward runs, in which the backbone gives them. So nothing that it does to logits is written here again:
    Gemma caps them, Granite divides them, Cohere multiplies them, ModernBERT has one more layer before.
    """

    def give(*_, **__) -> Given:
        return Given([hidden[None]])

    output = hf_model.get_output_embeddings()

    def multiply(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if output.bias is None else output.bias.float()
            return nn.functional.linear(hidden.float(), output.weight.float(), bias)

    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    with (
        replaced(backbone(hf_model), forward=give),
        replaced(text_model(hf_model), forward=give),  # OPT calls this one
        replaced(output, forward=multiply) if float32 else contextlib.nullcontext(),
    ):
        return hf_model(input_ids=ids, use_cache=False).logits[0]
