"""Tokens as serving/ shows and compares them. Reading and hiding: safety/secrets.py."""

import hashlib
import hmac
import os
import sys
from pathlib import Path

from cli import ConfigError
from safety.secrets import HIDDEN, NAME, SHORTEST, hide, learn  # noqa: F401
from safety.secrets import hide as mask  # noqa: F401
from safety.secrets import read as read  # noqa: F401


def read_file(path: str, flag: str) -> str:
    """What a file holds; ConfigError if it cannot be read. Says so when other users can read it, too."""
    try:
        if os.stat(path).st_mode & 0o077:
            print(f"{path} can be read by other users of this machine; chmod 600 {path}", file=sys.stderr)
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{flag}={path}: cannot be read ({reason}); give a file that holds the secret.") from None


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
