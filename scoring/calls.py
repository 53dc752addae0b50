"""Calls of tools that a model wrote, compared with those that were wanted, without running any.

    --reward_funcs calls      column `wanted`: a list of {"name": ..., "arguments": {...}}, as it is or as JSON

They are written as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
"""

import json

from envs.tools import read_calls
from scoring.text import completion_text


def calls(completions, wanted, **columns) -> list[dict | None]:
    """Half for the arguments that are right, as a share of all; half if every call is, in any order, and no other one.
    Values are compared as JSON has them: 3 is 3.0 and neither "3" nor true. No call is right where none is wanted."""
    scores = []
    for completion, right in zip(completions, wanted, strict=True):
        if right is None:
            scores.append(None)
            continue
        right = json.loads(right) if isinstance(right, str) else right
        given = read_calls(completion_text(completion), {}, "hermes")
        share = paired(right, given) / max(len(given), len(right), 1) if given or right else 1.0
        scores.append({"reward": 0.5 * share + 0.5 * (share == 1), "arguments": share, "exact": float(share == 1)})
    return scores


def paired(right: list[dict], given: list) -> float:
    """Sum of the shares of right arguments, each call compared with one other: those that are most alike first."""
    shares = [
        (alike(wanted["arguments"], call.arguments), i, j)
        for i, wanted in enumerate(right)
        for j, call in enumerate(given)
        if wanted["name"] == call.name
    ]
    total, taken, used = 0.0, set(), set()
    for share, i, j in sorted(shares, reverse=True):
        if i not in taken and j not in used:
            total, taken, used = total + share, taken | {i}, used | {j}
    return total


def alike(right: dict, given: dict) -> float:
    """Share of the arguments of either that are equal in both; of none, 1."""
    names = right.keys() | given.keys()
    return sum(n in right and n in given and same(right[n], given[n]) for n in names) / len(names) if names else 1.0


def same(a, b) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return isinstance(a, bool) == isinstance(b, bool) and a == b
