"""GRPO on one page: rows in, a better model out. Read it from top to bottom; train_grpo.py has what is left out here.

    python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct    # or --model_id: any text model for chats
    python train_minimal.py --generator hf                                # one process that trains and samples

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

Every rank has a copy of the model (DDP): weights and Adam's moments in float32, forward passes in bfloat16. No
KL term, no reference model. runs/NAME gets config.json, the trained model and metrics.jsonl, which `python look.py
runs/` draws. Dimensions: B completions (this rank's share of a step, or one micro-batch, `part`), T tokens of the
longest prompt + completion (column 0 is a prompt's first token), V vocabulary.
"""
# ruff: noqa: E402 - the command line is read before torch is imported, so that a wrong flag is reported at once

from dataclasses import field
from typing import Literal

from config import ConfigError, TrainConfig, parse_args, public_config


class Settings(TrainConfig):  # subclasses of TrainConfig become dataclasses by themselves
    """All flags of this script. The functions of other files that it calls read more of TrainConfig's settings, such as
    system_prompt, reward_weights, reward_timeout or dist_timeout, at their defaults: declare one of those below, and it
    is a flag. A flag that nothing reads, beta for one, would do nothing."""

    own_flags_alone = True  # the command line has the flags below, --config and --help
    first_run = "--generator hf"  # suggested when started without arguments and without VLLM_SERVER_TOKEN

    model_id: str = "models/SmolLM2-135M-Instruct"  # folder or hub id of the model to train
    dataset_id: str = "examples/sums.py:rows"  # function, file or hub id; a row has a `prompt` and what rewards need
    eval_dataset_id: str | None = None  # held-out rows; unset: dataset_id's split "test" (a file has none)
    reward_funcs: list[str] = field(default_factory=lambda: ["last_number"])  # by name (0 or 1), or FILE.py:FUNCTION
    generator: Literal["vllm", "hf"] = "vllm"  # servers sample, or a copy of the model in this process
    server_urls: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8000"])  # of vllm_server.py
    prompts_per_step: int = 8  # of all ranks together
    num_generations: int = 8  # completions of each prompt, 2 or more
    max_prompt_length: int = 128  # tokens; rows with longer prompts are left out
    max_completion_length: int = 12  # tokens; what is longer is cut off
    temperature: float = 1.0  # divides the logits, when sampling and when training
    rows_per_microbatch: int = 16  # completions in a forward and backward pass; their logits take the memory
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of forward passes; weights are float32
    num_iterations: int = 1  # optimizer updates on the completions of a step; with 1 the clips below do nothing
    learning_rate: float = 1e-5  # at the first step; decays linearly to 0 over max_steps
    epsilon: float = 0.2  # lower clip: a token with A < 0 gets no gradient once its ratio is below 1 - epsilon
    epsilon_high: float = 0.2  # upper clip: a token with A > 0 gets none above 1 + epsilon_high
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this
    max_steps: int = 30  # training steps
    eval_steps: int | None = 10  # evaluates every so many steps, before the first and after the last; none: never
    eval_generations: int = 4  # completions of each held-out row
    logprob_diff_limit: float = 0.2  # the run ends after its first step if the mean |trainer - generator| exceeds it
    seed: int = 42  # seeds the order of prompts, a data set that is a function, and sampling with --generator hf
    output_dir: str = "runs"  # the run's folder is made here
    run_name: str | None = None  # name of the run's folder, a new one; if unset, made of model and time


if __name__ == "__main__":
    CONFIG = parse_args(Settings, description=__doc__.split("\n")[0])

import asyncio
import contextlib
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

import utils
from data import check_step_size, load_data
from inputs.processor import load_processor
from inputs.prompts import begun_in, prompt_ids
from inputs.trajectory import Trajectory
from rewards import TRAINER_STATE, get_reward_functions, score

# ---- 1 prompts ------------------------------------------------------------------------------------------------------


def fitting(rows: list[dict], tokenizer, cfg: Settings) -> list[dict]:
    """The rows whose prompts are not too long."""
    kept = [row for row in rows if len(prompt_ids(row, tokenizer, cfg)) <= cfg.max_prompt_length]
    if dist.get_rank() == 0 and len(kept) < len(rows):
        print(f"{len(kept)} of {len(rows)} rows are used: the others' prompts exceed --max_prompt_length")
    return kept


def rows_of_step(rows: list[dict], step: int, cfg: Settings) -> list[dict]:
    """This rank's share of a step. Rows are shuffled anew in each epoch; all ranks draw the same order. Rows at its end
    that do not fill a step are left out."""
    epoch, place = divmod(step, len(rows) // cfg.prompts_per_step)
    order = np.random.default_rng([cfg.seed, epoch]).permutation(len(rows))
    numbers = order[place * cfg.prompts_per_step : (place + 1) * cfg.prompts_per_step]
    return [rows[number] for number in numbers[dist.get_rank() :: dist.get_world_size()]]


# ---- 2 completions and their rewards --------------------------------------------------------------------------------

# A row is a dict: {"prompt": [{"role": "user", "content": "What is 12 + 34?"}], "answer": "46"}, or its prompt a text.
# A reward function gets the `completions` of a prompt and each column, as lists with one element for each completion,
# and returns a number for each, or None. Those of several functions are added. rewards.py has more that it can ask for.
#
#     def exact(completions, answer, **columns):  # rewards.completion_text takes chat messages and texts
#         return [float(completion_text(c) == a) for c, a in zip(completions, answer)]


async def sample(
    rows: list[dict], count: int, generator, tokenizer, reward_functions: dict, cfg: Settings
) -> list[Trajectory]:
    """`count` completions of each row, scored, the first row's first, so that `scores.view(-1, count)` has a row of
    the data in each of its rows. All are sampled at the same time.  generator: VLLMClient or HFGenerator"""

    async def of_row(row: dict) -> list[Trajectory]:
        prompt = prompt_ids(row, tokenizer, cfg)  # in the model's chat template
        # Sampled from softmax(logits / temperature), as in `token_logprobs`: without top_p and top_k.
        how = dict(n=count, max_tokens=cfg.max_completion_length, temperature=cfg.temperature)
        begun = begun_in(prompt, tokenizer, cfg)  # "<think>" if the template ends with it: `score` puts it in front
        trajectories = [
            Trajectory(
                row=row,
                group=0,  # not used here
                prompt_ids=prompt,
                token_ids=c.token_ids,  # as they were sampled, the end token among them: never tokenised again
                loss_mask=[1] * len(c.token_ids),  # 1: sampled by the model; 0 would mark a tool's answer
                logprobs=c.logprobs,  # after the division by the temperature
                token_rewards=[0.0] * len(c.token_ids),  # `score` enters them; this script reads info["reward"]
                finish_reason=c.finish_reason,  # "length" if it was cut off, else "stop"
                policy_version=c.policy_version,  # the oldest weights that sampled any of it, and the newest
                policy_version_last=c.policy_version_last,
                info={"begun": begun, "completion": tokenizer.decode(c.token_ids, skip_special_tokens=True)},
            )
            for c in await generator.generate(prompt, **how)
        ]
        # Fills in info: "reward", their sum, and "unrewarded", 1 if all functions gave None. Other rows are sampled on.
        await score(trajectories, reward_functions, cfg)
        if any(t.info["unrewarded"] for t in trajectories):
            raise RuntimeError("All rewards of a completion were None. train_grpo.py can go on; this script cannot.")
        return trajectories

    return sum(await asyncio.gather(*map(of_row, rows)), [])


def tensors(trajectories: list[Trajectory], device: torch.device) -> dict[str, Tensor]:
    """Prompts with their completions, padded on the right: column k holds token k.  [B, T] each"""
    columns: dict[str, list[Tensor]] = {}
    for t in trajectories:
        ids, zeros = t.prompt_ids + t.token_ids, [0.0] * len(t.prompt_ids)  # 0.0, so that loss_mask becomes floats
        tokens = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        tokens |= {"loss_mask": zeros + t.loss_mask, "sampling_logprobs": zeros + t.logprobs}
        for name, values in tokens.items():
            columns.setdefault(name, []).append(torch.tensor(values))
    return {name: pad_sequence(rows, batch_first=True).to(device) for name, rows in columns.items()}


# ---- 3 advantages ---------------------------------------------------------------------------------------------------


def advantages(scores: Tensor) -> Tensor:
    """(score - mean) / std (of n - 1), over the completions of one prompt; about 0 where all scored the same.
    DeepSeekMath (2402.03300) sec. 4.1.2.  [prompts, completions of each], float64 -> the same, float32"""
    # In float64: a rounding error in the mean of equal scores is divided by 1e-6.
    centred = scores - scores.mean(1, keepdim=True)
    return (centred / (scores.std(1, keepdim=True) + 1e-6)).float()


# ---- 4 update -------------------------------------------------------------------------------------------------------


def micro_batches(batch: dict[str, Tensor], cfg: Settings) -> list[dict[str, Tensor]]:
    """The batch in parts of `rows_per_microbatch` completions; equally many on all ranks, which have equal shares."""
    starts, size = range(0, len(batch["input_ids"]), cfg.rows_per_microbatch), cfg.rows_per_microbatch
    return [{name: values[start : start + size] for name, values in batch.items()} for start in starts]


def token_logprobs(model: nn.Module, part: dict[str, Tensor], cfg: Settings) -> Tensor:
    """Log-prob of each token, given the tokens before it; 0 for the first.  [B, T]"""
    ids, mask = part["input_ids"], part["attention_mask"]
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=cfg.compute_dtype == "bfloat16"):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
    logprobs = (logits.float() / cfg.temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return nn.functional.pad(logprobs, (1, 0))


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, part: dict[str, Tensor], cfg: Settings) -> Tensor:
    """PPO's clipped ratio, per token. In a step's first update the ratio is 1: the loss is -A, its gradient
    -A grad log pi.  [B, T]

    part: some completions of the batch: input_ids, attention_mask, loss_mask, sampling_logprobs, advantages (a
    completion's at each of its tokens), and what you put into `batch`. A loss of yours takes no mean over completions,
    which would depend on how the batch is cut; one over a completion's tokens is fine. It must be finite at
    prompts and padding, too, with its gradient: there they are multiplied by 0."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - cfg.epsilon, 1 + cfg.epsilon_high)
    return -torch.min(ratio * part["advantages"], clipped * part["advantages"])


def accumulate_gradients(model: nn.Module, batch: dict[str, Tensor], cfg: Settings) -> dict[str, float]:
    """The gradient of the mean loss over all tokens that *all* ranks have sampled in this step, however many ranks and
    micro-batches there are. Returns the same mean of the loss, and of |trainer - generator| log-prob."""
    tokens = batch["loss_mask"].sum()
    dist.all_reduce(tokens)
    # What the sum of all losses is divided by. Here every token counts alike, as in DAPO, those of advantage 0, too.
    # GRPO averages each completion first: let policy_loss divide by part["loss_mask"].sum(1, keepdim=True), and
    # normalizer be cfg.prompts_per_step * cfg.num_generations.
    normalizer = tokens
    sums, parts = torch.zeros(2, device=tokens.device), micro_batches(batch, cfg)
    for part in parts:
        not_last = isinstance(model, DistributedDataParallel) and part is not parts[-1]
        with model.no_sync() if not_last else contextlib.nullcontext():  # ranks all-reduce gradients in the last only
            logprobs, mask = token_logprobs(model, part, cfg), part["loss_mask"]
            # The trainer's log-probs before the step's first update, not the generator's: the clip measures how far
            # updates have moved the policy. With one update a step they are the current ones; with several, `update`
            # has put them into the batch.
            old = part.get("old_logprobs", logprobs.detach())
            loss = (policy_loss(logprobs, old, part, cfg) * mask).sum() / normalizer
            (loss * dist.get_world_size()).backward()  # DDP averages over ranks, and a sum is wanted
        # The generator computes a little differently, which is only watched here (train_grpo.py --correction).
        # A mean over tokens, whatever `normalizer` is.
        gap = ((logprobs.detach() - part["sampling_logprobs"]).abs() * mask).sum() / tokens
        sums += torch.stack([loss.detach(), gap])
    dist.all_reduce(sums)
    return dict(zip(("loss", "sampling/logprob_diff_mean"), sums.tolist(), strict=True))


def update(model: nn.Module, optimizer, batch: dict[str, Tensor], step: int, cfg: Settings) -> dict[str, float]:
    """`num_iterations` updates of the weights. Returns numbers to log."""
    if cfg.num_iterations > 1:
        with torch.no_grad():
            old = [token_logprobs(model, part, cfg) for part in micro_batches(batch, cfg)]
        batch["old_logprobs"] = torch.cat(old)
    optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - step / cfg.max_steps)
    metrics: dict[str, float] = {}
    for _ in range(cfg.num_iterations):
        numbers = accumulate_gradients(model, batch, cfg)
        numbers["grad_norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm))
        if not np.isfinite(numbers["grad_norm"]):
            raise RuntimeError(f"step {step}: the gradient is not finite ({numbers}), so this update was not made.")
        metrics = metrics or numbers  # the first update's: only before it do trainer and generator have equal weights
        optimizer.step()
        optimizer.zero_grad()
    return metrics | {"lr": optimizer.param_groups[0]["lr"]}


# ---- 5 weights to the generator -------------------------------------------------------------------------------------


def push_weights(model: nn.Module, generator, version: int) -> None:
    """Sends all weights to the generator. Completions sampled after this carry `policy_version = version`. model:
    without DDP, which changes the names. No rank is sampling now: each had its completions before it took part in the
    update's all-reduce."""
    if generator.receives_weights:  # rank 0 for servers, every rank for a copy in its own process
        named = [(name, weight.detach()) for name, weight in model.named_parameters()]  # tied weights once
        generator.begin_push()
        for start in range(0, len(named), 32):  # a part at a time: each takes its memory once more
            generator.send_bucket(named[start : start + 32])
        generator.finish_push(version)  # an error if a weight is missing
    dist.barrier()  # no rank samples before the weights are there


# ---- the loop -------------------------------------------------------------------------------------------------------


def log(folder: Path | None, step: int, values: dict[str, Tensor], metrics: dict[str, float]) -> None:
    """A line of metrics.jsonl, and one on the terminal: the means of `values` over all ranks, and `metrics`. folder:
    None on all ranks but 0."""
    line = utils.over_ranks({name: (float(v.sum()), v.numel()) for name, v in values.items()}) | metrics
    if folder:
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | line | {"time/unix": time.time()}) + "\n")
        print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)


def train(cfg: Settings) -> None:
    # What is needed once is imported here.
    from modeling.loading import load_hf_model
    from saving.checkpoints import save_model
    from startup.servers import make_generator

    if cfg.num_generations < 2:
        raise ConfigError(f"--num_generations={cfg.num_generations}: completions are compared; give 2 or more.")
    rank, world, device = utils.init_distributed(cfg.dist_timeout)  # a process group, of one process without torchrun
    cfg = utils.computable(cfg, device)  # compute_dtype becomes float32 on a CPU that is slow in bfloat16
    folder = None
    if rank == 0:
        cfg.run_name = cfg.run_name or f"{Path(cfg.model_id).name}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(cfg.output_dir, cfg.run_name)
        if (folder / "metrics.jsonl").exists():
            raise ConfigError(f"--run_name: {folder} holds a run already; give another name, or move it away.")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(public_config(cfg), indent=2), encoding="utf-8")
    tokenizer = load_processor(cfg.model_id)
    reward_functions = get_reward_functions(cfg)
    train_split, test_split = load_data(cfg, format_row=None)  # None: rows as they are in the data set
    rows, held_out = fitting(train_split, tokenizer, cfg), fitting(test_split, tokenizer, cfg)
    check_step_size(len(rows), cfg.prompts_per_step, world)  # that ranks divide a step's prompts has been checked
    # transformers' from_pretrained, without dropout; an error if weights are missing.
    bare = load_hf_model(cfg, torch.float32).to(device)
    model = DistributedDataParallel(bare) if world > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    # Servers, once they are ready and are seen to serve this model; or a copy of it in the dtype of the forward passes.
    generator = make_generator(cfg, bare, tokenizer, device)
    push_weights(bare, generator, 0)  # the server may still have an earlier run's weights

    def sample_fresh(rows: list[dict], count: int, step: int) -> tuple[list[Trajectory], Tensor]:
        """Completions by the weights after exactly `step` steps, and their scores [prompts, completions]."""
        if cfg.generator == "hf":
            generator.seed(hash((cfg.seed, step, rank)))  # the hash of numbers is the same in every run
        trajectories = asyncio.run(sample(rows, count, generator, tokenizer, reward_functions, cfg))
        utils.check_fresh(trajectories, range(step, step + 1), cfg.generator)  # an error if other weights sampled any
        scores = torch.tensor([t.info["reward"] for t in trajectories], dtype=torch.float64)
        return trajectories, scores.view(-1, count)

    def evaluate(step: int) -> None:
        """Held-out rows, sampled as in training. mean@k: the share of completions with a score of 1 or more; pass@k:
        the share of rows with one at least."""
        k = cfg.eval_generations
        _, scores = sample_fresh(held_out[rank::world], k, step)  # [rows, k]
        solved = (scores > 1 - 1e-6).double()  # .7 + .2 + .1 is a little less than 1
        log(folder, step, {"eval/reward": scores, f"eval/mean@{k}": solved, f"eval/pass@{k}": solved.amax(1)}, {})

    if cfg.eval_steps:
        evaluate(0)
    for step in range(cfg.max_steps):
        TRAINER_STATE.global_step, TRAINER_STATE.max_steps = step, cfg.max_steps  # which rewards may ask for, as in TRL
        start = time.perf_counter()
        trajectories, scores = sample_fresh(rows_of_step(rows, step, cfg), cfg.num_generations, step)
        times = {"time/generate": time.perf_counter() - start}
        batch = tensors(trajectories, device)
        per_completion = advantages(scores).to(device).view(-1, 1)  # [B, 1]
        batch["advantages"] = per_completion.expand_as(batch["loss_mask"])  # every token of a completion alike  [B, T]
        metrics = update(model, optimizer, batch, step, cfg)
        if step == 0:  # ends the run if the server computes otherwise: quantised, another config, ...
            utils.check_agreement(metrics["sampling/logprob_diff_mean"], cfg)
        push_weights(bare, generator, step + 1)
        times["time/step"] = time.perf_counter() - start
        cut_off = [float(t.finish_reason == "length") for t in trajectories]
        values = {
            "reward": scores,
            "frac_reward_zero_std": (scores.std(1) < 1e-6).double(),  # groups that teach nothing
            "completions/mean_length": batch["loss_mask"].sum(1),
            "completions/clipped_ratio": torch.tensor(cut_off),  # TRL's name; it is not the clip of the ratio
        }
        log(folder, step + 1, values, metrics | times)  # steps done
        if step % 10 == 0 and rank == 0:
            print(f"  {trajectories[0].row} -> {trajectories[0].info['completion']!r}: {float(scores[0, 0]):g}")
        if cfg.eval_steps and ((step + 1) % cfg.eval_steps == 0 or step + 1 == cfg.max_steps):
            evaluate(step + 1)
    generator.close()
    if folder:
        save_model(folder / "model", bare, tokenizer)


if __name__ == "__main__":
    utils.run_and_exit(lambda: train(CONFIG), CONFIG)  # a failed run is explained, and leaves no rank behind
