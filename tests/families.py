"""Tiny random causal language models, one for each family (`model_type`) that tests try.

    from families import FAMILIES, config_of, model_of
    model = model_of("qwen3_5_text")     # 2 - 4 layers, 64 wide, 1,000 words, float32, some hundredths of a second
    saved("qwen3_moe", folder)           # as a from_pretrained folder, with the tokenizer of models/tiny

A family needs a line only where the sizes in TINY, of which each config takes those it knows, are not enough. The name
is that of the text model; where a family has images, tiny_vlms.py makes it.
"""

from pathlib import Path

import torch
from server_fixture import make_tiny
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

TINY = dict(
    vocab_size=1000, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=512, n_positions=512,
    initializer_range=0.1,  # enough that a token of a prompt shows in log-probs
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, n_embd=64, n_layer=2, n_head=4, n_inner=96,
    sliding_window=8,  # shorter than the prompts of a test, so that it is seen to count
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
    moe_shared_expert_intermediate_size=32, shared_intermediate_size=32,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,  # latent attention
    mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=128, mamba_n_groups=1, mamba_chunk_size=8,
    mamba_dt_rank=8, mamba_expand=2, time_step_rank=8, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8,
    state_size=8, n_groups=1, chunk_size=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip

LATENT = dict(num_key_value_heads=4)
LINEAR = ["linear_attention", "full_attention"]
WINDOW = ["sliding_attention", "full_attention"]
MAMBA = ["mamba", "attention"]

# model_type: what it needs besides TINY. Of each kind of attention, output layer and layer a few.
DENSE = {
    "cohere": {}, "falcon": {}, "gemma": {}, "glm4": {}, "gpt2": {}, "granite": dict(logits_scaling=8.0), "llama": {},
    "nemotron": {}, "olmo2": {}, "opt": dict(ffn_dim=96, word_embed_proj_dim=64), "phi3": {}, "qwen2": {}, "qwen3": {},
    "smollm3": {},
}  # fmt: skip
WINDOWS = {
    "cohere2": dict(layer_types=WINDOW), "exaone4": dict(layer_types=WINDOW), "gemma2": {},
    "gemma3_text": dict(layer_types=WINDOW),
    "gemma4_text": dict(
        layer_types=WINDOW, hidden_size_per_layer_input=16, global_head_dim=32, num_experts=None,
        num_kv_shared_layers=0, num_global_key_value_heads=2,
    ),
    "gpt_oss": dict(layer_types=WINDOW),
    "mistral": {}, "olmo3": dict(layer_types=WINDOW),
}  # fmt: skip
EXPERTS = {"glm4_moe": {}, "granitemoe": {}, "mixtral": {}, "olmoe": {}, "qwen2_moe": {}, "qwen3_moe": {}}
LATENTS = {  # latent attention
    "deepseek_v2": LATENT, "deepseek_v3": LATENT,
    "kimi_linear": LATENT | dict(layer_types=LINEAR, linear_head_dim=16, linear_num_heads=4),
    "minicpm3": LATENT | dict(dim_model_base=32),
}  # fmt: skip
RECURRENT = {
    "falcon_h1": {}, "granitemoehybrid": dict(layer_types=MAMBA),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1), "lfm2": dict(layer_types=["conv", "full_attention"]),
    "mamba": {},
    "nemotron_h": dict(layers_block_type=["mamba", "attention", "moe", "mlp"], num_hidden_layers=4),
    "qwen3_5_moe_text": dict(layer_types=LINEAR), "qwen3_5_text": dict(layer_types=LINEAR),
    "qwen3_next": dict(layer_types=LINEAR),
    "recurrent_gemma": dict(
        num_hidden_layers=3, lru_width=64, attention_window_size=8, block_types=["recurrent", "recurrent", "attention"]
    ),
}  # fmt: skip
FAMILIES = DENSE | WINDOWS | EXPERTS | LATENTS | RECURRENT


def config_of(family: str, **more) -> PreTrainedConfig:
    """more: further values, such as the vocab_size of a tokenizer."""
    kind = CONFIG_MAPPING[family]
    known = set(getattr(kind, "__dataclass_fields__", {})) | set(kind.attribute_map)
    values = {name: value for name, value in TINY.items() if name in known} | FAMILIES[family] | more
    if "vocab_size_per_layer_input" in known:
        values["vocab_size_per_layer_input"] = values["vocab_size"]
    return kind(**values)


def model_of(family: str, dtype: torch.dtype = torch.float32, **more) -> PreTrainedModel:
    """more: as in config_of."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family, **more), dtype=dtype).eval()


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32, **more) -> Path:
    """The same model for a tokenizer with a chat template, both in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    ids = dict(pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.eos_token_id)
    ids |= dict(eos_token_id=tokenizer.eos_token_id)
    model = model_of(family, dtype, vocab_size=len(tokenizer), **ids | more)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
