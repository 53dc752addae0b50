"""Connects rollouts with teachers: who teaches a trajectory, after which prompt, and how its answer enters the batch.

The settings of the row's domain choose one of three teachers:

    --teacher_urls      servers: asked about each trajectory as it ends, in parallel with its rewards (`tell`)
    --teacher_id        a frozen model in this process: asked about the whole step (`add`)
    --teacher_prompt    without either of these: the policy itself, given more than it saw when it sampled

--teacher_prompt shows the teacher another prompt, followed by the tokens as they were sampled. It is a column of the
data set, or a function (trajectory) -> text or chat messages, rendered as prompts are. A function is called once the
trajectory has its rewards (`trajectory.info["rewards"]`); if it returns None, no teacher is asked for this trajectory.
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from algorithms import checks
from algorithms.distillation import distill_metrics, divergence
from batch import Batch, collate
from config import ConfigError, TrainConfig, function_path, known_name, load_function, shorten
from data import columns_of
from inputs.processor import load_config, load_processor, takes_images
from inputs.prompts import is_vision, prompt_ids
from inputs.trajectory import Trajectory, TrajectoryError
from inputs.vision import Prompt, vision_prompt
from modeling.parameters import unwrapped
from network import secrets
from safety.calls import run_limited
from safety.results import as_it_is, say_once
from serving.teacher import TeacherError, TeacherServers


def connect(cfg: TrainConfig, processor, rows: list[dict]) -> None:
    """ConfigError for a teacher that cannot teach this policy, before anything is trained. rows: the domain's."""
    if cfg.teacher_prompt and function_path(cfg.teacher_prompt):
        load_function(cfg.teacher_prompt)
    elif cfg.teacher_prompt:
        known_name("--teacher_prompt (a column, or file.py:function)", cfg.teacher_prompt, columns_of(rows) or ())
    tokenizer = getattr(processor, "tokenizer", processor)
    if cfg.teacher_id:
        check_reads_alike(tokenizer, cfg, "--teacher_id", "serve it (--teacher_urls), or train on its answers first")
    if cfg.teacher_urls:
        window = cfg.max_prompt_length + cfg.max_completion_length
        decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        say_once(f"waiting up to {cfg.server_timeout:g} s for the teacher at {', '.join(cfg.teacher_urls)}")
        servers(cfg).connect(decode, len(tokenizer), window, cfg.distill_topk, cfg.server_timeout)


def check_reads_alike(tokenizer, cfg: TrainConfig, flag: str, remedy: str) -> None:
    """ConfigError unless the model that the flag names reads tokens, and images, as the policy does. remedy: what the
    message suggests."""
    name, of_policy = getattr(cfg, flag.removeprefix("--")), load_config(cfg.model_id)
    kind, processor = load_config(name).model_type, load_processor(name)
    differing = tokenizer.get_vocab().items() - getattr(processor, "tokenizer", processor).get_vocab().items()
    if differing or (takes_images(of_policy) and kind != of_policy.model_type):
        text, token = min(differing, key=lambda pair: pair[1], default=("", 0))
        first = f" (token {token} is {text!r} for the policy)" if differing else ""
        raise ConfigError(f"{flag}={name}, a {kind}, reads other text or images than the policy{first}; {remedy}.")


def servers(cfg: TrainConfig) -> TeacherServers:
    return _servers(tuple(cfg.teacher_urls), secrets.read("TEACHER_TOKEN"), cfg.request_timeout)


@functools.cache
def _servers(urls: tuple, *args) -> TeacherServers:  # one per process: it remembers what the servers reported at start
    return TeacherServers(list(urls), *args)


# ---- trajectories ---------------------------------------------------------------------------------------------------


async def tell(trajectories: list[Trajectory], generator, cfg: TrainConfig, scored: asyncio.Future) -> None:
    """Ask the teacher's servers about each trajectory and fill in teacher_logprobs, teacher_top and
    info["teacher_seconds"]. For a teacher in this process, fill in the prompt that it is to see:
    info["teacher_prompt"].

    scored: a future that ends when the trajectories have their rewards. A trajectory that the teacher could not score
    is left out (info["failure"]).
    """
    if not cfg.has_teacher or cfg.purpose != "train":
        return
    if cfg.teacher_prompt and function_path(cfg.teacher_prompt):
        await asyncio.wait([scored])

    async def tell_one(trajectory: Trajectory) -> None:
        try:
            prompt = await shown_to_teacher(trajectory, generator, cfg)
            if prompt is not None and cfg.teacher_urls:
                await ask(trajectory, prompt, cfg)
            elif prompt is not None and cfg.teacher_prompt:
                if later_images(trajectory):
                    raise TeacherError("--teacher_prompt shows no images of tools in this process; give --teacher_urls")
                trajectory.info["teacher_prompt"] = prompt
        except TeacherError as error:
            trajectory.info["failure"] = TrajectoryError(str(error), trajectory.row)

    await asyncio.gather(*map(tell_one, trajectories))


async def shown_to_teacher(trajectory: Trajectory, generator, cfg: TrainConfig) -> Prompt | None:
    """The prompt that the teacher sees before the sampled tokens; None if it is not to be asked."""
    if not cfg.teacher_prompt:
        sent_ids, *_ = trajectory.info.get("sent", (trajectory.prompt_ids,))
        return Prompt(trajectory.prompt_ids, sent_ids, trajectory.images)
    messages, row = trajectory.row.get(cfg.teacher_prompt), trajectory.row
    if function_path(cfg.teacher_prompt):
        function = functools.partial(load_function(cfg.teacher_prompt), trajectory)
        outcome = await run_limited(function, {}, cfg.reward_timeout, as_it_is)
        if outcome is None:
            fault = f"took over {cfg.reward_timeout:g} s for a trajectory (--reward_timeout)"
            raise TeacherError(f"--teacher_prompt {cfg.teacher_prompt} {fault}")
        messages, error = outcome
        if error is not None:
            raise TeacherError(f"--teacher_prompt {cfg.teacher_prompt} raised {error!r:.300}") from error
    if messages is None:
        return None
    try:
        row, processor = row | {"prompt": messages}, generator.tokenizer
        if is_vision(processor):
            prompt = vision_prompt(row, processor, generator.rope_index, cfg, trajectory.row)
            return replace(prompt, images=[*prompt.images, *later_images(trajectory)])
        ids = prompt_ids(row, processor, cfg)
    except Exception as error:  # templates and image decoders raise whatever they like
        raise TeacherError(f"--teacher_prompt gave no text or chat but {shorten(messages)} ({error!r:.300})") from error
    return Prompt(ids, ids)


def later_images(trajectory: Trajectory) -> list:
    """The images that tools and environments added after the prompt's."""
    return trajectory.images[trajectory.info["sent"][2] :] if "sent" in trajectory.info else []


async def ask(trajectory: Trajectory, prompt: Prompt, cfg: TrainConfig) -> None:
    began, mask = time.perf_counter(), trajectory.loss_mask
    _, sent_tokens, _ = trajectory.info.get("sent", (None, trajectory.token_ids, None))
    expanded = prompt.token_ids + trajectory.token_ids
    answer = await servers(cfg).score(prompt.sent_ids + sent_tokens, cfg.distill_topk, prompt.images, expanded)
    start = len(prompt.token_ids) - 1  # answer's item 0 is for the second token
    trajectory.teacher_logprobs = [p if m else 0.0 for p, m in zip(answer.logprobs[start:], mask, strict=True)]
    if cfg.distill_topk:
        trajectory.teacher_top = answer.top_ids[start:].clone(), answer.top_logprobs[start:].clone()
    trajectory.info["teacher_seconds"] = time.perf_counter() - began


# ---- a step ---------------------------------------------------------------------------------------------------------


def load(cfg: TrainConfig, device: torch.device, load_frozen: Callable) -> nn.Module | None:
    """The teacher of --teacher_id; None without one. load_frozen: train_grpo.py's."""
    if cfg.teacher_id is None:
        return None
    settings = replace(cfg, model_id=cfg.teacher_id, ref_sync_steps=None)
    return load_frozen(settings, device, "the teacher")


def add(batch: Batch, run, trajectories: list[Trajectory], pad_id: int, cfg: TrainConfig, all_logprobs) -> dict:
    """Adds the teacher's log-probs to a step's batch and returns metrics. Servers have sent theirs during sampling;
    those of a teacher in this process are computed here. run, all_logprobs: train_grpo.py's."""
    if not cfg.has_teacher:
        return {}
    seconds = torch.tensor([t.info["teacher_seconds"] for t in trajectories if "teacher_seconds" in t.info])
    metrics = checks.over_ranks({"distill/seconds": seconds, "distill/seconds_max": seconds}, len(seconds))
    complete(batch, cfg)
    if in_this_process(cfg):
        teacher = run.teacher or run.policy  # the policy itself, with another prompt
        teacher_batch, began = as_seen(batch, trajectories, pad_id, cfg), time.perf_counter()
        unwrapped(teacher).top = cfg.distill_topk
        outputs = all_logprobs(teacher, teacher_batch, cfg)
        unwrapped(teacher).top = 0
        metrics["time/teacher"] = time.perf_counter() - began
        enter(batch, teacher_batch, trajectories, outputs, cfg)
    drop_unknown(batch, unwrapped(run.policy).hf_model.config.get_text_config().vocab_size)
    return metrics | distill_metrics(batch)


def complete(batch: Batch, cfg: TrainConfig) -> None:
    """Gives every rank the same fields, also where no server was asked: nan, and no likeliest tokens."""
    mask = batch.loss_mask
    if batch.teacher_logprobs is None:
        batch.teacher_logprobs = torch.zeros_like(mask).masked_fill(mask > 0, math.nan)
    if cfg.distill_topk and batch.teacher_top is None:
        batch.teacher_top = mask.new_zeros(*mask.shape, cfg.distill_topk, dtype=torch.int64)
        batch.teacher_top_logprobs = mask.new_full(batch.teacher_top.shape, -math.inf)


def in_this_process(cfg: TrainConfig) -> bool:
    """Whether a model in this process is asked, for any domain."""
    return any(domain.teacher_id or (domain.teacher_prompt and not domain.teacher_urls) for domain in cfg.by_domain())


def as_seen(batch: Batch, trajectories: list[Trajectory], pad_id: int, cfg: TrainConfig) -> Batch:
    """The batch as the teacher sees it, after its own prompts (--teacher_prompt); each row's sampled tokens are
    unchanged."""
    if not any(domain.teacher_prompt for domain in cfg.by_domain()):
        return replace(batch, routed_experts=None, teacher_top=None)

    def seen(t: Trajectory) -> Trajectory:
        prompt = t.info.get("teacher_prompt", Prompt(t.prompt_ids, [], [], t.info.get("model_inputs", {})))
        info = {"model_inputs": prompt.model_inputs}
        return replace(t, prompt_ids=prompt.token_ids, teacher_logprobs=None, teacher_top=None, info=info)

    teacher_batch = collate([seen(t) for t in trajectories], pad_id, batch.input_ids.device)
    return replace(teacher_batch, groups=batch.groups)


def enter(batch: Batch, seen: Batch, trajectories: list[Trajectory], outputs: dict, cfg: TrainConfig) -> None:
    """Copies the answer of a teacher in this process, `all_logprobs` of the batch `seen`, into the batch, for the
    trajectories that it was asked about. Their sampled tokens are the same in both, in the same order."""
    domains = [cfg.of(t.row) for t in trajectories]
    is_asked = [
        "teacher_prompt" in t.info if domain.teacher_prompt else domain.teacher_id is not None
        for t, domain in zip(trajectories, domains, strict=True)
    ]
    is_asked = torch.tensor(is_asked, device=batch.loss_mask.device)[:, None]  # [B, 1]
    in_batch, in_seen = is_asked & (batch.loss_mask > 0), is_asked & (seen.loss_mask > 0)
    batch.teacher_logprobs[in_batch] = outputs["logprobs"][in_seen]
    if "top_ids" in outputs:
        batch.teacher_top_logprobs[in_batch] = outputs["top_logprobs"][in_seen]
        batch.teacher_top[in_batch] = outputs["top_ids"][in_seen]


def drop_unknown(batch: Batch, vocab_size: int) -> None:
    """Drops likeliest tokens that the policy's logits do not have: larger models pad their vocabulary further."""
    if batch.teacher_top is not None:
        unknown = batch.teacher_top >= vocab_size
        batch.teacher_top_logprobs.masked_fill_(unknown, -math.inf)
        batch.teacher_top.masked_fill_(unknown, 0)


# ---- a loss over the teacher's likeliest tokens (--distill_topk) -----------------------------------------------------


def likeliest(log_p: Tensor, count: int) -> dict[str, Tensor]:
    """The `count` likeliest tokens of a teacher in this process, with log-probs; {} for 0.  [n, V] -> [n, count]"""
    return dict(zip(("top_logprobs", "top_ids"), log_p.topk(count), strict=True)) if count else {}


def parted(outputs: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    """Where targets are [N, 1 + k], parts "logprobs" into those of sampled tokens and of a teacher's k likeliest."""
    if targets.ndim == 1:
        return outputs
    return outputs | {"logprobs": outputs["logprobs"][:, 0], "of_teacher_top": outputs["logprobs"][:, 1:]}


def term(outputs: dict[str, Tensor], part: Batch, cfg: TrainConfig, stats: dict) -> Tensor | float:
    """What --distill_topk adds to the loss per token [B, T], logged by way of stats; 0 without it."""
    if "of_teacher_top" not in outputs:
        return 0.0
    part.top_logprobs = outputs["of_teacher_top"]  # [B, T, k]
    distance, numbers = divergence(part, cfg)  # [B, T]
    stats |= numbers
    return cfg.distill_coef * distance
