"""vLLM's OpenAI server with our defaults, and a token on every route.

    python vllm_server.py --model Qwen/Qwen2.5-0.5B-Instruct [--port 8000] [--host 127.0.0.1] [--token-file FILE]
                          [--exit-with-parent] [any argument of `vllm serve`, passed through]

Training also works with `vllm serve` and the flags that docs/serving.md names. This script adds:

* A bearer token on every route (vLLM's --api-key guards only /v1 and /inference): `Authorization: Bearer T`, from
  VLLM_SERVER_TOKEN, or from the file that --token-file or VLLM_SERVER_TOKEN_FILE names. Without one, a token is made up
  and printed, but on loopback only; any other --host needs a token of yours.
* Defaults, which your arguments override: routes for sampling by token ids, for weight pushes and for adapters are
  switched on, log-probs are those of the distribution that tokens are drawn from, and serving/weights.py receives the
  weight pushes.
* Settings for machines without a GPU.
* One line when it is ready; all its processes end when it ends, however that happens.

--help shows our arguments, --help=all vLLM's.
"""

import argparse
import asyncio
import contextlib
import hmac
import json
import os
import re
import secrets as random_numbers
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback

import psutil

from network import secrets

# vLLM takes seconds to import, and reads the environment then: mistakes in the command line are reported before.

PARENT_SECONDS = 15.0  # for an orderly end after the parent has ended


class Token:
    """The outermost ASGI middleware: 401 for a request without the token, whatever its path."""

    token = ""  # set by main, or, under `vllm serve --middleware vllm_server.Token`, from VLLM_SERVER_TOKEN

    def __init__(self, app):
        self.app, Token.token = app, Token.token or secrets.read("VLLM_SERVER_TOKEN")
        if not Token.token:
            raise ValueError("vllm_server.Token: no token in VLLM_SERVER_TOKEN")

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            asyncio.get_running_loop().call_later(0.2, announce)  # the socket is opened right after this
            tell_ends_apart(scope["app"].state.engine_client)
            return await self.app(scope, receive, send)
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(authorization, b"Bearer " + Token.token.encode()):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        answer = b'{"error": "this server wants its token: Authorization: Bearer TOKEN, from VLLM_SERVER_TOKEN"}'
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]  # the body is left unread
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def tell_ends_apart(engine) -> None:
    """Set STATUS to 0 for an orderly end. vLLM's server returns in the same way when its engine has died; but in an
    orderly end it first stops an engine without errors."""
    stop = engine.shutdown

    def shutdown(*args, **kwargs):
        global STATUS
        STATUS = STATUS if engine.errored else 0
        return stop(*args, **kwargs)

    engine.shutdown = shutdown


def announce() -> None:
    if ADDRESS:
        print(f"vllm_server: ready on {ADDRESS}", flush=True)


ADDRESS = FOLDER = ""  # set by get_ready
STATUS = 1  # exit status of this process


def parse_command_line(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our arguments, those for vLLM alone). `token` is "" if one has to be made up."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; other than loopback wants a token")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token-file", help="file with the token; or VLLM_SERVER_TOKEN[_FILE]; else one is made up")
    parser.add_argument("--exit-with-parent", action="store_true", help="end with the process that started this one")
    args, vllm_args = parser.parse_known_args(argv)
    if args.token_file is not None:
        os.environ["VLLM_SERVER_TOKEN_FILE"] = args.token_file
    has_token = bool({"VLLM_SERVER_TOKEN", "VLLM_SERVER_TOKEN_FILE"} & os.environ.keys())
    try:
        args.token = secrets.read("VLLM_SERVER_TOKEN")
    except ValueError as error:
        parser.error(str(error))
    if has_token and not args.token:
        parser.error("the token is empty; leave --token-file and VLLM_SERVER_TOKEN out to have one made up")
    if not has_token and not re.fullmatch(r"localhost|::1|127(\.\d+){3}", args.host):
        remedy = "VLLM_SERVER_TOKEN=T or --token-file FILE (or leave --host out to serve this machine only)"
        parser.error(f"--host {args.host} can be reached by other machines, so it wants a token: {remedy}")
    return args, vllm_args


def check_free(host: str, port: int) -> None:
    """SystemExit if the port is taken: vLLM would notice only when it binds the port, many seconds later."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise SystemExit(f"vllm_server: cannot listen on {host}:{port} ({error}); pass another --port") from error


def our_arguments(user_args: list[str]) -> list[str]:
    """vLLM's arguments: our defaults, then the user's. Sets vLLM's environment variables unless the user has."""
    defaults = {
        "VLLM_SERVER_DEV_MODE": "1",  # routes for pausing and weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # routes for adapters
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONWARNINGS": "ignore",
        "TQDM_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # the trainer waits while the server samples
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.pop("VLLM_API_KEY", None)  # it would be a second secret in the same header
    args = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-loras", "4", "--max-lora-rank", "64"]
    args += ["--worker-extension-cls", "serving.weights.Worker"]
    args += ["--weight-transfer-config", json.dumps({"backend": "torch"}), "--middleware", "vllm_server.Token"]
    args += ["--uvicorn-log-level", "error", "--disable-uvicorn-access-log", "--disable-log-stats"]

    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        args += ["--enforce-eager"]  # compiling takes minutes and gains little on CPUs
        # Like the trainer (utils.computable): without AVX512, bfloat16 products run in a plain loop.
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported() and "--dtype" not in user_args:
            args += ["--dtype", "float32"]
    return args + user_args


def end_children() -> None:
    """Kill all child processes except multiprocessing's resource tracker, which cleans up and ends by itself."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if not any("resource_tracker" in word for word in child.cmdline()):
                child.kill()


def when_parent_ends(parent: int, then) -> None:
    """Call `then`, from a thread, within half a second after the parent process has ended."""

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        then()

    threading.Thread(target=watch, daemon=True).start()


def end_orphan() -> None:
    """End as by Ctrl-C, but wait at most PARENT_SECONDS."""
    print("vllm_server: the process that started this one has ended; ending, too", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PARENT_SECONDS)
    leave(1)


def leave(status: int) -> None:
    end_children()
    shutil.rmtree(FOLDER, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips the unloading of compiled libraries, whose order is wrong


def interrupted(signum, frame) -> None:
    print("vllm_server: stopped while loading", file=sys.stderr, flush=True)
    leave(1)  # vLLM would wait for its engine, which is busy


def get_ready(args: argparse.Namespace, vllm_args: list[str]) -> None:
    """Check everything that can be checked before the model is loaded, and make vLLM's command line in sys.argv."""
    global ADDRESS, FOLDER
    if args.exit_with_parent:
        when_parent_ends(os.getppid(), end_orphan)
    check_free(args.host, args.port)
    if not args.token:
        args.token = random_numbers.token_urlsafe(24)
        print(f"vllm_server: token {args.token} (export VLLM_SERVER_TOKEN={args.token})", flush=True)
    Token.token, secure = args.token, any(word.startswith("--ssl-certfile") for word in vllm_args)
    ADDRESS = f"{'https' if secure else 'http'}://{args.host}:{args.port}"
    print(f"vllm_server: loading {args.model}", flush=True)
    # For sockets and stores, which vLLM leaves where they are. What torch has compiled is kept for the next server.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    FOLDER = tempfile.mkdtemp(prefix="vllm-")  # short: a socket's path has at most 107 bytes
    os.environ["TMPDIR"] = tempfile.tempdir = FOLDER
    basics = ["--model", args.model, "--host", args.host, "--port", str(args.port)]
    sys.argv[1:] = our_arguments([*basics, *vllm_args])


def main() -> None:
    signal.signal(signal.SIGINT, interrupted)  # by hand: a shell starts background processes with SIGINT ignored
    signal.signal(signal.SIGTERM, interrupted)
    sys.modules["vllm_server"] = sys.modules["__main__"]  # so that --middleware imports this module, with its token
    if any(word.startswith("--help=") for word in sys.argv):
        sys.argv[1:] = our_arguments(sys.argv[1:])
    else:
        get_ready(*parse_command_line(sys.argv[1:]))
    from vllm.entrypoints.launchers.api_server import entry

    load = entry.run_server_worker

    async def run_server_worker(*args, **options) -> None:
        # Again, since vLLM has set a handler that waits for its engine. Once it is ready, its server sets another.
        signal.signal(signal.SIGTERM, interrupted)
        await load(*args, **options)

    entry.run_server_worker = run_server_worker
    try:
        entry.main()
    except SystemExit as error:  # from vLLM's parser: --help, an unknown argument
        leave(error.code if isinstance(error.code, int) else 1)
    except BaseException:  # vLLM's threads would hold up an exit
        traceback.print_exc()
        leave(1)
    if STATUS:
        print("vllm_server: vLLM's engine has died; its own message is above", file=sys.stderr)
    leave(STATUS)


if __name__ == "__mp_main__":  # in vLLM's own processes, which would outlive a server killed with -9
    when_parent_ends(os.getppid(), lambda: os.kill(os.getpid(), signal.SIGKILL))
if __name__ == "__main__":
    main()
