"""JSON over HTTP: how judges, reward models, tools, teachers and the client of vllm_servers ask.

    answer = ask("POST", route(url, "/chat/completions"), seconds=30, body={...}, token=token)  # a dict, or NoAnswer

Connections stay open from one question to the next, for all threads. A connection that cannot be made is tried again,
as nothing was asked yet; what was asked is asked again only where that is safe (`again`): after a broken connection,
and when the server is busy. A server that was silent for `seconds` is not asked again. Redirections are not followed:
question and token would go elsewhere.
"""

import functools
import logging
from urllib.parse import urljoin, urlsplit, urlunsplit

from network.secrets import HIDDEN, hide

CONNECT_SECONDS = 10.0
LONGEST_CALL = 86_400.0  # seconds; a socket takes no infinite limit
BUSY = (429, 500, 502, 503, 504)  # asked again after Retry-After, or after 0, 1, 2, 4, 8 s
PORTS = {"http": 80, "https": 443}
logging.getLogger("urllib3").setLevel(logging.ERROR)  # its warnings of what is asked again hold the whole address


class NoAnswer(RuntimeError):
    """A server gave no usable answer: its address, and what it did. status: of its HTTP answer, 0 if there was none."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(hide(message))
        self.status = status


def session(token: str = "", again: bool = True):
    """A requests.Session: keeps its connections; usable from many threads. again: whether POST, too, may be asked
    again."""
    import requests  # here, as a run that asks no server does without it
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import ReadTimeoutError
    from urllib3.util.retry import Retry

    class PatientRetry(Retry):
        """urllib3's Retry, but for time limits: a server that hangs would be waited for as often as it is asked."""

        def increment(self, method=None, url=None, response=None, error=None, _pool=None, _stacktrace=None):
            if isinstance(error, ReadTimeoutError):
                raise error
            return super().increment(method, url, response, error, _pool, _stacktrace)

    made = requests.Session()
    methods = None if again else ["GET", "HEAD"]
    retries = dict(connect=2, read=2, status=5, other=0, allowed_methods=methods)  # other: certificates
    retries |= dict(status_forcelist=BUSY, raise_on_status=False)
    retry = PatientRetry(total=6, backoff_factor=0.5, backoff_jitter=0.5, retry_after_max=30, **retries)
    for scheme in PORTS:
        made.mount(f"{scheme}://", HTTPAdapter(pool_maxsize=1024, max_retries=retry))

    if token:
        made.headers["Authorization"] = b"Bearer " + token.encode()  # bytes, as text would have to be Latin-1
        made.auth = lambda request: request  # else a .netrc would replace the header
    return made


shared_session = functools.cache(session)


def ask(method: str, url: str, seconds: float, body: dict | None = None, token: str = "", using=None) -> dict:
    """The JSON object that the server answers with; {} for an empty answer. NoAnswer if there is none.

    seconds: of the server's silence, which end the call. using: a `session` of one's own, in place of `token`.
    """
    import requests

    session, parts, status, cause = using or shared_session(token), urlsplit(url), 0, None
    seconds = min(seconds, LONGEST_CALL)
    limits = (min(seconds, CONNECT_SECONDS), seconds)
    try:
        answer = session.request(method, url, json=body, timeout=limits, allow_redirects=False)
    except requests.Timeout:
        fault = f"gave no answer within {seconds:.3g} s: it hangs, or has too much to do"
    except requests.RequestException as error:
        fault, cause = f"cannot be asked ({innermost(error)}). Is it started, at this address?", error
    else:
        status = answer.status_code
        if 200 <= status < 300:
            try:
                found = answer.json() if answer.content else {}
            except ValueError:
                found = answer.text
            if isinstance(found, dict):
                return found
            fault = f"answered no JSON object but {found!r:.200}: is it the right server?"
        else:
            said = answer.text.strip().replace(parts.query or HIDDEN, HIDDEN)[:500]  # some repeat the address
            if answer.is_redirect:
                said = f"a redirection to {origin(urljoin(url, answer.headers['Location']))}; give that address"
            hint = "; look at the token it was sent" if status in (401, 403) else ""
            fault = f"answered {status}: {said}{hint}"
    raise NoAnswer(f"{origin(url)}{parts.path} {fault}", status) from cause


def innermost(error: BaseException) -> str:
    """The cause in words: requests and urllib3 wrap it in texts with the whole address, which may hold keys."""
    while isinstance(inner := getattr(error, "reason", None) or next(iter(error.args), None), BaseException):
        error = inner
    return f"{type(error).__name__}: {error}"


def base(url: str) -> str:
    """An address as a user gave it, without a slash at its end. ValueError for one that is none."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000")
    return url.rstrip("/")


def route(url: str, path: str) -> str:
    """`path` below an address, whose query stays: https://host/v1?key=x -> https://host/v1/models?key=x"""
    parts = urlsplit(base(url))
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + path, fragment=""))


def origin(url: str) -> str:
    """SCHEME://HOST:PORT, the same for all ways to write an address; without what may be secret in it."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or PORTS.get(parts.scheme, 0)}"
