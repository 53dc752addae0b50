"""What vLLM's CPU build computes wrongly is computed by its own plain torch code instead. Imported in each worker."""

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

of_kernel = RotaryEmbedding.forward_cpu


def forward_cpu(self, positions, query, key=None):
    """vLLM 0.32's kernel of rotary embeddings takes [tokens, heads * width] and reads [tokens, heads, width] as if it
    were that: DeepSeek V3 and LFM2, whose queries have three dimensions, got log-probs .2 to .6 off."""
    run = self.forward_native if query.ndim > 2 else of_kernel.__get__(self)
    return run(positions, query, key)


RotaryEmbedding.forward_cpu = forward_cpu
