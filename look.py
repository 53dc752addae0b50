"""A page that shows runs while they train, down to the token: python look.py runs/

Prints an address with a token in it; open it in a browser. On another machine: `ssh -L 6060:127.0.0.1:6060 HOST` first,
then the same address. Reads the run folders and changes nothing in them; a training does not notice it.
With --prepare it also shows rows, calls rewards and tools, and starts trainings. See docs/looking.md.
"""

import argparse
import contextlib
import ipaddress
import socket
import ssl
import sys
from pathlib import Path

from cli import ConfigError
from safety.storable import visible

PORT = 6060


def loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def bound(host: str, port: int | None) -> socket.socket:
    """A listening socket; without a given port, PORT or the next that is free."""
    for number in [port] if port is not None else range(PORT, PORT + 50):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, number), family=family)
        except OSError as error:
            problem = error
    ports = port if port is not None else f"{PORT} to {PORT + 49}"
    raise ConfigError(f"--host {host} --port {ports}: {problem.strerror or problem}. Give another --port.")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="of runs, or one run; default: runs")
    parser.add_argument("--port", type=int, help=f"default: {PORT}, or the next that is free")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1, this machine alone"
    )
    parser.add_argument("--ssl-certfile", help="PEM file of a certificate, for https://; with --ssl-keyfile")
    parser.add_argument("--ssl-keyfile", help="PEM file of the certificate's key, unless --ssl-certfile holds it, too")
    parser.add_argument(
        "--prepare", action="store_true", help="also prepare and start runs: who has the token can run code as you"
    )
    parser.add_argument(
        "--let-others-run-code", action="store_true", help="with --prepare, on a --host that other machines reach"
    )
    given = parser.parse_args(arguments)
    if given.prepare and not given.folder.exists() and given.folder == Path("runs"):
        given.folder.mkdir()  # of a first run
    if not given.folder.is_dir():
        raise ConfigError(f"{given.folder} is no folder; give the one that run folders are in, such as runs/")
    if given.prepare and not loopback(given.host) and not given.let_others_run_code:
        raise ConfigError(
            f"--prepare --host {given.host}: whoever has the token can run code as you. Leave --host out and use "
            "`ssh -L`, or add --let-others-run-code."
        )
    try:  # here, so that --help and mistakes answer at once
        import uvicorn

        from looking.prepare import Prepare
        from looking.server import Connection, make_app, new_token
    except ImportError as error:
        raise ConfigError(f"look.py needs {error.name}, which is not installed: bash scripts/install.sh") from None
    tls = {"ssl_certfile": given.ssl_certfile, "ssl_keyfile": given.ssl_keyfile} if given.ssl_certfile else {}
    if given.ssl_keyfile and not tls:
        raise ConfigError("--ssl-keyfile without --ssl-certfile would serve plain HTTP; give the certificate, too.")
    try:
        if tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certfile=given.ssl_certfile, keyfile=given.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--ssl-certfile {given.ssl_certfile} --ssl-keyfile {given.ssl_keyfile}: cannot be used ({reason}). Give "
            "the PEM files of a certificate and of its key, without a pass phrase."
        ) from None
    token, listening = new_token(), bound(given.host, given.port)
    port = listening.getsockname()[1]
    prepare = Prepare(Path.cwd(), given.folder, given.let_others_run_code) if given.prepare else None
    app = make_app(given.folder, token, prepare)
    if not loopback(given.host) and not tls:
        print(
            f"Warning: --host {given.host} lets other machines connect. The token and all that models wrote travel "
            "unencrypted: better is ssh -L with the default host, or --ssl-certfile and --ssl-keyfile.",
            file=sys.stderr,
        )
    shown = f"[{given.host}]" if ":" in given.host else given.host
    where = visible(str(given.folder.resolve()))
    print(f"Runs in {where}: http{'s' * bool(tls)}://{shown}:{port}/?token={token}   (Ctrl-C ends)", flush=True)
    # No access log: it would show the token. Nothing is sent to others, so no header tells what runs here.
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        **tls,
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        if prepare:
            prepare.end()  # what it has under way; not the trainings that it has started


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        raise SystemExit(f"look.py: {error}") from None
