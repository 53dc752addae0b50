"""What a server may answer: the one place where answers are checked before anything is made of them.

A server can be another program's, another version's, or broken. Whatever is not of the form below is a ValueError that
says what was wrong with which field; VLLMClient adds the address and what to do.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inputs.trajectory import ABOVE_ZERO

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Answer(BaseModel):
    """No type is converted: "7" is no 7, and nan no log-prob. Further fields are allowed."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Experts(Answer):
    """Of inputs/routing.py."""

    dtype: Literal["uint8", "uint16"]
    shape: tuple[Positive, Positive, Positive] = Field(strict=False)  # tokens, layers, experts of a token
    data: str


class Sample(Answer):
    token_ids: list[Natural] = Field(min_length=1)
    logprobs: list[Annotated[float, Field(le=ABOVE_ZERO)]]
    finish_reason: Literal["stop", "length"]
    routed_experts: Experts | None = None


class Generated(Answer):
    """Of /generate."""

    samples: list[Sample]
    prompt_ids: list[Natural] = Field(min_length=1)
    policy_version: Natural
    policy_version_last: Natural
    instance: str | None


class Slots(Answer):
    """Of adapters."""

    max_rank: Positive
    slots: Positive


class Described(Answer):
    """Of /server_info: what the client and the trainer read of it."""

    model: str
    server: str  # another name for every process
    vocab_size: Positive
    hidden_size: Positive
    num_layers: Positive
    max_model_len: Positive
    dtype: Literal["float32", "float16", "bfloat16", "float64"]
    world_size: Positive
    device: Literal["cpu", "cuda"]
    devices: list[str]
    can_sleep: bool
    tells_experts: bool = False
    expert_bytes: Natural = 0  # in which it tells those of a token
    adapters: Slots | None = None  # of a server that takes adapters alone
    weights_replaced: bool = False  # by a push, so that they are not those of `model`
    never_sampled: list[Natural]
    policy_version: Natural
    weights_error: str | None


class State(Answer):
    """Of /sleep."""

    state: str


class Connected(Answer):
    """Of /init_weight_transfer_engine."""

    instance: str


class Finished(Answer):
    """Of /finish_weight_update."""

    policy_version: Natural
    checksum: Natural
    seconds: dict[str, float]
    used: dict[str, float] = {}  # by this run since the server's start, where runs share it


Form = TypeVar("Form", bound=Answer)


def checked(answer: dict, form: type[Form]) -> Form:
    """`answer` as a `form`; ValueError naming the first field that is not as it must be, and how many there are."""
    try:
        return form.model_validate(answer)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        where = ".".join(map(str, first["loc"]))
        given = "" if first["type"] == "missing" else f", not {first['input']!r:.60}"
        more = f" (and {len(others)} more)" * bool(others)
        raise ValueError(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}{given}{more}") from None


def generated(answer: dict, asked: dict, vocab_size: int | None, instance: str | None) -> Generated:
    """The answer to the request `asked` of /generate.

    vocab_size: of the server's model, None if unknown. instance: the name that the server gave itself when this trainer
    connected, None if none did. PermissionError for another one; ValueError for whatever was not asked for.
    """
    answer = checked(answer, Generated)
    if len(answer.samples) != asked["n"]:
        raise ValueError(f"samples: {len(answer.samples)} for the {asked['n']} asked for")
    for index, sample in enumerate(answer.samples):
        where, count = f"samples.{index}", len(sample.token_ids)
        if count != len(sample.logprobs):
            raise ValueError(f"{where}: {count} token_ids and {len(sample.logprobs)} logprobs")
        if count > asked["max_tokens"]:
            raise ValueError(
                f"{where}: {count} token_ids, where at most max_tokens={asked['max_tokens']} were asked for"
            )
        if sample.finish_reason == "stop" and count < asked["min_tokens"]:
            raise ValueError(
                f"{where}: {count} token_ids, where at least min_tokens={asked['min_tokens']} were asked for"
            )
        if asked.get("routed_experts"):
            tokens = len(answer.prompt_ids) + count - 1
            if sample.routed_experts is None or sample.routed_experts.shape[0] != tokens:
                got = sample.routed_experts and sample.routed_experts.shape[0]
                raise ValueError(f"{where}.routed_experts: of {got} tokens, not of the {tokens} that were run")
        if vocab_size is not None and max(sample.token_ids) >= vocab_size:
            raise ValueError(f"{where}: token id {max(sample.token_ids)} is outside the vocabulary of {vocab_size}")
    sent, expanded = asked["prompt_ids"], answer.prompt_ids
    if expanded != sent and not asked.get("images"):
        raise ValueError(f"prompt_ids: {len(expanded)} tokens that are not the {len(sent)} of the prompt sent")
    if len(expanded) < len(sent):
        raise ValueError(f"prompt_ids: {len(expanded)} tokens for a prompt of {len(sent)} with images")
    added = set(expanded) - set(sent)  # an image's placeholder may lie beyond the vocabulary
    if vocab_size is not None and added and max(added) >= vocab_size:
        raise ValueError(f"prompt_ids: token id {max(added)} is outside the vocabulary of {vocab_size}")
    if instance is not None and answer.instance != instance:
        raise PermissionError
    return answer
