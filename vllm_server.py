"""vLLM's own OpenAI server, plus what a trainer needs.

    python vllm_server.py --model Qwen/Qwen2.5-0.5B-Instruct [--port 8000] [--host 127.0.0.1] [--token-file FILE]
                          [--exit-with-parent] [any argument of `vllm serve`, passed through]

On top of vLLM's routes:

* A bearer token on every route, /health and /docs included: `Authorization: Bearer T`, from VLLM_SERVER_TOKEN, or the
  file that --token-file or VLLM_SERVER_TOKEN_FILE names. Without one, a token is made up and printed - on loopback
  only; any other --host wants its own. Limits on what a request costs before its token is seen: serving/gate.py.
* Nothing is fetched for a request: pictures come as data: URLs, unless --allowed-media-domains names hosts.
* `POST /generate`: token ids (and base64 images) in; token ids, log-probs, finish reason and policy version out; on
  request with log-probs of the prompt (a teacher's, of pictures, too). With a request_id, POST /abort_requests
  {"request_ids": [...]} ends it.
* `GET /server_info`: what is served, and which version of the weights.
* Weight pushes (`VLLMClient.begin_push / send_bucket / finish_push`) on vLLM's life cycle and route names:
  /init_weight_transfer_engine, /start_weight_update (pauses; sequences under way are kept), /update_weights once a
  bucket, /finish_weight_update (checks coverage, takes the version, resumes), /abort_weight_update.
* With --enable-lora, adapters alone: /adapters/connect, start, bucket, finish, abort; several runs may share the server
  (serving/adapters.py). vLLM's own routes for adapters stay closed.
* `/sleep`, `/wake_up` for a trainer on the same GPU: serving/sleep.py.
* TLS with vLLM's own arguments: --ssl-certfile, --ssl-keyfile and the other --ssl-*. Arguments that would change
  nothing here are refused.

Which weights sampled what. Requests that arrive during a push wait for its end. A sequence under way is frozen; after
the push its prefix is computed anew and it goes on under the new weights. `policy_version` is the version when it began
(the oldest that sampled any of its tokens), `policy_version_last` the one when it ended. A push empties vLLM's prefix
and encoder caches. (One of adapters does none of this: serving/adapters.py.) A push that breaks off (trainer dead or
silent, a damaged bucket, a missing parameter) leaves the server answering 503 with the reason on everything that
generates, until a complete push has arrived: never half-new weights, never silently old ones.

The process ends with an error code when the engine dies, and takes its children along when it ends.
"""

import argparse
import asyncio
import atexit
import contextlib
import fcntl
import importlib.util
import inspect
import ipaddress
import json
import math
import os
import secrets
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import psutil
from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from cli import ConfigError
from inputs.pictures import MAX_PIXELS, PICTURE_FORMATS, PictureError, read_image
from inputs.prompts import placeholder_tokens
from safety import credentials, open_files
from serving.experts import encoded
from serving.gate import HEADER_SECONDS, Gate, LimitedProtocol, failure

# vLLM takes seconds, and reads the environment when it is imported: that is set first, and mistakes answer at once.

# vLLM and torch are imported inside functions: a taken port or a missing token must not wait for them.

MAX_N = 1024  # samples a request
MAX_IMAGES = 64  # images a request
NO_HOST = "none, unless the server is started with --allowed-media-domains"  # where vLLM looks for names of hosts
LORA_RANK, LORA_SLOTS = 64, 4  # of adapters, with --enable-lora: largest rank; versions that sample at a time
PARENT_SECONDS = 15.0  # for an orderly end after the parent's


# --------------------------------------------------------------------------------------------------------------------
# Command line: everything that can be refused is refused before the model is loaded
# --------------------------------------------------------------------------------------------------------------------


def parse_command_line(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; other than loopback wants a token")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token", help="bearer token; every user of the machine sees it in `ps`: rather use one of")
    parser.add_argument("--token-file", help="file with the token; or VLLM_SERVER_TOKEN[_FILE]; else one is made up")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end when the process that started this one has ended"
    )
    args, rest = parser.parse_known_args(argv)
    given = {word.split("=")[0].replace("_", "-") for word in rest if word.startswith("--")}
    for flag, remedy in REFUSED.items():
        if flag in given:
            parser.error(f"{flag} cannot be used here: {remedy}")
    if not 0 < args.port < 65536:
        parser.error(f"--port {args.port}: give a number from 1 to 65535")
    sources = {"VLLM_SERVER_TOKEN", "VLLM_SERVER_TOKEN_FILE"} & os.environ.keys()
    args.token_was_given = bool(sources) or args.token is not None or args.token_file is not None
    try:
        if args.token is None and args.token_file is not None:
            args.token = credentials.read_file(args.token_file, "--token-file")
        args.token = credentials.read("VLLM_SERVER_TOKEN", args.token)
    except ConfigError as error:
        parser.error(str(error))
    if args.token_was_given and not args.token:
        parser.error("the token is empty; leave --token, --token-file and VLLM_SERVER_TOKEN out to have one made up")
    if not args.token_was_given and not is_loopback(args.host):
        parser.error(
            f"--host {args.host} can be reached from other machines, so it wants a token of your choice: "
            "VLLM_SERVER_TOKEN=T or --token-file FILE (or leave --host out to serve this machine only)"
        )
    args.token = args.token or secrets.token_urlsafe(24)
    return args, rest


REFUSED = {
    "--api-key": "use VLLM_SERVER_TOKEN or --token-file, which guard every route",
    "--weight-transfer-config": "the server brings its own transfer engine",
    "--worker-extension-cls": "the server brings its own",
    "--api-server-count": "weight pushes need one HTTP process a server; start more servers instead",
    "--uds": "clients reach the server by host and port",
    "--lora-modules": "adapters come from trainers, over the network",
    "--headless": "start one server a node instead",
    "--grpc": "clients ask by HTTP",
    "--grpc-port": "clients ask by HTTP",
    "--model-tag": "name the model once, by --model",
}


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. Taken now, and listening, so that two servers starting at once cannot both have it."""
    try:
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        # For its connections, too: a client whose machine is gone is noticed after three minutes.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 120), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3)):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return sock
    except OSError as error:
        raise SystemExit(
            f"vllm_server: cannot listen on {host}:{port} ({os.strerror(error.errno)}). If another server holds the "
            "port, stop it or pass another --port."
        ) from error


class TooManyPixels(Image.DecompressionBombError, ValueError):
    """In place of Pillow's own error: vLLM answers a ValueError with 400, others with 500."""


def open_own(path: str, flags: int) -> int:
    """What another user has put into the temporary directory is not opened, nor waited for."""
    if os.lstat(path).st_uid != os.getuid():
        raise PermissionError(path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def make_folder() -> Path:
    """A folder for this server's sockets and temporary files that no other user can enter. Those of servers that were
    killed are removed: a lock that nobody holds tells them apart."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > LONGEST_PARENT:
        parent = Path("/tmp")
    for lock in parent.glob("vllm_server_*/lock"):
        with contextlib.suppress(OSError), open(lock, "rb", opener=open_own) as file:  # another user's, gone, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="new_vllm_server_", dir=parent))
    HELD.append(open(made / "lock", "wb"))
    fcntl.flock(HELD[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = made.rename(made.with_name(made.name.removeprefix("new_")))  # seen by other servers only now, locked
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


HELD = []  # the lock, for as long as this process lives
LONGEST_PARENT = 48  # characters; the address of a UNIX socket in a folder below has at most 107


def remove_folder():
    if HELD:
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


def set_environment():
    """Before vLLM is imported. What the user set is kept, unless it would let others in."""
    defaults = {
        "VLLM_SERVER_DEV_MODE": "1",  # vLLM's routes for pausing and weights
        "VLLM_LOGGING_LEVEL": "ERROR",  # INFO brings vLLM's usual hundreds of lines
        "PYTHONWARNINGS": "ignore",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_MAX_N_SEQUENCES": str(MAX_N),  # for vLLM's own routes
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",  # to hosts that --allowed-media-domains does not name
        "TQDM_DISABLE": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")  # is to outlive this server
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # they would not: 5 s a start
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = str(make_folder())
    tempfile.tempdir = None  # to be looked up again
    os.environ["RL_SERVER_ERROR_FILE"] = os.path.join(os.environ["TMPDIR"], "error.log")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"  # no pickles from clients
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"  # nor adapters from files
    os.environ.pop("VLLM_API_KEY", None)
    open_files.allow_many()
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow refuses at twice this, for vLLM's own routes too
    Image.DecompressionBombError = TooManyPixels


def engine_arguments(args: argparse.Namespace, rest: list[str]) -> tuple["Watched", dict]:
    """The arguments of `vllm serve`, parsed by vLLM, with our defaults where the user gave none; options for TLS."""
    import torch
    import vllm.multimodal.image
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
    from vllm.platforms import current_platform
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from inputs.precision import slow_in_bfloat16

    if current_platform.is_cpu():  # compiling costs minutes and gains little there
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")  # the trainer waits while the server samples
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # one that spins keeps the one it waits for from a core
        rest = ["--enforce-eager", *rest]
        if " " in str(importlib.util.find_spec("torch").origin):  # torch's compiler cuts its include paths there
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    ours = ["--model", args.model, "--host", args.host, "--port", str(args.port)]
    ours += ["--logprobs-mode", "processed_logprobs"]  # of the distribution the tokens are drawn from
    ours += ["--worker-extension-cls", "serving.adapters.Worker"]
    ours += ["--weight-transfer-config", json.dumps({"backend": "torch"})]
    ours += ["--uvicorn-log-level", "error", "--disable-uvicorn-access-log", "--disable-log-stats"]
    ours += ["--no-use-tqdm-on-load", "--no-log-error-stack"]
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm_server.py"))
    parser.set_defaults(enable_return_routed_experts=None)  # left open: serving/engine.py
    parser.set_defaults(max_lora_rank=LORA_RANK, max_loras=LORA_SLOTS)
    if current_platform.is_cpu() and slow_in_bfloat16(torch.device("cpu")):  # as the trainer: utils.computable
        parser.set_defaults(dtype="float32")
    parsed, plain = parser.parse_args(ours + rest), parser.parse_args(ours)
    if parsed.dtype == plain.dtype != "auto":
        print("vllm_server: in float32, as this CPU has no instructions for bfloat16 (--dtype)", flush=True)
    for flag, remedy in REFUSED.items() | {(flag, "it is given already") for flag in ("--model", "--host", "--port")}:
        name = flag.removeprefix("--").replace("-", "_")
        if getattr(parsed, name) != getattr(plain, name):  # by a short form or a file: --config
            refuse(f"{flag} cannot be used here: {remedy}")
    parsed = Watched({name for name in vars(plain) if getattr(parsed, name) != getattr(plain, name)}, **vars(parsed))
    validate_parsed_serve_args(parsed)
    for path, load in (
        (parsed.tool_parser_plugin, ToolParserManager.import_tool_parser),
        (parsed.reasoning_parser_plugin, ReasoningParserManager.import_reasoning_parser),
    ):
        if path:
            load(path)
    validate_api_server_args(parsed)
    tls = tls_options(parsed, plain)
    vllm.multimodal.image.ALLOWED_IMAGE_FORMATS = PICTURE_FORMATS  # of the 37 that it would open
    parsed.allowed_media_domains = parsed.allowed_media_domains or [NO_HOST]  # an empty list would allow all
    return parsed, tls


def refuse(message: str):
    raise SystemExit(f"vllm_server: {message}")


class Watched(argparse.Namespace):
    """Arguments that know which of those that the user gave nobody has read yet: vLLM's parser takes some that only
    parts of vLLM read which do not run here."""

    def __init__(self, unread: set[str], **values):
        super().__init__(**values)
        object.__setattr__(self, "unread", unread)

    def __getattribute__(self, name: str):
        if name != "unread":
            object.__getattribute__(self, "__dict__").get("unread", set()).discard(name)
        return super().__getattribute__(name)


def tls_options(parsed: argparse.Namespace, plain: argparse.Namespace) -> dict:
    """uvicorn's options for TLS, as vLLM's parser knows them; {} where the user gave none (`plain` has none). Ends the
    process for those that could not serve."""
    import uvicorn

    known = [name for name in inspect.signature(uvicorn.Config).parameters if name.startswith("ssl_")]
    options = {name: getattr(parsed, name) for name in known if hasattr(parsed, name)}
    options["enable_ssl_refresh"] = parsed.enable_ssl_refresh
    given = ["--" + name.replace("_", "-") for name in options if options[name] != getattr(plain, name)]
    if not given:
        return {}
    certificate, key = options["ssl_certfile"], options["ssl_keyfile"]
    if not certificate:
        refuse(
            f"{', '.join(given)}: without --ssl-certfile FILE this would serve plain HTTP; give the certificate, too"
        )
    if options["ssl_cert_reqs"] and not options["ssl_ca_certs"]:
        refuse("--ssl-cert-reqs would refuse every client; give --ssl-ca-certs FILE, by which theirs are checked")
    for path in filter(None, (certificate, key, options["ssl_ca_certs"])):
        if not os.path.isfile(path):
            refuse(f"{', '.join(given)}: there is no file {path}; give a PEM file")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")  # it would be asked for at the terminal else
        context.verify_mode = ssl.VerifyMode(options["ssl_cert_reqs"])
        if options["ssl_ca_certs"]:
            context.load_verify_locations(options["ssl_ca_certs"])
        context.set_ciphers(options["ssl_ciphers"] or "DEFAULT")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        refuse(
            f"{', '.join(given)}: TLS cannot use them ({error}). Give PEM files: a certificate with its own key, which "
            "has no pass phrase; and ciphers that openssl knows"
        )
    return options


# --------------------------------------------------------------------------------------------------------------------
# POST /generate
# --------------------------------------------------------------------------------------------------------------------


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt_ids: list[int] = Field(min_length=1)  # one placeholder token an image, not expanded
    images: list[str] | None = Field(None, max_length=MAX_IMAGES)  # base64 of image files
    n: int = Field(1, ge=1, le=MAX_N)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: list[int] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=0, lt=2**63)
    routed_experts: bool = False  # with the experts that every token went through
    prompt_logprobs: int | None = Field(None, ge=0)  # with those of the prompt's tokens and of so many likeliest ones
    adapter: str | None = None  # whose newest version samples; unset: the newest of all that were pushed
    request_id: str | None = Field(None, pattern="^[0-9a-f]{32}$")  # by which POST /abort_requests ends it


def check_request(body: GenerateRequest, model_config, placeholders: list[int], tells_experts: bool = False):
    """400 for what the model cannot take."""
    vocab, window = model_config.get_vocab_size(), model_config.max_model_len
    length, images = len(body.prompt_ids), len(body.images or [])
    marks = sum(token in placeholders for token in body.prompt_ids)
    problem = None
    if length >= window:
        problem = f"the prompt has {length} tokens, the server's window {window}: shorten it, or raise --max-model-len"
    elif length + body.max_tokens > window:
        problem = (
            f"prompt {length} + max_tokens {body.max_tokens} exceed the server's window of {window} tokens: "
            f"at most max_tokens={window - length} fits, or raise --max-model-len"
        )
    elif body.min_tokens > body.max_tokens:
        problem = f"min_tokens={body.min_tokens} is more than max_tokens={body.max_tokens}"
    elif (body.prompt_logprobs or 0) > (most := model_config.max_logprobs) >= 0:
        problem = f"prompt_logprobs={body.prompt_logprobs} are more than this server gives, {most}: --max-logprobs"
    elif bad := [t for t in [*body.prompt_ids, *(body.stop_token_ids or [])] if not 0 <= t < vocab]:
        problem = f"token id {bad[0]} is outside the vocabulary of {vocab} tokens"
    elif images and not model_config.is_multimodal_model:
        problem = f"{model_config.model} takes no images"
    elif body.routed_experts and not tells_experts:
        problem = "the experts of its tokens are not noted: start it with --enable-return-routed-experts"
    elif marks > images:
        problem = f"{marks} placeholder tokens for {images} images: send one an image, the server expands it"
    if problem:
        raise HTTPException(400, problem)


def decode_image(text: str) -> Image.Image:
    """base64 of an image file -> RGB image; 400 for anything else."""
    try:
        return read_image(text, local_files=False)[0]  # with the trainer's function: both see the same pixels
    except PictureError as error:
        raise HTTPException(400, f"an image that cannot be read: {error}") from error


def sampling_parameters(body: GenerateRequest, placeholders: list[int]):
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    chosen = body.model_dump(exclude={"prompt_ids", "images", "request_id", "routed_experts", "adapter"})
    return SamplingParams(
        **chosen,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # A sampled placeholder would be taken for an image by the trainer's forward pass.
        logit_bias={token: -math.inf for token in placeholders} or None,
    )


def describe_sample(output, with_experts: bool = False) -> dict:
    logprobs = [output.logprobs.logprobs[start] for start in output.logprobs.start_indices]
    if not all(map(math.isfinite, logprobs)):
        raise HTTPException(500, "log-probs are not finite: the weights or the logits hold nan or inf")
    sample = {"token_ids": list(output.token_ids), "logprobs": logprobs, "finish_reason": output.finish_reason}
    return sample | ({"routed_experts": encoded(output.routed_experts)} if with_experts else {})


def describe_prompt(scored) -> list[dict | None]:
    """As vLLM's /v1/completions has it: {token: {"logprob": its log-prob}} of each place but the first; of what cannot
    come next -9999, since JSON has no infinity."""
    found = [{str(token): {"logprob": max(one.logprob, -9999.0)} for token, one in at.items()} for at in scored if at]
    if any(math.isnan(one["logprob"]) for at in found for one in at.values()):
        raise HTTPException(500, "log-probs of the prompt are nan: the weights or the logits hold nan or inf")
    return [None, *found]


async def render(engine, body: GenerateRequest, images: list[Image.Image]):
    """The prompt as the engine takes it, its images prepared in threads."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    prompt = {"prompt_token_ids": body.prompt_ids}
    if images:
        prompt["multi_modal_data"] = {"image": images}
    (rendered,) = await engine.renderer.render_cmpl_async([parse_model_prompt(engine.model_config, prompt)])
    return rendered


async def run_generation(engine, prompt, body: GenerateRequest, placeholders: list[int], adapter):
    """The engine's final RequestOutput. prompt: of `render`. adapter: vLLM's LoRARequest, or None."""
    final, name = None, body.request_id or uuid.uuid4().hex
    async for output in engine.generate(prompt, sampling_parameters(body, placeholders), name, lora_request=adapter):
        final = output
    return final


def not_generated(body: GenerateRequest, cause: BaseException) -> JSONResponse:
    """400 for what the model cannot take, else 500."""
    # vLLM asserts that images and placeholders can be matched
    bad_input = isinstance(cause, ValueError) or (body.images and isinstance(cause, AssertionError))
    return failure(400 if bad_input else 500, f"{type(cause).__name__}: {cause}")


async def not_sampling(engine, pushes) -> JSONResponse | None:
    """The answer that says why the engine does not sample; None if it does. The end of a push is waited for.

    Nothing is awaited between the last look at `pushes` and the return, so that what was seen holds. The engine is
    asked only after a POST /pause: that is a round trip to its process.
    """
    while True:
        while not pushes.settled.is_set():
            await pushes.settled.wait()
        if pushes.broken:
            return failure(503, pushes.broken)
        if not pushes.may_be_paused:
            return None
        paused = await engine.is_paused()
        if pushes.settled.is_set() and not pushes.broken:  # else a push began meanwhile
            message = "this server is paused (POST /pause); POST /resume lets it go on"
            return failure(503, message, 5) if paused else None


def generate_route(engine, pushes, adapters, placeholders: list[int]):
    from vllm.entrypoints.launchers.launcher import terminate_if_errored
    from vllm.entrypoints.serve.utils.api_utils import with_cancellation
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    tells_experts = engine.vllm_config.aux_output_config.enable_return_routed_experts

    @with_cancellation  # a client that goes away frees the engine
    async def generate(body: GenerateRequest, raw_request: Request):
        check_request(body, engine.model_config, placeholders, tells_experts)
        images = [await asyncio.to_thread(decode_image, text) for text in body.images or []]
        if refused := await not_sampling(engine, pushes):
            return refused
        try:
            prompt = await render(engine, body, images)
        except VLLMClientError:  # which vLLM answers
            raise
        except Exception as error:  # whatever the model's own processor raises
            return not_generated(body, error)
        if refused := await not_sampling(engine, pushes):
            return refused
        # Nothing is awaited between the look at the version and the engine: no push begins or ends meanwhile.
        version, bound = pushes.version, adapters.pick(body.adapter)
        try:
            final = await run_generation(engine, prompt, body, placeholders, bound and bound.request)
        except EngineGenerateError as error:
            return not_generated(body, error.__cause__ or error)
        except EngineDeadError:
            terminate_if_errored(raw_request.app.state.server, engine)
            return failure(500, f"the engine died; this server ends now. {last_error()}")
        if pushes.broken:
            return failure(503, pushes.broken)
        if any(output.finish_reason == "abort" for output in final.outputs):
            # Whoever reads this did not ask for it: our client does not wait for what it ends.
            ended = "ended by POST /abort_requests, or because this server is shut down"
            return failure(409, f"{ended}: look at its terminal, start it again if it is gone, and resume the run")
        if any(output.finish_reason == "error" for output in final.outputs):
            # Such as an image that vLLM took to be in its cache still: it is sent in full the next time.
            return failure(503, "the engine could not run this request; its terminal may say why", 1)
        ordered = sorted(final.outputs, key=lambda output: output.index)
        samples = [describe_sample(output, body.routed_experts) for output in ordered]
        versions = {"policy_version": version, "policy_version_last": pushes.version, "instance": pushes.instance}
        if bound is not None:  # to the end
            versions = {"policy_version": bound.number, "policy_version_last": bound.number, "instance": bound.instance}
        prompt = {"prompt_ids": list(final.prompt_token_ids), "cached_tokens": final.num_cached_tokens}
        if body.prompt_logprobs is not None:
            prompt["prompt_logprobs"] = describe_prompt(final.prompt_logprobs)
        return JSONResponse({"samples": samples} | prompt | versions)

    return generate


def last_error() -> str:
    """What the engine process logged before it died."""
    path = Path(os.environ["RL_SERVER_ERROR_FILE"])
    if not path.exists():
        return "See its terminal."
    return "Its last words:\n" + path.read_text(errors="replace", encoding="utf-8")[-8000:]


# --------------------------------------------------------------------------------------------------------------------
# Putting it together
# --------------------------------------------------------------------------------------------------------------------


async def describe_server(engine, adapters, placeholders: list[int]) -> dict:
    """What /server_info answers, but for the state of the weights."""
    import vllm

    from serving.transfer import ask_workers

    config, parallel = engine.model_config, engine.vllm_config.parallel_config
    tells_experts = engine.vllm_config.aux_output_config.enable_return_routed_experts
    return {
        "model": config.model,
        "server": uuid.uuid4().hex,  # of this process: one server under two names is known by it
        "architectures": list(config.architectures),
        "vocab_size": config.get_vocab_size(),
        "hidden_size": config.get_hidden_size(),
        "num_layers": config.hf_text_config.num_hidden_layers,
        "max_model_len": config.max_model_len,
        "dtype": str(config.dtype).removeprefix("torch."),
        "vllm_version": vllm.__version__,
        "world_size": parallel.world_size_across_dp,
        "device": "cpu" if engine.vllm_config.device_config.device_type == "cpu" else "cuda",
        "devices": sum(await ask_workers(engine, "name_device"), []),
        "never_sampled": placeholders,
        "max_n": MAX_N,
        "can_sleep": config.enable_sleep_mode,
        "adapters": adapters.describe(),
        "tells_experts": tells_experts,
        "expert_bytes": bytes_of_experts(config) if tells_experts else 0,
    }


def bytes_of_experts(config) -> int:
    """In which vLLM notes the experts that one token went through. config: vLLM's ModelConfig."""
    layers, chosen = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
    return layers * chosen * (1 if config.get_num_experts() <= 256 else 2)


async def build_app(engine, args: argparse.Namespace, token: str):
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app as build_vllm_app

    from serving.adapters import Adapters, adapter_routes
    from serving.sleep import Sleep, sleep_routes
    from serving.transfer import Pushes, push_routes

    tasks = await engine.get_supported_tasks()
    app = build_vllm_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    pushes, sleep = Pushes(), Sleep(engine)
    adapters = Adapters(engine, pushes)
    placeholders = placeholder_tokens(engine.model_config.hf_config)
    description = await describe_server(engine, adapters, placeholders)
    router = push_routes(engine, pushes, sleep, adapters)
    router.include_router(adapter_routes(engine, adapters))
    router.include_router(sleep_routes(engine, pushes, sleep))
    router.post("/generate")(generate_route(engine, pushes, adapters, placeholders))

    @router.get("/server_info")
    async def server_info():
        version = pushes.version if adapters.newest is None else adapters.newest.number
        state = {"policy_version": version, "weights_error": pushes.broken, "state": sleep.state(pushes)}
        state |= {"weights_replaced": pushes.replaced, "weights_run": pushes.run}
        return description | state | {"adapter_versions": adapters.served(), "runs": adapters.runs()}

    app.router.routes[:0] = router.routes  # before vLLM's of the same path
    app.middleware_stack = Gate(app.middleware_stack or app.build_middleware_stack(), token, pushes)  # outermost
    return app


async def serve(args: Watched, tls: dict, sock: socket.socket, token: str) -> bool:
    """Serve until a signal comes or the engine dies; True in the first case."""
    from vllm import envs
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client_from_engine_args
    from vllm.entrypoints.launchers.launcher import serve_http
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    from serving.engine import Arguments

    async with build_async_engine_client_from_engine_args(Arguments.from_cli_args(args)) as engine:
        app = await build_app(engine, args, token)
        logging = {"log_config": config} if (config := get_uvicorn_log_config(args)) is not None else {}
        logging |= {"log_level": args.uvicorn_log_level, "access_log": not args.disable_uvicorn_access_log}
        if args.unread:
            flags = ", ".join("--" + name.replace("_", "-") for name in sorted(args.unread))
            refuse(f"{flags}: nothing that runs here reads it, so it would change nothing; leave it out")
        scheme = "https" if tls else "http"
        print(f"vllm_server: ready, {args.model} on {scheme}://{args.host}:{args.port}", flush=True)
        shutdown = await serve_http(
            app,
            sock=sock,
            host=args.host,
            port=args.port,
            http=LimitedProtocol,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            **logging,
            **tls,
        )
    signalled = shutdown.__name__ != "dummy_shutdown"  # what serve_http returns when the server ended by itself
    await shutdown
    return signalled


def end_children():
    """Kill what this process started. multiprocessing's resource tracker ends by itself, after tidying up."""

    def ends_by_itself(child: psutil.Process) -> bool:
        try:
            return any("resource_tracker" in word for word in child.cmdline())
        except psutil.Error:  # it has ended
            return True

    # Not by their names: one that has only just been started has none of its own yet.
    children = [child for child in psutil.Process().children(recursive=True) if not ends_by_itself(child)]
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=5)


def interrupt(signum, frame):
    """While loading: vLLM would wait for its engine, which is busy, to end by itself."""
    print("vllm_server: stopped while loading", file=sys.stderr, flush=True)
    end_children()
    remove_folder()
    os._exit(1)


def when_parent_ends(parent: int, then):
    """Call `then`, from a thread, within half a second of the end of the process `parent` that started this one."""

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        then()

    threading.Thread(target=watch, daemon=True).start()


def die():
    """In vLLM's own processes, which import this file when they start: they outlive a server killed with -9 else."""
    os.kill(os.getpid(), signal.SIGKILL)


def end_orphan():
    """--exit-with-parent: as Ctrl-C ends it; without waiting for what does not end."""
    print("vllm_server: the process that started this one has ended; ending, too", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PARENT_SECONDS)
    end_children()
    remove_folder()
    os._exit(1)


def main():
    # Set by hand: a shell starts background processes with SIGINT ignored. vLLM takes over when it serves.
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    parent = os.getppid()
    args, rest = parse_command_line(sys.argv[1:])
    if args.exit_with_parent:
        when_parent_ends(parent, end_orphan)
    sock = bind(args.host, args.port)
    if not args.token_was_given:
        print(f"vllm_server: token {args.token} (export VLLM_SERVER_TOKEN={args.token})", flush=True)
    print(f"vllm_server: loading {args.model}", flush=True)
    set_environment()
    import uvloop

    class Loop(uvloop.Loop):
        async def create_server(self, *arguments, **options):
            if options.get("ssl"):  # uvicorn leaves a stranger a minute; for what follows see serving/gate.py
                options["ssl_handshake_timeout"] = HEADER_SECONDS
            return await super().create_server(*arguments, **options)

    try:
        sound = uvloop.run(serve(*engine_arguments(args, rest), sock, args.token), loop_factory=Loop)
    finally:
        end_children()
    if not sound:
        print(f"vllm_server: the engine died. {last_error()}", file=sys.stderr)
    remove_folder()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if sound else 1)  # past the complaints of compiled libraries that are unloaded in the wrong order


if __name__ == "__mp_main__":
    when_parent_ends(os.getppid(), die)
if __name__ == "__main__":
    main()
