"""Function calls with JSON schemas: xLAM's columns `query`, `tools` and `answers` (the last two are JSON in a text).

`calls`, the reward, compares them with the wanted ones and runs none. They are written as Hermes and Qwen write them:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>. For tools that are run, and answer, see docs/tools-mcp.md.
"""

import json
import re

from published import published

from inputs.formats import instructions, read_calls
from scoring.text import completion_text

KINDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
KINDS |= {"tuple": "array", "set": "array"}


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    found = published("Salesforce/xlam-function-calling-60k", split, source, test=None)
    return [asked(row["query"], map(schema, read(row["tools"])), read(row["answers"])) for row in found]


def read(value):
    return json.loads(value) if isinstance(value, str) else value


def asked(question: str, schemas, wanted: list[dict]) -> dict:
    told = instructions([{"function": one} for one in schemas], "hermes")
    prompt = [{"role": "system", "content": told}, {"role": "user", "content": question}]
    return {"prompt": prompt, "wanted": json.dumps(wanted)}  # as text: columns of a table have one type


def schema(tool: dict) -> dict:
    """xLAM's {"city": {"type": "str, optional", ...}} as a JSON schema."""
    properties, required = {}, []
    for name, about in (tool.get("parameters") or {}).items():
        given = about.get("type", "str")
        kind = KINDS.get(re.match(r"\w*", given)[0].lower())  # of List[int] or "str, optional" the first word
        properties[name] = {k: v for k, v in about.items() if k != "type"} | ({"type": kind} if kind else {})
        required += [name] if "optional" not in given and "default" not in about else []
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": parameters}


# ---- the reward ------------------------------------------------------------------------------------------------------


def calls(completions, wanted, **columns) -> list[dict | None]:
    """Half for the arguments that are right, as a share of all; half if every call is, in any order, and no other one.
    Values are compared as JSON has them: 3 is 3.0 and neither "3" nor true. No call is right where none is wanted."""
    scores = []
    for completion, right in zip(completions, wanted, strict=True):
        if right is None:
            scores.append(None)
            continue
        right = json.loads(right) if isinstance(right, str) else right
        given = read_calls(completion_text(completion), [], "hermes")
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


calls.per_trajectory = True
