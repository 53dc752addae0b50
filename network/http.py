"""JSON over HTTP, for judges, reward models, tools, teachers and the client of vllm_servers.

    answer = ask("POST", route(url, "/chat/completions"), seconds=30, body={...}, token=token)  # a dict, or NoAnswer

Connections stay open between requests, and all threads share them. A connection that cannot be made is tried again, as
nothing was sent yet. A request is sent again only if that is safe (`again`): after a broken connection, and when the
server is busy. It is not sent again after `seconds` of silence. Redirections are not followed: request and token would
go elsewhere.
"""

import functools
import logging
from urllib.parse import urljoin, urlsplit, urlunsplit

from network.secrets import HIDDEN, hide

CONNECT_SECONDS = 10.0
LONGEST_CALL = 86_400.0  # seconds; sockets accept no infinite limit
BUSY = (429, 500, 502, 503, 504)  # statuses after which to retry, by Retry-After or after 0, 1, 2, 4, 8 s
PORTS = {"http": 80, "https": 443}
logging.getLogger("urllib3").setLevel(logging.ERROR)  # its retry warnings contain the whole address


class NoAnswer(RuntimeError):
    """A server gave no usable answer. The message holds its address and what it did. status: of the HTTP answer, or
    0."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(hide(message))
        self.status = status


def session(token: str = "", again: bool = True):
    """A requests.Session, which keeps its connections and works from many threads. again: whether POST may be retried,
    too."""
    import requests  # here: a run without servers does not need it
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import ReadTimeoutError
    from urllib3.util.retry import Retry

    class PatientRetry(Retry):
        """urllib3's Retry, without retries after a time limit: each would wait for the hanging server again."""

        def increment(self, method=None, url=None, response=None, error=None, _pool=None, _stacktrace=None):
            if isinstance(error, ReadTimeoutError):
                raise error
            return super().increment(method, url, response, error, _pool, _stacktrace)

    new_session = requests.Session()
    methods = None if again else ["GET", "HEAD"]
    retries = dict(connect=2, read=2, status=5, other=0, allowed_methods=methods)  # other: certificates
    retries |= dict(status_forcelist=BUSY, raise_on_status=False)
    retry = PatientRetry(total=6, backoff_factor=0.5, backoff_jitter=0.5, retry_after_max=30, **retries)
    for scheme in PORTS:
        new_session.mount(f"{scheme}://", HTTPAdapter(pool_maxsize=1024, max_retries=retry))

    if token:
        new_session.headers["Authorization"] = b"Bearer " + token.encode()  # bytes: text would have to be Latin-1
        new_session.auth = lambda request: request  # otherwise a .netrc would replace the header
    return new_session


shared_session = functools.cache(session)


def ask(method: str, url: str, seconds: float, body: dict | None = None, token: str = "", using=None, read=dict):
    """read(the JSON that the server answers with, {} for an empty answer), by default a dict. NoAnswer if there is
    none, or `read` does not find what it looks for.

    seconds: of silence from the server, after which the call ends. using: a `session` of one's own, instead of `token`.
    """
    import requests

    session, parts, status, cause = using or shared_session(token), urlsplit(url), 0, None
    seconds = min(seconds, LONGEST_CALL)
    limits = (min(seconds, CONNECT_SECONDS), seconds)
    try:
        answer = session.request(method, url, json=body, timeout=limits, allow_redirects=False)
    except requests.Timeout:
        fault = f"gave no answer within {seconds:.3g} s: it hangs or is overloaded"
    except requests.RequestException as error:
        fault, cause = f"cannot be asked ({innermost(error)}). Is it started, at this address?", error
    else:
        status = answer.status_code
        if 200 <= status < 300:
            try:
                return read(answer.json() if answer.content else {})
            except (ValueError, LookupError, TypeError, AttributeError):
                fault = f"answered {answer.text!r:.200}, no JSON object of the expected form: is it the right server?"
        else:
            text = answer.text.strip().replace(parts.query or HIDDEN, HIDDEN)[:500]  # some servers repeat the address
            if answer.is_redirect:
                text = f"a redirection to {origin(urljoin(url, answer.headers['Location']))}; give that address"
            hint = "; check the token that it was sent" if status in (401, 403) else ""
            fault = f"answered {status}: {text}{hint}"
    raise NoAnswer(f"{origin(url)}{parts.path} {fault}", status) from cause


def innermost(error: BaseException) -> str:
    """The innermost cause in words: requests and urllib3 wrap it in texts with the whole address, which may hold
    keys."""
    while isinstance(inner := getattr(error, "reason", None) or next(iter(error.args), None), BaseException):
        error = inner
    return f"{type(error).__name__}: {error}"


def base(url: str) -> str:
    """A user's address without a trailing slash. ValueError if it is not a server's address."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r} is not the address of a server; give one such as http://127.0.0.1:8000")
    return url.rstrip("/")


def route(url: str, path: str) -> str:
    """`path` appended to an address, whose query stays: https://host/v1?key=x -> https://host/v1/models?key=x"""
    parts = urlsplit(base(url))
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + path, fragment=""))


def origin(url: str) -> str:
    """SCHEME://HOST:PORT, the same for every way to write an address, and without secrets."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or PORTS.get(parts.scheme, 0)}"
