"""A ragged batch, a small model, and the whole gradient of an update, under any sharding and on any rank."""

from dataclasses import replace

import torch

import train_grpo as script
from batch import GROUPS
from config import TrainConfig
from inputs.vision import Prompt
from modeling.agreement import check_policy
from rollouts import Trajectory

SETTINGS = {  # so that tokens are chosen in a batch as small as this
    "clip_cov": dict(clip_cov_ratio=0.2, clip_cov_min=0.0, clip_cov_max=9.0),
    "kl_cov": dict(kl_cov_ratio=0.2),
}
MODES = ("seq_mean", "seq_sum", "constant")
CPU = torch.device("cpu")


def trajectories() -> list[Trajectory]:
    """5 groups of one to five ragged rows: different prompts, lengths, an observation hole, a row without any loss
    token."""
    generator = torch.Generator().manual_seed(0)

    def ids(n):
        return torch.randint(10, 1000, (n,), generator=generator).tolist()

    out = []
    for group, size in enumerate((3, 5, 2, 1, 4)):
        prompt = ids(3 + 4 * group)
        for member in range(size):
            n = int(torch.randint(1, 12, (1,), generator=generator))
            mask = [0 if group == 1 and 1 <= t < 3 or group == 2 and member == 0 else 1 for t in range(n)]
            rewards = [0.0] * (n - 1) + [float((group + member) % 3)]
            out.append(Trajectory({}, group, prompt, ids(n), mask, [-m * 2.0 for m in mask], rewards))
    return out


def local_batch(rank: int, world: int, device: torch.device = CPU) -> script.Batch:
    """Whole groups per rank, unevenly: of two ranks the first has groups 0, 1, 2, the second 3, 4."""
    mine = [t for t in trajectories() if world == 1 or (t.group >= 3) == (rank == 1)]
    for trajectory in mine:
        trajectory.group -= 3 * rank  # each rank counts its own, and `collate` tells them apart
    batch = script.collate(mine, 0, device, rank)
    batch.advantages = script.dr_grpo(batch, TrainConfig())
    return batch


def full_gradients(policy) -> dict[str, torch.Tensor]:
    """Checkpoint name -> whole gradient of each trained parameter, on every rank and there on the CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    if isinstance(policy, FSDP):
        with FSDP.summon_full_params(policy, with_grads=True):
            named = [(n, p.grad) for n, p in policy.named_parameters() if p.requires_grad and p.grad is not None]
            return {script.clean_name(n): g.cpu().clone() for n, g in named}
    named = [(n, p.grad) for n, p in policy.named_parameters() if p.requires_grad and p.grad is not None]
    return {script.clean_name(n): script.full(g).cpu().clone() for n, g in named}


def settled(cfg: TrainConfig, policy, inner, given: list[Prompt] | None = None) -> TrainConfig:
    """As train_grpo.start leaves it: with plain rows where packed ones differ. given: prompts to try it with."""
    ids = list(range(20, 60))
    logprobs = lambda batch, cfg: script.all_logprobs(policy, batch, cfg)["logprobs"]  # noqa: E731
    return check_policy(inner, logprobs, given or [Prompt(ids, ids)], cfg, inner.hf_model.device)


def gradients(policy, batch, cfg, loss_of=script.micro_loss) -> dict[str, torch.Tensor]:
    script.unwrapped(policy).chunk = cfg.logprob_chunk
    policy.zero_grad()
    script.accumulate_gradients(policy, replace(batch), cfg, loss_of)
    return full_gradients(policy)


def small_llama(cfg, dtype, **_) -> torch.nn.Module:
    """Grouped-query attention, untied output layer, 1,000 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_hidden_layers=2, **shape)).to(dtype)


def wake_adapters(inner) -> None:
    """B starts at zero, which would leave A without gradient."""
    torch.manual_seed(1)
    for name, parameter in inner.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)


def load_awake(cfg: TrainConfig, device: torch.device):
    """The policy with adapters that are not zero: set before sharding, alike on every rank."""
    original = script.shard
    script.shard = lambda policy, *rest, **more: (wake_adapters(policy), original(policy, *rest, **more))[1]
    try:
        return script.load_policy(cfg, device)
    finally:
        script.shard = original


def relative_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    distance = sum((a[name] - b[name]).double().pow(2).sum() for name in a)
    return float((distance / sum(b[name].double().pow(2).sum() for name in b)).sqrt())


def all_gradients(base: TrainConfig, rank: int, world: int, device) -> dict[tuple, dict]:
    """{(loss, aggregation, cut): gradients by parameter}"""
    policy = load_awake(base, device)
    inner = script.unwrapped(policy)
    batch = local_batch(rank, world, device)
    logprobs = script.all_logprobs(policy, batch, base)["logprobs"]
    wave = torch.sin(batch.input_ids.float())
    batch.old_logprobs = (logprobs + 0.2 * wave) * batch.loss_mask
    batch.ref_logprobs = (logprobs - 0.3 * wave) * batch.loss_mask
    result = {}
    few = base.use_peft or base.strategy != "ddp"  # neither adapters nor shards change a loss
    losses = ("ppo", "gspo", "kl_cov") if few else sorted(script.POLICY_LOSSES)
    for loss, mode in [*((loss, "token_mean") for loss in losses), *(("ppo", mode) for mode in MODES)]:
        cfg = replace(base, policy_loss=loss, loss_agg=mode, **SETTINGS.get(loss, {}))
        cuts = {"many": replace(cfg, tokens_per_microbatch=40, logprob_chunk=4)}
        if world == 1:
            plain = replace(cfg, shared_prefix=False)
            cuts |= {"one": cfg, "plain rows": plain}
            cuts |= {"plain rows, many": replace(plain, tokens_per_microbatch=40)} if loss == "ppo" else {}
        for cut, cut_cfg in cuts.items():
            result[loss, mode, cut] = gradients(policy, batch, cut_cfg)
    # Groups without advantage, one on each rank: passes of their own, which have no backward pass, or one for all rows.
    number = batch.groups % GROUPS + 3 * rank
    speak = (number != 1) & (number != 3)
    batch = replace(batch, ref_logprobs=None, advantages=batch.advantages * speak[:, None])
    script.POLICY_LOSSES["foreign"] = foreign_loss
    for loss in [*losses, "foreign", "foreign term", "entropy", "teacher", "distill"]:
        cfg = replace(base, policy_loss=loss, beta=0.0, tokens_per_microbatch=40, **SETTINGS.get(loss, {}))
        if loss in ("foreign term", "entropy", "teacher", "distill"):
            cfg = replace(cfg, policy_loss="ppo", entropy_coef=0.1 * (loss == "entropy"))
        batch = taught(batch) if loss == "teacher" else batch
        batch = distilled(batch, asked=number % 2 == 0) if loss == "distill" else batch
        inner.entropy_gradient = cfg.entropy_coef != 0
        loss_of = with_foreign_term if loss == "foreign term" else script.micro_loss
        result[loss, "silent", "cut"] = gradients(policy, batch, cfg, loss_of)
        if world == 1:
            whole = replace(cfg, tokens_per_microbatch=100_000)
            result[loss, "silent", "one"] = gradients(policy, batch, whole, loss_of)
    return result


def taught(batch: script.Batch) -> script.Batch:
    """What a teacher might say: three likely tokens of each place; of some rows, nothing."""
    top = batch.input_ids[..., None] * torch.tensor([3, 7, 11], device=batch.input_ids.device) % 1000  # [B, T, 3]
    asked = (batch.input_ids[:, 3] % 3 > 0)[:, None, None]
    logprobs = torch.tensor([0.5, 0.3, 0.1], device=top.device).log().expand(top.shape).where(asked, -torch.inf)
    return replace(batch, teacher_top=top, teacher_top_logprobs=logprobs)


def distilled(batch: script.Batch, asked: torch.Tensor) -> script.Batch:
    """Advantages of rewards and of what a teacher says of the sampled tokens. asked: of which rows.  [B]"""
    said = -1 - (batch.input_ids % 7).float()  # [B, T]
    said = said.where(asked[:, None], torch.nan)
    batch = replace(batch, teacher_top=None, teacher_top_logprobs=None, teacher_logprobs=said)
    script.add_advantages(batch, TrainConfig(advantage="distill", distill_baseline="place"))
    return batch


def foreign_loss(logprobs, batch, cfg):
    """ppo, and likelihood of what was sampled: it has a gradient where the advantage is 0."""
    loss, stats = script.ppo(logprobs, batch, cfg)
    return loss - 0.1 * logprobs, stats


def with_foreign_term(policy, part, cfg):
    """A term beside the policy loss, as somebody may write who copies the script."""
    loss, stats = script.micro_loss(policy, part, cfg)
    logprobs = script.compute_logprobs(policy, part, cfg)["logprobs"]
    return loss - 0.1 * (part.weights * logprobs).sum(), stats
