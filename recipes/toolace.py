"""ToolACE's columns, for function_calling.yaml: `system` has the tools as JSON in its text, `conversations` a list of
{"from": "user", "assistant" or "tool", "value": ...}; an assistant's call is "[Get Weather(city='Oslo', days=3)]".

Only the first answer of a conversation is asked for. Where it is a question or a refusal, no call is right. Names may
have blanks. Rows that cannot be read are left out, and counted.
"""

import ast
import json
import re

from function_calling import asked
from published import published

QUOTED = r'"(?:\\.|[^"\\])*"' + r"|'(?:\\.|[^'\\])*'"


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    found = published("Team-ACE/ToolACE", split, source, test=None)
    made = [read(row["system"], *(turn["value"] for turn in row["conversations"][:2])) for row in found]
    if left_out := made.count(None):
        print(f"ToolACE: {left_out} of {len(made)} rows cannot be read and are left out")
    return [row for row in made if row]


def read(system: str, question: str, answer: str) -> dict | None:
    try:
        tools, _ = json.JSONDecoder().raw_decode(system, re.search(r"\[\s*\{", system).start())
        return asked(question, tools, calls(answer, [tool["name"] for tool in tools]))
    except (ValueError, SyntaxError, AttributeError, KeyError, TypeError):
        return None


def calls(answer: str, names: list[str]) -> list[dict]:
    """Of "[Get Weather(city='Oslo')]" the name and the arguments; [] of an answer in words. ValueError or SyntaxError
    of calls that cannot be read: that none is right would pay for a refusal."""
    answer = answer.strip()
    if not re.match(r"\[[^\[\]()\n]*\(", answer):
        return []
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    named = re.compile(rf"{QUOTED}|(?<=[\[\s,])({known})\s*\(")  # what is quoted comes first, and stays
    text = named.sub(lambda found: f"_tool{names.index(found[1])}(" if found[1] else found[0], answer)
    made = []
    for call in ast.parse(text, mode="eval").body.elts:
        name = re.fullmatch(r"_tool(\d+)", call.func.id)
        if not name or call.args or int(name[1]) >= len(names):
            raise ValueError(f"no call of one of its tools by names of arguments: {answer:.200}")
        arguments = {argument.arg: ast.literal_eval(argument.value) for argument in call.keywords}
        made.append({"name": names[int(name[1])], "arguments": arguments})
    return made
