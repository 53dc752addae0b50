"""Secrets: removed from the environment when they are read, so that no process started later gets them, and shown as
*** in everything that is printed and written.

    token = read("VLLM_SERVER_TOKEN")         # the variable, or the file that VLLM_SERVER_TOKEN_FILE names
    print(hide(text))
"""

import json
import os
import re
import sys
from pathlib import Path

SHORTEST = 6  # characters; hiding a shorter one would tear words apart
HIDDEN = "***"
NAME = re.compile(r"(?i)(token|secret|passw(or)?d|[_-]key|apikey|credentials?)$")  # of variables with secrets

_read: dict[str, str] = {}  # by variable
_learned: set[str] = set()


def read(variable: str, given: str | None = None) -> str:
    """The secret `given`, else the environment variable's, else that in the file named by VARIABLE_FILE; "" if there is
    none. Surrounding white space is removed. ValueError for a file that cannot be read."""
    if variable in os.environ:
        _read[variable] = os.environ.pop(variable).strip()
    elif variable not in _read and (path := os.environ.get(f"{variable}_FILE")):
        try:
            _read[variable] = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{variable}_FILE={path} cannot be read: {error}; give a file with the secret") from None
    secret = _read.get(variable, "") if given is None else given.strip()
    learn(secret)
    return secret


def learn(secret: str) -> None:
    """From now on `secret` is hidden, also in this process's arguments, which trackers record."""
    if len(secret) >= SHORTEST and secret not in _learned:
        _learned.add(secret)
        sys.argv[:] = hide(sys.argv)


def hide(value):
    """Text, or lists and dicts of text, with *** for each secret: those that were read, and the values of environment
    variables whose names look like secrets."""
    variables = {text.strip() for name, text in os.environ.items() if NAME.search(name)}
    secrets = _learned | {text for text in variables if len(text) >= SHORTEST}
    forms = sorted({form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}, key=len, reverse=True)

    def hidden(value):
        if isinstance(value, dict):
            return {key: hidden(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(hidden, value))
        if isinstance(value, str):
            for form in forms:
                value = value.replace(form, HIDDEN)
        return value

    return hidden(value)
