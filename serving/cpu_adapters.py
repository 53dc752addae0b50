"""Adapters on CPUs: vLLM's arithmetic of LoRA there, once for each adapter of a batch instead of once for each token.

vLLM 0.32 copies the matrices of A and B for every token of a batch, those of the output layer, too, which has none
here: it samples a third as fast as without adapters. Tokens without an adapter get that of the last slot, and log-probs
of a prompt, more rows than requests, end the engine. Here tokens of one adapter are one product, tokens without one are
left alone, and so is the output layer. On GPUs vLLM's kernels do this by themselves.
"""

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform


class ByAdapter(PunicaWrapperCPU):
    """Stacked weights are [slots, 1, rows, columns]; A has the rank as rows, B as columns."""

    groups: list[tuple[int, torch.Tensor | slice]] = []  # slot, and the tokens of the batch that have its adapter

    def _update_prefill_metadata(self, token_lora_tensor: torch.Tensor) -> None:
        super()._update_prefill_metadata(token_lora_tensor)
        slots = token_lora_tensor.unique().tolist()
        rows = [slice(None)] if len(slots) == 1 else [(token_lora_tensor == slot).nonzero()[:, 0] for slot in slots]
        self.groups = [(slot, tokens) for slot, tokens in zip(slots, rows, strict=True) if slot >= 0]

    def add_lora_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs):
        """y[:, slice i] += scale * (x A_i^T) B_i^T.  [tokens, out], [tokens, in]"""
        for slot, tokens in self.groups:
            given, start = x[tokens], 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                change = (given @ a[slot, 0].T) @ b[slot, 0].T
                y[tokens, start : start + size] += scale * change[:, :size]
                start += size

    def add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs):
        """No adapter of the output layer is taken (serving/adapters.py)."""

    def add_lora_embedding(self, y, x, lora_b_stacked, add_inputs=True, **kwargs):
        """Nor of the embedding."""


def use() -> None:
    """For adapters of models that are loaded from now on in this process."""
    type(current_platform).get_punica_wrapper = classmethod(lambda _: f"{__name__}.{ByAdapter.__name__}")
