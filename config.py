"""Every knob of the training scripts: one flat dataclass whose trailing comments are the help texts. Values come from
defaults, `--preset NAME`, `--config FILE.yaml` and the command line; later ones win.

A copied script that needs a knob of its own subclasses the config in the script, above `parse_args`:

    class TrainConfig(TrainConfig):
        my_coef: float = 0.1  # weight of my idea

Nothing in this file imports torch: `--help` and error messages appear in a fraction of a second, on a laptop, without
touching a GPU, a process group or a server.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

import yaml

from network import secrets


class ConfigError(ValueError):
    """A setting that cannot work. The message says what was given, what is allowed and what to do."""

    status = 2  # exit status; tells a restart loop that another try does not help
    needs_traceback = False


class NotNow(ConfigError):
    """A setting that cannot work at the moment, because of a lock or a server. Another try may help."""

    status = 1


Tracker = Literal["wandb", "tensorboard", "trackio", "swanlab", "mlflow"]
LossAgg = Literal["token_mean", "seq_mean", "seq_sum", "constant", "prompt_mean"]

# A field that is no flag: set by code, or a constant of one published loss. Redeclared above CONFIG, it becomes one.
NO_FLAG = {"flag": False}


@dataclass
class TrainConfig:
    def __init_subclass__(cls):  # so that a script's own TrainConfig needs no decorator; it may have one
        fields = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        dataclass(cls)
        for name, value in fields.items():
            setattr(cls, name, value)

    # What `--help` shows beside a script's own flags; `--help all` shows every one.
    first_flags = "model_id dataset_id reward_funcs tools env generator server_urls max_completion_length preset "
    first_flags += "prompts_per_step num_generations learning_rate max_steps use_peft strategy eval_steps report_to "
    first_flags += "run_name save_steps resume"
    first_run = "--config examples/sums.yaml --generator hf"  # runs anywhere; see first_steps

    # --- model ---
    model_id: str = "Qwen/Qwen2.5-1.5B-Instruct"  # hub id or folder of the policy
    dtype: Literal["float32", "bfloat16"] = "float32"  # master weights; in bfloat16 an update of 1e-6 is rounded away
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # autocast, FSDP param dtype; float32 on CPUs without it
    attn_implementation: str = "auto"  # sdpa where the model has it, else eager; or a name, such as flash_attention_2
    gradient_checkpointing: bool | None = None  # recompute activations: less memory, 1/3 slower; unset: on GPUs
    use_peft: bool = False  # train LoRA adapters instead of all weights
    load_in: Literal["4bit"] | None = None  # 4bit: LoRA on frozen 4-bit weights (QLoRA) of linear layers
    lora_r: int = 32  # LoRA rank
    lora_alpha: float = 64.0  # LoRA scale: the update is alpha / r * B A
    freeze_vision: bool = False  # freeze the image encoder, without adapters; a connector outside it is trained
    lora_targets: list[str] = field(default_factory=lambda: ["all-linear"])  # ends of names, or one regular expression

    # --- data ---
    dataset_id: str | None = None  # hub id, file, folder, reasoning_gym:TASK?key=value, file.py:function, seeds:N
    dataset_config: str | None = None  # configuration name of a hub data set
    dataset_split: str = "train"  # split to train on
    eval_dataset_id: str | None = None  # held-out data; unset: dataset_id with eval_split, if evaluation is on
    eval_split: str | None = "test"  # split to evaluate on; none: a domain without held-out rows
    system_prompt: str | None = None  # put before prompts that have no system message
    no_apply_chat_template: bool = False  # string prompts go to the model as they are
    chat_template_kwargs: dict | None = None  # arguments of the chat template, as '{"enable_thinking": false}'
    allow_special_tokens: bool = False  # let text in prompts that reads like a special token become one
    max_prompt_length: int = 1024  # rows with more tokens in their prompts are replaced when drawn, and counted
    max_pixels: int | None = None  # larger images are scaled down to this, for trainer and server alike
    domains: list[dict] = field(default_factory=list)  # data sets with their own settings: BY_DOMAIN below

    # --- rollout ---
    rollout: str | None = None  # name in ROLLOUTS (rollouts.py); unset: multi_turn with environment or tools
    max_completion_length: int = 512  # most tokens after the prompt, including those of tools and environments
    min_completion_length: int = 0  # no end-of-turn token before this many tokens (for benchmarks)
    temperature: float = 1.0  # sampling temperature; the trainer divides its logits by it, too
    top_p: float | None = None  # nucleus sampling; off by default, it biases the importance ratio
    top_k: int | None = None  # sample from the k likeliest tokens; off by default for the same reason
    stop: list[str] = field(default_factory=list)  # texts at which sampling ends; they are trained on as sampled
    generator: Literal["vllm", "hf"] = "vllm"  # vllm: vllm_server.py beside this script; hf: sample in this process
    server_urls: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8000"])  # one or several vllm_server.py
    server_token: str | None = field(default=None, repr=False, metadata=NO_FLAG)  # from VLLM_SERVER_TOKEN
    server_timeout: float = 60.0  # seconds to wait for a server to answer, and for each step of a weight push
    request_timeout: float = 600.0  # seconds one generation request may take
    colocate: bool = False  # server and trainer take turns on one GPU; the server needs --enable-sleep-mode
    push_steps: int = 1  # push weights every N steps, and always before an evaluation or a checkpoint
    push_bucket_mb: int | None = None  # bucket size of a push, which takes three of them; unset: 256, from 30B on 1024
    push_lora: Literal["auto", "adapters", "folded"] = "auto"  # how LoRA is pushed; auto: adapters if the server can

    # --- tools and environments ---
    env: str | None = None  # name in ENVIRONMENTS (envs/adapters.py) or file.py:NAME; arguments: NAME?key=value
    tools: list[str] = field(default_factory=list)  # names in TOOLS (envs/tools.py) or file.py:function
    mcp_config: str | None = None  # JSON file with `mcpServers`, whose tools are added
    tool_parser: str = "auto"  # format of calls; auto: the chat template's (inputs/formats.py)
    max_turns: int = 8  # most turns of the model in one trajectory
    max_turn_length: int | None = None  # most tokens sampled per turn; unset: all that max_completion_length leaves
    max_tool_result: int = 4000  # characters of a tool's result, or an environment's message, shown to the model
    tool_timeout: float = 30.0  # seconds a call, or a method of an environment, may take
    max_failed: float = 0.1  # the run stops if a larger share of a step's trajectories fails; 0: if any does
    allow_uncontained: bool = False  # run a model's code (--tools python, code_tests) where no sandbox contains it
    # if the template drops earlier thinking: append anyway, or fork a new row; unset: fork for agents, else append
    on_rewrite: Literal["append", "fork"] | None = None
    agent: str | None = None  # file.py:function(row, endpoint), or a command, that calls the model by OpenAI's API
    agent_timeout: float = 600.0  # seconds one trajectory of an agent may take
    agent_concurrency: int = 64  # agents at the same time on each rank
    # Why rollouts and rewards are called; set by code. baseline: the greedy completion that remax compares with.
    purpose: Literal["train", "eval", "baseline"] = field(default="train", metadata=NO_FLAG)  # no flag
    # Name of the domain with these settings, as `of` returns them; "" for a whole run. Set by code.
    domain: str = field(default="", metadata=NO_FLAG)

    # --- batch ---
    prompts_per_step: int = 32  # distinct prompts per step, over all ranks
    num_generations: int = 8  # completions sampled per prompt (the group); a row's column of this name overrides it
    num_minibatches: int = 1  # optimizer updates per pass over the step's completions
    num_iterations: int = 1  # passes over the step's completions (mu in the GRPO paper)
    tokens_per_microbatch: int | None = None  # tokens of a forward pass on a rank; unset: as many as fit
    shared_prefix: bool = True  # compute a prompt once for all its completions: same gradient, faster
    head_dtype: Literal["auto", "float32"] = "auto"  # dtype of the output layer's product; auto: --compute_dtype
    # sampled tokens whose logits are in memory at a time; unset: 256, more on GPUs
    logprob_chunk: int | None = field(default=None, metadata=NO_FLAG)

    # --- reward ---
    reward_funcs: list[str] | None = None  # names in REWARDS, or file.py:function; unset: --env's own, or reasoning_gym
    reward_model: str | None = None  # folder, hub id or http address of a classifier, for --reward_funcs reward_model
    judge_url: str | None = None  # OpenAI-compatible server, up to and with /v1, for --reward_funcs judge
    judge_model: str = ""  # name of the judge's model on that server
    judge_template: str | None = None  # file with its question; fills in {prompt}, {completion} and every column
    reward_weights: list[float] | None = None  # one weight per reward function; unset: all 1
    reward_timeout: float = 30.0  # seconds a reward function may take for one group
    reward_on_timeout: float = field(default=0.0, metadata=NO_FLAG)  # score where a reward function ran out of time
    reward_mean: Literal["none", "group", "batch", "running"] = "none"  # subtract this mean from the scores beforehand
    reward_std: Literal["none", "group", "batch", "running"] = "none"  # divide the scores by this std beforehand
    dynamic_sampling: bool = False  # sample other prompts in place of groups without signal (DAPO)
    resample_rounds: int = 8  # prompts tried in place of one without signal, or too long; the last stays
    # groups whose mean score is outside are left out of the loss: too hard, too easy
    group_mean_bounds: list[float] = field(default_factory=lambda: [-math.inf, math.inf])

    # --- teacher: on-policy distillation, docs/distillation.md ---
    teacher_urls: list[str] = field(default_factory=list)  # servers of a teacher that scores what the policy samples
    teacher_id: str | None = None  # hub id or folder of a frozen teacher in this process, sharded like the policy
    teacher_prompt: str | None = None  # teacher's prompt: a column, file.py:function; alone: the policy teaches itself
    distill_coef: float = 1.0  # weight of the teacher's term, beside the rewards; 0: it is only logged
    distill_baseline: Literal["none", "place"] = "none"  # place: subtract the mean of other tokens at the same place
    distill_topk: int = 0  # add a loss term over the teacher's k likeliest tokens; 0: none
    distill_jsd: float = 0.0  # kind of that term: 0 forward KL, 1 reverse KL, between them GKD's generalised JSD

    # --- algorithm ---
    preset: str | None = None  # a published recipe's settings, printed at start; flags override them
    advantage: str = "grpo"  # name in ADVANTAGES (train_grpo.py)
    scale_rewards: Literal["group", "batch", "none"] = "group"  # whose std divides the scores
    gamma: float = 1.0  # discount per sampled token (turn, gigpo: per turn)
    lam: float = field(default=1.0, metadata=NO_FLAG)  # for train_ppo.py, where it is a flag
    critic_warmup: int = field(default=0, metadata=NO_FLAG)  # likewise
    policy_loss: str = "ppo"  # name in POLICY_LOSSES (train_grpo.py)
    loss_agg: LossAgg = "seq_mean"  # weights of tokens
    epsilon: float = 0.2  # lower clip: a token with A < 0 has no gradient once its ratio is below 1 - epsilon
    epsilon_high: float = 0.2  # upper clip: a token with A > 0 has none above 1 + epsilon_high (DAPO: 0.28)
    dual_clip: float | None = None  # bound on the loss of a token with negative advantage (DAPO: 10)
    sapo_tau_pos: float = field(default=1.0, metadata=NO_FLAG)  # sapo: steepness of the gate where A > 0
    sapo_tau_neg: float = field(default=1.05, metadata=NO_FLAG)  # sapo: steepness where A <= 0
    clip_cov_ratio: float = field(default=0.0002, metadata=NO_FLAG)  # clip_cov: share of tokens without gradient
    clip_cov_min: float = field(default=1.0, metadata=NO_FLAG)  # clip_cov: among those with a covariance above this ...
    clip_cov_max: float = field(default=5.0, metadata=NO_FLAG)  # ... and below this
    kl_cov_ratio: float = field(default=0.0002, metadata=NO_FLAG)  # kl_cov: share of tokens that are held back
    kl_cov_coef: float = field(default=1.0, metadata=NO_FLAG)  # kl_cov: weight of |log-ratio| on them
    dro_beta: float = field(default=0.5, metadata=NO_FLAG)  # dro: weight of the squared log-ratio
    dppo_tau: float = field(default=0.0, metadata=NO_FLAG)  # dppo_tv, dppo_kl: the same, on all tokens (prime-rl: .001)
    beta: float = 0.0  # weight of the KL term; 0 loads no reference model
    kl: str = "k3"  # name in KL_ESTIMATORS (train_grpo.py)
    kl_ratio: bool = False  # multiply the KL term by pi / pi_old, with its gradient: the unbiased estimate
    kl_in_reward: bool = False  # subtract beta * KL from each token's reward instead of adding it to the loss
    kl_target: float | None = None  # adapt beta to keep the KL near this
    ref_sync_steps: int | None = None  # move the reference model towards the policy every N steps
    ref_sync_alpha: float = 0.6  # ref <- alpha * policy + (1 - alpha) * ref
    entropy_coef: float = 0.0  # weight of the entropy bonus
    entropy_target: float | None = None  # adapt entropy_coef: up while the entropy is below this, down while above
    top_entropy_quantile: float = 1.0  # train on this fraction of the step's tokens, highest entropy first
    router_replay: Literal["auto", "on", "off"] = "auto"  # reuse the generator's experts; auto: if it reports them
    router_aux_coef: float = 0.0  # weight of transformers' loss that keeps experts evenly used
    mask_truncated: bool = False  # leave completions cut at a length limit out of the loss
    # pi_old: the trainer's before the update, the generator's, between the generator's and pi by age, or always pi
    old_logprobs: Literal["recompute", "sampler", "interpolate", "current"] = "recompute"
    correction: Literal["none", "token", "sequence"] = "token"  # importance weights trainer / generator on the loss
    correction_mode: Literal["truncate", "mask"] = "truncate"  # weights outside the bounds: clamp, or leave out
    correction_min: float = 0.0  # lower bound of these weights
    correction_max: float = 2.0  # upper bound of these weights
    reject_by: str = "seq_mean_k1"  # token_, seq_mean_, seq_sum_ or seq_max_ k1, k2 or k3 of log trainer / generator
    # no policy loss where that value (for k1 its exponential, a ratio) is outside
    reject_bounds: list[float] = field(default_factory=lambda: [0.0, math.inf])
    off_policy_threshold: float | None = None  # drop tokens with A < 0 of rows that drifted further (mean nats/token)

    # --- optimisation ---
    learning_rate: float = 1e-6  # peak learning rate
    lr_schedule: str = "constant"  # schedule of transformers; arguments: cosine_with_min_lr?min_lr_rate=.1
    warmup_steps: float = 0.0  # steps over which the learning rate rises; below 1: a fraction of all updates
    optim: str = "AdamW"  # a class of torch.optim or bitsandbytes.optim, or transformers' name of one (adamw_8bit)
    weight_decay: float = 0.0  # weight decay of the optimizer
    adam_beta2: float = 0.99  # second of the optimizer's betas; the first is 0.9
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm
    num_epochs: float = 1.0  # passes over the data set, if max_steps is unset
    max_steps: int | None = None  # stop after this many steps; unset: after num_epochs
    seed: int = 42  # data order, sampling, initialisation of adapters

    # --- sharding ---
    strategy: Literal["ddp", "fsdp", "fsdp2"] = "ddp"  # replicate, or shard weights, gradients and optimizer state
    shard_size: int | None = None  # ranks that share one copy, replicated by the others (usually a node's); unset: all
    offload: bool = False  # with fsdp2: keep the shards in CPU memory
    offload_activations: bool = False  # keep in CPU memory what gradient_checkpointing saves of each layer
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
    resume: bool = False  # continue run_name from its last complete checkpoint; start it if there is none
    save_steps: int | None = None  # checkpoint every N steps, and one after the last step; Ctrl-C writes none
    save_total_limit: int = 2  # checkpoints kept
    log_steps: int = 1  # write a line of metrics, and the completions, every N steps
    log_completions: bool = True  # write every completion to completions/*.parquet, with rewards and values per token
    print_samples_every: int = 10  # print one prompt, completion and reward every N steps; 0: never
    logprob_diff_limit: float = 0.2  # the first step stops if |trainer - generator log-prob| exceeds this on average
    report_to: list[Tracker] = field(default_factory=list)  # also log to: wandb, tensorboard, trackio, swanlab, mlflow

    def __post_init__(self):
        # A domain inherits these values as given, before unset ones are filled in for the run as a whole.
        open_names = ("rollout", "dataset_id", "reward_funcs", "max_prompt_length", "max_completion_length")
        inherited = {name: getattr(self, name) for name in open_names}
        self.domains = [{"weight": 1} | inherited | read_entry(entry, type(self)) for entry in self.domains]
        has_turns = self.env or self.tools or self.mcp_config
        self.rollout = self.rollout or ("agent" if self.agent else "multi_turn" if has_turns else "single_turn")
        if self.dataset_id is None:
            self.dataset_id = "seeds:2000" if self.env else "reasoning_gym:chain_sum"
        if self.reward_funcs is None:
            self.reward_funcs = ["environment" if self.env or self.agent else "reasoning_gym"]
        for name in ("max_prompt_length", "max_completion_length"):  # for the run as a whole: room for the longest
            setattr(self, name, max([entry[name] for entry in self.domains] or [inherited[name]]))

    def of(self, row: dict) -> "TrainConfig":
        """The config of the row's domain: this one with the domain's own settings. Without domains, this one."""
        entry = next((entry for entry in self.domains if entry["name"] == row.get("domain")), None)
        if entry is None:
            return self
        cache = self.__dict__.setdefault("_of", {})
        if entry["name"] not in cache:
            settings = {key: value for key, value in entry.items() if key not in ("name", "weight")}
            cache[entry["name"]] = dataclasses.replace(self, **settings, domains=[], domain=entry["name"])
        return cache[entry["name"]]

    def by_domain(self) -> "list[TrainConfig]":
        """The config of each domain; without domains, this one."""
        return [self.of({"domain": entry["name"]}) for entry in self.domains] or [self]

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher scores what is sampled; in a run with domains, for any of them."""
        return any(domain.teacher_urls or domain.teacher_id or domain.teacher_prompt for domain in self.by_domain())

    @property
    def prefix(self) -> str:
        """Prefix of the names of the domain's metrics and reward functions."""
        return f"{self.domain}/" if self.domain else ""

    @property
    def sequences_per_step(self) -> int:
        """Completions asked for in a step whose rows have no column `num_generations`."""
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
    "prime_rl": _NO_KL | dict(  # the default of prime-rl; 2602.04879
        advantage="dr_grpo", policy_loss="dppo_tv", epsilon=0.2, epsilon_high=0.2, dppo_tau=1e-3, loss_agg="token_mean",
        old_logprobs="sampler",
    ),
    "ppo": _KL | _PPO | dict(num_generations=1, advantage="gae", gamma=1, lam=1, loss_agg="token_mean"),  # 1707.06347
}  # fmt: skip


# ---- domains: several data sets in one run, with their own settings --------------------------------------------------

# Settings that may differ by domain. To add your own: config.BY_DOMAIN.add("my_knob")
BY_DOMAIN = {
    *"dataset_id dataset_config dataset_split eval_dataset_id eval_split eval_solved".split(),
    *"system_prompt no_apply_chat_template allow_special_tokens max_prompt_length max_pixels".split(),
    *"rollout max_completion_length min_completion_length".split(),
    *"env tools mcp_config tool_parser tool_timeout max_turns max_turn_length max_tool_result".split(),
    *"agent agent_timeout".split(),
    *"reward_funcs reward_weights reward_model judge_url judge_model judge_template".split(),
    *"teacher_urls teacher_prompt".split(),
    *"reward_timeout group_mean_bounds".split(),
}
# First parts of metric names: a domain's NAME/reward must not collide with them.
TAKEN = "advantages async clip_ratio completions distill dynamic_sampling eval images kl kl_cov lr ranks".split()
TAKEN += "rewards rollout sampling staleness time tools turns value".split()


def read_entry(entry: dict, cls: type) -> dict:
    """An entry of `domains`, with values of the fields' types. ConfigError if it is invalid."""
    name, hints = entry.get("name"), typing.get_type_hints(cls)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,50}", name) or name in TAKEN:
        raise ConfigError(f"domains, name {name!r}: use letters, digits, - . _, and none of {', '.join(TAKEN)}.")
    for key in entry:
        known_name(f"settings of domain {name!r}", key, {"name", "weight", *BY_DOMAIN})
    try:
        settings = {key: convert(key, hints[key], value) for key, value in entry.items() if key in BY_DOMAIN}
    except ConfigError as error:
        raise ConfigError(f"domain {name!r}: {error}") from None
    weight = entry.get("weight", 1)
    if not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(f"domain {name!r}, weight {weight!r}: give a number above 0.")
    return settings | {"name": name, "weight": weight}


@contextlib.contextmanager
def naming_domain(cfg: TrainConfig):
    """Adds the domain's name to a ConfigError raised within."""
    try:
        yield
    except ConfigError as error:
        if not cfg.domain:
            raise
        raise ConfigError(f"domain {cfg.domain!r}: {error}") from error.__cause__


# ---- checks ---------------------------------------------------------------------------------------------------------

POSITIVE = "prompts_per_step num_generations num_minibatches num_iterations max_completion_length "
POSITIVE += "max_prompt_length temperature learning_rate num_epochs max_steps eval_steps eval_generations "
POSITIVE += "save_steps save_total_limit log_steps push_steps push_bucket_mb server_timeout request_timeout "
POSITIVE += "agent_timeout agent_concurrency dist_timeout reward_timeout tool_timeout max_turns max_turn_length "
POSITIVE += "max_tool_result lora_r lora_alpha tokens_per_microbatch rows_per_microbatch logprob_chunk shard_size "
POSITIVE += "top_k max_grad_norm sapo_tau_pos sapo_tau_neg kl_target ref_sync_steps correction_max "
POSITIVE += "critic_learning_rate critic_iterations value_clip gpus node_gpus gpu_memory tflops memory_bandwidth"
NOT_NEGATIVE = "seed beta epsilon_high weight_decay warmup_steps eval_temperature resample_rounds "
NOT_NEGATIVE += "print_samples_every min_completion_length distill_coef distill_topk router_aux_coef "
NOT_NEGATIVE += "dppo_tau max_staleness"
FRACTIONS = "epsilon gamma lam top_p adam_beta2 ref_sync_alpha top_entropy_quantile clip_cov_ratio "
FRACTIONS += "kl_cov_ratio max_failed distill_jsd"


def check(cfg: TrainConfig, world_size: int | None = None) -> None:
    """Checks that need only the config and the number of ranks (torchrun's WORLD_SIZE). ConfigError if one fails."""
    world = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    for names, valid, rule in (
        (POSITIVE, lambda value: value > 0, "above 0"),
        (NOT_NEGATIVE, lambda value: value >= 0, "0 or more"),
        (FRACTIONS, lambda value: 0 <= value <= 1, "between 0 and 1"),
        ("dual_clip", lambda value: value > 1, "above 1 (DAPO uses 10), or unset"),
    ):
        for name in names.split():
            if (value := getattr(cfg, name, None)) is not None and not valid(value):
                raise ConfigError(f"--{name}={value}: must be {rule}.")
    unit = world * cfg.num_minibatches
    if cfg.prompts_per_step % unit and not cfg.eval_only:
        low, high = cfg.prompts_per_step // unit * unit, -(-cfg.prompts_per_step // unit) * unit
        raise ConfigError(
            f"--prompts_per_step={cfg.prompts_per_step} is not divisible by {world} rank(s) x {cfg.num_minibatches} "
            f"minibatch(es); use {f'{low} or ' if low else ''}{high}."
        )
    for is_wrong, message in wrong_together(cfg):
        if is_wrong:
            raise ConfigError(message)
    if cfg.judge_template:
        read_text(cfg.judge_template)


def wrong_together(c: TrainConfig) -> list[tuple]:
    """(whether settings exclude one another, or one has no effect without another; the message)"""
    return [
        (c.reward_weights is not None and len(c.reward_weights) != len(c.reward_funcs),
         f"--reward_weights has {len(c.reward_weights or ())} values for {len(c.reward_funcs)} --reward_funcs "
         f"({', '.join(c.reward_funcs)}); give one each."),
        ("reward_model" in c.reward_funcs and not c.reward_model,
         "--reward_funcs reward_model needs --reward_model: a folder, a hub id or an http address."),
        ("judge" in c.reward_funcs and not (c.judge_url and c.judge_model),
         "--reward_funcs judge needs --judge_url and --judge_model."),
        (c.beta == 0 and (c.kl_in_reward or c.kl_target is not None),
         "--kl_in_reward and --kl_target need a --beta above 0; 0.001 is usual."),
        (c.ref_sync_steps and (c.use_peft or c.beta == 0),
         "--ref_sync_steps moves a reference model: --beta 0 loads none, and with --use_peft it is the model without "
         "adapters; leave it out."),
        *((len(pair) != 2 or pair[0] > pair[1], f"--{name} {pair}: give two numbers, the lower first, such as 0 inf.")
          for name in ("group_mean_bounds", "reject_bounds") for pair in [getattr(c, name)]),
        (not re.fullmatch("(token|seq_mean|seq_sum|seq_max)_k[123]", c.reject_by),
         f"--reject_by={c.reject_by}: token, seq_mean, seq_sum or seq_max, then _k1, _k2 or _k3, such as seq_mean_k3."),
        (c.teacher_urls and c.teacher_id,
         f"--teacher_urls and --teacher_id={c.teacher_id} are two teachers; leave one out."),
        (c.has_teacher and c.temperature != 1,
         f"--temperature={c.temperature}: a teacher's log-probs are those at temperature 1; leave --temperature out."),
        (c.offload and c.strategy != "fsdp2",
         f"--offload with --strategy {c.strategy}: only fsdp2 can keep shards in CPU memory; add --strategy fsdp2."),
        (c.shard_size and c.strategy == "ddp",
         f"--shard_size={c.shard_size} divides shards, and --strategy ddp has none; add --strategy fsdp2."),
        (c.strategy == "fsdp" and (c.compile or c.ref_sync_steps or c.use_peft and c.dtype != "float32"),
         "--strategy fsdp: flat parameters do not work with --compile, with --ref_sync_steps, or with "
         "--use_peft and a --dtype other than float32; use fsdp2 or ddp."),
        (c.load_in and (not c.use_peft or c.push_lora == "folded" or c.offload or c.strategy == "fsdp"),
         "--load_in 4bit: 4-bit weights are frozen, and nothing can be folded into them; add --use_peft, leave out "
         "--push_lora folded and --offload, and take --strategy ddp or fsdp2."),
        (c.load_in and c.strategy == "fsdp2" and c.generator == "hf",
         "--load_in 4bit --strategy fsdp2 --generator hf: ranks finish sampling at different times, but gathering "
         "shards needs all ranks at once; use a vLLM server, or --strategy ddp."),
        (c.colocate and (c.generator == "hf" or int(os.environ.get("WORLD_SIZE", "1")) > 1 or c.push_steps > 1
                         or c.load_in or c.strategy != "ddp" and not c.offload),
         "--colocate: a server and one rank take turns on one GPU, and each step pushes all weights. Start one rank, "
         "with --generator vllm and --strategy ddp (or fsdp2 --offload), without --push_steps and --load_in."),
        (c.eval_dataset_id and not (c.eval_steps or c.eval_only),
         "--eval_dataset_id is never used without --eval_steps N (or --eval_only); add it."),
        (c.run_name is not None and not re.fullmatch(r"(?!\.+$)[^/]{1,200}", c.run_name),
         f"--run_name={c.run_name!r:.60}: give the name of a folder under --output_dir, at most 200 characters, no /."),
        (c.resume and not c.run_name, "--resume needs --run_name, the folder under --output_dir to continue."),
    ]  # fmt: skip


# ---- values from defaults, preset, file and command line ------------------------------------------------------------


def load_config(cls: type = TrainConfig, argv: list[str] | None = None, description: str | None = None):
    """Defaults < --preset < --config < command line, converted and checked. Raises ConfigError."""
    from network import http

    parser, hints = build_parser(cls, description), typing.get_type_hints(cls)
    names = [f.name for f in flags(cls)]
    arguments, unknown = parser.parse_known_args(argv)
    arguments = vars(arguments)
    if unknown:
        raise unknown_argument(unknown[0], names)
    values, paths = {}, arguments.pop("config", None) or []
    for path in paths:
        values |= read_settings(path, names)
    values |= arguments
    if not is_none(preset := values.get("preset")):
        known_name("--preset", preset, PRESETS)
        values = PRESETS[preset] | values
    converted = {name: convert(name, hints[name], value) for name, value in values.items()}
    cfg = cls(**converted)
    if cfg.generator == "vllm":  # read first: from here on it is masked in output, and not inherited
        secrets.read("VLLM_SERVER_TOKEN")
        cfg.server_urls = [http.base(url) for url in cfg.server_urls]
    if len({domain.domain for domain in cfg.by_domain()}) < len(cfg.domains):
        raise ConfigError("domains: two entries have the same name; give each its own.")
    for domain in cfg.by_domain():
        with naming_domain(domain):
            for url in domain.teacher_urls:
                http.base(url)  # ValueError if it is no address
            check(domain)
    return cfg


def public_config(cfg: TrainConfig) -> dict:
    """The settings as plain values, with secrets hidden."""
    return secrets.hide({f.name: getattr(cfg, f.name) for f in flags(type(cfg))})


def knobs_of(script: str) -> type:
    """TrainConfig of a script that another one builds on. Only the part above its line CONFIG = ... is run, as the part
    below imports torch. A script without the line is run as a whole."""
    if script in sys.modules:
        return sys.modules[script].TrainConfig
    name = f"{script} (above CONFIG)"
    if name not in sys.modules:
        if (spec := importlib.util.find_spec(script)) is None:
            raise ModuleNotFoundError(f"there is no {script}.py to take TrainConfig from", name=script)
        above = Path(spec.origin).read_text(encoding="utf-8").split("\nCONFIG = ")[0]
        module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = spec.origin  # where --help finds the knobs' comments
        exec(compile(above, spec.origin, "exec"), module.__dict__)
    return sys.modules[name].TrainConfig


def parse_args(cls: type = TrainConfig, argv: list[str] | None = None, description: str | None = None):
    """`load_config` for scripts: on a mistake rank 0 prints one line, and the process exits with status 2. Starting
    without arguments and without the server's secret, which every server needs, is a newcomer's mistake: see
    `first_steps`."""
    try:
        cfg = load_config(cls, argv, description)
        no_arguments = argv is None and len(sys.argv) == 1 and cfg.generator == "vllm"
        if no_arguments and not secrets.read("VLLM_SERVER_TOKEN"):
            raise ConfigError(first_steps(cfg))
        return cfg
    except ValueError as error:  # ConfigError, or a file with a secret that cannot be read
        if os.environ.get("RANK", "0") == "0":
            print(f"{os.path.basename(sys.argv[0])}: error: {secrets.hide(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None


def words_of(settings: dict) -> list[str]:
    """The settings as command-line words."""
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def first_steps(cfg: TrainConfig) -> str:
    """What to type, for someone who started a script without flags and without a server's secret."""
    return f"""no arguments, and no VLLM_SERVER_TOKEN. On GPUs this trains {cfg.model_id} beside
a server on its own GPU, both with that secret: python vllm_server.py --model {cfg.model_id}
Without a GPU: with a server (installs, makes a small model, trains it: 10 to 20 minutes), or in one process:
  bash scripts/demo.sh
  python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct  # the small model alone; then
  python {os.path.basename(sys.argv[0])} {cfg.first_run}"""


# ---- from a dataclass to a command line -----------------------------------------------------------------------------


def flags(cls: type) -> list[dataclasses.Field]:
    """The fields that are flags: all without metadata=NO_FLAG. For a class with `own_flags_alone = True`, only those
    that it declares itself; the others keep their defaults."""
    declared = cls.__annotations__ if getattr(cls, "own_flags_alone", False) else None
    fields = [f for f in dataclasses.fields(cls) if declared is None or f.name in declared]
    return [f for f in fields if f.metadata.get("flag", True)]


def field_help(cls: type) -> dict[str, tuple[str, str]]:
    """Field name -> (group, help). The help is the comment after or above the field, the group its `# --- group ---`.
    Base classes come first."""
    help_of: dict[str, tuple[str, str]] = {}
    for base in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        group, name, above = None, None, ""
        for line in inspect.getsource(base).splitlines():
            if ruler := re.fullmatch(r"\s*# --- (.+) ---", line):
                group = ruler[1]
            if (declaration := re.match(r"    (\w+): ", line)) and declaration[1] in base.__annotations__:
                name = declaration[1]
                inherited = help_of.get(name, ("of this script", ""))
                help_of[name] = (group or inherited[0], above or inherited[1])
            if name and (comment := re.search(r"\S  # (.+)", line)):
                help_of[name], name = (help_of[name][0], comment[1]), None
            above = "".join(re.findall(r"^    # (\w.+)", line))
    return help_of


def on_first_page(cls: type) -> set[str]:
    """The flags that `--help` shows."""
    names = {f.name for f in flags(cls)}
    if getattr(cls, "own_flags_alone", False) or not issubclass(cls, TrainConfig):
        return names
    return names & {*cls.first_flags.split()} | names - {f.name for f in dataclasses.fields(TrainConfig)}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(f"{message}. See --help.")


def build_parser(cls: type, description: str | None = None, page: str | None = None) -> argparse.ArgumentParser:
    """The parser of all flags. page: whose help texts to include: "all", or those of the first page ("")."""
    hints, helps = typing.get_type_hints(cls), {} if page is None else field_help(cls)
    fields = flags(cls)
    visible = on_first_page(cls) if page == "" else {f.name for f in fields}
    parser = _Parser(
        prog=os.path.basename(sys.argv[0]),
        description=description,
        epilog=f"{len(fields) - len(visible)} more flags: --help all" if len(visible) < len(fields) else None,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
        usage="[torchrun --nproc_per_node=N] %(prog)s [--config FILE.yaml] [--flag value ...]",
    )
    parser._negative_number_matcher = re.compile(r"-(?:\d|\.\d|inf$)")  # argparse's matches neither -1e-3 nor -inf

    class Help(argparse.Action):
        def __call__(self, parser, namespace, word, option_string=None):
            build_parser(cls, description, word).print_help()
            parser.exit()

    options = dict(nargs="?", const="", default=argparse.SUPPRESS, metavar="all", choices=["", "all"])
    parser.add_argument("--help", "-h", action=Help, help="the flags that one needs first; all: every flag", **options)
    text = "YAML file of `flag: value` lines; later --config files override earlier ones, the command line all"
    parser.add_argument("--config", metavar="FILE", action="append", help=text)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for f in fields:
        kind, _ = without_none(hints[f.name])
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        group, text = helps.get(f.name, ("options", ""))
        if default not in (None, "", []):
            text += f" [{' '.join(map(str, default)) if isinstance(default, list) else default}]"
        text = text.replace("%", "%%") if f.name in visible else argparse.SUPPRESS
        options = dict(dest=f.name, default=argparse.SUPPRESS, help=text)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is list:
            options |= dict(nargs="*", metavar="X")
        elif typing.get_origin(kind) is Literal:
            options["metavar"] = "{" + ",".join(map(str, typing.get_args(kind))) + "}"
        else:
            options["metavar"] = kind.__name__.upper()
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(f"--{f.name}", **options)
    return parser


OF_OTHER_SCRIPTS = {"max_staleness": "train_async.py"} | dict.fromkeys(("lam", "critic_warmup", "gae"), "train_ppo.py")


def unknown_argument(argument: str, names: list[str]) -> ConfigError:
    """An error that guesses what an unknown argument was meant to be."""
    if not argument.startswith("--"):
        return ConfigError(f"unexpected {argument!r}. Switches take no value: --flag is on, --no-flag off. See --help.")
    word = argument.split("=")[0].lstrip("-").replace("-", "_").lower()
    scripts = dict.fromkeys((f.name for f in flags(TrainConfig)), "train_grpo.py") | OF_OTHER_SCRIPTS
    if word in scripts and word not in names:
        return ConfigError(f"unknown argument {argument!r}: it is one of {scripts[word]}.")
    guess = nearest(word.removeprefix("no_"), names)
    hint = f"Did you mean --{guess}?" if guess else "See --help all."
    return ConfigError(f"unknown argument {argument!r}. {hint} A knob of your own stands above the line CONFIG = ...")


def read_settings(path: str, names: list[str]) -> dict:
    """The `flag: value` lines of a --config file, with names checked, without the section `example`, which
    examples/run.py reads."""
    values = load_yaml(path) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config={path}: expected `flag: value` lines, found a {type(values).__name__}.")
    values.pop("example", None)
    for name in values:
        known_name(f"--config={path}", name, names)
    return values


def load_yaml(path: str):
    """The value in a YAML file. ConfigError, with the line, if it cannot be parsed."""
    text = read_text(path)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}. Write `name: value` lines.") from None


def read_text(path: str) -> str:
    """The text of a settings file. ConfigError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # -sig: some editors write a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def without_none(annotation) -> tuple[object, bool]:
    """`X | None` -> (X, True); anything else -> (itself, False)."""
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in args:
        return next(a for a in args if a is not type(None)), True
    return annotation, False


def is_none(value) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


KIND_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
KIND_NAMES[dict] = "`name: value` lines in a --config file, or JSON such as '{\"name\": 1}'"


def convert(name: str, annotation, value):
    """A string (command line) or YAML value as the field's type; ConfigError naming the flag otherwise."""
    kind, optional = without_none(annotation)
    if typing.get_origin(kind) is Literal:
        if isinstance(value, bool):  # YAML reads on and off as booleans
            value = "on" if value else "off"
        if value in typing.get_args(kind):  # before the test for None: a choice may be called none
            return value
    if typing.get_origin(kind) is list:
        items = value if isinstance(value, list) else [value]
        if len(items) == 1 and is_none(items[0]):
            return None if optional else []
        return [convert(name, typing.get_args(kind)[0], item) for item in items]
    if is_none(value):
        if optional:
            return None
        raise ConfigError(f"--{name}: cannot be unset; give a value.")
    if typing.get_origin(kind) is Literal:
        known_name(f"--{name}", value, typing.get_args(kind))
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    try:
        if kind is dict:
            return dict(json.loads(value) if isinstance(value, str) else value)
        # YAML has booleans, lists and maps: str() would accept them all, and int(True) is 1.
        if kind is bool or type(value) not in (str, int, float):
            raise ValueError
        if kind is int and float(value) % 1 != 0:  # int("1e3") fails, and int(1.5) is 1
            raise ValueError
        return int(float(value)) if kind is int else kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"--{name}={str(value):.200}: expected {KIND_NAMES.get(kind, kind)}.") from None


def nearest(name: str, names) -> str | None:
    """The name that `name` was probably meant to be."""
    return next(iter(difflib.get_close_matches(str(name), list(names), n=1)), None)


def known_name(kind: str, name: str, names) -> None:
    """ConfigError if `name` is not one of `names`; the message lists them, with the nearest guess."""
    if not isinstance(name, str) or name not in names:
        guess = nearest(name, names)
        hint = f" Did you mean {guess!r}?" if guess else ""
        if isinstance(name, str) and name in OF_OTHER_SCRIPTS:
            hint = f" {name!r} is for {OF_OTHER_SCRIPTS[name]}: start that script with the same flags."
        raise ConfigError(f"{kind}: unknown name {name!r:.200}; known are {', '.join(sorted(names))}.{hint}")


def shorten(value, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


# ---- users' code: functions named as path/to/file.py:function, and packages that not every run needs -----------------


def function_path(spec: str) -> tuple[str, str] | None:
    """`path/to/file.py:function` -> (path, function); None for anything else."""
    match = re.fullmatch(r"(.+\.py):(\w+)", spec)
    return (match[1], match[2]) if match else None


def with_arguments(spec: str) -> tuple[str, dict]:
    """`NAME?key=value&...` -> (NAME, {key: value}). A value is a Python literal if it parses as one, or true, false,
    none; otherwise text. As in a URL, + is a blank; write %26 for &, %2B for +."""
    name, _, query = spec.partition("?")
    try:
        arguments = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise ConfigError(f"{spec}: write NAME?key=value&key=value; a switch is key=true.") from None
    for key, text in arguments.items():
        with contextlib.suppress(ValueError, SyntaxError):
            arguments[key] = ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    return name, arguments


def require(module: str, feature: str, install: str | None = None) -> None:
    """ConfigError with the install command if `feature` needs a module that is missing. Imports nothing.

    install: pip's arguments, if the module's name is not enough.
    """
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        constraints = f"-c {Path(__file__).with_name('requirements-optional.txt')}"
        raise ConfigError(f"{feature}: {package} is not installed; pip install {install or f'{constraints} {package}'}")


def load_function(spec: str):
    """The function `path/to/file.py:function`. Each file runs only once."""
    path, name = function_path(spec)
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{spec}: there is no file {path} (looked in {Path.cwd()}).")
    # The hash keeps apart two files of the same name in different folders.
    module_name = f"user_{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:8]}"
    if module_name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(module_name, file)
        sys.modules[module_name] = importlib.util.module_from_spec(module_spec)
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # last, so that the file's neighbours never shadow our modules
        try:
            module_spec.loader.exec_module(sys.modules[module_name])
        except BaseException as error:
            del sys.modules[module_name]
            if isinstance(error, ModuleNotFoundError):
                require(error.name.partition(".")[0], spec)
            raise
    names = vars(sys.modules[module_name])
    if name not in names:
        symbols = [n for n, value in names.items() if getattr(value, "__module__", None) == module_name and n[0] != "_"]
        raise ConfigError(f"{spec}: {path} has no {name!r}; it has {', '.join(symbols) or 'nothing'}.")
    return names[name]
