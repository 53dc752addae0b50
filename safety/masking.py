"""Secrets: what they are in a run, and text without them. Run folders and trackers get shared.

Known are what credentials.py has read, environment variables that are named like secrets, and what --mcp_config gives
to its servers.
"""

import contextlib
import json
import os
import re
import sys

from cli import MOST_BYTES, flags, read_text
from safety import credentials
from safety.credentials import SECRET_NAME

SECRET_VARIABLE = re.compile(r"(?i)(token|secret|passw(or)?d|[_-]key|apikey|credentials?)$")


def secrets_of(cfg) -> list[str]:
    """What must not be written: the secrets that were read (credentials.py), values of environment variables that are
    named like secrets, and what --mcp_config gives to its servers."""
    named = [value for name, value in os.environ.items() if SECRET_VARIABLE.search(name)]
    given = []
    for path in {own.mcp_config for own in cfg.by_domain()} - {None}:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # said elsewhere
            given += mcp_secrets(json.loads(read_text(path, "JSON", MOST_BYTES)))
    found = {value.strip() for value in [*named, *given] if len(value.strip()) >= credentials.SHORTEST}
    own = {cfg.server_token} if cfg.server_token else set()
    return sorted(found | own | credentials.known(), key=len, reverse=True)


def mcp_secrets(config) -> set[str]:
    """What an --mcp_config gives to its servers in secret, and the values of variables that stand in it as ${VAR}."""
    given = set(_written(config))
    names = {name for value in given for name in re.findall(r"\$\{(?:env:)?(\w+)", value)}
    values = {os.environ[name] for name in names if name in os.environ}
    return given | {value for value in values if not os.path.exists(value)}  # as of ${HOME}


def _written(config):
    """Values under `env` and `headers`, of arguments and keys named like secrets, and the query of a url."""
    if isinstance(config, list):
        for before, item in zip([None, *config], config, strict=False):  # ["--api-key", "VALUE"]
            named = isinstance(before, str) and before.startswith("-") and SECRET_NAME.search(before)
            yield from [item] if named and isinstance(item, str) else _written(item)
        return
    if isinstance(config, str):
        for sign in "=:":  # --api-key=VALUE, and a header as one argument: Authorization: Bearer VALUE
            name, found, value = config.partition(sign)
            if found and SECRET_NAME.search(name) and "://" not in config and value.split():
                yield value.split()[-1]
        yield from re.findall(r"(?<=\?)[^\s#]+", config) if "://" in config else []
        return
    for name, value in config.items() if isinstance(config, dict) else ():
        if name in ("env", "headers") and isinstance(value, dict):
            texts = [inner for inner in value.values() if isinstance(inner, str)]
            yield from texts
            yield from (word for text in texts for word in text.split()[1:] if name == "headers")  # Bearer VALUE
        elif isinstance(value, str) and SECRET_NAME.search(name):
            yield value
        else:
            yield from _written(value)


def masked(value, hidden: list[str]):
    """Text, or lists and dicts of it, with *** in place of each of `hidden` and of the secrets in urls."""
    if isinstance(value, dict):
        return {key: masked(inner, hidden) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner, hidden) for inner in value]
    if not isinstance(value, str):
        return value
    for secret in hidden:
        for form in {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], secret}:
            value = value.replace(form, "***")
    return credentials.mask_urls(value)


def public_config(cfg) -> dict:
    """The config as plain values, without the secrets in it."""
    plain = {f.name: getattr(cfg, f.name) for f in flags(type(cfg))} | (
        {"server_token": "***"} if cfg.server_token else {}
    )
    return masked(plain, secrets_of(cfg))


@contextlib.contextmanager
def public_arguments(cfg):
    """sys.argv without the secrets in it, for the block under it: wandb records the command."""
    given, sys.argv = sys.argv, masked(sys.argv, secrets_of(cfg))
    try:
        yield
    finally:
        sys.argv = given
