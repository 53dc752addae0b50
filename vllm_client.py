"""The trainer's client of vLLM servers (vllm_server.py, or `vllm serve` with the flags that docs/serving.md names).

    client = VLLMClient(["http://127.0.0.1:8000"], token="...", run="my_run")
    client.wait_ready(300)
    completions = await client.generate(prompt_ids, n=8, max_tokens=64)       # every rank, for its own prompts
    client.connect_weights(device)                                            # one rank only, once
    client.begin_push(); client.send_bucket([(name, tensor), ...]); client.finish_push(version=1)

All routes are vLLM's. A push labels the weights RUN:VERSION, and every completion reports the labels of the weights
that sampled its tokens: those of another run, or of a server that was restarted, are an error. No part of vLLM is
imported.
"""

import asyncio
import base64
import contextlib
import io
import json
import math
import os
import socket
import tempfile
import time
import uuid
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from inputs.pictures import encode_image
from inputs.trajectory import Completion
from network import http, secrets
from serving import wire


@dataclass
class ServerInfo:
    """A server's description of itself."""

    model: str
    dtype: str
    window: int  # tokens
    world_size: int  # its workers
    gpus: list[str | None]  # of its workers, by wire.gpu_of
    engine: str | None  # for weight pushes: "torch" (serving/weights.py), "nccl" (vLLM's own), another one, or none
    can_sleep: bool
    tells_experts: bool
    vocab_size: int | None = None  # of the model; None: not reported
    hidden_size: int | None = None
    num_layers: int | None = None


class ServerError(RuntimeError):
    """A server is gone, refused, or gave a wrong answer. The message names the server, the cause and what to do."""

    status = 0  # HTTP status, if there was an answer
    needs_traceback = False


BASE = "default"  # vLLM's label of the weights that a server was started with


def join_vllm(init_info: dict, device: torch.device):
    """The trainer's end of vLLM's engine "nccl". vLLM has to be installed here, for its communicator. Never tried, for
    lack of a GPU."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    torch.cuda.set_device(device)  # for this thread
    return trainer_init(init_info)


class VLLMClient:
    """Talks to one or several servers that serve the same model.

    Args:
        urls: of the servers. A request goes to the server with the fewest sequences under way, a trajectory's later
            turns to the server of its first.
        token: bearer token; if unset, from VLLM_SERVER_TOKEN or the file that VLLM_SERVER_TOKEN_FILE names.
        run: name in the labels of its pushes; completions by other weights are refused. None: any weights will do.
        timeout: seconds for a control request, for a bucket and for setting up the transfer.
        request_timeout: seconds for one `generate`.
    """

    def __init__(
        self,
        urls: list[str],
        token: str | None = None,
        run: str | None = None,
        timeout: float = 60.0,
        request_timeout: float = 600.0,
    ):
        self.urls = [http.base(url) for url in urls]
        token = secrets.read("VLLM_SERVER_TOKEN", token)
        self.run, self.timeout, self.request_timeout = run, timeout, request_timeout
        self.session = http.session(token)
        # Requests of a push are not repeated: if an answer was lost, the server may have done the step already.
        self.once = http.session(token, again=False)
        self.once.headers["Connection"] = "close"  # nor sent over a connection that the server is about to close
        self.pool = ThreadPoolExecutor(1024, "vllm client")  # a thread per request under way
        self.load: Counter = Counter()  # sequences under way, by server
        self.turn = os.getpid()  # ranks start at different servers
        self.tokenizer = self.rope_index = None
        self.stop_token_ids: list[int] | None = None  # in addition to the server's
        self.never: list[int] = []  # tokens that must not be sampled: placeholders of images
        self.tells_experts = False  # whether completions shall include the experts of their tokens
        self.version = 0  # of the last push, by whichever rank
        # Pushing
        self.receives_weights = True  # whether pushes go through this process
        self.weight_dtype: torch.dtype | None = None  # of the servers
        self.convert = lambda named: named  # (name, tensor) pairs of the trainer -> those of a checkpoint
        self.device: torch.device | None = None  # where buckets are packed; None: not connected yet
        self.group = self.store = None
        self.asleep = False  # noted here, since a paused server also reports that it sleeps
        # For pushes of adapters alone:
        self.adapter: dict | None = None  # PEFT's config
        self.versions = 1  # that may be sampled from at a time
        self.tensors: dict[str, Tensor] = {}  # of the push under way
        self.folders: dict[int, tempfile.TemporaryDirectory] = {}  # by version

    # ---- the servers --------------------------------------------------------------------------------------------

    def wait_ready(self, seconds: float = 300.0) -> None:
        """Return when every server answers; ServerError naming the one that does not."""
        end = time.monotonic() + seconds
        for url in self.urls:
            while True:
                try:
                    http.ask("GET", url + "/health", 5, using=self.once)
                    break
                except http.NoAnswer as error:
                    if error.status in (401, 403):
                        remedy = "give the token that it was started with, or printed, in VLLM_SERVER_TOKEN[_FILE]"
                        raise ServerError(f"{url} refuses the token; {remedy}") from None
                    if time.monotonic() > end:
                        fault = f"was not ready within {seconds:g} s; python vllm_server.py --model MODEL starts one"
                        raise ServerError(f"{url} {fault}: {error}") from None
                time.sleep(0.3)

    def server_info(self) -> list[ServerInfo]:
        """Descriptions, in the order of `urls`."""
        return list(self.pool.map(self._describe, self.urls))

    def _describe(self, url: str) -> ServerInfo:
        """By serving/weights.py. A server without it reports less, and nothing about the sizes of its model."""
        try:
            workers = self._ask("POST", url + "/collective_rpc", {"method": "describe"})["results"]
            workers[0]["gpus"] = [worker.pop("gpu") for worker in workers]
            return ServerInfo(**workers[0], **self._ask("GET", url + "/get_world_size"))  # an engine knows no other one
        except ServerError as error:
            if not error.status:
                raise
            if error.status not in (400, 500):
                remedy = "start vllm_server.py, or vllm serve as docs/serving.md says (VLLM_SERVER_DEV_MODE=1)"
                raise ServerError(f"{url} has no /collective_rpc; {remedy}") from None
        config = self._ask("GET", url + "/server_info?config_format=json")["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        return ServerInfo(
            model=model["model"],
            dtype=model["dtype"].removeprefix("torch."),
            window=model["max_model_len"],
            world_size=parallel["world_size"] * parallel["data_parallel_size"],
            gpus=[None] * (config["device_config"]["device"] == "cpu"),
            engine=config["weight_transfer_config"] and config["weight_transfer_config"]["backend"],
            can_sleep=model["enable_sleep_mode"],
            tells_experts=config["aux_output_config"]["enable_return_routed_experts"],
        )

    def can_tell_experts(self) -> bool:
        return all(info.tells_experts for info in self.server_info())

    def _all(self, method: str, path: str, body: dict | None = None) -> list[dict]:
        """Send a request to all servers at once; raises the first error."""
        return [call.result() for call in self._begin(method, path, [body] * len(self.urls))]

    def _begin(self, method: str, path: str, bodies: list) -> list:
        """Futures of requests under way, one per server."""
        pairs = zip(self.urls, bodies, strict=True)
        return [self.pool.submit(self._ask, method, url + path, body) for url, body in pairs]

    def _ask(self, method: str, url: str, body: dict | None = None, seconds: float = 0, using=None) -> dict:
        """seconds: limit, if not that of control requests. using: a session other than `once`."""
        try:
            return http.ask(method, url, seconds or self.timeout + 10, body, using=using or self.once)
        except http.NoAnswer as error:
            if error.status == 200:  # routes of adapters answer in plain text
                return {}
            remedy = "Its terminal says why; start it again if it has ended, and start or resume the run."
            failed = ServerError(f"{error}\n  {remedy}")
            failed.status = error.status
            raise failed from error.__cause__

    # ---- sampling ------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, n: int = 1, images=(), expanded=None, home=None, **sampling
    ) -> list[Completion]:
        """`n` completions of one prompt, from the least loaded server; all of them, or ServerError. If this is
        cancelled, the server stops sampling, too.

        home: a dict that belongs to a trajectory. All its turns go to one server, which has the KV cache of the turns
        before.

        sampling: any of vLLM's SamplingParams, such as temperature, top_p, min_tokens, seed, stop_token_ids.
        images: `prompt_ids` has one placeholder token per image, as the chat template writes it. The server expands
        it; the completion's `prompt_ids` has the result (`expanded` is for in-process generators).
        """
        defaults = {"logprobs": 0, "detokenize": "stop" in sampling, "stop_token_ids": self.stop_token_ids}
        defaults["logit_bias"] = {token: -100.0 for token in self.never} or None
        body = {"request_id": uuid.uuid4().hex, "token_ids": [*prompt_ids], "return_token_ids": True}
        body["sampling_params"] = defaults | sampling | {"n": n, "max_tokens": max_tokens}
        body["model"] = None if self.adapter is None else self.name_of(self.version)
        if images:
            urls = [encode_image(image) for image in images]
            body["content_parts"] = [{"type": "image_url", "url": url} for url in urls]
        count, version = len(self.urls), self.version
        least = min(range(count), key=lambda i: (self.load[i], (i - self.turn) % count))
        place = least if home is None else home.setdefault("server", least)
        self.turn, url = place + 1, self.urls[place]
        self.load[place] += n
        route, seconds = url + "/inference/v1/generate", self.request_timeout
        call = partial(self._ask, "POST", route, body, seconds, self.session)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self.pool, call)
            return self._completions(answer, len(prompt_ids), n, version)
        except asyncio.CancelledError:  # nobody awaits the answer any more
            abort_body = {"request_ids": [f"generate-tokens-{body['request_id']}"]}
            self.pool.submit(self._ask, "POST", url + "/inference/v1/abort_requests", abort_body)
            raise
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ServerError(f"{url} gave no usable answer to a request for {n} completions: {error!r}") from None
        finally:
            self.load[place] -= n

    def _completions(self, answer: dict, length: int, n: int, version: int) -> list[Completion]:
        """ValueError if it cannot be trained on; ServerError for tokens of weights that are not this run's."""
        if len(answer["choices"]) != n or len(answer["prompt_token_ids"]) < length:
            num_tokens = len(answer["prompt_token_ids"])
            raise ValueError(f"{len(answer['choices'])} of them, for {num_tokens} tokens of {length}")
        completions = []
        for choice in answer["choices"]:
            tokens, logprobs = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
            reason = choice["finish_reason"]
            labels = choice["weight_versions"] or [{"version": "none", "start": 0, "end": len(tokens)}]
            if reason not in ("stop", "length"):
                raise ValueError(f"one ended by {reason!r}: was the server stopped or put to sleep?")
            if len(tokens) != len(logprobs) or not all(-9000 < p < math.inf for p in logprobs):  # -9999 stands for nan
                raise ValueError("log-probs that are missing or not finite: its weights or logits hold nan or inf")
            spans = [(self._version_of(span["version"], version), span["start"], span["end"]) for span in labels]
            versions = [span[0] for span in spans]
            experts = choice.get("routed_experts") if self.tells_experts else None
            experts = experts and np.load(io.BytesIO(base64.b64decode(experts))).astype(np.int16)
            args = [tokens, logprobs, reason, min(versions), answer["prompt_token_ids"], max(versions), experts, spans]
            completions.append(Completion(*args))
        return completions

    def _version_of(self, label: str, adapter_version: int) -> int:
        """The version in a label of weights; with adapters, whose label is the base's, `adapter_version`. ServerError
        if the weights are not this run's."""
        run, _, number = label.rpartition(":")
        is_ours = run == self.run if self.adapter is None else label == BASE
        if self.run is not None and not is_ours:
            raise ServerError(
                f"tokens were sampled by weights {label!r}, which run {self.run} has not pushed: the server was "
                "restarted, or another run pushes to it. Give each run a server of its own, and resume this one."
            )
        return adapter_version if self.adapter is not None else int(number) if run else 0

    # ---- pushing -------------------------------------------------------------------------------------------------

    def connect_weights(self, device: torch.device | str = "cpu") -> None:
        """Get ready to push; one process alone calls it. For whole weights this opens a process group with the workers
        of all servers, by NCCL if each has its own GPU, else by gloo. An earlier trainer's unfinished push is dropped.
        """
        infos, self.device = self.server_info(), torch.device(device)
        self.weight_dtype = getattr(torch, infos[0].dtype)
        if self.adapter is not None:
            return
        engines = {info.engine for info in infos}
        if engines not in ({"torch"}, {"nccl"}):
            fault = f"{' and '.join(self.urls)} take weights by {' and '.join(map(str, engines))}"
            raise ServerError(f"{fault}; start vllm_server.py, or vllm serve with the flags that docs/serving.md names")
        self.engine = engines.pop()
        hosts = [wire.local_address(urlsplit(url).hostname) for url in self.urls]
        address = next((host for host in hosts if not host.startswith("127.") and host != "::1"), hosts[0])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)  # a store's own listens on all addresses
        port, workers = listener.getsockname()[1], [info.world_size for info in infos]
        world_size = 1 + sum(workers)
        if self.engine == "nccl":
            listener.close()
            master = dict(master_address=address, master_port=port, world_size=world_size)
            join, shared = partial(join_vllm, master, self.device), master | {"packed": False}
        else:
            self._all("POST", "/collective_rpc", {"method": "abort_weight_update"})
            backend = wire.backend_for([wire.gpu_of(self.device), *(gpu for info in infos for gpu in info.gpus)])
            self.device = self.device if backend == "nccl" else torch.device("cpu")
            options = dict(is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
            limit = timedelta(seconds=self.timeout)
            self.store = dist.TCPStore(address, port, world_size, timeout=limit, **options)
            join = partial(wire.join, self.store, 0, world_size, backend, address, self.timeout)
            shared = dict(address=address, port=port, world_size=world_size, backend=backend, seconds=self.timeout)
        offsets = [1 + sum(workers[:place]) for place in range(len(workers))]
        bodies = [{"init_info": shared | {"rank_offset": offset}} for offset in offsets]
        joining = self.pool.submit(join)
        calls = [joining, *self._begin("POST", "/init_weight_transfer_engine", bodies)]
        done, pending = wait(calls, self.timeout + 15, return_when=FIRST_EXCEPTION)
        for call in done:
            call.result()
        if pending:
            raise ServerError(f"waited {self.timeout + 15:g} s for {', '.join(self.urls)} to join the weight transfer")
        self.group = joining.result()

    def begin_push(self) -> None:
        """Pause the servers, which keep sequences under way. Reconnects after a failure. Nothing to do for adapters."""
        self.tensors = {}
        if self.device is None:
            raise ServerError("begin_push before connect_weights: call connect_weights(device) once, on rank 0")
        if self.adapter is not None:
            return
        if self.group is None:
            self.connect_weights(self.device)
        self._all("POST", "/pause?mode=keep")
        if self.asleep:
            self._all("POST", "/wake_up?tags=weights")
        self._all("POST", "/start_weight_update")

    def send_bucket(self, named: list[tuple[str, Tensor]]) -> None:
        """Send whole tensors, on any device, to every server; returns when they are in place. Matrices travel in the
        server's dtype. Peak extra memory: one copy of the bucket."""
        if self.adapter is not None:
            self.tensors |= {name: tensor.detach().cpu().contiguous() for name, tensor in named}
            return
        named = self.convert(named)
        announcement, tensors, broadcasts = wire.announcement(named, self.weight_dtype), iter(named), []
        calls = self._begin("POST", "/update_weights", [{"update_info": announcement}] * len(self.urls))
        for piece, places in wire.pieces(announcement["dtype_names"], announcement["shapes"], self.device):
            for place in places:
                place.copy_(next(tensors)[1].detach())
            if self.engine == "torch":
                broadcasts.append(wire.begin_broadcast(self.group, piece))
                continue
            for place in places:
                self.group.broadcast(place, src=0, stream=torch.cuda.current_stream())
        for work in broadcasts:
            wire.finish(work, self.timeout, calls)
        for call in calls:
            call.result()

    def finish_push(self, version: int) -> None:
        """Close the update: the servers check that every weight came, take the version, and continue sampling.
        ServerError names layers that lack weights."""
        if self.adapter is not None:
            self._load_adapter(version)
            return
        label = {"weight_version": f"{self.run or 'run'}:{version}"}
        self._all("POST", "/finish_weight_update", label)
        if self.asleep:
            self._all("POST", "/wake_up?tags=kv_cache")
            self.asleep = False
        self._all("POST", "/resume")
        self.version = version

    def abort_push(self) -> None:
        """Give up a push. The servers stay paused, as some of their weights may be new; the next push starts over."""
        if self.device is not None and self.group is not None and self.device.type == "cuda":
            self.group.abort() if self.engine == "torch" else self.group.destroy()
        self.group = self.store = None

    # ---- adapters alone ------------------------------------------------------------------------------------------

    def name_of(self, version: int) -> str:
        return f"{self.run}-{version}"

    def why_no_adapters(self, shapes: dict[str, tuple[int, int, int]]) -> str | None:
        """Why the servers cannot load adapters of these (rank, inputs, outputs), by layer, from a folder; None if they
        can. It is tried with an adapter that is zero."""
        for url, weights in zip(self.urls, self._all("GET", "/weight_info"), strict=True):
            if weights["weight_version"] != BASE:
                return f"{url} has the weights {weights['weight_version']} of an earlier push: restart it"
        rank = max(rank for rank, _, _ in shapes.values())
        targets = sorted({name.rpartition(".")[2] for name in shapes})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
        zero = {}
        for name, (rank, inputs, outputs) in shapes.items():
            zero |= {f"{name}.lora_A.weight": torch.zeros(rank, inputs)}
            zero |= {f"{name}.lora_B.weight": torch.zeros(outputs, rank)}
        self.adapter, self.tensors = config, zero
        try:
            self._load_adapter(-1)
            self._unload_adapter(-1)
        except ServerError as error:
            self.adapter = None
            return f"the server refuses them; it needs --enable-lora --max-lora-rank {rank}: {error}"
        return None

    def _load_adapter(self, version: int) -> None:
        """Have the servers load the pushed tensors from a new folder in PEFT's format, which they must be able to see;
        unload the oldest adapter."""
        from safetensors.torch import save_file

        self.folders[version] = tempfile.TemporaryDirectory(prefix=f"{self.name_of(version)}-")
        folder = Path(self.folders[version].name)
        save_file(self.tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(self.adapter), encoding="utf-8")
        body = {"lora_name": self.name_of(version), "lora_path": str(folder)}
        self._all("POST", "/v1/load_lora_adapter", body)
        self.version, self.tensors = version, {}
        for old in sorted(self.folders)[: -self.versions - 1]:
            self._unload_adapter(old)

    def _unload_adapter(self, version: int) -> None:
        try:
            self._all("POST", "/v1/unload_lora_adapter", {"lora_name": self.name_of(version)})
        finally:
            self.folders.pop(version).cleanup()

    # ---- taking turns, and the end -------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Have the servers drop weights and KV cache, and free their memory. The next push wakes them."""
        self._all("POST", "/sleep?level=2")
        self.asleep = True

    def close(self) -> None:
        """Drop the transfer group and the adapters."""
        for version in list(self.folders):
            with contextlib.suppress(ServerError):  # the server is gone
                self._unload_adapter(version)
        self.abort_push()
        self.pool.shutdown(wait=False)
