"""Function calls with JSON schemas: xLAM's columns `query`, `tools` and `answers` (the last two are JSON in a text).

For the reward `calls`, which compares them with the wanted ones and runs none. For tools that are run, and answer, see
docs/tools-mcp.md.
"""

import json
import re

from published import published

from envs.tools import instructions

KINDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
KINDS |= {"tuple": "array", "set": "array"}


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    found = published("Salesforce/xlam-function-calling-60k", split, source, test=None)
    return [asked(row["query"], map(schema, read(row["tools"])), read(row["answers"])) for row in found]


def read(value):
    return json.loads(value) if isinstance(value, str) else value


def asked(question: str, schemas, calls: list[dict]) -> dict:
    told = instructions([{"function": one} for one in schemas], "hermes")
    prompt = [{"role": "system", "content": told}, {"role": "user", "content": question}]
    return {"prompt": prompt, "wanted": json.dumps(calls)}  # as text: columns of a table have one type


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
