"""Asking a model's server over HTTP, for judges, reward models, simulated users and models that are tools.

    found = asking.ask("POST", asking.route(url, "/chat/completions"), seconds=30, body={...}, token=token)

Within its seconds a call asks again where that is safe: as often as a server is busy (429, 503; after its Retry-After,
if it has one), and ATTEMPTS times in all where the connection breaks or the server fails. No answer has more than
MOST_BYTES, or what the caller allows. Redirections are refused: they would take the question elsewhere. Messages name
scheme, host and port of the server; the rest of its address may hold keys.
"""

import email.utils
import http
import json
import logging
import math
import os
import time
from urllib.parse import urljoin, urlsplit, urlunsplit

from safety import credentials
from safety.secrets import hide

# requests is imported where a server is asked: runs without one do not need it.

MOST_BYTES = 1 << 24
ATTEMPTS, WAIT, LONGEST_WAIT = 3, 1.0, 10.0  # seconds before the second attempt; twice as long before each next one
BUSY = (429, 503)
LONGEST_CALL = 86_400.0  # seconds; a socket takes no infinite limit

MOST_WARNINGS, WARNED_EVERY = 50, 3600.0  # so many in so many seconds, each once

WARNED: dict[str, float] = {}  # what was said within WARNED_EVERY, and when
logger = logging.getLogger(__name__)


class NoAnswer(RuntimeError):
    """A server gave no usable answer: which one, what it did, what to do.

    status: of its HTTP answer, 0 if there was none. again: whether asking again may help. wait: the seconds that it
    wants to be left alone, None if it did not say.
    """

    def __init__(self, message: str, status: int = 0, again: bool = False, wait: float | None = None):
        super().__init__(message)
        self.status, self.again, self.wait = status, again, wait


def route(url: str, path: str) -> str:
    """The address of `path` below `url`, whose query stays: https://host/v1?key=x -> https://host/v1/models?key=x
    NoAnswer for one that cannot be an address."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets without an end, a port that is no number
        usable = False
    if not usable:
        raise NoAnswer("the address of a model's server is no URL such as http://host:8000/v1; look at what was given")
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + path, fragment=""))


def place(url: str) -> str:
    """Scheme, host and port: what messages may show of an address that `route` made."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


def ask(
    method: str,
    url: str,
    seconds: float,
    body: dict | None = None,
    token: str | None = None,
    ca: str | None = None,
    client_cert: str | None = None,
    most: int = MOST_BYTES,
) -> dict:
    """The JSON object that the server answers with, at most `most` bytes. NoAnswer if there is none within `seconds`,
    of which a day's are the most.

    ca: PEM file by which an https server's certificate is checked; when not given, what SSL_CERT_FILE or
    REQUESTS_CA_BUNDLE names, else the usual authorities. client_cert: PEM file to show to servers that ask for one.
    """
    ca = ca or os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or True
    seconds = min(seconds, LONGEST_CALL)
    deadline, failures, wait = time.monotonic() + seconds, 0, WAIT
    while True:
        try:
            return ask_once(method, url, deadline, body, token, dict(verify=ca, cert=client_cert), most)
        except NoAnswer as error:
            failures += error.status not in BUSY
            pause = wait if error.wait is None else error.wait
            if not error.again or failures == ATTEMPTS:
                raise
            if time.monotonic() + pause >= deadline:
                wanted = f", and asks for {pause:g} s" if error.wait is not None else ""
                raise NoAnswer(
                    f"{error}{wanted}; the time limit of {round(seconds, 1):g} s is over.", error.status, True
                ) from None
            if error.status in BUSY:
                warned(f"{error}: it is asked again until the call's time limit.")
        time.sleep(pause)
        wait = min(2 * wait, LONGEST_WAIT)


def warned(message: str) -> None:
    """Warn, once an hour of the same: an outage in the fifth day of a run is news, as the one in the first was. Of
    servers that say something else each time, MOST_WARNINGS."""
    now = time.monotonic()
    for old in [text for text, said in list(WARNED.items()) if now - said >= WARNED_EVERY]:
        WARNED.pop(old, None)
    if message not in WARNED and len(WARNED) < MOST_WARNINGS:
        WARNED[message] = now
        logger.warning(message)


def ask_once(
    method: str, url: str, deadline: float, body: dict | None, token: str | None, tls: dict, most: int
) -> dict:
    import requests

    def present(request):  # as `auth`, since a .netrc would replace the header
        request.headers["Authorization"] = b"Bearer " + token.encode()
        return request

    where, left = place(url), max(deadline - time.monotonic(), 0.001)
    options = dict(json=body, auth=present if token else None, headers={"Accept-Encoding": "identity"})
    options |= dict(timeout=(min(left, 10), left), allow_redirects=False, stream=True) | tls
    over = f"{where} answered with over {most >> 20} MiB; is it the right server?"
    try:
        with requests.request(method, url, **options) as answer:
            text = read_body(answer, most, deadline, NoAnswer(over, answer.status_code))
    except requests.Timeout:
        raise NoAnswer(f"{where} gave no answer in time; it hangs or is overloaded", again=True) from None
    except requests.exceptions.SSLError as error:
        cause, remedy = reason(error, url), "SSL_CERT_FILE names the PEM file of who signed its certificate"
        text = f"{where}: no secure connection ({cause}); {remedy}, and a server without TLS is http://"
        raise NoAnswer(text, again="EOF" in cause) from None  # one that is going down breaks the handshake off
    except requests.ConnectionError as error:
        raise NoAnswer(f"{where} cannot be reached ({reason(error, url)})", again=True) from None
    except (requests.RequestException, ValueError, OSError) as error:
        raise NoAnswer(f"{where} cannot be asked ({reason(error, url)}); look at its address") from None
    status = answer.status_code
    if answer.is_redirect:
        raise NoAnswer(f"{where} redirects to {elsewhere(answer)}; give that address itself", status)
    if status in BUSY:
        wait = retry_after(answer.headers.get("Retry-After"))
        raise NoAnswer(f"{where} is busy ({status} {phrase(status)})", status, again=True, wait=wait)
    if not answer.ok:
        said = shown(text.decode(errors="replace"), url)
        remedy = "; look at the token it was sent" if status in (401, 403) else ""
        raise NoAnswer(f"{where} answered {status} {phrase(status)}: {said}{remedy}", status, again=status >= 500)
    try:
        if isinstance(found := json.loads(text), dict):
            return found
    except (ValueError, RecursionError):
        pass
    said = shown(text[:1000].decode(errors="replace"), url)
    raise NoAnswer(f"{where} answered with no JSON object but {said!r}; is it the right server?", status)


def read_body(answer, most: int, deadline: float, too_much: Exception) -> bytes:
    """The body of an answer whose headers have come; `too_much` if it has over `most` bytes, requests.Timeout if it is
    not there by `deadline` (of time.monotonic)."""
    import requests
    import urllib3

    text = bytearray()
    try:
        while part := answer.raw.read1(1 << 16):  # what there is; read() would wait for more, however slowly it comes
            text += part
            if len(text) > most:
                text.clear()  # the error keeps this frame, and with it the text, while others ask again
                raise too_much
            if time.monotonic() > deadline:
                raise requests.Timeout("the answer came too slowly")
    except urllib3.exceptions.ReadTimeoutError as error:
        raise requests.Timeout(error) from error
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(error) from error
    return bytes(text)


def elsewhere(answer) -> str:
    try:
        return place(urljoin(answer.url, answer.headers["Location"]))
    except ValueError:
        return "what is no URL"


def retry_after(text: str | None) -> float | None:
    """The seconds of a Retry-After header, or those until its date; None for none and for what is neither."""
    try:
        seconds = float(text or "")
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text or "").timestamp() - time.time()
        except (ValueError, TypeError, OverflowError, OSError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def phrase(status: int) -> str:
    return http.HTTPStatus(status).phrase if status in list(http.HTTPStatus) else "unknown status"


def reason(error: Exception, url: str) -> str:
    """The innermost cause, as a name: requests puts the address into its texts."""
    while isinstance(inner := getattr(error, "reason", None) or next(iter(error.args), None), Exception):
        error = inner
    return shown(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}", url)


def shown(text: str, url: str) -> str:
    """A foreign text for a message: in a line, short, without secrets and without what the address hides."""
    parts = urlsplit(url)
    text = hide(" ".join(text.split()))
    for secret in (parts.query, parts.password, *(pair.partition("=")[2] for pair in parts.query.split("&"))):
        text = text.replace(secret, credentials.HIDDEN) if secret and len(secret) >= credentials.SHORTEST else text
    return text[:300]
