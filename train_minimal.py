"""GRPO on one page: rows in, a better model out. Read it from top to bottom; train_grpo.py has what is left out here.

    python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct    # or --model_id: any text model for chats
    python train_minimal.py --generator hf --learning_rate 5e-5 --max_steps 10  # 4 minutes on a CPU: .04 right, then .5

With a server (its window, here 256 tokens, has to hold prompt and completion) and two ranks that train:

    export VLLM_SERVER_TOKEN=...    # in both terminals; any string
    CUDA_VISIBLE_DEVICES=0 python vllm_server.py --model models/SmolLM2-135M-Instruct --max-model-len 256  # terminal 1
    CUDA_VISIBLE_DEVICES=1,2 torchrun --nproc_per_node=2 train_minimal.py                                  # terminal 2

A step:

    1. prompts      every rank takes its share of `prompts_per_step` rows
    2. completions  the generator samples `num_generations` of each; reward functions score them
    3. advantages   how much better than the mean completion of the same prompt, in standard deviations
    4. update       make tokens of good completions more likely, of bad ones less, not too far at once
    5. push         the generator gets the new weights; the next step samples from them

Every rank has the whole model in float32, 16 bytes a parameter with its gradient and Adam's moments. No KL term, no
checkpoints: runs/NAME gets config.json, metrics.jsonl (`python look.py runs/` draws it) and at the end the model.
Shapes: B completions of a micro-batch (`part`), T tokens of its longest prompt + completion, V vocabulary size.
"""
# ruff: noqa: E402 - the command line is read before torch is imported, so that a wrong flag is reported at once

from dataclasses import field
from typing import Literal

from config import ConfigError, TrainConfig, parse_args, public_config


class Settings(TrainConfig):  # subclasses of TrainConfig become dataclasses by themselves
    """The flags of this script; the comment behind each is its help. Other fields of config.py keep their defaults; a
    line makes one a flag. Those of data, prompts, rewards, servers and time limits work (dist_timeout), no others."""

    own_flags_alone = True  # the command line has the flags below, --config and --help
    first_run = "--generator hf"  # suggested when started without arguments and without VLLM_SERVER_TOKEN

    model_id: str = "models/SmolLM2-135M-Instruct"  # folder or hub id of the model to train
    dataset_id: str = "examples/sums.py:rows"  # function, file or hub id; a row has a `prompt` and what rewards need
    eval_dataset_id: str | None = None  # held-out rows; unset: split "test" of dataset_id (a .jsonl has none: name one)
    reward_funcs: list[str] = field(default_factory=lambda: ["last_number"])  # of rewards.REWARDS, or FILE.py:FUNCTION
    generator: Literal["vllm", "hf"] = "vllm"  # servers sample, or a copy of the model in this process
    server_urls: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8000"])  # of vllm_server.py
    prompts_per_step: int = 8  # of all ranks together
    num_generations: int = 8  # completions of each prompt, 2 or more
    max_prompt_length: int = 128  # tokens; rows with longer prompts are left out
    max_completion_length: int = 12  # tokens; what is longer is cut off
    temperature: float = 1.0  # divides the logits, when sampling and when training
    rows_per_microbatch: int = 16  # completions in a forward and backward pass; their logits take the memory
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of forward passes; weights are float32
    num_iterations: int = 1  # optimizer updates on the completions of a step; with 1 the clip below does nothing
    learning_rate: float = 1e-5  # at the first step; decays linearly to 0 over max_steps
    epsilon: float = 0.2  # the clip: a token's loss has no gradient that moves its ratio further out of 1 +- epsilon
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this
    max_steps: int = 30  # training steps
    eval_steps: int | None = 10  # evaluates every so many steps, before the first and after the last; none: never
    eval_generations: int = 4  # completions of each held-out row, at the same temperature
    logprob_diff_limit: float = 0.2  # mean |trainer - generator| of log-probs that ends the run after its first step
    seed: int = 42  # seeds the order of prompts, a data set that is a function, and sampling with --generator hf
    output_dir: str = "runs"  # the run's folder is made here
    run_name: str | None = None  # name of the run's folder, a new one; if unset, made of model and time


if __name__ == "__main__":
    CONFIG = parse_args(Settings, description=__doc__.split("\n")[0])

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import utils
from data import check_step_size, columns_of, load_data
from inputs.processor import load_processor
from inputs.prompts import begun_in, prompt_ids
from inputs.trajectory import Trajectory
from rewards import TRAINER_STATE, get_reward_functions, score

# ---- 1 prompts ------------------------------------------------------------------------------------------------------


def fitting(rows: list[dict], name: str, tokenizer, cfg: Settings) -> list[dict]:
    """The rows whose prompts are not too long. name: what messages call them"""
    kept = [row for row in rows if len(prompt_ids(row, tokenizer, cfg)) <= cfg.max_prompt_length]
    if rows and not kept:
        raise ConfigError(f"--max_prompt_length={cfg.max_prompt_length}: all {len(rows)} {name} prompts are longer.")
    if dist.get_rank() == 0 and len(kept) < len(rows):
        print(f"{len(kept)} of {len(rows)} {name} prompts are used: the others exceed --max_prompt_length")
    return kept


def rows_of_step(rows: list[dict], step: int, cfg: Settings) -> list[dict]:
    """This rank's share of a step: parse_args refuses a prompts_per_step that ranks cannot divide evenly. All ranks
    shuffle alike, anew in each epoch."""
    epoch, place = divmod(step, len(rows) // cfg.prompts_per_step)
    order = np.random.default_rng([cfg.seed, epoch]).permutation(len(rows))
    numbers = order[place * cfg.prompts_per_step : (place + 1) * cfg.prompts_per_step]
    return [rows[number] for number in numbers[dist.get_rank() :: dist.get_world_size()]]


# ---- 2 completions and their rewards --------------------------------------------------------------------------------

# A row is a dict: {"prompt": [{"role": "user", "content": "What is 12 + 34?"}], "answer": "46"}, or its prompt a text.
# A reward function gets the `completions` of a prompt and each column, as lists with one element for each completion,
# and returns a number for each. The numbers of several functions are added. rewards.py has what else it may ask for.
#
#     def exact(completions, answer, **columns):  # rewards.completion_text takes chat messages and texts
#         return [float(completion_text(c) == a) for c, a in zip(completions, answer)]


async def sample(
    rows: list[dict], count: int, step: int, generator, rewards: dict, cfg: Settings
) -> tuple[list[Trajectory], Tensor]:
    """`count` completions of each row, those of the first row first, by the weights after exactly `step` steps; and
    their scores, [rows, count] float64.  generator: VLLMClient or HFGenerator; rewards: functions by name"""
    if cfg.generator == "hf":
        generator.seed(hash((cfg.seed, step, count, dist.get_rank())))  # whatever was sampled before
    prompts = [prompt_ids(row, generator.tokenizer, cfg) for row in rows]  # in the model's chat template
    # From softmax(logits / temperature), as in `token_logprobs`: without top_p and top_k.
    how = dict(n=count, max_tokens=cfg.max_completion_length, temperature=cfg.temperature)
    completions = await asyncio.gather(*(generator.generate(prompt, **how) for prompt in prompts))  # as one batch
    trajectories: list[Trajectory] = []
    for row, prompt, group in zip(rows, prompts, completions, strict=True):
        utils.check_fresh(group, range(step, step + 1), cfg.generator)  # an error if other weights sampled any token
        begun = begun_in(prompt, generator.tokenizer, cfg)  # "<think>" if the prompt ends so: rewards see it, too
        trajectories += [
            Trajectory(
                row=row,
                group=0,  # not used here
                prompt_ids=prompt,
                token_ids=c.token_ids,  # as they were sampled, the end token among them: never tokenised again
                loss_mask=[1] * len(c.token_ids),  # 1: sampled by the model; 0 would mark a tool's answer
                logprobs=c.logprobs,  # after the division by the temperature
                finish_reason=c.finish_reason,  # "length" if it was cut off, else "stop"
                info={"begun": begun, "completion": generator.tokenizer.decode(c.token_ids, skip_special_tokens=True)},
            )
            for c in group
        ]
    starts = range(0, len(trajectories), count)  # one call a prompt; over 30 s it gives 0
    await asyncio.gather(*(score(trajectories[start : start + count], rewards, cfg) for start in starts))
    if any(t.info["unrewarded"] for t in trajectories):  # filled in by `score`, as is info["reward"]
        raise RuntimeError("All rewards of a completion were None. train_grpo.py can go on; this script cannot.")
    scores = torch.tensor([t.info["reward"] for t in trajectories], dtype=torch.float64)
    return trajectories, scores.view(len(rows), count)


# ---- 3 advantages ---------------------------------------------------------------------------------------------------


def advantages(scores: Tensor) -> Tensor:
    """(score - mean) / std (of n - 1), over the completions of one prompt; about 0 where all scored the same.
    DeepSeekMath (2402.03300) sec. 4.1.2.  [prompts, completions of each], float64 -> the same, float32"""
    # In float64: a rounding error in the mean of equal scores is divided by 1e-6.
    centred = scores - scores.mean(1, keepdim=True)
    return (centred / (scores.std(1, keepdim=True) + 1e-6)).float()


# ---- 4 update -------------------------------------------------------------------------------------------------------


def tensors(trajectories: list[Trajectory], advantages: Tensor, device: torch.device) -> dict[str, Tensor]:
    """A micro-batch: prompts with their completions, padded on the right: column k holds token k.  [B, T] each
    advantages: one a completion, [B], which all its sampled tokens get"""

    def padded(rows: list[list]) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)

    loss_mask = padded([[0.0] * len(t.prompt_ids) + t.loss_mask for t in trajectories])
    return {
        "input_ids": padded([t.prompt_ids + t.token_ids for t in trajectories]),
        "loss_mask": loss_mask,
        "sampling_logprobs": padded([[0.0] * len(t.prompt_ids) + t.logprobs for t in trajectories]),
        "advantages": advantages.to(device)[:, None] * loss_mask,
    }


def token_logprobs(model: nn.Module, part: dict[str, Tensor], cfg: Settings) -> Tensor:
    """Log-prob of each token, given the tokens before it; 0 for the first.  [B, T]"""
    ids = part["input_ids"]
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=cfg.compute_dtype == "bfloat16"):
        # Without attention_mask: padding stands on the right, where no token of a causal model sees it.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
    logprobs = (logits.float() / cfg.temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # [B, T - 1]
    return nn.functional.pad(logprobs, (1, 0))


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, part: dict[str, Tensor], cfg: Settings) -> Tensor:
    """PPO's clipped ratio, per token. In a step's first update the ratio is 1: the loss is -A, which says nothing of
    progress (watch the reward); its gradient is -A grad log pi.  [B, T]

    A loss of yours may use whatever `tensors` puts into `part`. Take no mean over completions, which would depend
    on the micro-batches; be finite at prompts and padding, too, where the loss is multiplied by 0."""
    ratio = (logprobs - old_logprobs).exp()  # [B, T]
    clipped = ratio.clamp(1 - cfg.epsilon, 1 + cfg.epsilon)
    return -torch.min(ratio * part["advantages"], clipped * part["advantages"])


def accumulate_gradients(model: nn.Module, parts: list[dict[str, Tensor]], cfg: Settings) -> dict[str, float]:
    """The gradient of the mean loss over all tokens that *all* ranks have sampled in this step, however many ranks and
    micro-batches there are. Returns the same mean of the loss, and of |trainer - generator| log-prob."""
    tokens = sum(part["loss_mask"].sum() for part in parts)
    dist.all_reduce(tokens)  # the sum over ranks
    # Every token counts alike, as in DAPO. To average each completion first, as GRPO does, let policy_loss divide by
    # part["loss_mask"].sum(1, keepdim=True), and normalizer be cfg.prompts_per_step * cfg.num_generations.
    normalizer = tokens
    sums = torch.zeros(2, device=tokens.device)
    for part in parts:
        logprobs, mask = token_logprobs(model, part, cfg), part["loss_mask"]  # [B, T] each
        # The trainer's log-probs before the step's first update: the clip measures how far updates move the policy.
        # With one update a step they are the current ones; with several, `update` has put them into the part.
        old = part.get("old_logprobs", logprobs.detach())
        loss = (policy_loss(logprobs, old, part, cfg) * mask).sum() / normalizer
        loss.backward()
        # The generator computes a little differently, which is only watched here (train_grpo.py --correction).
        gap = ((logprobs.detach() - part["sampling_logprobs"]).abs() * mask).sum() / tokens
        sums += torch.stack([loss.detach(), gap])
    for weight in model.parameters():
        if weight.grad is not None:  # some models have parts that no text reaches
            dist.all_reduce(weight.grad)
    dist.all_reduce(sums)
    loss, gap = sums.tolist()
    return {"loss": loss, "sampling/logprob_diff_mean": gap}


def update(model: nn.Module, optimizer, parts: list[dict[str, Tensor]], step: int, cfg: Settings) -> dict[str, float]:
    """`num_iterations` updates. Returns the first one's numbers: later ones have weights that the generator has not."""
    if cfg.num_iterations > 1:
        for part in parts:
            with torch.no_grad():
                part["old_logprobs"] = token_logprobs(model, part, cfg)
    optimizer.param_groups[0]["lr"] = lr = cfg.learning_rate * (1 - step / cfg.max_steps)
    first: dict[str, float] = {}
    for _ in range(cfg.num_iterations):
        numbers = accumulate_gradients(model, parts, cfg)
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        if not norm.isfinite():
            raise RuntimeError(f"step {step}: the gradient norm is {norm:g}; lower --learning_rate; look at rewards.")
        optimizer.step()
        optimizer.zero_grad()
        first = first or numbers | {"grad_norm": float(norm), "lr": lr}
    return first


# ---- 5 weights to the generator -------------------------------------------------------------------------------------


def push_weights(model: nn.Module, generator, version: int) -> None:
    """Sends all weights to the generator. Completions sampled after this carry `policy_version = version`. No rank is
    sampling now: each had its completions before it took part in the update's all-reduce."""
    if generator.receives_weights:  # rank 0 for servers, every rank for a copy in its own process
        named = [(name, weight.detach()) for name, weight in model.named_parameters()]  # tied weights once
        generator.begin_push()
        for start in range(0, len(named), 32):  # a part at a time, as sending copies it, cast to the generator's dtype
            generator.send_bucket(named[start : start + 32])
        generator.finish_push(version)  # an error if a weight is missing; cached prefixes are dropped
    dist.barrier()  # no rank samples before the weights are there


# ---- the loop -------------------------------------------------------------------------------------------------------


def log(folder: Path, step: int, values: dict[str, Tensor], metrics: dict[str, float]) -> None:
    """A line of metrics.jsonl and of the terminal: means of `values`, those of all ranks together, and `metrics`. Step
    10 of training: sampled by the weights after 9 steps. An evaluation at step 10: by the weights after 10."""
    line = {name: float(utils.global_mean(value)) for name, value in values.items()} | metrics
    if dist.get_rank() == 0:
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | line | {"time/unix": time.time()}) + "\n")
        print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)


def train(cfg: Settings) -> None:
    from modeling.loading import load_hf_model  # here, so that `import train_minimal` stays light
    from saving.checkpoints import save_model
    from startup.servers import make_generator

    if cfg.num_generations < 2:
        raise ConfigError(f"--num_generations={cfg.num_generations}: completions are compared; give 2 or more.")
    folder = Path(cfg.output_dir, cfg.run_name or f"{Path(cfg.model_id).name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if (folder / "metrics.jsonl").exists():
        raise ConfigError(f"--run_name: {folder} holds a run already; give another name, or move it away.")
    rank, world, device = utils.init_distributed(cfg.dist_timeout)  # CPU tensors by gloo, GPU tensors by NCCL
    cfg = utils.computable(cfg, device)  # compute_dtype becomes float32 on a CPU that is slow in bfloat16
    tokenizer, (rows, held_out) = load_processor(cfg.model_id), load_data(cfg)
    rewards = get_reward_functions(cfg, columns_of(rows), columns_of(held_out))
    rows, held_out = fitting(rows, "training", tokenizer, cfg), fitting(held_out, "held-out", tokenizer, cfg)
    check_step_size(len(rows), cfg.prompts_per_step, world)  # an error if there are too few rows for one
    model = load_hf_model(cfg, torch.float32).to(device)  # transformers' from_pretrained, without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    generator = make_generator(cfg, model, tokenizer, device)  # servers, or a copy in compute_dtype
    push_weights(model, generator, 0)  # the server may still have an earlier run's weights
    TRAINER_STATE.max_steps = cfg.max_steps
    if rank == 0:  # only now: a start that failed leaves no run
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(public_config(cfg), indent=2), encoding="utf-8")

    for step in range(cfg.max_steps + 1):  # steps done so far; after the last there is only the evaluation
        TRAINER_STATE.global_step, TRAINER_STATE.epoch = step, step * cfg.prompts_per_step / len(rows)  # as in TRL
        if cfg.eval_steps and (step % cfg.eval_steps == 0 or step == cfg.max_steps):
            share, k = held_out[rank::world], cfg.eval_generations
            _, scores = asyncio.run(sample(share, k, step, generator, rewards, cfg))  # [rows, k]
            solved = (scores >= cfg.eval_solved - 1e-6).double()  # eval_solved is 1; 1e-6 is for rounding
            log(folder, step, {"eval/reward": scores, f"eval/mean@{k}": solved}, {})
        if step == cfg.max_steps:
            break
        start = time.perf_counter()
        share, n = rows_of_step(rows, step, cfg), cfg.num_generations
        trajectories, scores = asyncio.run(sample(share, n, step, generator, rewards, cfg))  # [rows, n]
        sampled = time.perf_counter()
        per_completion, size = advantages(scores).flatten(), cfg.rows_per_microbatch  # [rows * n]
        starts = range(0, len(trajectories), size)
        parts = [tensors(trajectories[i : i + size], per_completion[i : i + size], device) for i in starts]
        metrics = update(model, optimizer, parts, step, cfg)
        if step == 0:  # ends the run if the server computes otherwise: quantised, another config, ...
            utils.check_agreement(metrics["sampling/logprob_diff_mean"], cfg)
        push_weights(model, generator, step + 1)
        times = {"time/generate": sampled - start, "time/step": time.perf_counter() - start}
        values = {
            "reward": scores,
            "frac_reward_zero_std": (scores.std(1) < 1e-6).double(),  # groups that teach nothing
            "completions/mean_length": torch.tensor([float(len(t.token_ids)) for t in trajectories]),
            "completions/clipped_ratio": torch.tensor([float(t.finish_reason == "length") for t in trajectories]),
        }
        log(folder, step + 1, values, metrics | times)
        if step % 10 == 0 and rank == 0:
            print(f"  {trajectories[0].row} -> {trajectories[0].info['completion']!r}: {float(scores[0, 0]):g}")
    generator.close()
    if rank == 0:
        save_model(folder / "model", model, tokenizer)


if __name__ == "__main__":
    utils.run_and_exit(lambda: train(CONFIG), CONFIG)  # a failed run is explained, and leaves no rank behind
