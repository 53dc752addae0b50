"""The experts that a completion's tokens went through, on their way from the generator to a trajectory. What is made of
them: inputs/routing.py."""

import base64

import numpy as np


def encoded(choice: np.ndarray) -> dict:
    """[tokens, layers, k] of unsigned bytes or shorts, as the server sends it."""
    data = base64.b64encode(np.ascontiguousarray(choice).tobytes()).decode()
    return {"dtype": str(choice.dtype), "shape": list(choice.shape), "data": data}


def decoded(sent: dict) -> np.ndarray:
    """[tokens, layers, k] int16. ValueError if the bytes are not as many as the shape says."""
    flat = np.frombuffer(base64.b64decode(sent["data"], validate=True), sent["dtype"])
    if flat.size != np.prod(sent["shape"]):
        raise ValueError(f"{flat.size} numbers for the shape {sent['shape']}")
    return flat.reshape(sent["shape"]).astype(np.int16)


def joined(known: np.ndarray | None, completion) -> np.ndarray | None:
    """The choices for a conversation's tokens so far, and those that came with its next turn. What was sampled earlier
    keeps the experts it was sampled with; a completion's last token has gone through no layer yet.
    [tokens, layers, k] int16"""
    if completion.routed_experts is None:
        return None
    tokens = len(completion.prompt_ids) + len(completion.token_ids)
    out = np.full((tokens, *completion.routed_experts.shape[1:]), -1, np.int16)
    out[: len(completion.routed_experts)] = completion.routed_experts
    if known is not None:
        out[: len(known)] = np.where(known >= 0, known, out[: len(known)])
    return out
