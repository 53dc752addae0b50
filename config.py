"""Every knob of the training scripts: one flat dataclass whose trailing comments are the help texts.

A copied script that needs a knob of its own subclasses the config in the script, above `parse_args`:

    class TrainConfig(TrainConfig):
        my_coef: float = 0.1  # weight of my idea

Values come from, later ones winning: the defaults here, `--preset NAME`, `--config FILE.yaml`, the command line.
Nothing in this file imports torch: `--help` and every mistake answer in a fraction of a second, on a laptop, without
touching a GPU, a process group or a server.
"""

import ast
import dataclasses
import importlib.util
import math
import os
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from typing import Literal

import cli
import domains
from cli import ConfigError, build_parser, convert, flags, is_none, known_name, read_yaml, unknown_argument
from safety import secrets


@dataclass
class TrainConfig:
    def __init_subclass__(cls):  # a knob in a script's own TrainConfig needs no decorator, and may have one
        given = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        dataclass(cls)
        for name, value in given.items():
            setattr(cls, name, value)

    first_flags = {  # what `--help` shows; `--help all` shows every flag, under the headings below
        "your task": "model_id dataset_id reward_funcs tools env",
        "sampling": "generator server_urls max_completion_length",
        "learning": "preset prompts_per_step num_generations learning_rate max_steps",
        "memory, and several GPUs": "use_peft strategy",
        "seeing whether it learns": "eval_steps report_to",
        "keeping it, and going on later": "run_name save_steps resume",
    }
    starts_ranks = True  # False for a script that speaks of ranks that others start, so that WORLD_SIZE is not theirs
    first_run = "--config examples/sums.yaml --generator hf"  # what runs anywhere: see first_steps

    # --- model ---
    model_id: str = "Qwen/Qwen2.5-1.5B-Instruct"  # hub id or folder of the policy
    dtype: Literal["float32", "bfloat16"] = "float32"  # master weights; in bfloat16 an update of 1e-6 is rounded away
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # autocast, FSDP param dtype; float32 on CPUs without it
    attn_implementation: str = "auto"  # sdpa where the model has it, else eager; or a name, such as flash_attention_2
    gradient_checkpointing: bool | None = None  # recompute activations: less memory, 1/3 slower; unset: on GPUs
    use_peft: bool = False  # train LoRA adapters instead of all weights
    load_in: Literal["4bit"] | None = None  # 4bit: LoRA on frozen weights in 4 bits (QLoRA), those of linear layers
    lora_r: int = 32  # LoRA rank
    lora_alpha: float = 64.0  # LoRA scale: the update is alpha / r * B A
    freeze_vision: bool = False  # the image encoder is frozen, and has no adapters; a connector outside it is trained
    lora_targets: list[str] = field(default_factory=lambda: ["all-linear"])  # ends of names, or one regular expression

    # --- data ---
    dataset_id: str | None = (
        None  # hub id, .jsonl .parquet .csv, reasoning_gym:TASK?key=value (unset: chain_sum), file.py:function, seeds:N
    )
    dataset_config: str | None = None  # configuration name of a hub data set
    dataset_split: str = "train"  # split to train on
    eval_dataset_id: str | None = None  # held-out data; unset: dataset_id with eval_split, if evaluation is on
    eval_split: str | None = "test"  # split to evaluate on; none: a domain without held-out rows
    system_prompt: str | None = None  # put before prompts that bring no system message
    no_apply_chat_template: bool = False  # string prompts go to the model as they are
    chat_template_kwargs: dict | None = None  # what the chat template is given, as '{"enable_thinking": false}'
    allow_special_tokens: bool = False  # text in prompts that reads like a special token becomes one; else plain text
    max_prompt_length: int = 1024  # prompts with more tokens (of images, too) are left out, and counted
    max_pixels: int | None = None  # larger images are scaled down to it, for trainer and server alike
    min_pixels: int | None = None  # smaller images are scaled up to it
    domains: list[dict] = field(
        default_factory=list
    )  # data sets with rewards, tools, limits of their own: see domains.py

    # --- rollout ---
    rollout: str | None = None  # name in ROLLOUTS (rollouts.py); unset: multi_turn with environment or tools
    max_completion_length: int = 512  # most tokens after the prompt, those of tools and environments included
    min_completion_length: int = 0  # no end-of-turn token before this many (for benchmarks)
    temperature: float = 1.0  # sampling temperature; the trainer divides its logits by it, too
    top_p: float | None = None  # nucleus sampling; off by default, it biases the importance ratio
    top_k: int | None = None  # sample from the k likeliest tokens; off by default for the same reason
    min_p: float | None = None  # drop tokens below this fraction of the likeliest one
    generator: Literal["vllm", "hf"] = "vllm"  # vllm: vllm_server.py beside this script; hf: sample in this process
    server_urls: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8000"])  # one or several vllm_server.py
    server_token: str | None = field(default=None, repr=False)  # `ps` shows it: rather set VLLM_SERVER_TOKEN
    server_timeout: float = 60.0  # seconds to wait for a server to answer, and for each step of a weight push
    request_timeout: float = 600.0  # seconds one generation request may take
    colocate: bool = False  # server and trainer take turns on one GPU; the server needs --enable-sleep-mode
    push_steps: int = 1  # push weights every N steps; before an evaluation and a checkpoint in any case
    push_bucket_mb: int | None = None  # weights travel in buckets, a push takes three; unset: 256, from 30B on 1024
    push_lora: Literal["auto", "adapters", "folded"] = "auto"  # what of LoRA travels; auto: adapters if the server can

    # --- tools and environments ---
    env: str | None = (
        None  # name in ENVIRONMENTS (envs/adapters.py) or file.py:NAME, arguments behind as in NAME?key=value
    )
    tools: list[str] = field(default_factory=list)  # names in TOOLS (envs/tools.py) or file.py:function
    mcp_config: str | None = None  # JSON file with `mcpServers`, whose tools are added
    tool_parser: str = "auto"  # how calls are written: auto: as the chat template does (envs/formats.py)
    max_turns: int = 8  # most turns of the model in one trajectory
    max_turn_length: int | None = None  # most tokens sampled per turn; unset: what max_completion_length leaves
    max_tool_result: int = 4000  # characters of a tool's result, or an environment's message, shown to the model
    max_calls_per_turn: int = 16  # tool calls of one turn that are run; the model is told about the others
    tool_timeout: float = 30.0  # seconds a call may take, and each method of an environment
    env_errors: Literal["drop", "stop"] = "drop"  # a failing environment or reward costs its trajectory, or the run
    max_failed: float = 0.1  # with env_errors drop: the run stops if a larger share of a step's trajectories failed
    tool_concurrency: int = 64  # most calls of tools at the same time on each rank; environments have no such limit
    tool_cache: bool = False  # equal calls of a tool are run once; the last 4096 results are kept
    allow_uncontained: bool = False  # run a model's code (--tools python, code_tests) where no sandbox contains it
    tokenization_check: Literal["strict", "warn", "off"] = "warn"  # tokens of all turns against the chat template's

    rollout_timeout: float = 3600.0  # seconds one call of a rollout of your own may take, its sampling included
    # What rollouts, and rewards, are called for; set by code. baseline: the greedy completion that remax compares with.
    purpose: Literal["train", "eval", "baseline"] = field(default="train", metadata={"flag": False})  # no flag

    # --- batch ---
    prompts_per_step: int = 32  # distinct prompts per step, over all ranks
    num_generations: int = 8  # completions sampled per prompt (the group); a row's column of this name wins over it
    num_minibatches: int = 1  # optimizer updates per pass over the step's completions
    num_iterations: int = 1  # passes over the step's completions (mu in the GRPO paper)
    tokens_per_microbatch: int | None = None  # of a forward pass on a rank, a tenth more to save one; unset: what fits
    shared_prefix: bool = True  # compute a prompt once for all its completions; same gradient, faster
    logprob_chunk: int | None = None  # sampled tokens whose logits exist at a time; unset: 256, more on GPUs

    # --- reward ---
    reward_funcs: list[str] | None = None  # names in REWARDS, or file.py:function; unset: --env's own, or reasoning_gym
    reward_model: str | None = None  # folder, hub id or http address of a classifier, for --reward_funcs reward_model
    judge_url: str | None = None  # OpenAI-compatible server, up to and with /v1, for --reward_funcs judge
    judge_model: str = ""  # the judge's name there
    judge_max_tokens: int = 1000  # most tokens of its answer, its thinking included; one that is cut off does not count
    judge_template: str | None = None  # file with its question; {prompt}, {completion} and every column are filled in
    reward_weights: list[float] | None = None  # one weight per reward function; unset: all 1
    reward_timeout: float = 30.0  # seconds a reward function may take for one group
    reward_on_timeout: float = 0.0  # score of completions whose reward function ran out of time
    reward_mean: Literal["none", "group", "batch", "running"] = "none"  # subtract this mean from the scores beforehand
    reward_std: Literal["none", "group", "batch", "running"] = "none"  # divide the scores by this std beforehand
    dynamic_sampling: bool = False  # sample other prompts in place of groups without signal (DAPO)
    resample_rounds: int = 3  # with dynamic_sampling: at most this many times a step; groups still without signal stay
    spare_prompts: int = 0  # with dynamic_sampling: so many more begin with each step, to replace groups without signal
    group_std_min: float = 0.0  # a group has signal if its scores' std is above this ...
    group_mean_min: float = -math.inf  # ... and their mean is at least this (not too hard)
    group_mean_max: float = math.inf  # ... and at most this (not too easy); others leave the loss

    # --- teacher: on-policy distillation, docs/algorithms.md ---
    teacher_urls: list[str] = field(default_factory=list)  # servers of a teacher that scores what the policy samples
    teacher_model: str | None = None  # its name there; unset: the only one that is served
    teacher_id: str | None = None  # or a hub id or folder: a frozen teacher in this process, sharded as the policy is
    teacher_prompt: str | None = None  # prompt that it sees instead: a column, file.py:function; alone: of the policy
    teacher_timeout: float = 120.0  # seconds its servers may take to score a completion
    distill_coef: float = 1.0  # weight of what the teacher says, beside the rewards; 0: it is only watched
    distill_gamma: float = 0.0  # distill: discount of the tokens after; 0: each token counts for itself
    distill_baseline: Literal["none", "place"] = "none"  # place: minus the mean of the step's others there: less noise
    distill_clip: float = 20.0  # distill: a token's log p_teacher - log p_policy is kept within this
    distill_topk: int = 0  # a term beside the loss over the teacher's k likeliest tokens; 0: none
    distill_jsd: float = 0.0  # of that term: 0 forward KL, 1 reverse KL, between them GKD's generalised JSD

    # --- algorithm ---
    preset: str | None = None  # a published recipe's settings, printed at start; flags still win over it
    advantage: str = "grpo"  # name in ADVANTAGES (train_grpo.py)
    scale_rewards: Literal["group", "batch", "none"] = "group"  # std that grpo divides by: of ...
    gamma: float = 1.0  # discount per sampled token (turn, gigpo: per turn)
    lam: float = field(default=1.0, metadata={"flag": False})  # of train_ppo.py, where it is a flag
    critic_warmup: int = field(default=0, metadata={"flag": False})  # the same
    gigpo_step_weight: float = 1.0  # weight of gigpo's step-level advantage
    policy_loss: str = "ppo"  # name in POLICY_LOSSES (train_grpo.py)
    loss_agg: Literal["token_mean", "seq_mean", "seq_sum", "constant"] = "seq_mean"  # how tokens are weighted
    epsilon: float = 0.2  # lower clip: the ratio is kept above 1 - epsilon
    epsilon_high: float = 0.2  # upper clip: the ratio is kept below 1 + epsilon_high (DAPO: 0.28)
    dual_clip: float | None = None  # bound on the loss of a token with negative advantage (DAPO: 10)
    sapo_tau_pos: float = 1.0  # sapo: steepness of the gate where the advantage is positive
    sapo_tau_neg: float = 1.05  # sapo: and where it is not
    clip_cov_ratio: float = 0.0002  # clip_cov: fraction of the update's tokens that lose their gradient
    clip_cov_min: float = 1.0  # clip_cov: drawn from those with a covariance above this ...
    clip_cov_max: float = 5.0  # ... and below this
    kl_cov_ratio: float = (
        0.0002  # kl_cov: fraction of the update's tokens, highest covariance first, that are held back
    )
    kl_cov_coef: float = 1.0  # kl_cov: weight of |log-ratio| on them
    kimi_tau: float = 0.1  # kimi: weight of the squared log-ratio
    dro_beta: float = 0.5  # dro: weight of the squared log-ratio
    beta: float = 0.0  # weight of the KL term; 0 loads no reference model
    kl: str = "k3"  # name in KL_ESTIMATORS (train_grpo.py)
    kl_in_reward: bool = False  # subtract beta * KL from each token's reward instead of adding it to the loss
    kl_target: float | None = None  # adapt beta so that the KL stays near this
    kl_horizon: float = 10000.0  # completions over which beta adapts
    ref_sync_steps: int | None = None  # move the reference model towards the policy every N steps
    ref_sync_alpha: float = 0.6  # ref <- alpha * policy + (1 - alpha) * ref
    entropy_coef: float = 0.0  # weight of the entropy bonus
    entropy_target: float | None = None  # adapt entropy_coef: up while the entropy is below this, down while above
    entropy_coef_step: float = 0.0005  # change of entropy_coef per step
    top_entropy_quantile: float = 1.0  # train on this fraction of the step's tokens, highest entropy first
    router_replay: Literal["auto", "on", "off"] = "auto"  # experts as the generator chose; auto: where it tells them
    router_replay_reference: bool = False  # the reference model, too, takes the generator's experts
    router_aux_coef: float = 0.0  # on the loss that keeps experts evenly used, over the tokens that are learned from
    mask_truncated: bool = False  # leave completions cut at a length limit out of the loss
    old_logprobs: Literal["recompute", "sampler", "current"] = "recompute"  # pi_old: trainer's, generator's, always pi
    correction: Literal["none", "token", "sequence"] = "token"  # importance weights trainer / generator on the loss
    correction_mode: Literal["truncate", "mask"] = "truncate"  # weights outside the bounds: clamp, or leave out
    correction_min: float = 0.0  # lower bound
    correction_max: float = 2.0  # upper bound
    reject_below: float = 0.0  # no policy loss where a completion's geometric mean of trainer / generator is below
    reject_above: float = math.inf  # ... or above
    off_policy_threshold: float | None = None  # drop tokens with A < 0 of rows that drifted further (mean nats a token)

    # --- optimisation ---
    learning_rate: float = 1e-6  # peak learning rate
    lr_schedule: str = "constant"  # after the warm-up: constant, linear, cosine, or a name of transformers' schedules
    lr_scheduler_kwargs: dict | None = None  # arguments of transformers' schedule, as '{"min_lr_rate": 0.1}'
    warmup_ratio: float = 0.0  # fraction of all optimizer updates over which the learning rate rises
    warmup_steps: int | None = None  # or the number of steps over which it does
    optim: str = "AdamW"  # a class of torch.optim or bitsandbytes.optim, or transformers' name of one (adamw_8bit)
    weight_decay: float = 0.0  # the optimizer's
    adam_beta1: float = 0.9  # first of the optimizer's betas
    adam_beta2: float = 0.99  # second of the optimizer's betas
    adam_epsilon: float = 1e-8  # the optimizer's, if it has betas
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm
    num_epochs: float = 1.0  # passes over the data set, if max_steps is unset
    max_steps: int | None = None  # stop after this many steps; unset: after num_epochs
    seed: int = 42  # data order, sampling, initialisation of adapters

    # --- sharding ---
    strategy: Literal["ddp", "fsdp", "fsdp2"] = "ddp"  # replicate, or shard weights, gradients and optimizer state
    shard_size: int | None = None  # ranks that share one copy, others replicate it (usual: a node's); unset: all ranks
    offload: bool = False  # with fsdp2: keep the shards in CPU memory
    offload_activations: bool = False  # what gradient_checkpointing keeps of each layer waits in CPU memory
    compile: bool = False  # torch.compile of the decoder layers; the first steps are slow
    dist_timeout: float = 600.0  # seconds a rank waits for the others

    # --- evaluation ---
    eval_steps: int | None = None  # evaluate every N steps, also before the first and after the last; unset: never
    eval_generations: int = 4  # completions per held-out row (k of mean@k and pass@k)
    eval_temperature: float = 1.0  # sampling temperature of the evaluation
    eval_solved: float = 1.0  # score from which a completion counts as solved in mean@k and pass@k
    eval_only: bool = False  # evaluate model_id once and stop

    # --- run ---
    run_name: str | None = None  # folder under output_dir; unset: model, advantage, time, four digits
    output_dir: str = "runs"  # where run folders go
    resume: bool = False  # continue run_name from its last complete checkpoint
    strict_resume: bool = False  # refuse to resume where settings, rows, code, ranks or versions are not as they were
    keep_going: bool = False  # with --resume, in a loop: begin anew without a checkpoint, set a damaged one aside
    save_steps: int | None = None  # checkpoint every N steps, and one after the last step; Ctrl-C writes none
    save_total_limit: int = 2  # checkpoints kept
    log_steps: int = 1  # write a line of metrics, and the completions, every N steps
    log_completions: bool = True  # write every completion with its rewards to completions/*.parquet
    log_unique_prompts: bool = False  # of the completions of equal prompts, write the first alone
    log_tokens_every: int = 1  # and every N steps its tokens, with advantage, weight in the loss, log-probs; 0: never
    print_samples_every: int = 10  # print one prompt, completion and reward every N steps; 0: never
    logprob_diff_limit: float = 0.2  # first step stops if |trainer - generator log-prob| exceeds this on average
    report_to: list[str] = field(default_factory=list)  # trackers besides the run folder: wandb, tensorboard, trackio
    wandb_project: str = "grpo"  # project name for wandb and trackio
    push_to_hub: bool = False  # upload the final model
    hub_repo_id: str | None = None  # where to
    hub_private: bool = True  # as a private repository; --no-hub_private makes it public

    def __post_init__(self):
        own = domains.read(self)
        several = self.env or self.tools or self.mcp_config
        self.rollout = self.rollout or ("multi_turn" if several else "single_turn")
        if self.dataset_id is None:
            self.dataset_id = "seeds:2000" if self.env else "reasoning_gym:chain_sum"
        if self.reward_funcs is None:
            self.reward_funcs = ["environment" if self.env else "reasoning_gym"]
        domains.settle(self, own)

    def of(self, row: dict) -> "TrainConfig":
        """The config of the row's domain: this one, with what the domain has of its own. Without domains, this one."""
        entry = next((entry for entry in self.domains if entry["name"] == row.get("domain")), None)
        if entry is None:
            return self
        known = self.__dict__.setdefault("_of", {})
        if entry["name"] not in known:
            own = {key: value for key, value in entry.items() if key not in domains.OWN_KEYS}
            known[entry["name"]] = dataclasses.replace(self, **own, domains=[{"name": entry["name"]}])
        return known[entry["name"]]

    def by_domain(self) -> "list[TrainConfig]":
        """The config of each domain; without domains, this one."""
        return [self.of({"domain": entry["name"]}) for entry in self.domains] or [self]

    @property
    def domain(self) -> str:
        """The domain that these are the settings of, as `of` gave them; "" for those of a whole run."""
        return self.domains[0]["name"] if len(self.domains) == 1 else ""

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher scores what is sampled; one of a run with domains, of some of them."""
        return any(own.teacher_urls or own.teacher_id or own.teacher_prompt for own in self.by_domain())

    @property
    def prefix(self) -> str:
        """What names of the domain's metrics and reward functions begin with."""
        return f"{self.domain}/" if self.domain else ""

    @property
    def sequences_per_step(self) -> int:
        """Completions asked for in a step whose rows have no `num_generations` of their own."""
        return self.prompts_per_step * self.num_generations


_PPO = dict(policy_loss="ppo", epsilon=0.2, epsilon_high=0.2)
_KL = dict(kl_in_reward=True, kl="k1", beta=0.001)
_NO_KL = dict(kl_in_reward=False, beta=0.0)
_GROUP = _NO_KL | dict(num_generations=8, advantage="grpo", scale_rewards="group")
PRESETS: dict[str, dict] = {  # arXiv
    "grpo": _GROUP | _PPO | dict(loss_agg="seq_mean", kl="k3", beta=0.04),  # 2402.03300
    "dapo": _GROUP | _PPO | dict(  # 2503.14476; its over-long shaping: add overlong to --reward_funcs
        epsilon_high=0.28, dual_clip=10.0, loss_agg="token_mean", dynamic_sampling=True,
    ),
    "dr_grpo": _NO_KL | _PPO | dict(advantage="dr_grpo", loss_agg="constant"),  # 2503.20783
    "gspo": _GROUP | dict(policy_loss="gspo", epsilon=3e-4, epsilon_high=4e-4, loss_agg="seq_mean"),  # 2507.18071
    "gmpo": _GROUP | dict(policy_loss="gmpo", epsilon=0.4, epsilon_high=0.4, loss_agg="seq_mean"),  # 2507.20673
    "cispo": _GROUP | dict(policy_loss="cispo", epsilon=1.0, epsilon_high=0.28, loss_agg="token_mean"),  # 2506.13585
    "sapo": _GROUP | dict(policy_loss="sapo", loss_agg="seq_mean"),  # 2511.20347
    "lite_ppo": _NO_KL | _PPO | dict(advantage="lite_ppo", loss_agg="token_mean"),  # 2508.08221
    "rloo": _KL | _PPO | dict(advantage="rloo", loss_agg="seq_sum"),  # 2402.14740
    "reinforce_plus_plus": _KL | _PPO | dict(advantage="reinforce_plus_plus", loss_agg="token_mean"),  # 2501.03262
    "remax": _KL | dict(advantage="remax", policy_loss="reinforce", loss_agg="seq_sum"),  # 2310.10505
    "opo": _NO_KL | dict(advantage="opo", policy_loss="gpg", loss_agg="token_mean", num_minibatches=1),  # 2505.23585
    "gpg": _NO_KL | dict(advantage="gpg", policy_loss="gpg", loss_agg="token_mean"),  # 2504.02546
    "clip_cov": _GROUP | _PPO | dict(policy_loss="clip_cov", loss_agg="token_mean"),  # 2505.22617
    "kl_cov": _GROUP | dict(policy_loss="kl_cov", loss_agg="token_mean"),  # 2505.22617
    "topr": _NO_KL | dict(advantage="dr_grpo", policy_loss="topr", loss_agg="seq_sum"),  # 2503.14286
    "kimi": _NO_KL | dict(advantage="dr_grpo", policy_loss="kimi", loss_agg="seq_sum"),  # 2501.12599
    "gigpo": _PPO | dict(advantage="gigpo", gamma=0.95, loss_agg="seq_mean", beta=0.01, kl="k3"),  # 2505.10978
    "ppo": _KL | _PPO | dict(num_generations=1, advantage="gae", gamma=1, lam=1, loss_agg="token_mean"),  # 1707.06347
}  # fmt: skip


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_ranges(cfg: TrainConfig) -> None:
    """Each number for itself. Written so that nan fails, too."""
    positive = "prompts_per_step num_minibatches num_iterations max_completion_length max_prompt_length temperature "
    positive += "learning_rate eval_generations reward_timeout judge_max_tokens "
    positive += "max_turns max_calls_per_turn max_tool_result tool_timeout tool_concurrency server_timeout "
    positive += "teacher_timeout distill_clip "
    positive += "request_timeout rollout_timeout dist_timeout push_steps "
    positive += "lora_r lora_alpha save_total_limit log_steps max_grad_norm num_epochs "
    positive += "kl_horizon sapo_tau_pos sapo_tau_neg correction_max top_entropy_quantile"
    positive += " critic_learning_rate critic_iterations value_clip"  # of train_ppo.py
    for name in positive.split():
        if not getattr(cfg, name, 1) > 0:
            raise ConfigError(f"--{name}={getattr(cfg, name)}: must be above 0.")
    for name in (
        "min_completion_length beta weight_decay eval_temperature print_samples_every log_tokens_every epsilon_high "
        "resample_rounds spare_prompts critic_warmup group_std_min correction_min reject_below entropy_coef_step "
        "router_aux_coef kl_cov_coef kimi_tau dro_beta adam_epsilon distill_coef distill_topk"
    ).split():
        if not getattr(cfg, name) >= 0:
            raise ConfigError(f"--{name}={getattr(cfg, name)}: must be 0 or more.")
    for name in "server_timeout request_timeout teacher_timeout dist_timeout".split():
        if not getattr(cfg, name) <= 2e6:  # a socket's limit is that of a C int of milliseconds
            raise ConfigError(f"--{name}={getattr(cfg, name)}: at most 2,000,000 seconds, which are 23 days.")
    optional = "max_steps eval_steps save_steps top_k ref_sync_steps max_turn_length tokens_per_microbatch "
    for name in (optional + "push_bucket_mb logprob_chunk").split():
        if getattr(cfg, name) is not None and getattr(cfg, name) < 1:
            raise ConfigError(
                f"--{name}={getattr(cfg, name)}: at least 1; leave it out, or give none, to switch it off."
            )
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"--seed={cfg.seed}: must be between 0 and 2^32 - 1.")
    for name in (
        "epsilon warmup_ratio adam_beta1 adam_beta2 top_p min_p gamma lam ref_sync_alpha top_entropy_quantile "
        "clip_cov_ratio kl_cov_ratio max_failed distill_gamma distill_jsd"
    ).split():
        if getattr(cfg, name) is not None and not 0 <= getattr(cfg, name) <= 1:
            raise ConfigError(f"--{name}={getattr(cfg, name)}: must be between 0 and 1.")


def check(cfg: TrainConfig, world_size: int | None = None) -> None:
    """Checks that need nothing but the config and the number of ranks (torchrun's WORLD_SIZE)."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            raise ConfigError(f"{name}={os.environ[name]} in the environment must be a whole number; torchrun sets it.")
    world = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    check_ranges(cfg)
    unit = world * cfg.num_minibatches
    if cfg.prompts_per_step % unit and not cfg.eval_only:
        low, high = cfg.prompts_per_step // unit * unit, -(-cfg.prompts_per_step // unit) * unit
        raise ConfigError(
            f"--prompts_per_step={cfg.prompts_per_step} is not divisible by {world} rank(s) x {cfg.num_minibatches} "
            f"minibatch(es); use {f'{low} or ' if low else ''}{high}."
        )
    c = cfg
    why = "with --use_peft it is the model without adapters" if c.use_peft else "--beta 0 loads none"
    for wrong, message in (
        (c.num_generations < 1, f"--num_generations={c.num_generations}: at least 1; 8 is usual."),
        (c.offload and c.strategy == "ddp",
         "--offload moves shards to the CPU, and --strategy ddp has none; add --strategy fsdp2."),
        (c.offload and c.strategy == "fsdp",
         "--offload with --strategy fsdp: torch's FSDP1 would keep the gradient of the last micro-batch alone; use "
         "--strategy fsdp2."),
        (c.shard_size is not None and c.strategy == "ddp",
         f"--shard_size={c.shard_size} divides shards, and --strategy ddp has none; add --strategy fsdp2."),
        (c.shard_size is not None and c.shard_size < 1,
         f"--shard_size={c.shard_size}: at least 1; usual is the number of GPUs of a node."),
        (c.shard_size and c.starts_ranks and world % c.shard_size,
         f"--shard_size={c.shard_size} does not divide the {world} rank(s); usual is the number of GPUs of a node."),
        (c.offload_activations and c.gradient_checkpointing is False,
         "--offload_activations moves what --gradient_checkpointing keeps; leave out --no-gradient_checkpointing."),
        (c.compile and c.strategy == "fsdp",
         "--compile with --strategy fsdp: flat parameters change under compiled code; use --strategy fsdp2 or ddp."),
        (c.beta == 0 and (c.kl_in_reward or c.kl_target is not None),
         "--kl_in_reward and --kl_target need a --beta above 0; 0.001 is usual."),
        (c.kl_target is not None and not c.kl_target > 0, f"--kl_target={c.kl_target}: must be above 0."),
        (c.kl_target is not None and c.kl_horizon < c.sequences_per_step,
         f"--kl_horizon={c.kl_horizon}: at least the completions of a step, {c.sequences_per_step}."),
        (c.group_mean_min > c.group_mean_max,
         f"--group_mean_min={c.group_mean_min} is above --group_mean_max={c.group_mean_max}: no group would be learned "
         "from; swap them, or leave one out."),
        (c.clip_cov_min >= c.clip_cov_max,
         f"--clip_cov_min={c.clip_cov_min} is not below --clip_cov_max={c.clip_cov_max}: no token would be chosen."),
        (c.ref_sync_steps and (c.use_peft or c.beta == 0),
         f"--ref_sync_steps moves the reference model, and {why}; leave it out."),
        (not c.reject_above > c.reject_below, f"--reject_above={c.reject_above} is not above --reject_below."),
        (c.correction_max < c.correction_min, f"--correction_max={c.correction_max} is below --correction_min."),
        (c.dual_clip is not None and not c.dual_clip > 1,
         f"--dual_clip={c.dual_clip}: must be above 1 (DAPO uses 10), or leave it unset."),
        (c.dual_clip is not None and c.policy_loss != "ppo", "--dual_clip belongs to --policy_loss ppo; give none."),
        (c.min_completion_length > c.max_completion_length,
         f"--min_completion_length={c.min_completion_length} is more than --max_completion_length="
         f"{c.max_completion_length}; lower the first or raise the second."),
        (c.spare_prompts and not c.dynamic_sampling,
         f"--spare_prompts={c.spare_prompts} replace groups without signal; add --dynamic_sampling, or leave it out."),
        (c.spare_prompts and c.generator == "hf",
         f"--spare_prompts={c.spare_prompts}: --generator hf samples one prompt after another, so spare ones gain no "
         "time; leave it out, or use --generator vllm."),
        (c.spare_prompts > c.resample_rounds * c.prompts_per_step,
         f"--spare_prompts={c.spare_prompts}: a step draws at most --resample_rounds={c.resample_rounds} x "
         f"--prompts_per_step={c.prompts_per_step} further prompts; lower it, or raise --resample_rounds."),
        (not c.reward_funcs,
         "--reward_funcs is empty: give at least one, a name in REWARDS or path/to/file.py:function."),
        (c.reward_weights is not None and len(c.reward_weights) != len(c.reward_funcs),
         f"--reward_weights has {len(c.reward_weights or ())} values for {len(c.reward_funcs)} --reward_funcs "
         f"({', '.join(c.reward_funcs)}); give one each."),
        ("reward_model" in c.reward_funcs and not c.reward_model,
         "--reward_funcs reward_model needs --reward_model: a folder, a hub id or an http address."),
        ("judge" in c.reward_funcs and not (c.judge_url and c.judge_model),
         "--reward_funcs judge needs --judge_url and --judge_model."),
        (c.judge_url and not c.judge_url.startswith(("http://", "https://")),
         "--judge_url has no http:// or https:// before it; give the address up to and with /v1."),
        (c.judge_template and not os.path.isfile(c.judge_template),
         f"--judge_template={c.judge_template}: there is no such file, or it is a folder or a pipe."),
        (c.mcp_config and os.path.exists(c.mcp_config) and not os.path.isfile(c.mcp_config),
         f"--mcp_config={c.mcp_config} is a folder, a pipe or a device; give a JSON file."),
        (c.colocate and c.generator == "hf",
         "--colocate has a server and the trainer take turns; --generator hf samples in the trainer: leave one out."),
        (c.colocate and world > 1,
         f"--colocate is for one GPU, and there are {world} ranks: start one, or give the server a GPU of its own."),
        (c.colocate and c.strategy != "ddp" and not c.offload,
         f"--colocate --strategy {c.strategy}: its shards cannot be moved; take ddp, or fsdp2 with --offload."),
        (c.strategy == "fsdp" and c.ref_sync_steps,
         "--strategy fsdp --ref_sync_steps: its flat shards cannot be averaged in place; take fsdp2 or ddp."),
        (c.strategy == "fsdp" and c.use_peft and c.dtype != "float32",
         f"--strategy fsdp --use_peft --dtype {c.dtype}: a unit has one dtype, adapters float32; use fsdp2 or ddp."),
        (c.colocate and c.push_steps > 1,
         f"--colocate --push_steps={c.push_steps}: a server that slept has no weights, so each step pushes them."),
        (c.push_lora != "auto" and not (c.use_peft and c.generator == "vllm"),
         f"--push_lora={c.push_lora} says how LoRA travels to a server; add --use_peft, and --generator vllm, or leave "
         "it out."),
        (c.load_in and not c.use_peft,
         "--load_in 4bit: weights in 4 bits are frozen, so adapters learn on them; add --use_peft, or leave it out."),
        (c.load_in and (c.strategy == "fsdp" or c.offload),
         f"--load_in 4bit {'--offload' if c.offload else '--strategy fsdp'}: not built for weights in 4 bits; use "
         "--strategy ddp, with which each GPU has the whole base in 4 bits, or --strategy fsdp2 without --offload."),
        (c.load_in and c.strategy == "fsdp2" and c.generator == "hf",
         "--load_in 4bit --strategy fsdp2 --generator hf: the policy itself would sample, and each rank for as long as "
         "its own completions take, while its shards want all ranks; use a vLLM server, or --strategy ddp."),
        (c.load_in and c.push_lora == "folded",
         "--load_in 4bit --push_lora folded: nothing can be folded into 4 bits; leave --push_lora out, and start the "
         "server with --enable-lora."),
        (c.load_in and c.colocate,
         "--load_in 4bit --colocate: a server that slept has no weights, and only adapters are pushed; leave "
         "--colocate out and give the server a share of the GPU (--gpu-memory-utilization), or --generator hf."),
        (c.load_in and c.generator == "hf" and c.push_steps > 1,
         f"--load_in 4bit --generator hf --push_steps={c.push_steps}: the policy itself samples, with its newest "
         "adapters; leave --push_steps out."),
        (c.teacher_urls and c.teacher_id,
         f"--teacher_urls and --teacher_id={c.teacher_id} are two teachers; leave one out."),
        (c.teacher_model and not c.teacher_urls,
         f"--teacher_model={c.teacher_model} is a name on a server; add --teacher_urls, or give --teacher_id FOLDER."),
        (c.has_teacher and c.temperature != 1,
         f"--temperature={c.temperature}: a teacher's log-probs are those at temperature 1, to which the policy would "
         "be pulled at this one; leave --temperature out."),
        (c.distill_jsd and not c.distill_topk,
         f"--distill_jsd={c.distill_jsd} is a kind of the term over the teacher's top tokens; add --distill_topk 20."),
        (c.generator == "vllm" and not c.server_urls,
         "--server_urls is empty: give the address of a vllm_server.py, or --generator hf for none."),
        (c.push_to_hub and not c.hub_repo_id, "--push_to_hub needs a place to upload to: add --hub_repo_id NAME/REPO."),
        (c.push_to_hub and c.eval_only, "--eval_only makes nothing to upload; leave out --push_to_hub."),
        (c.eval_split is None and (c.eval_steps or c.eval_only) and not c.domain,
         "--eval_split=none and evaluation contradict each other; in a list of domains, one may have none."),
        (c.eval_dataset_id and not (c.eval_steps or c.eval_only),
         "--eval_dataset_id is never used without --eval_steps N (or --eval_only); add it."),
        (math.isinf(c.num_epochs), f"--num_epochs={c.num_epochs}: give a number; --max_steps N ends a run earlier."),
        (c.min_pixels is not None and c.max_pixels is not None and c.min_pixels > c.max_pixels,
         f"--min_pixels={c.min_pixels} is above --max_pixels={c.max_pixels}: no image could be scaled to both; swap "
         "them, or leave one out."),
        (c.warmup_steps is not None and c.warmup_steps < 0, f"--warmup_steps={c.warmup_steps}: must be 0 or more."),
        (c.warmup_steps is not None and c.warmup_ratio > 0,
         f"--warmup_steps={c.warmup_steps} and --warmup_ratio={c.warmup_ratio} are two lengths of one warm-up: give "
         "one."),
        (c.run_name is not None and not re.fullmatch(r"(?!\.+$)[^/\x00-\x1f]{1,200}", c.run_name),
         f"--run_name={c.run_name!r:.60}: give the name of a folder under --output_dir, at most 200 characters, no /."),
        (c.resume and not c.run_name, "--resume needs --run_name, the folder under --output_dir to continue."),
        (c.strict_resume and not c.resume, "--strict_resume says how to resume; add --resume, or leave it out."),
        (c.keep_going and not c.resume, "--keep_going says how to resume; add --resume, or leave it out."),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(message)
    if c.judge_template:
        cli.read_text(c.judge_template, "text", cli.MOST_BYTES)
    for tracker in cfg.report_to:
        known_name("--report_to", tracker, ("wandb", "tensorboard", "trackio"))


# ---- values from defaults, preset, file and command line ------------------------------------------------------------


def load_config(cls: type = TrainConfig, argv: list[str] | None = None, description: str | None = None):
    """Defaults < --preset < --config < command line, converted and checked. Raises ConfigError."""
    parser, hints = build_parser(cls, description), typing.get_type_hints(cls)
    known = [f.name for f in flags(cls)]
    given, unknown = parser.parse_known_args(argv)
    given = vars(given)
    if unknown:
        raise unknown_argument(unknown[0], {name: hints[name] for name in known})
    values, paths = {}, given.pop("config", None) or []
    for path in paths:
        values |= read_yaml(path, known)
    values |= given
    if not is_none(preset := values.get("preset")):
        known_name("--preset", preset, PRESETS)
        values = PRESETS[preset] | values
    converted = {name: convert(name, hints[name], value) for name, value in values.items()}
    cfg = cls(**converted)
    if cfg.generator == "vllm":  # read before anything is written or started: masked from here on, and not inherited
        token = read_secret("VLLM_SERVER_TOKEN", cfg.server_token)
        cfg.server_token = cfg.server_token and token
        cfg.server_urls = addresses(cfg.server_urls, "--server_urls")
    for own in cfg.by_domain():
        with domains.named(own):
            addresses(own.teacher_urls, "--teacher_urls")
            check(own)
    if (cfg.eval_steps or cfg.eval_only) and all(own.eval_split is None for own in cfg.by_domain()):
        raise ConfigError("evaluation and eval_split none in every domain contradict each other; give one a split.")
    for name in given if cfg.domains else ():
        if all(name in entry for entry in converted["domains"]):
            where = f"of {' and '.join(paths)}" if paths else "of --domains"
            raise ConfigError(f"--{name} changes nothing: every domain {where} has its own. Change it there.")
    return cfg


def read_secret(variable: str, given: str | None = None) -> str:
    """As secrets.read; ConfigError for a file that cannot be read."""
    try:
        return secrets.read(variable, given)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None


def addresses(urls: list[str], flag: str) -> list[str]:
    """Of servers, without slashes at their ends. ConfigError for what is none, and for one given twice."""
    from safety import http

    try:
        places = [http.origin(http.base(url)) for url in urls]
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}.") from None
    if twice := next((url for n, url in enumerate(urls) if places[n] in places[:n]), None):
        raise ConfigError(f"{flag} names {twice} twice: give it once, it takes many requests at a time.")
    return [http.base(url) for url in urls]


def public_config(cfg: TrainConfig) -> dict:
    """The settings as plain values, without the secrets in them."""
    shown = {f.name: getattr(cfg, f.name) for f in flags(type(cfg))}
    return secrets.hide(shown | ({"server_token": secrets.HIDDEN} if cfg.server_token else {}))


def first_steps(cfg: TrainConfig) -> str:
    """What to type, for somebody who started a script without flags and without a server's secret."""
    script = os.path.basename(sys.argv[0])
    return f"""no arguments, and no VLLM_SERVER_TOKEN. On GPUs this trains {cfg.model_id} beside
a server on a GPU of its own, both with that secret: python vllm_server.py --model {cfg.model_id}
What runs without a GPU: with a server (installs, makes a small model and trains it, 10 minutes), or all in one process:
  bash scripts/demo.sh
  python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct  # the small model alone; then
  python {script} {cfg.first_run}"""


def knobs_of(script: str) -> type:
    """TrainConfig of a script that another one builds on: what stands above its line CONFIG = ... is run, and nothing
    below, as that imports torch. A script without the line is run as a whole."""
    if script in sys.modules:
        return sys.modules[script].TrainConfig
    name = f"{script} (above CONFIG)"
    if name not in sys.modules:
        if (spec := importlib.util.find_spec(script)) is None:
            raise ModuleNotFoundError(f"there is no {script}.py to take TrainConfig from", name=script)
        with open(spec.origin, encoding="utf-8") as file:
            tree = ast.parse(file.read(), spec.origin)
        names = [[getattr(target, "id", "") for target in getattr(node, "targets", ())] for node in tree.body]
        tree.body = tree.body[: names.index(["CONFIG"]) if ["CONFIG"] in names else None]
        module = types.ModuleType(name)
        module.__file__ = spec.origin  # where --help finds the knobs' comments
        sys.modules[name] = module
        exec(compile(tree, spec.origin, "exec"), module.__dict__)
    return sys.modules[name].TrainConfig


def parse_args(cls: type = TrainConfig, argv: list[str] | None = None, description: str | None = None):
    """`load_config` for scripts: a mistake prints one line and exits with status 2. Rank 0 alone speaks. No arguments
    and no secret of a server, which every server asks for, is a newcomer's mistake: see `first_steps`."""
    try:
        cfg = load_config(cls, argv, description)
        bare = argv is None and len(sys.argv) == 1 and cfg.generator == "vllm"
        if bare and not read_secret("VLLM_SERVER_TOKEN"):
            raise ConfigError(first_steps(cfg))
        return cfg
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{os.path.basename(sys.argv[0])}: error: {secrets.hide(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
