"""PPO with a critic, on top of train_grpo.py: same server, rewards, checkpoints and resume.

    CUDA_VISIBLE_DEVICES=0 python vllm_server.py --model Qwen/Qwen2.5-1.5B-Instruct
    CUDA_VISIBLE_DEVICES=1,2,3,4 torchrun --nproc_per_node=4 train_ppo.py --model_id Qwen/Qwen2.5-1.5B-Instruct

A second model with one output, the critic, estimates at every sampled token the reward of the rest of the completion;
the advantage is the reward beyond that estimate. Each step updates the critic, then the policy, on the same
trajectories:

    values -> returns and advantages (GAE) -> critic update -> policy update, after --critic_warmup steps

Schulman et al., "Proximal policy optimization algorithms", 1707.06347. One completion per prompt is enough. To use it
with a copy of train_grpo.py, copy this file as well, and replace `train_grpo` in it by the copy's name.
"""

# ruff: noqa: E402 - the command line is parsed before torch is imported, so that a wrong flag is reported at once

from config import LossAgg, knobs_of, parse_args


class TrainConfig(knobs_of("train_grpo")):  # includes any knobs that you add there
    # --- batch ---
    prompts_per_step: int = 256  # distinct prompts per step, over all ranks
    num_generations: int = 1  # completions sampled per prompt; the critic stands in for the group

    # --- algorithm ---
    advantage: str = "gae"  # name in ADVANTAGES (train_grpo.py, and gae here)
    lam: float = 1.0  # GAE's lambda
    loss_agg: LossAgg = "token_mean"  # weights of tokens
    beta: float = 0.001  # weight of the KL term; 0 loads no reference model
    kl: str = "k1"  # name in KL_ESTIMATORS (train_grpo.py)
    kl_in_reward: bool = True  # subtract beta * KL from each token's reward instead of adding it to the loss

    # --- critic ---
    critic_model_id: str | None = None  # hub id or folder the critic starts from; unset: model_id
    critic_learning_rate: float = 1e-5  # peak learning rate of the critic's AdamW
    critic_warmup: int = 0  # steps that train the critic only
    critic_iterations: int = 1  # passes over the step's completions for the critic
    value_clip: float = 0.5  # how far a value may move from its value before the step's updates


CONFIG = parse_args(TrainConfig, description=__doc__.split("\n")[0]) if __name__ == "__main__" else None

import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

import train_grpo
import utils
from algorithms import optimizers, teachers
from config import ConfigError
from inputs.processor import load_config
from modeling.model import backbone
from modeling.parameters import unwrapped
from runlog.log import clock
from train_grpo import ADVANTAGES, Batch, Policy, all_logprobs, compute_logprobs, make_optimizer, whiten


def gae_returns(batch: Batch, cfg: TrainConfig) -> tuple[Tensor, Tensor]:
    """Advantages A = delta + gamma lam A', delta = r + gamma V' - V, and returns A + V.  1506.02438 eq. 11-16.

    ' means the next *sampled* token: text of tools and environments (mask 0) passes V' and A' through, so that a reward
    after an observation reaches the turns before it.  [B, T], [B, T], 0 where nothing was sampled
    """
    advantages, next_value, next_advantage = torch.zeros_like(batch.rewards), 0.0, 0.0
    for t in reversed(range(batch.rewards.shape[1])):
        sampled, reward, value = batch.loss_mask[:, t] > 0, batch.rewards[:, t], batch.values[:, t]
        delta = reward + cfg.gamma * next_value - value
        advantage = delta + cfg.gamma * cfg.lam * next_advantage
        advantages[:, t] = advantage
        # A place that was not sampled has no value: a reward there counts as part of what follows, and so reaches the
        # sampled token before it.
        next_value = torch.where(sampled, value, next_value + reward)
        next_advantage = torch.where(sampled, advantage, next_advantage)
    return advantages * batch.loss_mask, (advantages + batch.values) * batch.loss_mask


def gae(batch: Batch, cfg: TrainConfig) -> Tensor:
    """Generalised advantage estimates, whitened over the step's tokens on all ranks.  [B, T]"""
    return whiten(gae_returns(batch, cfg)[0], batch.loss_mask)


gae.compares_group = False
WITHOUT_CRITIC = {*ADVANTAGES}  # all of train_grpo.py
ADVANTAGES["gae"] = gae


def value_loss(values: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 per token.  [B, T]"""
    clipped_values = batch.values + (values - batch.values).clamp(-cfg.value_clip, cfg.value_clip)
    loss, clipped_loss = (values - batch.returns) ** 2, (clipped_values - batch.returns) ** 2
    return torch.max(loss, clipped_loss) / 2, {"value/clip_ratio": (clipped_loss > loss).float(), "value/mean": values}


class ValueHead(nn.Linear):
    """One number per position, initially 0. In float32, since bfloat16 could not tell .70 from .7025."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n]"""
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]


class Critic(Policy):
    """The backbone of a causal LM with one number per position instead of logits, initially 0 everywhere."""

    replays = reads_head = False

    def __init__(self, model: nn.Module, cfg: TrainConfig, autocast: bool):
        super().__init__(model, cfg, autocast)
        self.chunk = sys.maxsize  # no chunks: there are no logits, and FSDP needs equally many calls on all ranks
        self.value = ValueHead(model.config.get_text_config().hidden_size, 1)
        used = set(backbone(self.hf_model).parameters())
        for parameter in set(self.hf_model.parameters()) - used:  # the output layer's: DDP would wait for gradients
            parameter.requires_grad_(False)

    def head(self, hidden: Tensor, *_) -> dict[str, Tensor]:
        """[n, H] -> [n]"""
        return {"values": self.value(hidden)}


class CriticTrainer:
    """The critic with its optimizer, for `train_grpo.train`."""

    @staticmethod
    def check(cfg: TrainConfig, processor) -> None:
        """ConfigError, before any model is loaded, for a critic that is not used or has another vocabulary."""
        if cfg.advantage in WITHOUT_CRITIC:
            remedy = "use train_grpo.py, or --advantage gae"
            raise ConfigError(f"--advantage {cfg.advantage} reads no values of a critic (batch.values); {remedy}.")
        if cfg.strategy == "fsdp" and cfg.dtype != "float32":  # the value head is in float32
            raise ConfigError(f"--strategy fsdp --dtype {cfg.dtype}: its shards have one dtype; use fsdp2, or float32.")
        if cfg.critic_model_id:
            tokenizer = getattr(processor, "tokenizer", processor)
            teachers.check_reads_alike(tokenizer, cfg, "--critic_model_id", "leave the flag out")

    def __init__(self, cfg: TrainConfig, device: torch.device):
        critic_cfg = replace(cfg, model_id=cfg.critic_model_id or cfg.model_id)
        self.module = train_grpo.load_policy(critic_cfg, device, Critic)
        # Packed rows have been tried with the policy's family alone (modeling/agreement.py).
        kind = unwrapped(self.module).hf_model.config.model_type
        self.shares = cfg.critic_model_id is None or load_config(cfg.model_id).model_type == kind
        self.optimizer = optimizers.check_optimizer(make_optimizer(self.module, critic_cfg), self.module)

    def learn(self, batch: Batch, cfg: TrainConfig, step: int) -> dict:
        """Fill in batch.values and batch.returns, and update the critic towards the returns. Returns metrics."""
        metrics: dict[str, float] = {}
        cfg = replace(cfg, shared_prefix=cfg.shared_prefix and self.shares)
        with clock(metrics, "critic"):
            batch.values = all_logprobs(self.module, batch, cfg)["values"]
            _, batch.returns = gae_returns(batch, cfg)
            mask = batch.loss_mask
            _, mean, spread = utils.global_moments(batch.returns, mask)
            errors = utils.global_moments(batch.returns - batch.values, mask)[2]
            if spread > 1e-3 * max(abs(mean), errors):  # else there is nothing to explain
                metrics["value/explained_variance"] = float(1 - (errors / spread) ** 2)
            overrides = dict(learning_rate=cfg.critic_learning_rate, num_iterations=cfg.critic_iterations)
            critic_cfg = replace(cfg, loss_agg="token_mean", **overrides)
            batch = replace(batch, teacher_top=None)  # whose log-probs are the policy's to give
            update = train_grpo.update(self.module, self.optimizer, batch, critic_cfg, step, critic_loss)
        return metrics | {f"value/{name.removeprefix('value/')}": value for name, value in update.items()}


def critic_loss(critic: nn.Module, part: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """This micro-batch's share of the critic's loss, and statistics as per-token matrices [B, T]."""
    values = compute_logprobs(critic, part, cfg)["values"]  # [B, T]
    per_token, stats = value_loss(values, part, cfg)
    return (part.weights * per_token).sum(), stats


if __name__ == "__main__":
    train_grpo.main(CONFIG, CriticTrainer)
