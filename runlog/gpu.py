"""How much of a GPU a step uses: `memory/peak_gb` and `perf/tflops`, which are logged on GPUs."""

from collections.abc import Callable, Iterable
from itertools import groupby

import torch
from torch import nn

import utils
from config import TrainConfig
from inputs.trajectory import Trajectory
from modeling.model import experts_of


def sizes(model: nn.Module) -> tuple[float, float, int]:
    """(parameters that a token is multiplied with, the trained ones among them, width of attention: heads x size of a
    head, summed over the layers) of a transformers model without shards.

    An input embedding that the output layer does not share is not counted, since it is looked up. Of the experts of a
    mixture, num_experts_per_tok count.
    """
    config = model.config.get_text_config()
    experts, chosen = experts_of(config)
    share = chosen / experts if experts else 1.0
    embedding = None if config.tie_word_embeddings else model.get_input_embeddings().weight
    parameters = trained = 0.0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * (share if ".experts." in name else 1.0) * (parameter is not embedding)
        parameters += size
        trained += size * parameter.requires_grad
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return parameters, trained, config.num_hidden_layers * config.num_attention_heads * head


def size_of(make_policy: Callable[[], nn.Module], device: torch.device) -> tuple[float, float, int] | None:
    """`sizes` of a policy that make_policy builds without values; None without a GPU."""
    if device.type != "cuda":
        return None
    with torch.device("meta"):
        return sizes(make_policy().hf_model)


def update_flops(sizes: tuple[float, float, int], groups: Iterable[tuple[int, list[int]]], shared: bool) -> float:
    """Floating-point operations of one pass over some groups, forward and backward: 6 x parameters x tokens if all
    parameters are trained, plus those of attention (PaLM, arXiv 2204.02311, appendix B).

    A token costs 2 operations per parameter forward, 2 backward to its inputs, and 2 for the gradient of each trained
    parameter. A query costs 4 operations per key and unit of attention's width forward, and 8 backward; its keys are
    its own token and those before it, regardless of windows.

    All tokens of completions count, including answers of tools and environments. Those of a prompt count once per group
    if prompts are `shared`, else once per completion. As is usual for model FLOPs, repeated work does not count
    (recomputed activations, a prompt cut over several micro-batches), nor does padding.

    sizes: from the function above. groups: (length of a prompt, lengths of its completions) each.
    """
    parameters, trained, width = sizes
    tokens = pairs = 0.0
    for prompt, completions in groups:
        times = 1 if shared else len(completions)
        tokens += times * prompt + sum(completions)
        pairs += times * prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in completions)
    return tokens * (4 * parameters + 2 * trained) + 12 * width * pairs


def metrics(size, trajectories: list[Trajectory], cfg: TrainConfig, seconds: float, device) -> dict[str, float]:
    """The largest memory of any rank's GPU since the last call, in GB, and the mean rate of the ranks' updates, in
    TFLOP/s; {} without GPUs.

    size: from `size_of`. trajectories: this rank's, those of a group adjacent. seconds: of the update.
    """
    if size is None:
        return {}
    groups = [list(group) for _, group in groupby(trajectories, lambda t: t.group)]
    lengths = [(len(group[0].prompt_ids), [len(t.token_ids) for t in group]) for group in groups]
    flops = cfg.num_iterations * update_flops(size, lengths, cfg.shared_prefix)
    flops = utils.all_sum(torch.tensor(flops, dtype=torch.float64)).item() / utils.world_size()
    peak = utils.all_max(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory/peak_gb": peak / 1e9, "perf/tflops": flops / seconds / 1e12}
