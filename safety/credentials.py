"""The one place that reads secrets: once, stripped, compared in constant time, masked in texts, not passed on.

    token = credentials.read("VLLM_SERVER_TOKEN")         # the variable, or the file named by VLLM_SERVER_TOKEN_FILE
    print(credentials.mask(text))                         # every secret read so far is *** in it, and those of urls

A secret that was read is gone from os.environ, so that processes started from here on do not inherit it, and from what
`ps` and /proc show of this process. It stays in this process's memory, and in its parents: SECURITY.md.
"""

import ctypes
import hashlib
import hmac
import json
import os
import re
import shlex
import sys
from pathlib import Path

from cli import ConfigError

SHORTEST = 6  # characters; masking a shorter secret would tear words apart, so those stay visible
HIDDEN = "***"
SECRET_NAME = re.compile(r"token|secret|passw|api_?-?key|authorization|credential|private_?-?key", re.IGNORECASE)
# Of a url: what stands before its @, and the values of parameters that are named like secrets.
IN_URL = re.compile(
    r"(?<=://)[^/\s@?#'\"]*(?:@[^/\s@?#'\"]*)*(?=@)"
    r"|(?<=[?&;])(?![\w.-]{0,64}tokens[\w.-]{0,64}=\d+(?![^&\s#'\":;,.)]))"  # a number of tokens is none
    rf"([\w.-]{{0,64}}(?:{SECRET_NAME.pattern}|[_-]key|signature)[\w.-]{{0,64}}|key|sig)=[^&\s#'\"]*[^&\s#'\":;,.)]",
    re.IGNORECASE,
)

_known: set[str] = set()  # what mask() hides
_read: dict[str, str] = {}  # by variable: it is gone from os.environ


def read(variable: str, given: str | None = None) -> str:
    """The secret `given`, else that of the environment variable, else that in the file named by VARIABLE_FILE; "" if
    there is none. White space around it is no part of it. ConfigError, without the secret, for one that cannot be."""
    if variable in os.environ:
        _read[variable] = checked(os.environ.pop(variable), variable, variable)
    if given is not None:
        return checked(given, "the secret given", variable)
    if variable not in _read and (path := os.environ.get(f"{variable}_FILE")):
        _read[variable] = checked(read_file(path, f"{variable}_FILE"), f"the file of {variable}_FILE", variable)
    return _read.get(variable, "")


def checked(value: str, source: str, variable: str) -> str:
    secret = value.strip()
    if position := next((i for i, c in enumerate(secret, 1) if not c.isprintable()), None):
        raise ConfigError(
            f"{source} holds a control character or line break at position {position} of {len(secret)}; "
            "a secret is one line of printable characters."
        )
    learn(secret, variable)
    return secret


def read_file(path: str, flag: str) -> str:
    """What a file holds; ConfigError if it cannot be read. Says so when other users can read it, too."""
    try:
        if os.stat(path).st_mode & 0o077:
            print(f"{path} can be read by other users of this machine; chmod 600 {path}", file=sys.stderr)
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{flag}={path}: cannot be read ({reason}); give a file that holds the secret.") from None


def learn(secret: str, variable: str = "") -> None:
    """From now on `secret` is masked, in the command line of this process, too. `variable`: where it came from."""
    if len(secret) < SHORTEST:
        return
    _known.add(secret)
    sys.argv[:] = [mask(word) for word in sys.argv]  # what wandb and command.txt record
    overwrite(secret.encode(), variable.encode())


def overwrite(secret: bytes, variable: bytes) -> None:
    """Write * over the secret in the arguments and in the variable that this process started with, which `ps` and
    /proc/PID/environ show. Linux only; a parent that was given the same arguments still shows them."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        areas = [(int(fields[i]), int(fields[i + 1])) for i in (45, 47)]  # arg_start, arg_end, env_start, env_end
    except (OSError, IndexError, ValueError):
        return
    for which, (start, end) in enumerate(areas):
        if not 0 < start < end:  # the kernel does not tell
            continue
        place = start
        for entry in ctypes.string_at(start, end - start).split(b"\0"):
            name, _, value = entry.rpartition(b"=") if which == 0 else entry.partition(b"=")
            if value.strip() == secret and (which == 0 or name == variable):
                ctypes.memset(place + entry.rindex(secret), ord("*"), len(secret))
            place += len(entry) + 1


def mask(text: str) -> str:
    """`text` with *** for every secret that was read, also where it stands quoted for a shell or escaped in JSON, and
    for the secrets of every url in it, read or not."""
    for secret in sorted(_known, key=len, reverse=True):
        for form in (shlex.quote(secret), json.dumps(secret)[1:-1], secret):
            text = text.replace(form, HIDDEN)
    return mask_urls(text)


def mask_urls(text: str) -> str:
    """`text` with *** for user and password of every url in it, and for parameters such as ?api_key=."""
    return IN_URL.sub(lambda found: f"{found[1]}={HIDDEN}" if found[1] else HIDDEN, text) if "://" in text else text


def known() -> set[str]:
    """The secrets that were read so far."""
    return set(_known)


def bearer(token: str) -> dict[str, bytes]:
    """The header that presents `token`; {} for none. In bytes: as text it would have to be Latin-1."""
    return {"Authorization": b"Bearer " + token.encode()} if token else {}


def digests(token: str) -> list[bytes]:
    """What `presented` compares with: clients write a token that is no ASCII in UTF-8 or in Latin-1."""
    forms = [token.encode()]
    if not token.isascii() and all(character <= "\xff" for character in token):
        forms.append(token.encode("latin-1"))
    return [hashlib.sha256(form).digest() for form in forms]


def presented(header: bytes, known: list[bytes]) -> bool:
    """Whether an Authorization header carries the token whose digests are `known`. Takes the same time always."""
    scheme, _, token = header.partition(b" ")
    digest = hashlib.sha256(token.strip()).digest()
    right = [hmac.compare_digest(digest, one) for one in known]
    return any(right) and scheme.lower() == b"bearer"
