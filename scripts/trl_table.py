"""What becomes of each field of TRL's GRPOConfig here. One table, for docs/coming-from-trl.md and from_trl.py.

Defaults stand in trl_fields.json, as an installed TRL has them (`from_trl.py --read_fields` writes it), and in our own
config. tests/test_coming_from_trl.py compares all of them, name by name.
"""

import json
from pathlib import Path

FIELDS = json.loads(Path(__file__).with_name("trl_fields.json").read_text(encoding="utf-8"))

# TRL's field -> (our flags, what differs besides names and defaults)
HERE: dict[str, tuple[str, str]] = {
    "output_dir": ("output_dir run_name", "ours is the folder of all runs; a run is the folder `run_name` in it"),
    "run_name": ("run_name", ""),
    "per_device_train_batch_size": (
        "prompts_per_step",
        "x `gradient_accumulation_steps` x processes = completions of an update there; / `num_generations` = prompts, "
        "over all ranks; memory is bounded by `--tokens_per_microbatch` instead",
    ),
    "gradient_accumulation_steps": ("prompts_per_step", "as above"),
    "generation_batch_size": (
        "prompts_per_step num_minibatches",
        "completions sampled at once; / `num_generations` = prompts of a step here; unset there: one update's",
    ),
    "steps_per_generation": (
        "num_minibatches",
        "counts micro-batches there, updates here: / `gradient_accumulation_steps`",
    ),
    "num_generations": ("num_generations", ""),
    "num_generations_eval": ("eval_generations", "unset there: `num_generations`"),
    "num_iterations": ("num_iterations", ""),
    "max_completion_length": ("max_completion_length", ""),
    "temperature": ("temperature", ""),
    "top_p": ("top_p", "off in both"),
    "top_k": ("top_k", "off in both"),
    "min_p": ("min_p", ""),
    "use_vllm": ("generator", "`vllm` needs vllm_server.py beside the trainer; `hf` samples in the process"),
    "vllm_mode": ("colocate", "a server of its own process on the same GPU, by turns; there within the trainer's"),
    "vllm_enable_sleep_mode": ("colocate", "and the server's `--enable-sleep-mode`"),
    "vllm_server_base_url": ("server_urls", ""),
    "vllm_server_host": ("server_urls", ""),
    "vllm_server_port": ("server_urls", ""),
    "vllm_server_timeout": ("server_timeout", "seconds to wait for the server; there at start alone"),
    "vllm_importance_sampling_correction": ("correction", "`False`: `--correction none`; with vLLM alone there"),
    "vllm_importance_sampling_mode": ("correction correction_mode", "`sequence_mask`: `sequence` and `mask`"),
    "vllm_importance_sampling_clip_max": ("correction_max", ""),
    "vllm_importance_sampling_cap": ("correction_max", "the older name"),
    "vllm_importance_sampling_clip_min": ("correction_min", ""),
    "loss_type": (
        "loss_agg policy_loss",
        "`dapo`, `bnpo`: `token_mean` (of the whole update); `grpo`: `seq_mean`; `dr_grpo`: `constant`; `cispo`, "
        "`vespo`: `--policy_loss` and `token_mean`; `sapo`: `--policy_loss` and `seq_mean`; `luspo`: `seq_sum`, with "
        "`importance_sampling_level` `sequence` and no KL term the same as `--policy_loss luspo`. `vespo` has the "
        "correction within its ratio there: `--old_logprobs sampler --correction none`",
    ),
    "importance_sampling_level": (
        "policy_loss",
        "`sequence`: `gspo`; `cispo` and `sapo` are by tokens alone here, `vespo` by sequences in both. What "
        "multiplies one token's loss counts in the gradient of the whole completion there, of the token alone here",
    ),
    "epsilon": ("epsilon", "`cispo` has no lower bound there: `--epsilon 1`"),
    "epsilon_high": (
        "epsilon_high",
        "unset there: `epsilon`; with `cispo` it is the bound itself there, here 1 less, and at least 0",
    ),
    "delta": ("dual_clip", ""),
    "sapo_temperature_pos": ("sapo_tau_pos", ""),
    "sapo_temperature_neg": ("sapo_tau_neg", ""),
    "reward_weights": ("reward_weights", ""),
    "scale_rewards": ("scale_rewards", "`True`: `group`, `False`: `none`; 1e-4 is added to the std there, 1e-6 here"),
    "multi_objective_aggregation": (
        "advantage",
        "`normalize_then_sum`: `gdpo`, whitened over tokens, there over completions; where one of several functions "
        "gives None, its value counts as 0 here, and is left out there",
    ),
    "beta": ("beta", "without the ratio on the KL term, see `use_bias_correction_kl`"),
    "sync_ref_model": ("ref_sync_steps", ""),
    "ref_model_sync_steps": ("ref_sync_steps", "updates there, steps here; counts with `sync_ref_model` alone there"),
    "ref_model_mixup_alpha": ("ref_sync_alpha", ""),
    "mask_truncated_completions": (
        "mask_truncated",
        "with `seq_mean` and `seq_sum` the mean is over all completions there, over those that are left here",
    ),
    "top_entropy_quantile": ("top_entropy_quantile", "of the step's tokens here, of a micro-batch's there"),
    "off_policy_mask_threshold": ("off_policy_threshold", ""),
    "router_aux_loss_coef": (
        "router_aux_coef",
        "unset there: that of the model's config; over all tokens of a micro-batch there, over those that an update "
        "learns from here",
    ),
    "entropy_coef": (
        "entropy_coef",
        "a mean over tokens there, over those that `top_entropy_quantile` keeps; here over all, as `--loss_agg` has it",
    ),
    "use_adaptive_entropy": ("entropy_target", "setting the target adapts"),
    "entropy_target": ("entropy_target", "counts with `use_adaptive_entropy` alone there"),
    "entropy_coef_delta": (
        "entropy_coef_step",
        "per update there, per step here; there the bonus counts only while the entropy is at or below the target, "
        "here always",
    ),
    "max_tool_calling_iterations": ("max_turns", "counts all turns of the model here: one more"),
    "learning_rate": ("learning_rate", ""),
    "lr_scheduler_type": (
        "lr_schedule",
        "all but `reduce_lr_on_plateau` and `greedy`; of `linear`, `cosine` and `constant` the warm-up begins above 0 "
        "here and at 0 there (`constant` has none there)",
    ),
    "lr_scheduler_kwargs": ("lr_scheduler_kwargs", "JSON"),
    "chat_template_kwargs": ("chat_template_kwargs", "JSON"),
    "warmup_steps": ("warmup_steps", "updates there, steps here; below 1 it is a share: `--warmup_ratio`"),
    "optim": ("optim", "a class of torch.optim or bitsandbytes.optim, or transformers' name of one"),
    "weight_decay": ("weight_decay", "there biases and norms have none"),
    "adam_beta1": ("adam_beta1", ""),
    "adam_beta2": ("adam_beta2", ""),
    "adam_epsilon": ("adam_epsilon", ""),
    "max_grad_norm": ("max_grad_norm", ""),
    "num_train_epochs": ("num_epochs", ""),
    "max_steps": ("max_steps", "updates there, steps here (a step: sampled once, all its updates); likewise below"),
    "seed": ("seed", ""),
    "bf16": ("compute_dtype", "on in both; off: `--compute_dtype float32`"),
    "gradient_checkpointing": ("gradient_checkpointing", "here on GPUs"),
    "torch_compile": ("compile", ""),
    "eval_strategy": ("eval_steps", "`no`: leave it out"),
    "eval_steps": ("eval_steps", "updates there, steps here; here also before the first and after the last step"),
    "eval_on_start": ("eval_steps", "always, if there is an evaluation"),
    "save_strategy": ("save_steps", "`no`: leave it out; the end is always saved"),
    "save_steps": ("save_steps", "updates there, steps here"),
    "save_total_limit": ("save_total_limit", "unset there: all are kept"),
    "resume_from_checkpoint": ("resume", "from the last complete checkpoint of `--run_name`"),
    "logging_steps": ("log_steps", "updates there, steps here"),
    "log_completions": ("log_completions", "to files, read with look.py; there to the terminal and trackers"),
    "log_unique_prompts": ("log_unique_prompts", ""),
    "num_completions_to_print": ("print_samples_every", "every so many steps one"),
    "report_to": ("report_to", "`wandb`, `tensorboard`, `trackio`"),
    "project": ("wandb_project", "of wandb and trackio"),
    "fsdp": ("strategy", "`fsdp` or `fsdp2`"),
    "ddp_timeout": ("dist_timeout", "seconds"),
    "push_to_hub": ("push_to_hub", "at the end alone"),
    "hub_model_id": ("hub_repo_id", ""),
    "hub_private_repo": ("hub_private", "unset there: public, or what the organisation has set"),
}

# Of vllm_server.py, not of the trainer.
SERVER: dict[str, str] = {
    "vllm_gpu_memory_utilization": "--gpu-memory-utilization",
    "vllm_max_model_length": "--max-model-len",
    "vllm_tensor_parallel_size": "--tensor-parallel-size",
    "vllm_model_impl": "--model-impl",
}

# Fields without a counterpart, by the reason.
NOT_HERE: list[tuple[str, str]] = [
    ("model_init_kwargs", "of its keys, `dtype` and `attn_implementation` are flags; others would have to hold for the "
     "server, too: download what you mean (a `revision`, say) and give the folder"),
    ("trust_remote_code", "code that comes with a model is not run, here or in the server: the model needs a class in "
     "transformers and in vLLM"),
    ("disable_dropout", "dropout is always off: with it, what was sampled would be scored by other weights"),
    ("cast_lm_head_to_fp32", "logits become float32 behind the product with the output layer"),
    ("use_bias_correction_kl", "the KL term is a plain estimate (`--kl`); on by default there, with `beta` above 0"),
    ("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "the paper's values, 2, 3, 3, 2; edit `vespo` in "
     "algorithms/losses.py"),
    ("entropy_coef_min entropy_coef_max", "from 0, without an upper bound"),
    ("generation_kwargs repetition_penalty vllm_structured_outputs_regex", "the trainer must score with the "
     "distribution that was sampled from"),
    ("cache_implementation", "`--generator hf` has a cache of its own"),
    ("use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
     "`--generator hf` samples in the process, a server is faster"),
    ("vllm_group_port", "servers tell the trainer where weights go"),
    ("optim_args optim_target_modules", "write them into `make_optimizer`"),
    ("label_smoothing_factor neftune_noise_alpha", "change the loss or the forward pass in the script"),
    ("use_liger_kernel liger_kernel_config", "the output layer works in slices (`--logprob_chunk`), prompts are "
     "computed once"),
    ("fp16 fp16_full_eval bf16_full_eval tf32", "bfloat16 or float32, of `--dtype` and `--compute_dtype`"),
    ("gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode use_cache torch_empty_cache_steps",
     "edit the script"),
    ("shuffle_dataset data_seed train_sampling_strategy length_column_name", "rows are always shuffled, by `--seed`; "
     "edit `PromptSampler`"),
    ("remove_unused_columns label_names", "all columns reach rewards and environments"),
    ("pad_to_multiple_of average_tokens_across_devices auto_find_batch_size", "nothing is padded that is computed, "
     "counts are taken over all ranks, and the size of a pass is what fits"),
    ("ds3_gather_for_generation deepspeed fsdp_config parallelism_config accelerator_config", "`--strategy`, "
     "`--shard_size`, `--offload`"),
    ("ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend local_rank "
     "use_cpu full_determinism", "torchrun, and a GPU where there is one"),
    ("dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
     "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
     "there is no data loader: rows are texts"),
    ("per_device_eval_batch_size eval_delay eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
     "prediction_loss_only include_for_metrics batch_eval_metrics do_train do_eval do_predict",
     "an evaluation samples all held-out rows and scores them (`--eval_only` for that alone)"),
    ("save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip "
     "restore_callback_states_from_checkpoint", "a checkpoint is whole, and a resumed run goes on as if it had not "
     "stopped"),
    ("load_best_model_at_end metric_for_best_model greater_is_better", "choose by the log; `--save_total_limit` keeps "
     "the last ones"),
    ("hub_token hub_strategy hub_always_push hub_revision log_completions_hub_repo", "the final model alone is "
     "uploaded; the token is HF_TOKEN"),
    ("logging_strategy logging_first_step logging_nan_inf_filter log_on_each_node log_level log_level_replica "
     "disable_tqdm include_num_input_tokens_seen log_multimodal skip_memory_metrics debug", "docs/runs.md says what is "
     "logged"),
    ("trackio_space_id trackio_bucket_id trackio_static_space_id", "not passed on to trackio"),
]  # fmt: skip

# What AsyncGRPOConfig has besides.
ASYNC_HERE: dict[str, tuple[str, str]] = {
    "dtype": ("dtype", ""),
    "max_staleness": ("max_staleness", "a prompt is never dropped for its age here"),
    "weight_sync_steps": ("push_steps", ""),
    "request_timeout": ("request_timeout", ""),
    "token_budget": ("tokens_per_microbatch", "unset: what fits, measured"),
}
ASYNC_NOT_HERE: list[tuple[str, str]] = [
    ("fork_threshold_tokens", "all turns are one row of the sampled tokens"),
    ("max_inflight_tasks queue_maxsize", "what `--max_staleness` allows is under way"),
    ("weight_sync_timeout heartbeat_stale_after_s", "`--server_timeout`, for each step of a push"),
]


def shown(value) -> str:
    return "" if value is None or value == [] else f"`{value}`"


def tables(ours: dict, ours_async: dict) -> str:
    """The page's tables as markdown.  ours, ours_async: the defaults of our config."""
    text = []
    for kind, here, not_here, own in (
        ("GRPOConfig", HERE | {name: (flag, "of vllm_server.py") for name, flag in SERVER.items()}, NOT_HERE, ours),
        ("AsyncGRPOConfig", ASYNC_HERE, ASYNC_NOT_HERE, ours_async),
    ):
        theirs = FIELDS[kind]
        text += [f"| {kind} | default | here | default | |", "|---|---|---|---|---|"]
        for name, (flags, note) in here.items():
            names = [] if flags.startswith("--") else flags.split()
            flag = ", ".join(f"`--{n}`" for n in names) or f"`{flags}`"
            default = ", ".join(filter(None, [shown(own[n]) for n in names]))
            text.append(f"| `{name}` | {shown(theirs[name])} | {flag} | {default} | {note} |")
        text += ["", f"| {kind}, not here | |", "|---|---|"]
        text += [f"| {', '.join(f'`{n}`' for n in names.split())} | {why} |" for names, why in not_here]
        text.append("")
    return "\n".join(text)
