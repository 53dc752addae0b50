"""What a run refuses to start with, or to go on with. Each says what was found, what is allowed and what to do."""

import os
import re
from collections.abc import Callable

import torch
from torch import Tensor

from config import ConfigError, TrainConfig


def check_model_id(model_id: str) -> None:
    """ConfigError if it can be neither a folder nor found on the hub; transformers retries for a minute in silence."""
    import requests
    from huggingface_hub import constants, try_to_load_from_cache

    if os.path.isdir(model_id):
        if not os.path.exists(os.path.join(model_id, "config.json")):
            raise ConfigError(f"--model_id={model_id}: the folder holds no config.json; give one a model was saved to.")
        return
    missing = f"--model_id={model_id}: no such folder (looked in {os.getcwd()})"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_id):
        raise ConfigError(f"{missing}, and not the form of a hub id, NAME or OWNER/NAME.")
    if isinstance(try_to_load_from_cache(model_id, "config.json"), str):
        return
    try:
        if constants.HF_HUB_OFFLINE:
            raise requests.ConnectionError("HF_HUB_OFFLINE is set")
        requests.head(f"{constants.ENDPOINT}/{model_id}/resolve/main/config.json", timeout=10)
    except requests.RequestException as error:
        raise ConfigError(
            f"{missing}, not in the hub's cache, and {constants.ENDPOINT} cannot be asked ({type(error).__name__}). "
            "Give the folder of a model, or mend the connection."
        ) from error


def check_servers(client, config, window: int) -> None:
    """Do the servers serve the model that is trained, with room for prompt and completion? Raises ValueError."""
    ours = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_layers": config.num_hidden_layers}
    for url, info in zip(client.urls, client.server_info(), strict=True):
        theirs = {key: info[key] for key in ours}
        if theirs != ours:
            raise ValueError(
                f"{url} serves {info['model']} with {theirs}; the trainer trains {config._name_or_path} with {ours}. "
                "Start the server with the trainer's --model_id as its --model."
            )
        if info["max_model_len"] < window:
            raise ValueError(
                f"{url} has a window of {info['max_model_len']} tokens; prompts and completions need up to {window} "
                f"(--max_prompt_length + --max_completion_length). Lower those, or serve with --max-model-len {window}."
            )


def check_fresh(trajectories: list, version: int) -> None:
    """RuntimeError unless the weights `version` sampled every token: from the first one on and to the last."""
    spans = [(t.policy_version, t.policy_version_last) for t in trajectories]
    spans = [(first, first if last is None else last) for first, last in spans]
    if stale := [span for span in spans if span != (version, version)]:
        first, last = stale[0]
        raise RuntimeError(
            f"{len(stale)} of {len(spans)} completions come from weights {first}{f' to {last}' * (last != first)}, not "
            f"{version}. Was the server started anew, or does another trainer push to it? Give each run a server of "
            "its own; --resume continues from the last checkpoint."
        )


@torch.no_grad()
def not_finite(module: torch.nn.Module) -> list[str]:
    """Names of this rank's parameters, or shards of them, that hold nan, infinity or numbers beyond 1e19.

    By their norms: a tenth of the time of isfinite(), which makes a copy (0.05 s for 135 M parameters on two cores).
    """
    local = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in module.named_parameters()}
    norms = [
        torch.linalg.vector_norm(p, dtype=torch.float32 if p.dtype.itemsize < 4 else None).float()
        for p in local.values()
    ]
    return [name for name, good in zip(local, torch.stack(norms).isfinite().tolist(), strict=True) if not good]


def check_finite(model: torch.nn.Module, model_id: str) -> None:
    """ConfigError for weights that came as nan or infinity: what is sampled from them would be blamed instead."""
    if bad := not_finite(model):
        raise ConfigError(
            f"--model_id={model_id}: {len(bad)} of its weights hold nan, infinity or numbers beyond 1e19, first "
            f"{bad[0]}. Its training failed, or the file is damaged: take an earlier checkpoint, or download it again."
        )


def check_agreement(difference: float, cfg: TrainConfig) -> None:
    if difference > cfg.logprob_diff_limit:
        raise RuntimeError(
            f"Trainer and sampler disagree on the sampled tokens: mean |log-prob difference| {difference:.3f}, limit "
            f"{cfg.logprob_diff_limit}. Usual causes: another model on the server, a quantised server, top-k / top-p "
            "sampling, a modified model class. --logprob_diff_limit raises the limit."
        )


def computed(advantage: Callable, batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """(what an advantage computes, its statistics), if it can be trained on."""
    try:
        result = advantage(batch, cfg)
    except (TypeError, AttributeError) as error:
        fields = ("old_logprobs", "ref_logprobs", "entropy", "sum_pi_squared", "baselines")
        read = [f for f in fields if f in advantage.__code__.co_names and getattr(batch, f) is None]
        if not read:
            raise
        raise TypeError(
            f"advantage {cfg.advantage!r} reads batch.{read[0]}, which is not computed unless a function asks for it: "
            f"write {advantage.__name__}.needs = ({', '.join(map(repr, read))},) below it."
        ) from error
    advantages, stats = result if isinstance(result, tuple) else (result, {})
    return check_advantages(advantages, batch, cfg), dict(stats)


def check_advantages(advantages: Tensor, batch, cfg: TrainConfig) -> Tensor:
    """The advantages themselves, if they can be trained on."""
    remedy = "spread(values, batch.loss_mask) makes it from [B]"
    return checked(f"advantage {cfg.advantage!r}", advantages, batch, remedy)


DO_NOT_AVERAGE = "do not average: --loss_agg does"


def check_loss(result, batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """What a policy loss returned, if it is (loss per token, statistics)."""
    name = f"policy loss {cfg.policy_loss!r}"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise TypeError(f"{name} must return (loss per token [B, T], dict of statistics [B, T]); got {type(result)}.")
    return checked(name, result[0], batch, DO_NOT_AVERAGE), result[1]


def checked(name: str, matrix: Tensor, batch, remedy: str) -> Tensor:
    shape = tuple(batch.loss_mask.shape)
    if not isinstance(matrix, Tensor) or tuple(matrix.shape) != shape:
        got = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"{name} returned {got}; it must be a value per token, {shape}: {remedy}.")
    if not torch.isfinite(matrix.detach()[batch.loss_mask > 0]).all():
        raise ValueError(
            f"{name} returned nan or infinity on a sampled token. Does it divide by a std or a length of 0?"
        )
    return matrix
