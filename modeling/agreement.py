"""Before the first step, the log-probs of a fixed text (and of a picture, where the rows have some) are computed in
packed rows, by the plain transformers model and by the generator. If packed rows differ, the run takes plain rows; if
the policy or the generator differs, it stops."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

import utils
from batch import Batch, collate
from config import TrainConfig
from data import LOOKED_AT
from inputs import prompts, vision
from inputs.trajectory import Trajectory, TrajectoryError
from inputs.vision import Prompt
from modeling.attention import take_packed_rows
from modeling.model import evaluating, replaced

TEXT = (
    "A farmer has 17 sheep and buys 8 more. Each of them gives 3 kg of wool a year, which sells for 4 dollars a "
    "kilogram. How much does she earn? She has 25 sheep, so she gets 25 * 3 = 75 kg, and 75 * 4 = 300 dollars."
)
SAMPLES, TOKENS = 4, 16  # completions that each generator or server samples, and tokens of each


def trials(generator, hf_model: nn.Module, cfg: TrainConfig, rows) -> list[Prompt]:
    """A text and, if one of the first rows has images, that row's prompt: a text alone tries neither the image tower
    nor positions on several axes. Of the generator only its `tokenizer` is used."""
    vocab_size, sees_images = hf_model.config.get_text_config().vocab_size, prompts.is_vision(generator.tokenizer)
    ids = [token % vocab_size for token in prompts.tokenize(TEXT, generator.tokenizer)[:64]]
    text = Prompt(ids, ids)
    for row in itertools.islice(rows, LOOKED_AT) if sees_images else ():
        with contextlib.suppress(TrajectoryError):
            if (prompt := vision.build_prompt(row, generator, cfg.of(row))).images:
                return [text, prompt]
    return [text]


def batch_of(samples: list[tuple[Prompt, list[list[int]]]], device: torch.device) -> Batch:
    """Each prompt with its completions, as a step would have them."""
    trajectories = []
    for group, (prompt, completions) in enumerate(samples):
        for tokens in completions:
            mask, zeros, info = [1] * len(tokens), [0.0] * len(tokens), {"model_inputs": prompt.model_inputs}
            trajectories.append(Trajectory({}, group, prompt.token_ids, tokens, mask, zeros, zeros, info=info))
    return collate(trajectories, 0, device)


def own_forward(hf_model: nn.Module, autocast: bool) -> Callable:
    """A stand-in for Policy.forward: the log-probs that transformers gives the tokens, without a line of ours."""

    def forward(inputs: dict, rows: Tensor, columns: Tensor, targets: Tensor, *_) -> dict[str, Tensor]:
        with torch.autocast(targets.device.type, torch.bfloat16, enabled=autocast):
            logits = hf_model(**inputs, use_cache=False).logits[rows, columns].float()  # [N, V]
        return {"logprobs": logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]}

    return forward


def carries_state(hf_model: nn.Module) -> bool:
    """Whether a layer hands a state from token to token. In a packed row the state would reach the next completion, and
    with a small model in bfloat16 the trial may not see it. transformers flags most such models; the others have such
    layers by name."""
    kinds = getattr(hf_model.config.get_text_config(), "layer_types", None) or []
    return hf_model._is_stateful or any(kind == "conv" or kind.startswith(("linear", "hybrid")) for kind in kinds)


@torch.no_grad()
def check_policy(inner: nn.Module, logprobs: Callable, trials: list[Prompt], cfg: TrainConfig, device) -> TrainConfig:
    """The settings, with plain rows if packed rows differ from what the transformers model itself, in eval mode, gives
    each row on its own. RuntimeError if plain rows differ, too. Collective.

    logprobs: (batch, cfg) -> [B, T] of `inner`, through whatever shards it. trials: from `trials`.
    """
    ids = trials[0].token_ids  # half of them as completions, so that segments have prompts of different lengths
    batch = batch_of([(prompt, [ids[: len(ids) // 2 + 1], ids[len(ids) // 3 :]]) for prompt in trials], device)
    sampled, plain = batch.loss_mask.bool(), replace(cfg, temperature=1.0, shared_prefix=False)
    name, exact = type(inner.hf_model).__name__, cfg.compute_dtype == "float32"

    def differs(settings: TrainConfig, limit: float) -> str:
        try:
            gap, error = (logprobs(batch, settings) - expected)[sampled].abs().mean(), None
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as raised:  # of the model's own code
            gap, error = torch.inf, raised
        if utils.all_max(int(not gap <= limit)) == 0:
            return ""
        return f"{type(error).__name__}: {error}".splitlines()[0] if error else f"by {gap:.4f}, limit {limit}"

    with replaced(inner, never=[]):
        take_packed_rows(inner.hf_model, False)
        with evaluating(inner), replaced(inner, forward=own_forward(inner.hf_model, inner.autocast)):
            row_logprobs = [logprobs(batch.select([row]), plain)[0] for row in range(len(batch))]  # [T of the row] each
            expected = nn.utils.rnn.pad_sequence(row_logprobs, batch_first=True)  # [B, T]
        take_packed_rows(inner.hf_model, cfg.shared_prefix)
        why = "" if not carries_state(inner.hf_model) else "layers with a state"
        if cfg.shared_prefix and (why := why or differs(replace(cfg, temperature=1.0), 2e-4 if exact else 0.05)):
            cfg = replace(cfg, shared_prefix=False)
            take_packed_rows(inner.hf_model, False)
            if utils.is_main():
                print(f"Prompts are computed once per completion: packed rows differ from {name}'s own ({why}).")
        if why := differs(plain, 1e-3 if exact else 0.02):
            raise RuntimeError(
                f"The policy gives a fixed text other log-probs than {name} itself ({why}, in {cfg.compute_dtype}). "
                "Its forward pass does something that Policy.forward (train_grpo.py) leaves out, or it is random."
            )
    return cfg


def ask(generator, trials: list[Prompt], cfg: TrainConfig) -> list[tuple[Prompt, list, list]]:
    """(prompt, token ids of the completions that the generator samples, their log-probs) of each prompt. Either every
    rank has a generator of its own, or all take the answers of rank 0's. Each of several servers gets a request.
    Collective."""
    own_generator, local_answers, error = generator.receives_weights, [], None

    async def sample(prompt: Prompt) -> tuple[Prompt, list, list]:
        args = dict(n=SAMPLES, max_tokens=min(TOKENS, cfg.max_completion_length), temperature=cfg.temperature)
        args |= dict(images=prompt.images) if prompt.images else {}
        calls = (generator.generate(prompt.sent_ids, **args, expanded=prompt) for _ in getattr(generator, "urls", [""]))
        samples = await asyncio.gather(*calls)
        for server_samples in samples if prompt.images else ():
            vision.check_echo(prompt, server_samples)
        completions = sum(samples, [])
        return prompt, [c.token_ids for c in completions], [c.logprobs for c in completions]

    try:
        for prompt in trials if own_generator else ():
            local_answers.append(asyncio.run(sample(prompt)))
    except Exception as raised:  # raised on every rank
        error = raised
    utils.raise_together(error, "Sampling from the weights that were pushed")
    answers = utils.gather_objects(local_answers)
    return answers[torch.distributed.get_rank()] if own_generator else answers[0]


@torch.no_grad()
def check_generator(sampled: list[tuple], logprobs: Callable, dtype: torch.dtype, cfg: TrainConfig, device) -> None:
    """RuntimeError if the policy gives the tokens of `ask` other log-probs than the generator, which has the same
    weights. Collective. dtype: the generator's."""
    exact = cfg.compute_dtype == "float32" and dtype == torch.float32 and not cfg.load_in
    for prompt, tokens, expected in sampled:
        batch = batch_of([(prompt, tokens)], device)
        actual = logprobs(batch, cfg)[batch.loss_mask.bool()].cpu()
        difference = utils.all_max((actual - torch.tensor(sum(expected, []))).abs().mean().item())  # all ranks raise
        if cfg.load_in and cfg.generator == "vllm" and utils.is_main():
            print(f"The base is in 4 bits here and not on the server: mean |log-prob difference| {difference:.2g}.")
        utils.check_agreement(difference, cfg, 0.05 if exact else 1, bool(prompt.images))


def check_step(metrics: dict[str, float], cfg: TrainConfig, compares: bool) -> None:
    """RuntimeError if trainer and generator disagree on the log-probs of a step's completions. compares: whether this
    step is to be checked."""
    # With several updates a step, and no log-probs from before them, the updates themselves make a difference.
    comparable = cfg.old_logprobs == "recompute" or cfg.num_iterations * cfg.num_minibatches == 1
    if compares and comparable and "sampling/logprob_diff_mean" in metrics:
        utils.check_agreement(metrics["sampling/logprob_diff_mean"], cfg)
