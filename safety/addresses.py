"""Addresses of vllm_servers as users give them, looked at before anything is sent there."""

from urllib.parse import urlsplit

from cli import ConfigError
from safety import credentials

PORTS = {"http": 80, "https": 443}


def place_of(url: str) -> tuple[str, str, int]:
    """(scheme, host, port), the same for all ways to write them. ValueError for a port that is none."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)


def checked(urls: list[str], flag: str = "--server_urls", secret: str = "VLLM_SERVER_TOKEN") -> list[str]:
    """`urls` without a slash at their ends. ConfigError for what is no address of a server, and for one given twice.
    secret: the variable with the token."""
    places: dict[tuple, str] = {}
    for url in urls:
        shown = credentials.mask(url if "://" in url else f"http://{url}")
        try:
            parts, place = urlsplit(url), place_of(url)
        except ValueError as error:  # of the port, or of brackets
            raise ConfigError(f"{flag}={shown}: {error}; give http://HOST:PORT.") from None
        if parts.scheme not in PORTS or not parts.hostname:
            rest = shown.partition("://")[2]
            wanted = f"http://{rest or 'HOST:PORT'}"
            raise ConfigError(
                f"{flag}={shown if '://' in url else rest}: an address begins with http:// or https://. Give {wanted}."
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                f"{flag}={shown}: give the address alone, {parts.scheme}://HOST:PORT. The server knows its clients by "
                f"a token: {secret}, or a file that {secret}_FILE names."
            )
        if place in places:
            raise ConfigError(
                f"{flag} names one server twice, {places[place]} and {url}: give it once, it takes many requests at a "
                "time."
            )
        places[place] = url
    return [url.rstrip("/") for url in urls]
