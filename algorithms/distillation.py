"""On-policy distillation: the policy samples, and a teacher gives the log-probability of each sampled token.

The policy learns from these as an advantage (`distill`) or, with the teacher's likeliest tokens, as a term added to the
loss (`divergence`). Where no teacher was asked (a domain without one, a demonstration) both are 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

import utils
from batch import Batch, normalize, spread
from config import ConfigError, TrainConfig

FAR = 3.0  # nats: the teacher gives a token less than a twentieth of what the policy does
NOTHING = -1e4  # a log-prob of probability 0; unlike with -inf, 0 times it is not nan


def gap(batch: Batch) -> Tensor:
    """log p_teacher - log p_policy of sampled tokens, 0 elsewhere; its mean is minus the reverse KL.  [B, T]"""
    if batch.teacher_logprobs is None:
        return torch.zeros_like(batch.loss_mask)
    policy = batch.sampling_logprobs if batch.old_logprobs is None else batch.old_logprobs
    difference = batch.teacher_logprobs - policy
    return difference.where((batch.loss_mask > 0) & ~difference.isnan(), 0)


def rewards_count(cfg: TrainConfig) -> bool:
    return set(cfg.reward_funcs) != {"zero"} and any(cfg.reward_weights or [1.0])


def about_place(values: Tensor, mask: Tensor) -> Tensor:
    """Values minus the mean of the step's other tokens (0 if there are none) at the same place of their completions.
    The mean leaves the token itself out, as it would take away a part of its gradient. Collective.  [B, T]"""
    place = (mask.cumsum(1) * mask).long()  # [B, T] 1, 2, ... on sampled tokens; 0 elsewhere
    last_place = utils.all_max(int(place.max()))
    place = place.clamp(max=last_place)  # a stand-in may be longer than the domain's rows
    sums = values.new_zeros(2, last_place + 1, dtype=torch.float64)
    sums[0].scatter_add_(0, place.flatten(), (values * mask).flatten().double())
    sums[1].scatter_add_(0, place.flatten(), mask.flatten().double())
    total, count = utils.all_sum(sums)
    mean_of_others = (total[place] - values.double()) / (count[place] - 1).clamp(min=1)
    return (values - mean_of_others.to(values)) * mask


def distill(batch: Batch, cfg: TrainConfig) -> Tensor:
    """grpo's advantage + distill_coef * R_t, R_t = log p_teacher - log p_policy at token t, within 20 nats: the sampled
    reverse KL. With all rewards 0 it is pure distillation.

    K. Lu, Thinking Machines, "On-Policy Distillation", Oct. 2025. An addition to it is --distill_baseline place: R_t
    minus the mean of the step's other tokens at place t. The expected gradient is the same, but far from the teacher,
    where every token's gap is negative, most of the noise is gone.  [B, T]
    """
    teacher_gap = gap(batch).clamp(-20, 20)
    rewarded = spread(normalize(batch.shaped_scores, batch.groups, "group", cfg.scale_rewards), batch.loss_mask)
    if cfg.distill_baseline == "place":
        mask = batch.loss_mask if batch.teacher_logprobs is None else batch.loss_mask * ~batch.teacher_logprobs.isnan()
        teacher_gap = about_place(teacher_gap, mask)
    return rewarded + cfg.distill_coef * teacher_gap


distill.needs = ("teacher_logprobs",)
# Where no reward counts, one completion per prompt is enough.
distill.compares_group = rewards_count


def with_rest(logprobs: Tensor, is_top: Tensor) -> Tensor:
    """Log-probs of k tokens, followed by that of all other tokens together.  [..., k], [..., k] -> [..., k + 1]"""
    logprobs = logprobs.masked_fill(~is_top, NOTHING)
    mass = logprobs.exp().sum(-1, keepdim=True)
    excess = (mass.detach() - (1 - 1e-6)).clamp(min=0)  # rounding can make the mass 1 or more; it keeps its gradient
    return torch.cat([logprobs, torch.log1p(excess - mass)], -1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probs [..., n].  [...]"""
    return (p.exp() * (p - q)).sum(-1)


def divergence(part: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """Distance of teacher T and policy S over the teacher's k likeliest tokens, with all others as one more token; and
    statistics. Its gradient covers all k tokens, not only the sampled one.  [B, T]

    b = --distill_jsd: KL(T || S) at 0, KL(S || T) at 1, between them GKD's b KL(T || M) + (1 - b) KL(S || M) with
    M = b T + (1 - b) S.  2306.13649 eq. 1 and sec. 3
    """
    is_top, b = part.teacher_top_logprobs > -math.inf, cfg.distill_jsd
    teacher, policy = with_rest(part.teacher_top_logprobs, is_top), with_rest(part.top_logprobs, is_top)
    if b == 0:
        term = kl(teacher, policy)
    elif b == 1:
        term = kl(policy, teacher)
    else:
        mixed = torch.logaddexp(teacher + math.log(b), policy + math.log(1 - b))
        term = b * kl(teacher, mixed) + (1 - b) * kl(policy, mixed)
    covered = part.top_logprobs.detach().exp().where(is_top, 0).sum(-1)
    return term, {"distill/divergence": term, "distill/policy_mass": covered}


@torch.no_grad()
def distill_metrics(batch: Batch) -> dict[str, float]:
    """How far apart teacher and policy are on the tokens that the teacher scored, over all ranks. Collective."""
    gaps = batch.teacher_logprobs - batch.sampling_logprobs
    scored = ((batch.loss_mask > 0) & gaps.isfinite()).float()
    first = scored * (scored.cumsum(1) == 1)
    means = {"reverse_kl": (-gaps, scored), "far_below": ((gaps < -FAR).float(), scored)}
    means |= {"first_gap": (gaps, first), "asked": (scored, batch.loss_mask)}
    if batch.teacher_top is not None:
        top = batch.teacher_top_logprobs.exp()
        in_top = ((batch.teacher_top == batch.input_ids[..., None]) & (top > 0)).any(-1)
        means |= {"top_mass": (top.sum(-1), scored), "outside_top": ((~in_top).float(), scored)}
    return {f"distill/{name}": float(utils.global_mean(*values)) for name, values in means.items()}


def check_teacher(functions: dict[str, Callable], cfg: TrainConfig) -> None:
    """ConfigError if something needs a teacher and there is none, or nothing learns from the teacher."""
    flags = [flag for flag, function in functions.items() if "teacher_logprobs" in getattr(function, "needs", ())]
    tops = [flag for flag, function in functions.items() if "teacher_top" in getattr(function, "needs", ())]
    uses = [*flags, *tops, *([f"--distill_topk {cfg.distill_topk}"] if cfg.distill_topk else [])]
    if uses and not cfg.has_teacher:
        raise ConfigError(f"{uses[0]}: there is no teacher; give --teacher_urls, --teacher_id or --teacher_prompt.")
    if tops and not cfg.distill_topk:
        raise ConfigError(f"{tops[0]} reads batch.teacher_top, which needs --distill_topk K; add --distill_topk 20.")
    if cfg.has_teacher and not uses and cfg.distill_coef:
        remedy = "add --advantage distill or --distill_topk 20, or --distill_coef 0"
        raise ConfigError(f"nothing learns from the teacher: {remedy}.")
