"""Before the first step: the policy gives a fixed text the log-probs that the model itself gives it, draws no random
numbers, and gives what the generator samples the generator's log-probs."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

import utils
from batch import Batch
from config import ConfigError, TrainConfig
from inputs import prompts
from inputs.logits import replaced
from inputs.prompts import FOLLOWED_BY, Prompt

TEXT = (
    "A farmer has 17 sheep and buys 8 more. Each of them gives 3 kg of wool a year, which sells for 4 dollars a "
    "kilogram. How much does she earn? She has 25 sheep, so she gets 25 * 3 = 75 kg, and 75 * 4 = 300 dollars."
)
SAMPLES, TOKENS = 4, 16  # of each generator or server


def text_ids(tokenizer, hf_model: nn.Module) -> list[int]:
    """Up to 64 tokens, which any window holds. tokenizer: or a processor that has one."""
    tokenizer, known = getattr(tokenizer, "tokenizer", tokenizer), hf_model.config.get_text_config().vocab_size
    return [token for token in tokenizer(TEXT, add_special_tokens=False)["input_ids"] if token < known][:64] or [0]


def text_inputs(hf_model: nn.Module, tokens: int) -> dict:
    """`model_inputs` of a prompt of so many tokens that is text alone. Without token types PaliGemma takes all of it
    for a prefix that sees itself in both directions."""
    name, follows = FOLLOWED_BY.get(hf_model.config.model_type.replace("_", ""), (None, None))
    return {} if name is None else {name: torch.full((1, tokens + 1), follows)}


def group_of(prompt: list[int], completions: list[list[int]], device: torch.device, model_inputs=None) -> Batch:
    """As a step would have it. model_inputs: what the model is given beside the prompt's tokens."""
    rows = [torch.tensor(prompt + completion) for completion in completions]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [B, T]
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    sampled = mask * (torch.arange(ids.shape[1]) >= len(prompt))
    groups = torch.zeros(len(rows), dtype=torch.long)
    tensors = (x.to(device) for x in (ids, mask, sampled, torch.zeros_like(mask), groups))
    return Batch(*tensors, model_inputs=[model_inputs] * len(rows) if model_inputs else [])


# ---- nothing random ------------------------------------------------------------------------------------------------


def random_state(device: torch.device) -> bytes:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.numpy().tobytes()


@contextlib.contextmanager
def drawing(module: nn.Module, device: torch.device) -> Iterator[list[nn.Module]]:
    """The innermost modules in whose forward a random number was drawn since."""
    found, open_calls, hooks = [], [], []

    def enter(part, args) -> None:
        open_calls.append([random_state(device), False])

    def leave(part, args, output) -> None:
        before, within = open_calls.pop()
        if changed := random_state(device) != before:
            found.extend([] if within else [part])
        if open_calls:
            open_calls[-1][1] |= changed

    for part in module.modules():
        hooks += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def silence(module: nn.Module, run: Callable[[], object], device: torch.device) -> None:
    """Puts parts of `module` that draw random numbers in train mode into eval mode, such as a router that shakes what
    it chooses by. Ratios between two passes must be those of the weights. RuntimeError if that does not help.
    Collective.

    run: a forward pass of it. Random numbers, not results, tell: on GPUs sums may differ from pass to pass.
    """
    quiet: Counter = Counter()
    while True:
        before = random_state(device)
        run()
        if random_state(device) == before:
            break
        with drawing(module, device) as parts:
            run()
        names = Counter(type(part).__name__ for part in parts)
        if not any(part.training for part in parts):
            where = " and ".join(names) or type(module).__name__
            raise RuntimeError(
                f"The policy draws random numbers in {where}, in eval mode, too: "
                "two passes over the same tokens differ. Switch that off, in the model's config.json for example."
            )
        for part in parts:
            part.training = False  # not .eval(), which is its parts' as well
        quiet |= names
    if quiet and utils.is_main():
        print(f"Noise in train mode is off: {', '.join(f'{n} {name}' for name, n in quiet.items())}.")


# ---- the same log-probs --------------------------------------------------------------------------------------------


def own_forward(hf_model: nn.Module, autocast: bool = False) -> Callable:
    """In place of Policy.forward: what transformers gives the tokens, without a line of ours. autocast: in bfloat16, as
    the policy computes, whose rounding alone can be .03 of a log-prob; else in the dtype of the weights."""

    def forward(inputs: dict, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor]:
        with torch.autocast(targets.device.type, torch.bfloat16, enabled=autocast):
            logits = hf_model(**inputs, use_cache=False).logits[rows, columns].float()  # [N, V]
        return (logits.log_softmax(-1).gather(1, targets[:, None])[:, 0],)

    return forward


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was


@contextlib.contextmanager
def in_bfloat16(hf_model: nn.Module) -> Iterator[None]:
    """ConfigError where layers mix it with float32 in a way that torch refuses."""
    try:
        yield
    except RuntimeError as error:
        if not re.search("dtype|scalar type", str(error)):
            raise
        name = type(hf_model).__name__
        raise ConfigError(f"{name} cannot compute in bfloat16 ({error}): use --compute_dtype float32.") from error


@torch.no_grad()
def check_policy(inner: nn.Module, logprobs: Callable, tokenizer, cfg: TrainConfig, device: torch.device) -> None:
    """RuntimeError if a row alone, or two behind a shared prompt, have other log-probs than the transformers model
    gives each of them by itself in eval mode; ConfigError if it cannot compute in bfloat16 at all. Collective.

    logprobs: (batch, cfg) -> [B, T] of `inner`, through whatever shards it.
    """
    ids = text_ids(tokenizer, inner.hf_model)
    third = max(1, len(ids) // 3)
    prompt, one, other = ids[:third], ids[third:] or ids, ids[-third:]
    beside = text_inputs(inner.hf_model, third)
    cfg = replace(cfg, temperature=1.0)
    plain, pair = replace(cfg, shared_prefix=False), group_of(prompt, [one, other], device, beside)
    with replaced(inner, temperature=1.0, never=[]):
        with in_bfloat16(inner.hf_model):
            silence(inner, lambda: logprobs(pair, cfg), device)
        with evaluating(inner), replaced(inner, forward=own_forward(inner.hf_model, inner.autocast)):
            expected = [logprobs(group_of(prompt, [row], device, beside), plain)[0, third:] for row in (one, other)]
        alone = logprobs(group_of(prompt, [one], device, beside), plain)[0, third:]
        both = logprobs(pair, cfg)[:, third:]
    exact = cfg.compute_dtype == "float32"
    name, how = type(inner.hf_model).__name__, "behind the shared prompt " if cfg.shared_prefix else ""
    for what, found, own, limit in (
        ("", alone, expected[0], 1e-3 if exact else 0.02),
        (how, both[0], expected[0], 1e-3 if exact else 0.2),
        (how, both[1, : len(other)], expected[1], 1e-3 if exact else 0.2),
    ):
        difference = (found - own).abs().mean()
        if not difference <= limit:
            raise RuntimeError(
                f"The policy gives {len(own)} tokens of a fixed text {what}other log-probs than {name} itself: mean "
                f"|difference| {difference:.4f}, limit {limit} in {cfg.compute_dtype}. "
                + ("--no-shared_prefix computes it in plain rows." if what and cfg.shared_prefix else "")
                + ("" if what else "Its forward pass does something that Policy.forward (train_grpo.py) does not.")
            )


def asked(generator, hf_model: nn.Module, cfg: TrainConfig, rows: list[dict]) -> list[Prompt]:
    """A text and, where rows have images, the first of these: a tower's outputs, and places on several axes, are known
    to no text."""
    ids, sees = text_ids(generator.tokenizer, hf_model), prompts.is_vision(generator.tokenizer)
    shown = next((row for row in rows if prompts.image_sources(row)), None) if sees else None
    text = Prompt(ids, ids, model_inputs=text_inputs(hf_model, len(ids)))
    return [text] if shown is None else [text, prompts.build_prompt(shown, generator, cfg.of(shown))]


def ask(generator, hf_model: nn.Module, cfg: TrainConfig, rows: list[dict]) -> list[tuple[Prompt, list, list]]:
    """For each prompt, (it, tokens that the generator samples after it, their log-probs): each rank's own generator, or
    rank 0's for all. Of several servers each has a request. Collective."""
    own, found, error = generator.receives_weights, [], None

    async def sample(prompt: Prompt) -> tuple[Prompt, list, list]:
        how = dict(n=SAMPLES, max_tokens=min(TOKENS, cfg.max_completion_length), temperature=cfg.temperature)
        how |= dict(images=prompt.images) if prompt.images else {}
        calls = (generator.generate(prompt.sent_ids, **how, expanded=prompt) for _ in getattr(generator, "urls", [""]))
        samples = await asyncio.gather(*calls)
        for some in samples if prompt.images else ():
            prompts.check_echo(prompt, some)
        completions = sum(samples, [])
        return prompt, [c.token_ids for c in completions], [c.logprobs for c in completions]

    try:
        for prompt in asked(generator, hf_model, cfg, rows) if own else ():
            with in_bfloat16(hf_model):
                found.append(asyncio.run(sample(prompt)))
    except Exception as raised:  # raised on every rank
        error = raised
    utils.raise_together(error, "Sampling from the weights that were pushed")
    prompts.image_metrics(generator)  # of the steps alone
    answers = utils.gather_objects(found)
    return answers[torch.distributed.get_rank()] if own else answers[0]


@torch.no_grad()
def check_generator(sampled: list[tuple], logprobs: Callable, dtype: torch.dtype, cfg: TrainConfig, device) -> None:
    """RuntimeError if the policy gives `ask`'s tokens other log-probs than the generator, which has its weights.
    Collective. dtype: the generator's."""
    exact = cfg.compute_dtype == "float32" and dtype == torch.float32 and not cfg.load_in
    for prompt, tokens, given in sampled:
        batch, error = group_of(prompt.token_ids, tokens, device, prompt.model_inputs), None
        found = logprobs(batch, cfg)[batch.loss_mask.bool()].cpu()
        given = torch.tensor([value for one in given for value in one])
        difference = (found - given).abs().mean().item()
        if cfg.load_in and cfg.generator == "vllm" and utils.is_main():
            print(
                f"A base in 4 bits here, the server's own there: at first mean |log-prob difference| {difference:.2g}."
            )
        try:
            utils.check_agreement(difference, cfg, 0.05 if exact else 1, bool(prompt.images))
        except RuntimeError as raised:
            error = raised
        utils.raise_together(error, "Comparing the generator with the policy")
