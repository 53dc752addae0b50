"""GRPO for language models in one file, on plain torch.distributed, with a vLLM server beside it. Copy it, edit it.

    python vllm_server.py --model Qwen/Qwen2.5-1.5B-Instruct                       # terminal 1, GPU 0
    torchrun --nproc_per_node=8 train_grpo.py --model_id Qwen/Qwen2.5-1.5B-Instruct # terminal 2, the other GPUs

The algorithm, once per step:

    1  take `prompts_per_step` prompts, sample `num_generations` completions of each      rollouts.py, the server
    2  score every completion as soon as it ends                                          rewards.py
    3  lay them out as one Batch; token ids are those of the sampler, never re-tokenised  section 1
    4  advantages: compare the completions of one prompt                                  section 2
    5  num_iterations passes of num_minibatches optimizer updates of the policy loss      sections 3, 6, 7
    6  push the new weights to the server; the next step samples from them                utils.py

Where it differs from the papers and from TRL, on purpose:

    * The loss is a sum of per-token weights times per-token losses, the weights taken from counts over the whole
      optimizer update and all ranks: the gradient does not depend on how the update is cut into micro-batches or ranks.
    * A prompt is computed once for all its completions (`--shared_prefix`): same gradient, several times faster.
    * A prompt with one completion has advantage 0 (some implementations pass its raw score through).
    * No truncated sampling by default: top-k or top-p would bias the importance ratio.
    * With one update per step the ratio is 1 and the loss is 0 by construction: watch `reward`, not `loss`.

Dimensions in comments: B rows (completions) of a batch, T tokens of the longest row, G completions per prompt,
N sampled tokens, V vocabulary; R packed rows of a micro-batch, L their length.
"""
# ruff: noqa: E402 - the command line is parsed before torch is imported, so that every mistake answers at once

from config import PRESETS, ConfigError, TrainConfig, known_name, parse_args

# A knob of your own:  class TrainConfig(TrainConfig): my_coef: float = 0.1  # what it does
CONFIG = parse_args(TrainConfig, description=__doc__.split("\n")[0]) if __name__ == "__main__" else None

import asyncio
import contextlib
import dataclasses
import math
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import data
import utils
from rewards import get_reward_functions, score
from rollouts import ROLLOUTS, Trajectory
from runlog import RunLog, close_all, name_run

# ==== 1 batch ========================================================================================================


@dataclass
class Batch:
    """Trajectories as right-padded tensors, one row each, rows of a prompt adjacent. Position t is token t."""

    input_ids: Tensor  # [B, T] int64: prompt and everything after it
    attention_mask: Tensor  # [B, T] 1 on tokens, 0 on padding
    loss_mask: Tensor  # [B, T] 1 exactly on tokens the policy sampled
    rewards: Tensor  # [B, T] outcome on the last sampled token; a turn's reward on the turn's last sampled token
    groups: Tensor  # [B] int64: rows of one prompt share it; unique over all ranks
    sampling_logprobs: Tensor | None = None  # [B, T] of the sampler, 0 where loss_mask is 0
    old_logprobs: Tensor | None = None  # [B, T] before the first update of the step; None if the ratio is 1 anyway
    ref_logprobs: Tensor | None = None  # [B, T] of the reference model; None if beta is 0
    values: Tensor | None = None  # [B, T] of a critic
    baselines: Tensor | None = None  # [B]
    advantages: Tensor | None = None  # [B, T] 0 where loss_mask is 0
    model_inputs: list[dict] = field(default_factory=list)  # per row, vision tensors; never read by name

    @property
    def scores(self) -> Tensor:  # [B]
        return self.rewards.sum(1)

    def __len__(self) -> int:
        return len(self.input_ids)

    def select(self, rows: list[int]) -> "Batch":
        """The given rows, cut to the longest of them."""
        longest = int(self.attention_mask[rows].sum(1).max())

        def take(value):
            if isinstance(value, Tensor):
                return value[rows, :longest] if value.ndim == 2 else value[rows]
            return [value[row] for row in rows] if value else value

        return Batch(**{f.name: take(getattr(self, f.name)) for f in dataclasses.fields(self)})


def collate(trajectories: list[Trajectory], pad_id: int, device: torch.device, group_offset: int = 0) -> Batch:
    """Trajectories of this rank as a Batch. group_offset makes the group numbers unique over ranks."""
    rows, length = len(trajectories), max(len(t.prompt_ids) + len(t.token_ids) for t in trajectories)
    input_ids = torch.full((rows, length), pad_id)
    attention_mask, loss_mask, rewards, logprobs = torch.zeros(4, rows, length).unbind()  # [B, T] each
    for row, t in enumerate(trajectories):
        start, end = len(t.prompt_ids), len(t.prompt_ids) + len(t.token_ids)
        input_ids[row, :end] = torch.tensor(t.prompt_ids + t.token_ids)
        attention_mask[row, :end] = 1
        loss_mask[row, start:end] = torch.tensor(t.loss_mask, dtype=torch.float)
        rewards[row, start:end] = torch.tensor(t.token_rewards, dtype=torch.float)
        logprobs[row, start:end] = torch.tensor(t.logprobs, dtype=torch.float)
    groups = torch.tensor([t.group + group_offset for t in trajectories])
    inputs = [t.info.get("model_inputs", {}) for t in trajectories]
    tensors = (t.to(device) for t in (input_ids, attention_mask, loss_mask, rewards, groups, logprobs))
    return Batch(*tensors, model_inputs=inputs)


# ==== 2 advantages: (batch, cfg) -> [B, T] ===========================================================================


def group_index(groups: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the number of its group, 0, 1, ..., and the size of that group.  [B], [B]"""
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    return index, counts[index]


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """For each row the mean over its group.  [B] -> [B]"""
    index, size = group_index(groups)
    return torch.zeros_like(values).index_add(0, index, values)[index] / size


def center_by_group(scores: Tensor, groups: Tensor) -> Tensor:
    """Scores minus their group's mean; exactly 0 for a group of one.  [B] -> [B]"""
    return scores - group_mean(scores, groups)


def group_std(scores: Tensor, groups: Tensor) -> Tensor:
    """For each row the unbiased standard deviation of its group; 0 for a group of one.  [B] -> [B]"""
    _, size = group_index(groups)
    variance = group_mean(center_by_group(scores, groups) ** 2, groups) * size / (size - 1).clamp(min=1)
    return variance.sqrt()


def spread(values: Tensor, loss_mask: Tensor) -> Tensor:
    """One value per row onto the row's sampled tokens.  [B], [B, T] -> [B, T]"""
    return values[:, None] * loss_mask


def grpo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """(s - group mean) / (std + 1e-6); --scale_rewards says which std.  DeepSeekMath (2402.03300) eq. 3.  [B, T]"""
    centered = center_by_group(batch.scores, batch.groups)  # [B]
    if cfg.scale_rewards == "group":
        centered = centered / (group_std(batch.scores, batch.groups) + 1e-6)
    elif cfg.scale_rewards == "batch":  # over all ranks: a rank's own std would change the algorithm with their number
        centered = centered / (utils.global_moments(batch.scores)[2] + 1e-6)
    return spread(centered, batch.loss_mask)


def dr_grpo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """s - group mean: the std over-weights nearly solved and nearly hopeless prompts.  2503.20783 sec. 3.  [B, T]"""
    return spread(center_by_group(batch.scores, batch.groups), batch.loss_mask)


def rloo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """s - mean of the other n - 1 scores = (s - mean) n / (n - 1).  REINFORCE leave-one-out, 2402.14740.  [B, T]"""
    _, size = group_index(batch.groups)
    others = center_by_group(batch.scores, batch.groups) * size / (size - 1).clamp(min=1)
    return spread(others, batch.loss_mask)


ADVANTAGES: dict[str, Callable[[Batch, TrainConfig], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}


# ==== 3 policy losses: (logprobs [B, T], batch, cfg) -> loss per token [B, T], statistics {name: [B, T]} ==============


def log_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """log pi / pi_old on sampled tokens, 0 elsewhere; clamped so that its exponential stays finite.  [B, T]"""
    return ((logprobs - batch.old_logprobs) * batch.loss_mask).clamp(-20, 20)


def clipped_surrogate(ratio: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """max(-A r, -A clip(r, 1 - epsilon, 1 + epsilon_high)), and where the clip binds.  1707.06347 eq. 7.  [B, T]"""
    advantages, low, high = batch.advantages, 1 - cfg.epsilon, 1 + cfg.epsilon_high
    loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(low, high))  # [B, T]
    clipped_low, clipped_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    stats = {"low_mean": clipped_low, "high_mean": clipped_high, "region_mean": clipped_low | clipped_high}
    return loss, {f"clip_ratio/{name}": value.float() for name, value in stats.items()}


def ppo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """Clipped importance ratio per token; --dual_clip c bounds the loss by -A c where A < 0 (1912.09729 eq. 5).

    Where the dual clip binds, the token has no gradient.  [B, T]
    """
    loss, stats = clipped_surrogate(log_ratio(logprobs, batch).exp(), batch, cfg)
    if cfg.dual_clip is not None:
        bounded = torch.min(loss, -batch.advantages * cfg.dual_clip)
        loss = torch.where(batch.advantages < 0, bounded, loss)
    return loss, stats


def gspo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """One ratio per sequence, exp(mean log-ratio), clipped.  2507.18071 eq. 5-7, in the token form of its sec. 4.3: the
    value is the sequence's, the gradient each token's own.  [B, T]"""
    length = batch.loss_mask.sum(1, keepdim=True).clamp(min=1)
    mean = log_ratio(logprobs, batch).sum(1, keepdim=True) / length  # [B, 1]
    token_form = (logprobs - logprobs.detach() + mean.detach()).clamp(max=10)  # [B, T]
    return clipped_surrogate(token_form.exp(), batch, cfg)


def reinforce(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-A log pi, no ratio: the plain policy gradient, Williams 1992.  [B, T]"""
    return -batch.advantages * logprobs, {}


POLICY_LOSSES: dict[str, Callable[[Tensor, Batch, TrainConfig], tuple[Tensor, dict]]] = {
    "ppo": ppo,
    "gspo": gspo,
    "reinforce": reinforce,
}


# KL(pi || ref) per token from one sample, x = log pi - log ref (J. Schulman, "Approximating KL divergence", 2020).
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda logprobs, ref: (logprobs - ref).clamp(-20, 20),  # unbiased, high variance; as a loss: no KL gradient
    "k2": lambda logprobs, ref: (logprobs - ref).clamp(-20, 20) ** 2 / 2,  # biased value, right gradient
    "k3": lambda logprobs, ref: (x := (ref - logprobs).clamp(-20, 20)).exp() - x - 1,  # unbiased, >= 0 (GRPO)
}


def token_weights(loss_mask: Tensor, mode: str, *, num_tokens, num_sequences, max_tokens) -> Tensor:
    """What each token's loss counts for: loss = (weights * per_token_loss).sum().  [B, T] -> [B, T]

    num_tokens, num_sequences: loss tokens and rows (with a loss token; for "constant": all) of the *whole* optimizer
    update over all ranks, so that the gradient cannot depend on how the update is cut. max_tokens: the constant of
    Dr. GRPO, the longest completion allowed.
    """
    if mode == "token_mean":  # every token alike (DAPO, 2503.14476 eq. 8)
        return loss_mask / max(num_tokens, 1)
    if mode == "seq_mean":  # every completion alike (GRPO, 2402.03300 eq. 3)
        return loss_mask / loss_mask.sum(1, keepdim=True).clamp(min=1) / max(num_sequences, 1)
    if mode == "seq_sum":
        return loss_mask / max(num_sequences, 1)
    if mode == "constant":  # no length in it at all (Dr. GRPO, 2503.20783 sec. 3.1)
        return loss_mask / (max(num_sequences, 1) * max_tokens)
    raise ValueError(f"loss_agg {mode!r}: known are token_mean, seq_mean, seq_sum, constant")


# ==== 4 models =======================================================================================================


class Policy(nn.Module):
    """A causal LM that answers with log-probs of chosen tokens. Logits exist for `chunk` sampled tokens at a time only.

    The wrapper exists because DDP and FSDP want everything that uses parameters inside one `forward`.
    """

    def __init__(self, model: nn.Module, cfg: TrainConfig, autocast: bool):
        super().__init__()
        self.model, self.temperature, self.chunk, self.autocast = model, cfg.temperature, cfg.logprob_chunk, autocast

    @property
    def hf_model(self) -> nn.Module:  # the transformers model, below PEFT
        return self.model.get_base_model() if isinstance(self.model, _peft_model()) else self.model

    def forward(self, inputs: dict, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of `targets` [N] given what stands up to (rows, columns) [N] of `inputs`.  [N], [N]"""
        device = targets.device.type
        with torch.autocast(device, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            hidden = self.hf_model.base_model(**inputs, use_cache=False).last_hidden_state  # [R, L, H]
            hidden = hidden[rows, columns]  # [N, H]
            if len(hidden) <= self.chunk or not torch.is_grad_enabled():
                parts = [self.head(h, t) for h, t in self._chunks(hidden, targets)]
            else:  # several chunks: recompute each one's logits in the backward pass
                parts = [checkpoint(self.head, h, t, use_reentrant=False) for h, t in self._chunks(hidden, targets)]
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)

    def _chunks(self, hidden: Tensor, targets: Tensor):
        return zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True)

    def head(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Output layer on sampled positions.  [n, H], [n] -> [n], [n]"""
        logits = self.hf_model.get_output_embeddings()(hidden).float()  # [n, V]
        if cap := getattr(self.hf_model.config.get_text_config(), "final_logit_softcapping", None):  # Gemma
            logits = cap * torch.tanh(logits / cap)
        if self.temperature != 1:  # the sampler did the same
            logits = logits / self.temperature
        log_p = logits.log_softmax(-1)  # [n, V]
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)  # [n]
        return log_p.gather(1, targets[:, None])[:, 0], entropy


def _peft_model() -> type:
    from peft import PeftModel

    return PeftModel


def load_hf_model(cfg: TrainConfig, dtype: torch.dtype) -> nn.Module:
    """The transformers model of --model_id, dropout off (ratios between two passes must be those of the weights)."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            cfg.model_id, dtype=dtype, attn_implementation=cfg.attn_implementation
        )
    except OSError as error:
        raise ValueError(f"--model_id={cfg.model_id}: no such folder, and not found on the hub ({error})") from error
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


def add_lora(model: nn.Module, cfg: TrainConfig) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = cfg.lora_targets[0] if cfg.lora_targets == ["all-linear"] else cfg.lora_targets
    try:
        lora = LoraConfig(r=cfg.lora_r, lora_alpha=cfg.lora_alpha, target_modules=targets, task_type="CAUSAL_LM")
        return get_peft_model(model, lora, autocast_adapter_dtype=False)
    except ValueError as error:
        names = sorted({n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ValueError(f"--lora_targets {' '.join(cfg.lora_targets)}: {error}; linear layers: {names}") from error


def shard(policy: Policy, cfg: TrainConfig, device: torch.device, trained: bool) -> nn.Module:
    """The policy under --strategy. The reference model is sharded like the policy."""
    layer_names = set(policy.hf_model._no_split_modules or [])
    layers = [m for m in policy.modules() if type(m).__name__ in layer_names]
    param_dtype = getattr(torch, cfg.compute_dtype)
    if cfg.strategy == "ddp":
        policy = policy.to(device)
        if not trained or utils.world_size() == 1:
            return policy
        return nn.parallel.DistributedDataParallel(
            policy, device_ids=[device.index] if device.index is not None else None
        )
    if cfg.strategy == "fsdp":
        from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        # Adapters and frozen weights share a flat parameter; torch warns of that with a page of names per layer.
        warnings.filterwarnings("ignore", message="(?s).*requires_grad=", module="torch.distributed.fsdp")
        return FullyShardedDataParallel(
            policy,
            auto_wrap_policy=ModuleWrapPolicy({type(m) for m in layers}),
            mixed_precision=MixedPrecision(param_dtype=param_dtype, reduce_dtype=torch.float32),
            cpu_offload=CPUOffload(cfg.offload),
            use_orig_params=True,
            device_id=device,
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    options = dict(
        mesh=init_device_mesh(device.type, (utils.world_size(),)),
        mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda") if cfg.offload else OffloadPolicy(),
    )
    if not cfg.offload:
        policy = policy.to(device)
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(policy, **options)


def load_policy(cfg: TrainConfig, device: torch.device) -> tuple[nn.Module, Policy]:
    """(the policy as it is called, the same below DDP / FSDP)."""
    torch.manual_seed(cfg.seed)  # adapters start alike on every rank
    model = load_hf_model(cfg, getattr(torch, cfg.dtype))
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()  # else nothing reaches adapters below frozen embeddings
    if cfg.use_peft:
        model = add_lora(model, cfg)
    autocast = cfg.strategy == "ddp" and cfg.compute_dtype == "bfloat16"  # FSDP casts its shards itself
    inner = Policy(model.train(), cfg, autocast)
    return shard(inner, cfg, device, trained=True), inner


def load_reference(cfg: TrainConfig, device: torch.device) -> nn.Module | None:
    """A frozen copy of the start, in the compute dtype. None without KL, and with LoRA (adapters off is the start)."""
    if cfg.beta == 0 or cfg.use_peft:
        return None
    model = load_hf_model(cfg, getattr(torch, cfg.compute_dtype))
    return shard(Policy(model.eval().requires_grad_(False), cfg, autocast=False), cfg, device, trained=False)


# ==== 5 rollout and scoring ==========================================================================================


def format_row(row: dict) -> dict:
    """Edit me: a row of your data set -> a dict with `prompt` (string or chat messages) and whatever rewards need."""
    return row


async def rollout(rows: list[dict], generator, reward_functions: dict, cfg: TrainConfig) -> tuple[list, dict]:
    """Sample and score. One task per prompt: a group is scored while others are still being sampled.

    Returns the trajectories, and seconds: until the last token was sampled, and what scoring took beyond that.
    """
    start, sampled = time.perf_counter(), []

    async def one_group(group: int, row: dict) -> list[Trajectory]:
        trajectories = await ROLLOUTS[cfg.rollout]([row], generator, cfg)
        sampled.append(time.perf_counter())
        for trajectory in trajectories:
            trajectory.group = group
        await score(trajectories, reward_functions, cfg)
        return trajectories

    groups = await asyncio.gather(*(one_group(group, row) for group, row in enumerate(rows)))
    seconds = {"time/generate": max(sampled) - start, "time/score": time.perf_counter() - max(sampled)}
    return [trajectory for group in groups for trajectory in group], seconds


def make_generator(cfg: TrainConfig, hf_model: nn.Module, tokenizer, device: torch.device):
    """The sampler of --generator; servers are checked to serve this model before anything is trained."""
    if cfg.generator == "hf":
        from hf_generator import HFGenerator

        return HFGenerator(load_hf_model(cfg, getattr(torch, cfg.compute_dtype)).to(device), tokenizer)
    from vllm_client import VLLMClient

    token = cfg.server_token or os.environ.get("VLLM_SERVER_TOKEN")
    client = VLLMClient(cfg.server_urls, token, timeout=cfg.server_timeout, request_timeout=cfg.request_timeout)
    client.wait_ready(cfg.server_timeout)
    utils.check_servers(client, hf_model.config.get_text_config(), cfg.max_prompt_length + cfg.max_completion_length)
    client.tokenizer, client.receives_weights = tokenizer, utils.is_main()
    client.weight_dtype = getattr(torch, client.server_info()[0]["dtype"])
    if client.receives_weights:
        client.connect_weights(device)
    return client


def rollout_metrics(trajectories: list[Trajectory], batch: Batch) -> dict:
    """What the step's completions look like, over all ranks. Keys are TRL's."""
    lengths = batch.loss_mask.sum(1)
    spread_of_group = group_std(batch.scores, batch.groups)
    _, size = group_index(batch.groups)
    metrics = {
        "reward": batch.scores,
        "reward_std": spread_of_group,
        "frac_reward_zero_std": (spread_of_group < 1e-6).float(),
        "frac_singleton_groups": (size == 1).float(),
        "completions/mean_length": lengths,
        "completions/clipped_ratio": torch.tensor([float(t.finish_reason == "length") for t in trajectories]),
    }
    mine = {key for t in trajectories for key in t.info["rewards"]}  # components of dict rewards may differ by row
    for key in sorted(set().union(*utils.gather_objects(mine))):
        metrics[f"rewards/{key}/mean"] = torch.tensor([t.info["rewards"].get(key, math.nan) for t in trajectories])
    out = {}
    for name, values in metrics.items():
        _, mean, _ = utils.global_moments(values.cpu().nan_to_num(), ~values.cpu().isnan())
        out[name] = float(mean)
    for name in ("reward_timeouts", "unrewarded", "reward_without_token"):  # completions of the step
        out[name] = int(utils.all_sum(torch.tensor(sum(t.info[name] for t in trajectories))))
    out["completions/max_length"] = utils.all_max(int(lengths.max()))
    out["completions/min_length"] = -utils.all_max(-int(lengths.min()))
    out["num_tokens"] = int(utils.all_sum(batch.attention_mask.sum()))
    return out


# ==== 6 log-probs ====================================================================================================


def why_not_shared(hf_model: nn.Module, cfg: TrainConfig) -> str | None:
    """Why prompts cannot be computed once per group for this model, or None if they can."""
    config = hf_model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"layers of type {', '.join(sorted(kinds - {'full_attention'}))} take no free-form attention mask"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding-window attention takes no free-form attention mask"
    if cfg.attn_implementation not in ("sdpa", "eager"):
        return f"--attn_implementation {cfg.attn_implementation} takes no free-form attention mask; sdpa does"
    return None


def runs(groups: Tensor) -> list[list[int]]:
    """Adjacent rows of one group together: [5, 5, 7] -> [[0, 1], [2]]"""
    _, counts = groups.unique_consecutive(return_counts=True)
    return [list(range(end - n, end)) for end, n in zip(counts.cumsum(0).tolist(), counts.tolist(), strict=True)]


def shared_prefix(batch: Batch, members: list[int]) -> int:
    """How many leading tokens these rows share before any of them was sampled."""
    sampled = batch.loss_mask[members]
    before = torch.where(sampled.any(1), sampled.argmax(1), batch.attention_mask[members].sum(1)).min().int()
    same = (batch.input_ids[members] == batch.input_ids[members[0]]).all(0)[:before]
    return int(same.cumprod(0).sum())


def pack(batch: Batch, cfg: TrainConfig) -> tuple[dict, Tensor, Tensor, Tensor]:
    """A forward pass's inputs and, for each sampled token in row-major order, the place that predicts it.

    A group becomes one packed row [prompt | completion 1 | ... | completion G]; positions restart after the prompt and
    a completion sees the prompt and itself:   p p a a b   positions 0 1 2 3 2   segments 0 0 1 1 2
    Returns inputs [R, L], rows [N], columns [N], targets [N].
    """
    device, where = batch.input_ids.device, batch.loss_mask.nonzero()  # [N, 2]
    rows, before, targets = where[:, 0], where[:, 1] - 1, batch.input_ids[where[:, 0], where[:, 1]]  # [N] each
    if not cfg.shared_prefix or any(batch.model_inputs):
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
        for key in batch.model_inputs[0] if batch.model_inputs else ():
            inputs[key] = torch.cat([row[key] for row in batch.model_inputs])
        return inputs, rows, before, targets
    lengths = batch.attention_mask.sum(1).long().tolist()
    packed, row_of, prefix_of, shift_of = [], [], [], []
    for members in runs(batch.groups):
        prefix = shared_prefix(batch, members)
        pieces = [(batch.input_ids[members[0], :prefix], torch.arange(prefix), 0)]  # ids, positions, segment
        end = prefix
        for segment, member in enumerate(members, 1):
            pieces.append(
                (batch.input_ids[member, prefix : lengths[member]], torch.arange(prefix, lengths[member]), segment)
            )
            row_of.append(len(packed))
            prefix_of.append(prefix)
            shift_of.append(end - prefix)  # token t of this completion stands in column t + shift
            end += lengths[member] - prefix
        packed.append(pieces)
    length = max(sum(len(ids) for ids, _, _ in pieces) for pieces in packed)
    input_ids, positions = torch.zeros(2, len(packed), length, dtype=torch.long, device=device).unbind()  # [R, L]
    segments = torch.full_like(input_ids, -1)
    for row, pieces in enumerate(packed):
        end = sum(len(ids) for ids, _, _ in pieces)
        input_ids[row, :end] = torch.cat([ids for ids, _, _ in pieces])
        positions[row, :end] = torch.cat([position for _, position, _ in pieces]).to(device)
        segments[row, :end] = torch.cat([torch.full((len(ids),), segment) for ids, _, segment in pieces]).to(device)
    order = torch.arange(length, device=device)
    visible = (segments[:, None] == 0) | (segments[:, None] == segments[:, :, None])  # [R, query, key]
    mask = (visible & (order[None] <= order[:, None]))[:, None]  # [R, 1, L, L]
    if cfg.attn_implementation == "eager":  # adds its mask
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    row_of, prefix_of, shift_of = (torch.tensor(x, device=device)[rows] for x in (row_of, prefix_of, shift_of))  # [N]
    columns = torch.where(before < prefix_of, before, before + shift_of)
    return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}, row_of, columns, targets


def compute_logprobs(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, Tensor]:
    """Log-probs of the sampled tokens and the entropy at their places, 0 elsewhere. With gradient.  [B, T], [B, T]"""
    logprobs, entropy = policy(*pack(batch, cfg))  # [N], [N]
    where = batch.loss_mask.nonzero(as_tuple=True)
    empty = torch.zeros(batch.loss_mask.shape, device=logprobs.device)
    return empty.index_put(where, logprobs), empty.index_put(where, entropy)


def micro_batches(batch: Batch, cfg: TrainConfig) -> list[list[int]]:
    """Row numbers of each forward pass, at most --tokens_per_microbatch tokens with padding; as many on every rank.

    Groups stay together while they fit, since they share their prompt. Longest first, so that rows of a pass are alike
    in length. A rank with fewer passes gets empty ones: FSDP's collectives would wait for each other.
    """
    lengths, limit = batch.attention_mask.sum(1).long().tolist(), cfg.tokens_per_microbatch
    units: list[tuple[int, list[int]]] = []  # (tokens, rows) of what becomes one packed row
    for members in runs(batch.groups) if cfg.shared_prefix else [[row] for row in range(len(batch))]:
        prefix, size, rows = shared_prefix(batch, members), 0, []
        for member in members:
            extra = lengths[member] - prefix
            if rows and size + extra > limit:
                units.append((size, rows))
                rows = []
            size = size + extra if rows else lengths[member]
            rows = rows + [member]
        units.append((size, rows))
    passes: list[list[int]] = []
    longest = used = 0
    for size, rows in sorted(units, reverse=True):
        if passes and (used + 1) * longest <= limit:
            passes[-1] += rows
            used += 1
        else:
            passes.append(list(rows))
            longest, used = size, 1
    return passes + [[]] * (int(utils.all_max(len(passes))) - len(passes))


@torch.no_grad()
def all_logprobs(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> Tensor:
    """Log-probs of the whole batch without gradient, micro-batch by micro-batch.  [B, T]"""
    out = torch.zeros_like(batch.loss_mask)
    for rows in micro_batches(batch, cfg):
        part = batch.select(rows or [0])
        logprobs, _ = compute_logprobs(policy, part, cfg)
        if rows:
            out[rows, : logprobs.shape[1]] = logprobs
    return out


# ==== 7 update =======================================================================================================


def lr_at(update: int, cfg: TrainConfig) -> float:
    """Learning rate of an optimizer update: linear warm-up, then --lr_schedule to 0 at the end.

    A function of the update's number, so that resuming needs no scheduler state.
    """
    total = cfg.max_steps * cfg.num_iterations * cfg.num_minibatches
    warmup = math.ceil(cfg.warmup_ratio * total)
    if update < warmup:
        return cfg.learning_rate * (update + 1) / warmup
    done = (update - warmup) / max(total - warmup, 1)
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return cfg.learning_rate * decay[cfg.lr_schedule]


def clip_gradients(policy: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global norm of at most max_norm; returns the norm before."""
    if isinstance(policy, torch.distributed.fsdp.FullyShardedDataParallel):
        return float(policy.clip_grad_norm_(max_norm))
    norm = nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.grad is not None], max_norm)
    return float(norm.full_tensor() if isinstance(norm, utils._dtensor()) else norm)


def micro_loss(policy: nn.Module, part: Batch, cfg: TrainConfig, counts: dict) -> tuple[Tensor, dict]:
    """This micro-batch's share of the update's loss, and statistics as per-token matrices [B, T]."""
    logprobs, entropy = compute_logprobs(policy, part, cfg)  # [B, T]
    if part.old_logprobs is None:  # first and only pass: pi_old is pi, the ratio is 1 and carries the gradient
        part.old_logprobs = logprobs.detach()
    per_token, stats = POLICY_LOSSES[cfg.policy_loss](logprobs, part, cfg)  # [B, T]
    if part.ref_logprobs is not None:
        kl = KL_ESTIMATORS[cfg.kl](logprobs, part.ref_logprobs)  # [B, T]
        per_token, stats["kl"] = per_token + cfg.beta * kl, kl
    weights = token_weights(part.loss_mask, cfg.loss_agg, **counts)  # [B, T]
    stats |= {"entropy": entropy, "sampling/logprob_diff_mean": (part.old_logprobs - part.sampling_logprobs).abs()}
    return (weights * per_token).sum(), stats


def accumulate_gradients(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> dict[str, Tensor]:
    """Gradient of one optimizer update, however it is cut into micro-batches and ranks.

    Returns this rank's sums over tokens {name: []}: "loss", "tokens" and the statistics. Counts are global and taken
    before the loop; DDP and FSDP average over ranks, so the loss is multiplied by their number: without it ranks with
    short completions would count more.
    """
    nonempty = batch.loss_mask.any(1).sum()
    sequences = torch.tensor(float(len(batch))) if cfg.loss_agg == "constant" else nonempty.cpu()
    tokens, sequences = utils.all_sum(torch.stack([batch.loss_mask.sum().cpu(), sequences])).tolist()
    counts = dict(num_tokens=tokens, num_sequences=sequences, max_tokens=cfg.max_completion_length)
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    passes = micro_batches(batch, cfg)
    for number, rows in enumerate(passes):
        part = batch.select(rows or [0])
        if not rows:
            part.loss_mask = torch.zeros_like(part.loss_mask)
        last = number + 1 == len(passes)
        ddp = isinstance(policy, nn.parallel.DistributedDataParallel)
        with policy.no_sync() if ddp and not last else contextlib.nullcontext():
            loss, stats = micro_loss(policy, part, cfg, counts)
            (loss * utils.world_size()).backward()
        sums["loss"] += loss.detach().double().cpu()
        sums["tokens"] += part.loss_mask.sum().double().cpu()
        for name, matrix in stats.items():
            sums[name] += (matrix.detach() * part.loss_mask).sum().double().cpu()
    return sums


def minibatches(batch: Batch, cfg: TrainConfig) -> list[Batch]:
    """The step's rows in num_minibatches parts of whole groups."""
    members = runs(batch.groups)
    size = math.ceil(len(members) / cfg.num_minibatches)
    return [batch.select(sum(members[i : i + size], [])) for i in range(0, len(members), size)]


def update(policy: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, cfg: TrainConfig, step: int) -> dict:
    """num_iterations passes of num_minibatches optimizer updates. Returns metrics, the same on every rank."""
    total, norms = defaultdict(float), []
    parts = [batch] if cfg.num_minibatches == 1 else minibatches(batch, cfg)
    number = step * cfg.num_iterations * cfg.num_minibatches
    for part in parts * cfg.num_iterations:
        optimizer.zero_grad(set_to_none=True)
        for name, value in accumulate_gradients(policy, part, cfg).items():
            total[name] = total[name] + value
        norms.append(clip_gradients(policy, cfg.max_grad_norm))
        if not math.isfinite(norms[-1]):
            raise RuntimeError(
                f"step {step}: the gradient norm is {norms[-1]}, so no update was made. Look at the rewards and at "
                "sampling/logprob_diff_mean of the last steps; lower --learning_rate, or --compute_dtype float32."
            )
        for group in optimizer.param_groups:
            group["lr"] = lr_at(number, cfg)
        optimizer.step()
        number += 1
    optimizer.zero_grad(set_to_none=True)
    names = sorted(total)
    sums = dict(zip(names, utils.all_sum(torch.stack([total[name] for name in names])).tolist(), strict=True))
    tokens, loss = max(sums.pop("tokens"), 1.0), sums.pop("loss") / len(norms)
    metrics = {name: value / tokens for name, value in sums.items()}
    return metrics | {"loss": loss, "grad_norm": sum(norms) / len(norms), "lr": optimizer.param_groups[0]["lr"]}


# ==== 8 evaluation ===================================================================================================


def evaluate(rows: list[dict], generator, reward_functions: dict, cfg: TrainConfig) -> dict:
    """k completions of every held-out row: eval/reward, eval/mean@k (share solved), eval/pass@k (rows with one solved).

    A completion counts as solved if its score reaches --eval_solved. Rows are divided over the ranks; none is dropped.
    """
    rank, world = torch.distributed.get_rank(), utils.world_size()
    k = cfg.eval_generations
    eval_cfg = replace(cfg, num_generations=k, temperature=cfg.eval_temperature)
    share = rows[rank::world]
    mine = asyncio.run(rollout(share, generator, reward_functions, eval_cfg))[0] if share else []
    scores = torch.tensor([sum(t.token_rewards) for t in mine]).view(-1, k)  # [rows of this rank, k]
    solved = (scores >= cfg.eval_solved).double()
    length = torch.tensor([float(len(t.token_ids)) for t in mine]).sum()
    sums = [scores.sum(), solved.sum(), solved.any(1).sum(), length, torch.tensor(float(scores.numel()))]
    reward, right, any_right, length, count = utils.all_sum(torch.stack([s.double() for s in sums])).tolist()
    metrics = {"eval/reward": reward / count, f"eval/mean@{k}": right / count, f"eval/pass@{k}": any_right * k / count}
    return metrics | {"eval/mean_length": length / count, "eval/rows": int(count / k)}


# ==== 9 train() ======================================================================================================


def load_data(cfg: TrainConfig, tokenizer) -> tuple[list[dict], list[dict]]:
    """Training rows and held-out rows (empty without evaluation), over-long prompts left out and counted."""
    rows, held_out = [], []
    options = dict(apply_chat_template=not cfg.no_apply_chat_template, system_prompt=cfg.system_prompt)
    sources = [] if cfg.eval_only else [(rows, cfg.dataset_id, cfg.dataset_split)]
    if cfg.eval_only or cfg.eval_steps:
        if not cfg.eval_dataset_id and Path(cfg.dataset_id).suffix in data.FILE_TYPES:
            raise ConfigError(f"{cfg.dataset_id} has no splits: name the held-out rows' file with --eval_dataset_id.")
        sources.append((held_out, cfg.eval_dataset_id or cfg.dataset_id, cfg.eval_split))
    for target, dataset_id, split in sources:
        loaded = data.load_rows(dataset_id, cfg.dataset_config, split, cfg.seed, format_row)
        kept, dropped = data.filter_overlong(loaded, tokenizer, cfg.max_prompt_length, **options)
        target += kept
        if utils.is_main():
            print(f"{dataset_id} [{split}]: {len(kept)} rows" + (f", {dropped} over-long left out" if dropped else ""))
    return rows, held_out


def describe(cfg: TrainConfig, policy: nn.Module, num_rows: int, world: int) -> None:
    """What follows from the settings, as a table."""
    trained, total = (sum(p.numel() for p in policy.parameters() if p.requires_grad or not t) for t in (True, False))
    lines = {
        "prompts x generations": f"{cfg.prompts_per_step} x {cfg.num_generations} = {cfg.sequences_per_step} per step, "
        f"{cfg.sequences_per_step // world} on each of {world} rank(s)",
        "optimizer updates": f"{cfg.num_iterations} x {cfg.num_minibatches} per step, {cfg.max_steps} steps",
        "data": f"{num_rows} prompts, {cfg.max_steps * cfg.prompts_per_step / max(num_rows, 1):.2f} epochs",
        "parameters": f"{trained / 1e6:.1f} M trained of {total / 1e6:.1f} M on this rank, {cfg.strategy}",
        "algorithm": f"{cfg.advantage} / {cfg.policy_loss} / {cfg.loss_agg}, beta {cfg.beta}",
    }
    if cfg.preset:
        lines[f"preset {cfg.preset}"] = ", ".join(f"{k} {v}" for k, v in PRESETS[cfg.preset].items())
    for name, text in lines.items():
        print(f"  {name:<22} {text}")
    if cfg.num_iterations * cfg.num_minibatches == 1 and cfg.beta == 0:
        print("  One update per step and beta 0: the ratio is 1 and the loss 0 by construction. Watch the reward.")


@contextlib.contextmanager
def clock(metrics: dict, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    metrics[f"time/{name}"] = time.perf_counter() - start


def setup(cfg: TrainConfig) -> tuple[TrainConfig, dict, object, list, list]:
    """Everything that can be wrong before a process group, a GPU or a server is touched."""
    from transformers import AutoTokenizer

    registries = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "kl": KL_ESTIMATORS, "rollout": ROLLOUTS}
    for name, known in registries.items():
        known_name(f"--{name}", getattr(cfg, name), known)
    utils.check_model_id(cfg.model_id)
    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.model_id)
    except OSError as error:
        raise ValueError(f"--model_id={cfg.model_id}: no such folder, and not found on the hub ({error})") from error
    rows, held_out = load_data(cfg, tokenizer)
    reward_functions = get_reward_functions(cfg, columns=(rows or held_out)[0])
    if cfg.max_steps is None:
        cfg = replace(cfg, max_steps=max(1, int(cfg.num_epochs * len(rows)) // cfg.prompts_per_step))
    return cfg, reward_functions, tokenizer, rows, held_out


def train(cfg: TrainConfig) -> dict:
    """The loop. Returns the last evaluation's metrics (empty without evaluation)."""
    cfg, reward_functions, tokenizer, rows, held_out = setup(cfg)
    rank, world, device = utils.init_distributed(cfg.dist_timeout)
    cfg = replace(cfg, run_name=utils.gather_objects(name_run(cfg))[0])
    run_dir = Path(cfg.output_dir) / cfg.run_name
    start, tokens_seen = utils.last_step(run_dir) if cfg.resume else 0, 0
    log = RunLog(cfg, start if cfg.resume else None, cfg.max_steps) if rank == 0 else None
    policy, inner = load_policy(cfg, device)
    reference = load_reference(cfg, device)
    if cfg.shared_prefix and (reason := why_not_shared(inner.hf_model, cfg)):
        cfg = replace(cfg, shared_prefix=False)
        if rank == 0:
            print(f"Prompts are computed once per completion, not once per group: {reason}.")
    trained = [p for p in policy.parameters() if p.requires_grad]
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    optimizer = torch.optim.AdamW(trained, lr=cfg.learning_rate, betas=betas, weight_decay=cfg.weight_decay, fused=True)
    generator = make_generator(cfg, inner.hf_model, tokenizer, device)

    if cfg.resume:
        tokens_seen = utils.load_checkpoint(run_dir, start, policy, optimizer)["num_tokens"]
    if rank == 0:
        describe(cfg, policy, len(rows), world)
    utils.push_weights(policy, generator, start, cfg.push_bucket_mb)

    def seed_generator(step: int, stream: int) -> None:
        if cfg.generator == "hf":  # a function of the step: a resumed run samples what the uninterrupted one did
            generator.seed(cfg.seed + 1_000_003 * (2 * step + stream + 1) + rank)

    def evaluation(step: int) -> dict:
        seed_generator(step, 1)
        metrics = evaluate(held_out, generator, reward_functions, cfg)
        if log:
            log.eval(step, metrics)
        return metrics

    def save(step: int) -> None:
        state = {"num_tokens": tokens_seen}
        utils.save_checkpoint(run_dir, step, policy, optimizer, inner.hf_model, tokenizer, state, cfg.save_total_limit)

    last_eval = evaluation(start) if cfg.eval_only or (cfg.eval_steps and start == 0) else {}
    if cfg.eval_only:
        cfg = replace(cfg, max_steps=start)
    else:
        sampler = data.PromptSampler(len(rows), cfg.prompts_per_step, cfg.seed, rank, world)

    for step in range(start, cfg.max_steps):
        metrics: dict[str, float] = {}
        with clock(metrics, "step"):
            seed_generator(step, 0)
            prompts = [rows[i] for i in sampler.next(step)]
            trajectories, seconds = asyncio.run(rollout(prompts, generator, reward_functions, cfg))
            check_fresh(trajectories, step)
            batch = collate(trajectories, tokenizer.pad_token_id or 0, device, group_offset=rank * len(prompts))
            with clock(metrics, "logprobs"):
                if cfg.num_iterations * cfg.num_minibatches > 1:  # else the ratio is 1 by construction
                    batch.old_logprobs = all_logprobs(policy, batch, cfg)
                if cfg.beta > 0:
                    batch.ref_logprobs = reference_logprobs(reference, policy, inner, batch, cfg)
            batch.advantages = ADVANTAGES[cfg.advantage](batch, cfg)
            with clock(metrics, "update"):
                metrics |= update(policy, optimizer, batch, cfg, step)
            if step == start:
                check_agreement(metrics["sampling/logprob_diff_mean"], cfg)
            with clock(metrics, "push"):
                utils.push_weights(policy, generator, step + 1, cfg.push_bucket_mb)
        metrics |= seconds | rollout_metrics(trajectories, batch)
        tokens_seen += metrics["num_tokens"]
        metrics["num_tokens"] = tokens_seen
        done = step + 1 == cfg.max_steps
        if log and ((step + 1) % cfg.log_steps == 0 or done):
            log.step(step + 1, metrics)
            log_completions(log, trajectories, batch, step + 1, cfg)
        if cfg.eval_steps and ((step + 1) % cfg.eval_steps == 0 or done):  # before saving, so that a resume has it
            last_eval = evaluation(step + 1)
        if cfg.save_steps and (step + 1) % cfg.save_steps == 0 or done:
            save(step + 1)

    generator.close()
    if log:
        log.close()
        if cfg.push_to_hub:
            utils.push_to_hub(run_dir, cfg.max_steps, cfg.hub_repo_id, cfg.hub_private)
    return last_eval


def reference_logprobs(reference, policy, inner: Policy, batch: Batch, cfg: TrainConfig) -> Tensor:
    """Log-probs of the frozen start: its own model, or the policy with its adapters switched off.  [B, T]"""
    if reference is not None:
        return all_logprobs(reference, batch, cfg)
    with inner.model.disable_adapter():
        return all_logprobs(policy, batch, cfg)


def check_fresh(trajectories: list[Trajectory], version: int) -> None:
    stale = [t.policy_version for t in trajectories if t.policy_version != version]
    if stale:
        raise RuntimeError(
            f"{len(stale)} of {len(trajectories)} completions come from weights {stale[0]}, not {version}. Does "
            "another trainer push to the same server? Give each run a server of its own."
        )


def check_agreement(difference: float, cfg: TrainConfig) -> None:
    if difference > cfg.logprob_diff_limit:
        raise RuntimeError(
            f"Trainer and sampler disagree on the sampled tokens: mean |log-prob difference| {difference:.3f}, limit "
            f"{cfg.logprob_diff_limit}. Usual causes: another model on the server, a quantised server, top-k / top-p "
            "sampling, a modified model class. --logprob_diff_limit raises the limit."
        )


def log_completions(log: RunLog, trajectories: list[Trajectory], batch: Batch, step: int, cfg: TrainConfig) -> None:
    """This rank's completions with rewards and advantages: to completions/*.parquet, now and then to the terminal."""
    count = batch.loss_mask.sum(1).clamp(min=1)
    advantages, scores = (batch.advantages.sum(1) / count).tolist(), batch.scores.tolist()
    rows = []
    for t, advantage, reward in zip(trajectories, advantages, scores, strict=True):
        row = {"prompt": t.row["prompt"], "completion": t.info["completion"]}
        row |= {"reward": reward, "advantage": advantage, "finish_reason": t.finish_reason}
        rows.append(row | {f"rewards/{name}": value for name, value in t.info["rewards"].items()})
    if cfg.log_completions:
        log.completions(step, rows)
    if cfg.print_samples_every and (step - 1) % cfg.print_samples_every == 0:
        log.sample(step, rows[0])


# ==== main ===========================================================================================================


def main(cfg: TrainConfig) -> None:
    """Train, and end the process for good: no rank, thread or process group keeps a failed run alive."""
    utils.explain_sigterm()
    status = 1
    try:
        train(cfg)
        status = 0
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        utils.print_failure(error, cfg)
    finally:
        utils.end_process(status, close_all)


if __name__ == "__main__":
    main(CONFIG)
