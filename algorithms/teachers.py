"""Who teaches a trajectory, behind which prompt, and what comes of it: between rollouts and serving/teacher.py.

A teacher is one of three, by the settings of the row's domain:

    --teacher_urls      servers: asked about each trajectory as it ends, beside its rewards (`tell`)
    --teacher_id        a frozen model in this process: asked about the whole step (`add`)
    --teacher_prompt    without either of these: the policy itself, which sees more than it saw when it sampled

With --teacher_prompt the teacher sees another prompt, and behind it the tokens as they were sampled: a column of the
data set, or a function (trajectory) -> text or chat messages, rendered as prompts are. A function is called when the
trajectory has its rewards (`trajectory.info["rewards"]`); None from it: no teacher for this one.
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
from algorithms.distillation import distill_metrics
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
from safety.results import say_once, unread
from serving.teacher import TeacherError, TeacherServers


def connect(cfg: TrainConfig, processor, rows: list[dict]) -> None:
    """ConfigError for a teacher that cannot teach this policy, before anything is trained. rows: of the domain."""
    if cfg.teacher_prompt and function_path(cfg.teacher_prompt):
        load_function(cfg.teacher_prompt)
    elif cfg.teacher_prompt:
        known_name(
            "--teacher_prompt (columns of all rows, or file.py:function)", cfg.teacher_prompt, columns_of(rows) or ()
        )
    tokenizer = getattr(processor, "tokenizer", processor)
    if cfg.teacher_id:
        remedy = "serve it (--teacher_urls), or train on a teacher's answers (supervised) first"
        check_reads_alike(tokenizer, cfg, "--teacher_id", remedy)
    if cfg.teacher_urls:
        window = cfg.max_prompt_length + cfg.max_completion_length
        decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        say_once(f"waiting up to {cfg.server_timeout:g} s for the teacher at {', '.join(cfg.teacher_urls)}")
        servers(cfg).connect(decode, len(tokenizer), window, cfg.distill_topk, cfg.server_timeout)


def check_reads_alike(tokenizer, cfg: TrainConfig, flag: str, instead: str) -> None:
    """ConfigError unless the model that the flag names reads tokens, and images, as the policy does. instead: what else
    could be done."""
    name, of_policy = getattr(cfg, flag.removeprefix("--")), load_config(cfg.model_id)
    kind, theirs = load_config(name).model_type, load_processor(name)
    unlike = tokenizer.get_vocab().items() - getattr(theirs, "tokenizer", theirs).get_vocab().items()
    if unlike or (takes_images(of_policy) and kind != of_policy.model_type):
        text, token = min(unlike, key=lambda pair: pair[1], default=("", 0))
        first = f" (token {token} is {text!r} for the policy)" if unlike else ""
        raise ConfigError(f"{flag}={name}, a {kind}, reads other text or images than the policy{first}; {instead}.")


def servers(cfg: TrainConfig) -> TeacherServers:
    return _servers(tuple(cfg.teacher_urls), secrets.read("TEACHER_TOKEN"), cfg.request_timeout)


@functools.cache
def _servers(urls: tuple, *how) -> TeacherServers:  # one a process, which knows what was said at start
    return TeacherServers(list(urls), *how)


# ---- trajectories ---------------------------------------------------------------------------------------------------


async def tell(trajectories: list[Trajectory], generator, cfg: TrainConfig, scored: asyncio.Future) -> None:
    """Have the teacher's servers say what they find of each trajectory: teacher_logprobs, teacher_top and
    info["teacher_seconds"]; of a teacher in this process, what it is to see: info["teacher_prompt"].

    scored: ends when the trajectories have their rewards. One that could not be scored is left out (info["failure"]).
    """
    if not cfg.has_teacher or cfg.purpose != "train":
        return
    if cfg.teacher_prompt and function_path(cfg.teacher_prompt):
        await asyncio.wait([scored])

    async def one(trajectory: Trajectory) -> None:
        try:
            shown = await shown_to_teacher(trajectory, generator, cfg)
            if shown is not None and cfg.teacher_urls:
                await ask(trajectory, shown, cfg)
            elif shown is not None and cfg.teacher_prompt:
                if later_images(trajectory):
                    raise TeacherError(
                        "images of tools cannot be shown behind --teacher_prompt here; give --teacher_urls"
                    )
                trajectory.info["teacher_prompt"] = shown
        except TeacherError as error:
            trajectory.info["failure"] = TrajectoryError(str(error), trajectory.row)

    await asyncio.gather(*map(one, trajectories))


async def shown_to_teacher(trajectory: Trajectory, generator, cfg: TrainConfig) -> Prompt | None:
    """The prompt behind which the teacher sees the sampled tokens; None where it is not to be asked."""
    if not cfg.teacher_prompt:
        sent, *_ = trajectory.info.get("sent", (trajectory.prompt_ids,))
        return Prompt(trajectory.prompt_ids, sent, trajectory.images)
    messages, row = trajectory.row.get(cfg.teacher_prompt), trajectory.row
    if function_path(cfg.teacher_prompt):
        function = functools.partial(load_function(cfg.teacher_prompt), trajectory)
        outcome = await run_limited(function, {}, cfg.reward_timeout, unread)
        if outcome is None:
            took = f"took over {cfg.reward_timeout:g} s for a trajectory (--reward_timeout)"
            raise TeacherError(f"--teacher_prompt {cfg.teacher_prompt} {took}")
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
    """Those of tools and environments, behind the prompt's."""
    return trajectory.images[trajectory.info["sent"][2] :] if "sent" in trajectory.info else []


async def ask(trajectory: Trajectory, shown: Prompt, cfg: TrainConfig) -> None:
    began, mask = time.perf_counter(), trajectory.loss_mask
    _, after, _ = trajectory.info.get("sent", (None, trajectory.token_ids, None))
    expanded = shown.token_ids + trajectory.token_ids
    said = await servers(cfg).score(shown.sent_ids + after, cfg.distill_topk, shown.images, expanded)
    start = len(shown.token_ids) - 1  # said[0] is of the second token
    trajectory.teacher_logprobs = [p if m else 0.0 for p, m in zip(said.logprobs[start:], mask, strict=True)]
    if cfg.distill_topk:
        trajectory.teacher_top = said.top_ids[start:].clone(), said.top_logprobs[start:].clone()
    trajectory.info["teacher_seconds"] = time.perf_counter() - began


# ---- a step ---------------------------------------------------------------------------------------------------------


def load(cfg: TrainConfig, device: torch.device, load_frozen: Callable) -> nn.Module | None:
    """The teacher of --teacher_id; None without one. load_frozen: train_grpo.py's."""
    if cfg.teacher_id is None:
        return None
    settings = replace(cfg, model_id=cfg.teacher_id, ref_sync_steps=None)
    return load_frozen(settings, device, "the teacher")


def add(batch: Batch, run, trajectories: list[Trajectory], pad_id: int, cfg: TrainConfig, all_logprobs) -> dict:
    """Adds a teacher's log-probs to a step's batch, and returns metrics. Servers have sent theirs while sampling; those
    of a teacher in this process are computed here. run, all_logprobs: train_grpo.py's."""
    if not cfg.has_teacher:
        return {}
    took = torch.tensor([t.info["teacher_seconds"] for t in trajectories if "teacher_seconds" in t.info])
    metrics = checks.over_ranks({"distill/seconds": took, "distill/seconds_max": took}, len(took))
    complete(batch, cfg)
    if in_this_process(cfg):
        teacher = run.teacher or run.policy  # itself, by another prompt
        seen, began = as_seen(batch, trajectories, pad_id, cfg), time.perf_counter()
        unwrapped(teacher).top = cfg.distill_topk
        # [B, T], [B, T, k]: its log-probs, its tokens
        logprobs, _, _, *top = all_logprobs(teacher, seen, cfg)
        unwrapped(teacher).top = 0
        metrics["time/teacher"] = time.perf_counter() - began
        enter(batch, seen, trajectories, logprobs, top, cfg)
    drop_unknown(batch, unwrapped(run.policy).hf_model.config.get_text_config().vocab_size)
    return metrics | distill_metrics(batch)


def complete(batch: Batch, cfg: TrainConfig) -> None:
    """The same fields on every rank, also where no server was asked: nan, and no likeliest tokens."""
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
    """The batch behind the prompts that the teacher sees (--teacher_prompt); each row has the same sampled tokens."""
    if not any(domain.teacher_prompt for domain in cfg.by_domain()):
        return replace(batch, routed_experts=None, teacher_top=None)

    def seen(t: Trajectory) -> Trajectory:
        shown = t.info.get("teacher_prompt", Prompt(t.prompt_ids, [], [], t.info.get("model_inputs", {})))
        info = {"model_inputs": shown.model_inputs}
        return replace(t, prompt_ids=shown.token_ids, teacher_logprobs=None, teacher_top=None, info=info)

    made = collate([seen(t) for t in trajectories], pad_id, batch.input_ids.device)
    return replace(made, groups=batch.groups)


def enter(
    batch: Batch, seen: Batch, trajectories: list[Trajectory], logprobs: Tensor, top: list[Tensor], cfg: TrainConfig
) -> None:
    """What a teacher in this process said of `seen`, [B, T'] and [B, T', k], into the batch; of the trajectories that
    it was to be asked about. Their sampled tokens are the same, in the same order."""
    here = [
        "teacher_prompt" in t.info if domain.teacher_prompt else domain.teacher_id is not None
        for t, domain in ((t, cfg.of(t.row)) for t in trajectories)
    ]
    here = torch.tensor(here, device=logprobs.device)[:, None]  # [B, 1]
    ours, theirs = here & (batch.loss_mask > 0), here & (seen.loss_mask > 0)
    batch.teacher_logprobs[ours] = logprobs[theirs]
    if top:
        batch.teacher_top_logprobs[ours], batch.teacher_top[ours] = (values[theirs] for values in top)


def drop_unknown(batch: Batch, vocab_size: int) -> None:
    """Likeliest tokens that the policy's logits do not have: a larger model's are padded to a larger number."""
    if batch.teacher_top is not None:
        unknown = batch.teacher_top >= vocab_size
        batch.teacher_top_logprobs.masked_fill_(unknown, -math.inf)
        batch.teacher_top.masked_fill_(unknown, 0)
