"""A page that shows runs while they train, down to the token: python look.py runs/

Prints an address with a token in it; open it in a browser. On another machine: `ssh -L 6060:127.0.0.1:6060 HOST` first,
then the same address. Reads the run folders and changes nothing in them; a training does not notice it. With `--try`
and the flags of a training behind it, the page "Try" shows rows and rewards before the run, by scripts/try.py;
whoever has the token can then choose what these flags' rewards and tools get. See docs/looking.md.
"""

import argparse
import secrets
import socket
import sys
from pathlib import Path

from config import ConfigError

HOST, PORT = "127.0.0.1", 6060
TRY = Path(__file__).parent / "scripts" / "try.py"  # a row and completions of a run that has not begun


def bound(port: int | None) -> socket.socket:
    """A listening socket; without a given port, PORT or the next that is free."""
    for number in [port] if port is not None else range(PORT, PORT + 50):
        try:
            return socket.create_server((HOST, number))
        except OSError as error:
            problem = error
    ports = port if port is not None else f"{PORT} to {PORT + 49}"
    raise ConfigError(f"--port {ports}: {problem.strerror or problem}. Give another --port.")


def main(arguments: list[str]) -> None:
    port = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    port.add_argument("--port", type=int, help=f"default: {PORT}, or the next that is free")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[port]
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="of runs, or one run; default: runs")
    parser.add_argument("--report", action="store_true", help="write the report.html of one run, and end")
    parser.add_argument("--try", nargs=argparse.REMAINDER, dest="flags", help="flags of a training to try; comes last")
    given = parser.parse_args(arguments)
    given, flags = port.parse_known_args(given.flags or [], given)  # --port may come behind --try, too
    if not given.folder.is_dir():
        raise ConfigError(f"{given.folder} is no folder; give the one that run folders are in, such as runs/")
    if given.report:
        from looking.report import write_report

        if not (path := write_report(given.folder)):
            raise ConfigError(f"{given.folder} has no line in metrics.jsonl yet; give the folder of one run")
        print(f"report: {path}")
        return
    try:  # here, so that --help and mistakes answer at once
        import uvicorn

        from looking.server import make_app
    except ImportError as error:
        installed = (Path(__file__).parent / ".venv/installed").exists()
        remedy = "it is in .venv: . .venv/bin/activate" if installed else "bash scripts/install.sh"
        raise ConfigError(f"look.py needs {error.name}, which this Python has not: {remedy}") from None
    token, listening = secrets.token_urlsafe(18), bound(given.port)
    trial = None if given.flags is None else [sys.executable, str(TRY), *flags]
    app = make_app(given.folder, token, trial)
    port = listening.getsockname()[1]
    print(f"Runs in {given.folder.resolve()}: http://{HOST}:{port}/?token={token}   (Ctrl-C ends)", flush=True)
    # No access log: it would show the token.
    config = uvicorn.Config(app, ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        raise SystemExit(f"look.py: {error}") from None
