"""Tiny random causal language models, one for each family (`model_type`) that transformers can build from a config.

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
    head_dim=16, n_embd=64, n_layer=2, n_head=4, n_inner=96, d_model=64, n_heads=4, n_layers=2, max_seq_len=512,
    sliding_window=8,  # shorter than the prompts of a test, so that it is seen to count
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2,
    moe_topk=2, moe_intermediate_size=32, expert_ffn_hidden_size=32, shared_expert_intermediate_size=32,
    n_shared_experts=1, num_shared_experts=1, moe_num_shared_experts=1, n_group=1, topk_group=1,
    moe_shared_expert_intermediate_size=32, shared_intermediate_size=32, first_k_dense_replace=1, num_dense_layers=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,  # latent attention
    index_n_heads=8, index_head_dim=16, index_topk=8,
    mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=128, mamba_n_groups=1, mamba_chunk_size=8,
    n_mamba_heads=4, mamba_dt_rank=8, mamba_expand=2, mamba_ngroups=1, time_step_rank=8,
    state_size=8, num_heads=8, n_groups=1, chunk_size=8, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip

LATENT = dict(num_key_value_heads=4)
LINEAR = ["linear_attention", "full_attention"]
WINDOW = ["sliding_attention", "full_attention"]
MAMBA = ["mamba", "attention"]

# model_type: what it needs besides TINY.
DENSE = {
    "apertus": {}, "arcee": {}, "biogpt": {}, "bitnet": {}, "bloom": {}, "codegen": dict(rotary_dim=8), "cohere": {},
    "diffllama": {}, "doge": {}, "ernie4_5": {}, "falcon": {}, "gemma": {}, "glm": {}, "glm4": {}, "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]), "gpt_neox": {},
    "gpt_neox_japanese": {}, "gptj": dict(rotary_dim=8), "granite": dict(logits_scaling=8.0), "helium": {},
    "hunyuan_v1_dense": {}, "hrm_text": {}, "hyperclovax": dict(logits_scaling=4.0), "jais2": {}, "llama": {},
    "ministral3": {}, "mpt": {}, "nanochat": {}, "nemotron": {}, "olmo": {}, "olmo2": {}, "openai-gpt": {},
    "opt": dict(ffn_dim=96, word_embed_proj_dim=64), "persimmon": {}, "phi": {}, "phi3": {}, "qwen2": {}, "qwen3": {},
    "seed_oss": {}, "smollm3": {}, "stablelm": {}, "starcoder2": {}, "xglm": dict(ffn_dim=96, num_layers=2),
}  # fmt: skip
WINDOWS = {
    "afmoe": dict(layer_types=WINDOW), "cohere2": dict(layer_types=WINDOW), "cohere2_moe": dict(layer_types=WINDOW),
    "cwm": dict(layer_types=WINDOW), "exaone4": dict(layer_types=WINDOW), "exaone_moe": dict(layer_types=WINDOW),
    "gemma2": {}, "gemma3_text": dict(layer_types=WINDOW),
    "gemma3n_text": dict(
        layer_types=WINDOW * 2, num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=16,
        laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0],
    ),
    "gemma4_text": dict(
        layer_types=WINDOW, hidden_size_per_layer_input=16, global_head_dim=32, num_experts=None,
        num_kv_shared_layers=0, num_global_key_value_heads=2,
    ),
    "gpt_oss": dict(layer_types=WINDOW), "granite_swa": dict(layer_types=WINDOW),
    "granitemoe_swa": dict(layer_types=WINDOW), "laguna": {},
    "llama4_text": dict(intermediate_size_mlp=96, attention_chunk_size=64, num_experts_per_tok=1), "mellum": {},
    "mimo_v2_flash": dict(layer_types=WINDOW), "ministral": {}, "mistral": {},
    "modernbert-decoder": dict(local_attention=8),
    "olmo3": dict(layer_types=WINDOW), "vaultgemma": dict(layer_types=WINDOW),
}  # fmt: skip
EXPERTS = {
    "aria_text": {},
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(hidden_size=64, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
    ),
    "dots1": {}, "ernie4_5_moe": {}, "flex_olmo": {}, "glm4_moe": {}, "granitemoe": {}, "granitemoeshared": {},
    "hunyuan_v1_moe": {}, "hy_v3": {}, "jetmoe": dict(kv_channels=16), "minimax_m2": dict(rotary_dim=8), "mixtral": {},
    "olmoe": {}, "phimoe": {}, "qwen2_moe": {}, "qwen3_moe": {}, "solar_open": {},
}  # fmt: skip
LATENTS = {  # latent attention, or one that chooses among tokens
    "axk1": LATENT, "axk2": LATENT, "deepseek_v2": LATENT, "deepseek_v3": LATENT, "deepseek_v32": LATENT,
    "deepseek_v4": dict(
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        num_hidden_layers=3, num_key_value_heads=1, o_groups=2, o_lora_rank=16, hc_mult=2,
        compress_rates=dict(compressed_sparse_attention=2, heavily_compressed_attention=4),
    ),
    "glm4_moe_lite": LATENT, "glm_moe_dsa": LATENT,
    "hy_v4": LATENT, "kimi_linear": LATENT | dict(layer_types=LINEAR, linear_head_dim=16, linear_num_heads=4),
    "longcat_flash": LATENT | dict(num_layers=1, ffn_hidden_size=96, head_dim=8, zero_expert_num=1),
    "minicpm3": LATENT | dict(dim_model_base=32),
    "minimax_m3_vl_text": dict(
        layer_types=["minimax_m3_sparse", "full_attention"], rotary_dim=8, index_block_size=2, index_topk_blocks=4,
        index_n_heads=2,
    ),
    "youtu": LATENT,
}  # fmt: skip
RECURRENT = {
    "bamba": dict(attn_layer_indices=[1]), "falcon_h1": {}, "falcon_mamba": {},
    "granitemoehybrid": dict(layer_types=MAMBA), "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2": dict(layer_types=["conv", "full_attention"]), "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "mamba": {}, "mamba2": dict(num_heads=8, head_dim=16), "minimax": dict(layer_types=LINEAR, block_size=8),
    "nemotron_h": dict(layers_block_type=["mamba", "attention", "moe", "mlp"], num_hidden_layers=4),
    "olmo_hybrid": dict(layer_types=LINEAR), "qwen3_5_moe_text": dict(layer_types=LINEAR),
    "qwen3_5_text": dict(layer_types=LINEAR), "qwen3_next": dict(layer_types=LINEAR),
    "qwen4_exp_text": dict(
        layer_types=LINEAR, hc_count=2, hc_lowrank=8, ngram_vocab_size_base=500, split_ngram_parts=2, heads_per_ngram=2,
        make_ngram_vocab_size_divisible_by=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16,
        indexer_budget=8, indexer_compress_ratio=2,
    ),
    "recurrent_gemma": dict(
        num_hidden_layers=3, lru_width=64, attention_window_size=8, block_types=["recurrent", "recurrent", "attention"]
    ),
    "rwkv": dict(context_length=512),
    "xlstm": dict(num_heads=4, chunk_size=8, qk_dim_factor=1.0),
    "zamba": dict(
        layers_block_type=["mamba", "hybrid", "hybrid"], num_hidden_layers=3, attention_hidden_size=128,
        attention_head_dim=32, num_key_value_heads=4,
    ),
    "zamba2": dict(layers_block_type=["mamba", "hybrid"], num_key_value_heads=4, num_mem_blocks=1),
    "zaya": dict(num_experts_per_tok=1, router_hidden_size=16),
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
