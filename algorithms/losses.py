"""Published policy losses beyond those in train_grpo.py: (logprobs, batch, cfg) -> loss per token, statistics.

All are [B, T]. What a function needs is set right below it; see the beginning of section 5 in train_grpo.py.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import utils
from algorithms.advantages import largest
from batch import Batch, clip_stats, clipped_surrogate, log_ratio, row_mean, sequence_ratio
from config import TrainConfig


def has_no_ratio(cfg: TrainConfig) -> str | None:
    """For losses that read no old log-probs."""
    if cfg.old_logprobs == "sampler":
        return "it has no ratio to put them into; leave out --old_logprobs sampler"
    return None


def cispo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-sg(clip(ratio)) A log pi: the weight is clipped, every token keeps its gradient.  2506.13585 eq. 4.  [B, T]"""
    ratio, low, high = log_ratio(logprobs, batch).exp().detach(), 1 - cfg.epsilon, 1 + cfg.epsilon_high
    return -ratio.clamp(low, high) * batch.advantages * logprobs, clip_stats(ratio < low, ratio > high)


def luspo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """gspo times the completion's length, so that under seq_mean long ones are not favoured.  2602.05261.  [B, T]"""
    loss, stats = clipped_surrogate(sequence_ratio(logprobs, batch), batch, cfg)
    return loss * batch.loss_mask.sum(1, keepdim=True), stats


def gmpo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """Geometric mean of the ratios, each clipped in log space on the side of its advantage's sign: -epsilon,
    epsilon_high (.4 each in the paper). In token form, like gspo: the value is the row's, the gradient each token's
    own, with its own advantage, and 0 where the clip binds.  2507.20673.  [B, T]"""
    d, sign = log_ratio(logprobs, batch), batch.advantages.sign()
    clipped = sign * torch.min(sign * d, sign * d.clamp(-cfg.epsilon, cfg.epsilon_high))
    low, high = (d < -cfg.epsilon) & (sign < 0), (d > cfg.epsilon_high) & (sign > 0)
    mean = row_mean(clipped, batch.loss_mask).detach()  # [B, 1]
    return -batch.advantages * (clipped - clipped.detach() + mean).exp(), clip_stats(low, high)


def sapo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-A sigmoid(tau (ratio - 1)) 4 / tau: a soft gate for the clip; gradient A at ratio 1.  2511.20347.  [B, T]"""
    tau = torch.where(batch.advantages > 0, cfg.sapo_tau_pos, cfg.sapo_tau_neg)
    gate = torch.sigmoid(tau * (log_ratio(logprobs, batch).exp() - 1)) * 4 / tau
    return -batch.advantages * gate, {}


def tis(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-sg(min(ratio, 1)) A log pi: truncated importance sampling.  [B, T]"""
    return -log_ratio(logprobs, batch).exp().clamp(max=1).detach() * batch.advantages * logprobs, {}


def luffy(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """ppo, but -A p / (p + .1) on demonstrations (nan in sampling_logprobs), where p = pi of the token: the weight does
    not vanish on tokens that the policy hardly ever samples.  2504.14945.  [B, T]"""
    loss, stats = clipped_surrogate(log_ratio(logprobs, batch).exp(), batch, cfg)
    if batch.sampling_logprobs is None:
        return loss, stats
    p = logprobs.exp()
    return torch.where(batch.sampling_logprobs.isnan(), -batch.advantages * p / (p + 0.1), loss), stats


def topr(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """Plain gradient for completions with a positive score, truncated weights for others.  2503.14286.  [B, T]"""
    good = batch.scores[:, None] > 0
    return torch.where(good, -batch.advantages * logprobs, tis(logprobs, batch, cfg)[0]), {}


def kimi(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """dro with the coefficient .1.  Kimi k1.5, 2501.12599.  [B, T]"""
    return dro(logprobs, batch, replace(cfg, dro_beta=0.1))


def dro(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-A log pi + beta / 2 log-ratio^2: direct reward optimisation.  2405.19107.  [B, T]"""
    return -batch.advantages * logprobs + cfg.dro_beta / 2 * log_ratio(logprobs, batch) ** 2, {}


topr.check = kimi.check = dro.check = has_no_ratio


def vespo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-sg(phi(w)) A log pi, w the sequence's ratio, phi(w) = w^k exp(k' (1 - w)), k, k' = 2, 3 (A >= 0) or 3, 2.

    phi(1) = 1, and it fades to 0 on both sides.  2602.10693.  [B, T]
    """
    log_w = log_ratio(logprobs, batch).sum(1, keepdim=True).clamp(-18, 20).detach()  # [B, 1]
    k, fade = (torch.where(batch.advantages >= 0, *pair) for pair in ((2.0, 3.0), (3.0, 2.0)))
    return -(k * log_w + fade * (1 - log_w.exp())).exp() * batch.advantages * logprobs, {}


def dppo_tv(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-sg(min(ratio, 20)) A log pi while the token's probability moved by at most epsilon / epsilon_high in A's
    direction: divergence PPO, binary total variation.  2602.04879.  Plus dppo_tau log-ratio^2 on all tokens, whether
    they moved too far or not: with --old_logprobs sampler this is prime-rl's loss.  [B, T]"""
    moved = (logprobs.exp() - batch.old_logprobs.exp()).detach()
    return within_divergence(moved.abs(), moved, logprobs, batch, cfg)


def dppo_kl(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """dppo_tv with the KL divergence of "this token or another".  2602.04879.  [B, T]"""
    old, new = (x.detach().exp().clamp(1e-7, 1 - 1e-7) for x in (batch.old_logprobs, logprobs))
    divergence = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    return within_divergence(divergence, new - old, logprobs, batch, cfg)


def within_divergence(divergence: Tensor, moved: Tensor, logprobs, batch: Batch, cfg) -> tuple[Tensor, dict]:
    high = (batch.advantages > 0) & (moved > 0) & (divergence > cfg.epsilon_high)
    low = (batch.advantages <= 0) & (moved < 0) & (divergence > cfg.epsilon)
    d = log_ratio(logprobs, batch)
    weight = d.exp().clamp(max=20).detach() * ~(low | high)
    return -weight * batch.advantages * logprobs + cfg.dppo_tau * d**2, clip_stats(low, high)


# clip_cov and kl_cov (2505.22617) hold back the tokens that reduce the entropy most: those that contribute most to the
# covariance of advantage and log-prob. An example of four tokens; the mean of A is 0, that of log pi -1.05:
#
#     A         1     1    -1    -1
#     log pi  -0.1  -2.0  -0.1  -2.0     (the first and third were likely, the others rare)
#     share   +0.95 -0.95 -0.95 +0.95    = (A - 0) (log pi + 1.05)
#
# The first token is likely and becomes likelier, the last is rare and becomes rarer. Both sharpen the distribution, so
# both are held back. Tokens are chosen among all of the update on all ranks: a choice per micro-batch would depend on
# the number of micro-batches.


def covariance(batch: Batch) -> Tensor:
    """(A - mean A) (log pi - mean log pi) of each token; means over the update's tokens on all ranks.  [B, T]"""
    mask, logprobs = batch.loss_mask > 0, batch.current_logprobs
    means = [utils.global_moments(values, mask)[1] for values in (batch.advantages, logprobs)]
    return (batch.advantages - means[0]) * (logprobs - means[1])


def random_subset(candidates: Tensor, count: int, seed: int) -> Tensor:
    """`count` random ones of the candidates on all ranks; which ones does not depend on how the rows, in this order,
    are dealt to ranks.  [B, T] of bool"""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    count_of = dict(utils.gather_objects((rank, int(candidates.sum()))))
    order = torch.randperm(sum(count_of.values()), generator=torch.Generator().manual_seed(seed))
    offset = sum(number for peer, number in count_of.items() if peer < rank)
    is_drawn = torch.isin(offset + torch.arange(int(candidates.sum())), order[:count])
    return torch.zeros_like(candidates).masked_scatter(candidates, is_drawn.to(candidates.device))


@torch.no_grad()
def random_of_high_covariance(batch: Batch, cfg: TrainConfig) -> dict[str, Tensor]:
    """A random few of the tokens whose covariance is between clip_cov_min and clip_cov_max and which the ratio's clip
    does not silence already.  [B, T] of bool"""
    cov, ratio = covariance(batch), log_ratio(batch.current_logprobs, batch).exp()
    clipped = clipped_surrogate(ratio, batch, cfg)[1]["clip_ratio/region_mean"] > 0
    candidates = (batch.loss_mask > 0) & (cov > cfg.clip_cov_min) & (cov < cfg.clip_cov_max) & ~clipped
    count = int(cfg.clip_cov_ratio * utils.all_sum((batch.loss_mask > 0).sum()).item())
    return {"chosen": random_subset(candidates, max(count, 1), cfg.seed)}


@torch.no_grad()
def highest_covariance(batch: Batch, cfg: TrainConfig) -> dict[str, Tensor]:
    """The share kl_cov_ratio of the tokens, those with the highest covariance.  [B, T] of bool"""
    return {"chosen": largest(covariance(batch), batch.loss_mask, cfg.kl_cov_ratio)}


def chosen_by(prepare: Callable, logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> Tensor:
    """The tokens that `prepare` chose for the update. Without its extras the batch is the whole update: choose now."""
    extras = batch.extras if "chosen" in batch.extras else prepare(replace(batch, current_logprobs=logprobs), cfg)
    return extras["chosen"]


def clip_cov(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """ppo, but a random few of the tokens with high covariance get no gradient.  2505.22617.  [B, T]"""
    chosen = chosen_by(random_of_high_covariance, logprobs, batch, cfg)  # [B, T]
    loss, stats = clipped_surrogate(log_ratio(logprobs, batch).exp(), batch, cfg)
    return loss * ~chosen, stats | {"clip_ratio/cov": chosen.float()}


def kl_cov(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-A ratio + coef |log-ratio| on the tokens with the highest covariance. At ratio 1 the penalty has no gradient, so
    it needs several updates per step.  2505.22617.  [B, T]"""
    chosen = chosen_by(highest_covariance, logprobs, batch, cfg)  # [B, T]
    d = log_ratio(logprobs, batch)
    return -batch.advantages * d.exp() + cfg.kl_cov_coef * d.abs() * chosen, {"kl_cov/chosen": chosen.float()}


clip_cov.needs = kl_cov.needs = ("current_logprobs",)
clip_cov.prepare, kl_cov.prepare = random_of_high_covariance, highest_covariance


MORE_LOSSES = {
    "cispo": cispo, "luspo": luspo, "gmpo": gmpo, "sapo": sapo, "tis": tis, "topr": topr, "kimi": kimi, "dro": dro,
    "luffy": luffy, "vespo": vespo, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl, "clip_cov": clip_cov, "kl_cov": kl_cov,
}  # fmt: skip


# ---- KL(pi || ref) --------------------------------------------------------------------------------------------------


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """The value of `value` with the gradient of `gradient_of`."""
    return gradient_of - gradient_of.detach() + value.detach()


def k1_plus(logprobs: Tensor, ref: Tensor) -> Tensor:
    """x = log pi - log ref with the gradient of k2 = x^2 / 2, which is the KL's."""
    x = (logprobs - ref).clamp(-20, 20)
    return straight_through(x, x**2 / 2)


def k3_plus(logprobs: Tensor, ref: Tensor) -> Tensor:
    """e^-x - 1 + x with the gradient of k2."""
    x = (logprobs - ref).clamp(-20, 20)
    return straight_through((-x).exp() + x - 1, x**2 / 2)


MORE_KL = {"abs": lambda logprobs, ref: (logprobs - ref).clamp(-20, 20).abs(), "k1+": k1_plus, "k3+": k3_plus}
