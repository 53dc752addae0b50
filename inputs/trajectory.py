"""Completion, which generators return; Trajectory, a prompt and all that follows it, which rollouts return; and
stand-ins for trajectories that failed."""

from dataclasses import dataclass, field

import numpy as np

from config import TrainConfig, shorten

LARGEST = 1e18  # limit of a reward: its square has to fit a float32, for standard deviations


@dataclass
class Completion:
    """One sampled sequence. `len(token_ids) == len(logprobs)`; a sampled end-of-turn token is included."""

    token_ids: list[int]
    logprobs: list[float]  # under the distribution the tokens were drawn from (temperature and truncation applied)
    finish_reason: str  # "stop" | "length"
    policy_version: int  # oldest weights that sampled any of its tokens
    prompt_ids: list[int]  # as the server expanded them (images)
    policy_version_last: int | None = None  # newest weights that sampled any of them; None: the same
    # [tokens, layers, k] of prompt and completion, without the last token; None: the server does not report them
    routed_experts: np.ndarray | None = None
    # (version, first token, end) of the tokens that each version sampled; None: policy_version sampled all
    spans: list[tuple[int, int, int]] | None = None


@dataclass
class Trajectory:
    """One prompt and everything after it, token by token. The four lists below have one entry per token after the
    prompt: `loss_mask` is 1 exactly where the policy sampled the token, including its end-of-turn token.

    A context may begin anew, without the tokens before: a sub-agent, a history that was compacted. info["restarts"] has
    the places in token_ids where one does; the tokens that the model saw then follow, with loss_mask 0. Each context is
    a row of its own in the forward pass; scores, counts and comparisons take the trajectory as one completion.
    """

    row: dict  # the data set row it came from
    group: int  # trajectories of one prompt share it
    prompt_ids: list[int]
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]  # the generator's, 0 where loss_mask is 0
    token_rewards: list[float] = field(default_factory=list)  # zeros if not given; `score` adds to them
    images: list = field(default_factory=list)
    finish_reason: str = "stop"  # "stop" or "length", the generator's: never inferred from the last token
    turns: int = 1
    policy_version: int = 0  # of the oldest weights that sampled any of its tokens
    policy_version_last: int | None = None  # of the newest; None: the same
    teacher_logprobs: list[float] | None = None  # a teacher's, in the form of `logprobs`; None: no teacher's server
    teacher_top: tuple | None = None  # tensors [n, k]: the teacher's likeliest tokens, and their log-probs
    info: dict = field(default_factory=dict)  # completion text, rewards by function, counters

    def __getstate__(self) -> dict:
        """For another rank or a checkpoint: without the live environment."""
        return vars(self) | {"info": {name: value for name, value in self.info.items() if name != "object"}}

    def __post_init__(self):
        self.token_rewards = self.token_rewards or [0.0] * len(self.token_ids)
        lengths = {name: len(getattr(self, name)) for name in ("token_ids", "loss_mask", "logprobs", "token_rewards")}
        optional = {"teacher_logprobs": self.teacher_logprobs, "teacher_top": self.teacher_top and self.teacher_top[0]}
        lengths |= {name: len(values) for name, values in optional.items() if values is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a trajectory's per-token lists must have one length, got {lengths}")


def sampling_options(cfg: TrainConfig) -> dict:
    """The sampling arguments of `generator.generate` that a config sets; all turns have the same."""
    options = dict(temperature=cfg.temperature, max_tokens=cfg.max_completion_length)
    options |= dict(min_tokens=cfg.min_completion_length, top_p=cfg.top_p, top_k=cfg.top_k)
    options |= {"stop": tuple(cfg.stop)} if cfg.stop else {}
    return {name: value for name, value in options.items() if value is not None}


def calls_in(info: dict) -> list[dict]:
    """The tool calls in a turn's info (`run_calls`). An environment without tools may use the key `calls` for anything
    else."""
    calls = info.get("calls")
    return [call for call in calls if isinstance(call, dict) and "failed" in call] if isinstance(calls, list) else []


def version_spans(t: Trajectory) -> list[tuple[int, int, int]]:
    """(version, first token, end) of the tokens that each version sampled after the prompt: info["spans"] if the
    rollout reports it, else all by the oldest version."""
    return t.info.get("spans") or [(t.policy_version, 0, len(t.token_ids))]


def spans_of(sample: Completion, start: int) -> list[tuple[int, int, int]]:
    """`version_spans` of a completion that begins at token `start` of a trajectory."""
    spans = sample.spans or [(sample.policy_version, 0, len(sample.token_ids))]
    return [(version, start + first, start + end) for version, first, end in spans]


class TrajectoryError(RuntimeError):
    """Ends one trajectory and no other: its environment failed, or one of its messages cannot be shown to the model.
    `cause` is equal for trajectories that failed for the same reason."""

    def __init__(self, cause: str, row: dict | None = None):
        where = "" if row is None else f"\n  row with prompt {shorten(row.get('prompt'))}"
        super().__init__(cause + where)
        self.cause = cause


class RowError(TrajectoryError):
    """A data row that cannot be shown to the model: its prompt is too long, or an image is damaged. Another row takes
    its place."""


def failed_trajectory(row: dict, group: int, error: Exception) -> Trajectory:
    """Stands for a trajectory that could not be played or scored to its end; none of it is trained on."""
    return Trajectory(row, group, [], [], [], [], [], finish_reason="failed", info={"failure": error})


def empty_trajectory(row: dict, cfg: TrainConfig) -> Trajectory:
    """A row without a sampled token, for a rank on which every trajectory failed: ranks make the same collective calls,
    so each needs a row with the same fields."""
    counts = dict.fromkeys(("unrewarded", "reward_timeouts", "reward_without_token"), 0)
    scores = {"rewards": {}, "reward": 0.0, "reward_components": [0.0] * len(cfg.reward_funcs), "baselines": 0.0}
    info = {"completion": "", "model_inputs": {}, "row_number": -1} | counts | scores
    if cfg.rollout in ("multi_turn", "agent"):
        info["turns"] = []
    return Trajectory(row, 0, [0], [0], [0], [0.0], [0.0], finish_reason="failed", info=info)


def stands_in(trajectory: Trajectory) -> bool:
    """Whether it is an `empty_trajectory`, which counts for nothing."""
    return trajectory.info.get("row_number") == -1


def without_failed(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
    return [[t for t in group if "failure" not in t.info] for group in groups]


def is_scored(t: Trajectory) -> bool:
    """Whether it was played to its end and has a score, from a reward function or from its rollout."""
    return "failure" not in t.info and (not t.info.get("unrewarded") or any(t.token_rewards))


def known_scores(group: list[Trajectory]) -> list[float]:
    return [sum(t.token_rewards) for t in group if is_scored(t)]


def without_unscored(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
    """The groups without trajectories that have no score: as a 0 it would be compared with the others, though a judge
    that did not answer found nothing bad. A group in which none has a score stays unchanged."""
    return [[t for t in group if is_scored(t)] or group for group in groups]


def end_to_end(experts: list[np.ndarray | None]) -> np.ndarray | None:
    """The experts of several contexts, concatenated; None if those of any are unknown."""
    return None if any(choices is None for choices in experts) else np.concatenate(experts)


def joined_experts(known: np.ndarray | None, completion) -> np.ndarray | None:
    """The experts of a conversation's tokens so far (`known`), extended by its next turn.  [tokens, layers, k] int16

    Tokens sampled earlier keep the experts they were sampled with; a completion's last token, which has gone through no
    layer yet, has -1."""
    if completion.routed_experts is None:
        return None
    tokens = len(completion.prompt_ids) + len(completion.token_ids)
    out = np.full((tokens, *completion.routed_experts.shape[1:]), -1, np.int16)
    out[: len(completion.routed_experts)] = completion.routed_experts
    if known is not None:
        out[: len(known)] = np.where(known >= 0, known, out[: len(known)])
    return out
