"""How far apart trainer and generator are on the sampled tokens, and which of these are left out for it."""

from torch import Tensor

from batch import Batch, row_mean
from config import TrainConfig


def mismatch(trainer: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, Tensor]:
    """The trainer's minus the generator's log-probs, and the ratio of probabilities per token or per sequence.  [B, T]
    each"""
    d = (trainer - batch.sampling_logprobs) * batch.loss_mask
    d = d.nan_to_num().clamp(-20, 20)  # nan: not sampled (demonstrations)
    by_row = d.sum(1, keepdim=True).clamp(-20, 20).expand_as(d)
    return d, (by_row if cfg.correction == "sequence" else d).exp()


def mismatch_statistics(logprobs: Tensor, weights: Tensor, batch: Batch, cfg: TrainConfig) -> dict[str, Tensor]:
    """Statistics of how far apart trainer and generator are; weights: those of `correction`.  [B, T] each"""
    old_from_generator = cfg.old_logprobs in ("sampler", "interpolate")  # then pi_old is not the trainer's
    d, w = mismatch(logprobs.detach() if old_from_generator else batch.old_logprobs, batch, cfg)
    outside = (w < cfg.correction_min) | (w > cfg.correction_max)
    stats = {"logprob_diff_mean": d.abs(), "logprob_diff_max": d.abs(), "kl": d.exp() - d - 1}
    stats |= {"ratio_mean": w, "ratio_max": w, "ratio_squared": w**2, "ratio_outside": outside.float()}
    stats["left_out"] = (weights == 0).float()
    return {f"sampling/{name}": value for name, value in stats.items()}


def not_rejected(d: Tensor, logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> Tensor:
    """Which tokens or completions are not left out.  [B, T] or [B, 1], bool

    --reject_by: with d = log trainer / generator, a value within the bounds is kept: k1 = e^d, k2 = d^2 / 2 or
    k3 = e^d - 1 - d. It is taken per token, or per completion as the mean or the sum (of d for k1), or as the largest
    value (for k1 the smallest, too).
    --off_policy_threshold (DeepSeek-V3.2): without tokens with A < 0 of completions that drifted further, in mean nats
    per token.
    """
    mask, (level, _, name) = batch.loss_mask, cfg.reject_by.rpartition("_")
    values = {"k1": d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[name] * mask
    values = {"seq_mean": row_mean(values, mask), "seq_sum": values.sum(1, keepdim=True)}.get(level, values)
    values = values.exp() if name == "k1" else values
    keep = (values >= cfg.reject_bounds[0]) & (values <= cfg.reject_bounds[1])
    keep = (keep | (mask == 0)).all(1, keepdim=True) if level == "seq_max" else keep
    if cfg.off_policy_threshold is not None:
        drift = row_mean((batch.sampling_logprobs - logprobs.detach()).nan_to_num(), mask)  # [B, 1]
        keep = keep & ((batch.advantages >= 0) | (drift <= cfg.off_policy_threshold))
    return keep
