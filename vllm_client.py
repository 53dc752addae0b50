"""The trainer's client of vLLM servers (vllm_server.py, or `vllm serve` with the flags that docs/serving.md names).

    client = VLLMClient(["http://127.0.0.1:8000"], token="...", run="my_run")
    client.wait_ready(300)
    completions = await client.generate(prompt_ids, n=8, max_tokens=64)       # every rank, for its own prompts
    client.connect_weights(device)                                            # one rank only, once
    client.begin_push(); client.send_bucket([(name, tensor), ...]); client.finish_push(version=1)

The routes are vLLM's own. A push labels the weights RUN:VERSION, and every completion tells by which labels its tokens
were sampled: those of another run, or of a server that was started anew, are an error. No part of vLLM is imported.
"""

import asyncio
import base64
import io
import json
import math
import os
import shutil
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

from safety import secrets
from serving import wire


@dataclass
class Completion:
    """One sampled sequence. `len(token_ids) == len(logprobs)`; a sampled end-of-turn token is included."""

    token_ids: list[int]
    logprobs: list[float]  # under the distribution the tokens were drawn from (temperature and truncation applied)
    finish_reason: str  # "stop" | "length"
    policy_version: int  # oldest weights that sampled any of its tokens
    prompt_ids: list[int]  # as the server expanded them (images)
    policy_version_last: int | None = None  # newest weights that sampled any of them; None: the same
    # [tokens, layers, k] that prompt and completion went through, but the last token; None: the server does not tell
    routed_experts: np.ndarray | None = None


@dataclass
class Served:
    """What a server says of itself."""

    model: str
    dtype: str
    window: int  # tokens
    world_size: int  # its workers
    on_cpu: bool
    engine: str | None  # of weight pushes: "torch" (serving/weights.py), "nccl" (vLLM's own), another one, or none
    lora_rank: int  # the largest it takes; 0 without --enable-lora
    can_sleep: bool
    tells_experts: bool
    vocab_size: int | None = None  # of the model; None: it does not say
    hidden_size: int | None = None
    num_layers: int | None = None


class ServerError(RuntimeError):
    """A server is gone, refused, or gave a wrong answer. The message names it, the cause and what to do."""


def failed(error: Exception) -> ServerError:
    """Of a server that gave no usable answer (safety/http.py, NoAnswer)."""
    remedy = "Its terminal says why; start it again if it has ended, and resume the run."
    return ServerError(f"{str(error).rstrip('.?')}. {remedy}")


def encode_image(image) -> str:
    """A data: URL of an image file given as bytes, or of a PIL image, as PNG: the server decodes the same pixels."""
    if not isinstance(image, bytes):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        image = buffer.getvalue()
    return "data:image/png;base64," + base64.b64encode(image).decode()  # vLLM looks at the bytes, not at the type


class VLLMClient:
    """Talks to one or several servers that serve the same model.

    Args:
        urls: of the servers; a request goes to the one with the fewest sequences under way.
        token: bearer token; when not given, VLLM_SERVER_TOKEN or what is in the file VLLM_SERVER_TOKEN_FILE names.
        run: whose pushes label the weights; completions by other weights are refused. None: whatever is served.
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
        from safety import http  # here, as a run without a server needs no `requests`

        self.http = http
        self.urls = [http.base(url) for url in urls]
        token = secrets.read("VLLM_SERVER_TOKEN", token)
        self.run, self.timeout, self.request_timeout = run, timeout, request_timeout
        self.session = http.session(token)
        # Steps of a push are not asked again: whether one whose answer was lost was taken cannot be known.
        self.once = http.session(token, again=False)
        self.once.headers["Connection"] = "close"  # nor sent into a connection that the server is about to close
        self.pool = ThreadPoolExecutor(1024, "vllm client")  # a thread a request under way
        self.load: Counter = Counter()  # sequences under way, by server
        self.turn = os.getpid()  # ranks start at different servers
        self.tokenizer = self.rope_index = None
        self.stop_token_ids: list[int] | None = None  # beside those that the server knows
        self.image_bytes = 0  # sent since the start, as base64
        self.never: list[int] = []  # tokens that are not to be sampled: placeholders of images
        self.tells_experts = False  # whether completions are to come with the experts of their tokens
        self.version = 0  # of the weights that were pushed last, by whichever rank
        # Pushing
        self.receives_weights = True  # whether pushes go through this process
        self.weight_dtype: torch.dtype | None = None  # of the servers
        self.convert = lambda named: named  # (name, tensor) pairs as the trainer has them -> as a checkpoint has them
        self.device: torch.device | None = None  # where buckets are packed; None: not connected yet
        self.group = self.store = None
        self.asleep = False  # by whoever put them to sleep: a server that is paused says it sleeps, too
        # Adapters alone: PEFT's config of one; how many versions may be sampled from at a time; what has come of one.
        self.adapter: dict | None = None
        self.versions = 1
        self.tensors: dict[str, Tensor] = {}
        self.folders: dict[int, Path] = {}  # by version
        self.base_label = "default"  # of the weights below the adapters

    # ---- who serves what ----------------------------------------------------------------------------------------

    def wait_ready(self, seconds: float = 300.0) -> None:
        """Return when every server answers, and all serve the same model; ServerError naming the one that does not."""
        end = time.monotonic() + seconds
        for url in self.urls:
            while True:
                try:
                    self.http.ask("GET", url + "/health", 5, using=self.once)
                    break
                except self.http.NoAnswer as error:
                    if error.status in (401, 403):
                        remedy = "give the one it was started with, or printed, in VLLM_SERVER_TOKEN[_FILE]"
                        raise ServerError(f"{url} refuses the token; {remedy}") from None
                    if time.monotonic() > end:
                        raise ServerError(f"{url} was not ready within {seconds:g} s: {error}") from None
                time.sleep(0.3)
        first, *others = self.server_info()
        for url, other in zip(self.urls[1:], others, strict=True):
            sizes = [(info.vocab_size, info.hidden_size, info.num_layers, info.dtype) for info in (first, other)]
            if sizes[0] != sizes[1]:
                raise ServerError(
                    f"servers differ: {self.urls[0]} has {first}, {url} {other}. Start them with the same --model and "
                    "--dtype."
                )

    def server_info(self) -> list[Served]:
        """Of each server."""
        return list(self.pool.map(self._describe, self.urls))

    def _describe(self, url: str) -> Served:
        """As serving/weights.py says it. A server without that tells less, and not its model's sizes."""
        try:
            answer = self.http.ask(
                "POST", url + "/collective_rpc", self.timeout, {"method": "describe"}, using=self.once
            )
            return Served(**answer["results"][0])
        except self.http.NoAnswer as error:
            if error.status not in (400, 500):
                self._ask("GET", url + "/version", self.timeout, None, self.session)  # raises, and says why
                raise ServerError(
                    f"{url} has no /collective_rpc; start vllm_server.py, or vllm serve with VLLM_SERVER_DEV_MODE=1 "
                    "and the flags that docs/serving.md names"
                ) from None
        config = self._ask("GET", url + "/server_info?config_format=json", self.timeout, None, self.session)
        config = config["vllm_config"]
        model, lora, parallel = config["model_config"], config["lora_config"], config["parallel_config"]
        return Served(
            model["model"],
            model["dtype"].removeprefix("torch."),
            model["max_model_len"],
            parallel["world_size"] * parallel["data_parallel_size"],
            config["device_config"]["device"] == "cpu",
            config["weight_transfer_config"] and config["weight_transfer_config"]["backend"],
            lora["max_lora_rank"] if lora else 0,
            model["enable_sleep_mode"],
            config["aux_output_config"]["enable_return_routed_experts"],
        )

    def can_tell_experts(self) -> bool:
        return all(info.tells_experts for info in self.server_info())

    def _all(self, method: str, path: str, body: dict | None = None, using=None) -> list[dict]:
        """Ask all servers at once; the first error is raised."""
        return [call.result() for call in self._begin(method, path, body, using)]

    def _begin(self, method: str, path: str, body: dict | None = None, using=None) -> list:
        """Calls under way, one a server."""
        using = using or self.session
        return [self.pool.submit(self._ask, method, url + path, self.timeout, body, using) for url in self.urls]

    def _ask(self, method: str, url: str, seconds: float, body: dict | None, using) -> dict:
        try:
            return self.http.ask(method, url, seconds, body, using=using)
        except self.http.NoAnswer as error:
            if error.status == 200:  # done, and said in plain text: of adapters
                return {}
            raise failed(error) from error.__cause__

    # ---- sampling ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        n: int = 1,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        min_tokens: int = 0,
        stop_token_ids: list[int] | None = None,
        seed: int | None = None,
        images: list | None = None,
        expanded=None,
    ) -> list[Completion]:
        """`n` completions of one prompt, from the least loaded server; ServerError, never part of them. Cancelled, the
        server stops sampling them, too.

        With images, `prompt_ids` has one placeholder token an image, as the chat template writes it; the server
        expands it and the completion's `prompt_ids` says to what (`expanded` is for in-process generators).
        """
        sampling = dict(n=n, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed, logprobs=0, detokenize=False)
        sampling |= dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        sampling["stop_token_ids"] = stop_token_ids or self.stop_token_ids
        if self.never:
            sampling["logit_bias"] = {token: -100.0 for token in self.never}
        body = {"request_id": uuid.uuid4().hex, "token_ids": [*prompt_ids], "sampling_params": sampling}
        body |= {"model": None if self.adapter is None else self.name_of(self.version), "return_token_ids": True}
        if images:
            urls = [encode_image(image) for image in images]
            body["content_parts"] = [{"type": "image_url", "url": url} for url in urls]
            self.image_bytes += sum(map(len, urls))
        count, version = len(self.urls), self.version
        place = min(range(count), key=lambda i: (self.load[i], (i - self.turn) % count))
        self.turn, url = place + 1, self.urls[place]
        self.load[place] += n
        route = url + "/inference/v1/generate"
        call = partial(self.http.ask, "POST", route, self.request_timeout, body, using=self.session)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self.pool, call)
            return self._completions(answer, len(prompt_ids), n, version)
        except asyncio.CancelledError:  # nobody waits for the answer any more
            ended = {"request_ids": [f"generate-tokens-{body['request_id']}"]}
            self.pool.submit(self._ask, "POST", url + "/inference/v1/abort_requests", 10, ended, self.session)
            raise
        except self.http.NoAnswer as error:
            raise failed(error) from error.__cause__
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ServerError(f"{url} answered a request for {n} completions with what is none: {error!r}") from None
        finally:
            self.load[place] -= n

    def _completions(self, answer: dict, length: int, n: int, version: int) -> list[Completion]:
        """ValueError for what cannot be trained on; ServerError for tokens of weights that are not this run's."""
        completions = []
        for choice in answer["choices"]:
            tokens, logprobs = choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]
            if choice["finish_reason"] not in ("stop", "length"):
                raise ValueError(f"one ended by {choice['finish_reason']!r}: was the server stopped or put to sleep?")
            if len(tokens) != len(logprobs) or not all(-9000 < p < math.inf for p in logprobs):  # -9999: nan there
                raise ValueError("log-probs that are missing or not finite: its weights or logits hold nan or inf")
            versions = [] if self.adapter is None else [version]
            for label in [span["version"] for span in choice["weight_versions"] or [{"version": "none"}]]:
                whose, _, number = label.rpartition(":")
                ours = whose == self.run if self.adapter is None else label == self.base_label
                if self.run is not None and not ours:
                    raise ServerError(
                        f"tokens were sampled by weights {label!r}, which run {self.run} has not pushed: the server "
                        "was started anew, or another run pushes to it. Give each run a server of its own, and resume "
                        "this one."
                    )
                if self.adapter is None:
                    versions.append(int(number) if whose else 0)
            experts = choice.get("routed_experts") if self.tells_experts else None
            completions.append(
                Completion(
                    tokens,
                    logprobs,
                    choice["finish_reason"],
                    min(versions),
                    answer["prompt_token_ids"],
                    max(versions),
                    experts and np.load(io.BytesIO(base64.b64decode(experts))).astype(np.int16),
                )
            )
        if len(completions) != n or len(answer["prompt_token_ids"]) < length:
            raise ValueError(f"{len(completions)} of them, for {len(answer['prompt_token_ids'])} tokens of {length}")
        return completions

    # ---- pushing -------------------------------------------------------------------------------------------------

    def connect_weights(self, device: torch.device | str = "cpu") -> None:
        """Get ready to push, from one process alone. Of whole weights: open a process group with all servers' workers,
        NCCL where trainer and servers are on GPUs, else gloo; what an earlier trainer left unfinished is dropped."""
        infos, self.device = self.server_info(), torch.device(device)
        self.weight_dtype = getattr(torch, infos[0].dtype)
        if self.adapter is not None:
            return
        engines = {info.engine for info in infos}
        if engines not in ({"torch"}, {"nccl"}):
            raise ServerError(
                f"{' and '.join(self.urls)} take weights by {' and '.join(map(str, engines))}; start vllm_server.py, "
                "or vllm serve with the flags that docs/serving.md names"
            )
        self.engine = engines.pop()
        world_size = 1 + sum(info.world_size for info in infos)
        hosts = [wire.local_address(urlsplit(url).hostname) for url in self.urls]
        address = next((host for host in hosts if not host.startswith("127.") and host != "::1"), hosts[0])
        offsets = [1 + sum(info.world_size for info in infos[:place]) for place in range(len(infos))]
        if self.engine == "nccl":
            self._connect_nccl(address, world_size, offsets)
            return
        self._all("POST", "/collective_rpc", {"method": "abort_weight_update"})
        nccl = self.device.type == "cuda" and not any(info.on_cpu for info in infos)
        self.device = self.device if nccl else torch.device("cpu")
        backend = "nccl" if nccl else "gloo"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)  # a store's own would listen on all addresses
        limit, port = timedelta(seconds=self.timeout), listener.getsockname()[1]
        how = dict(timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach())
        self.store = dist.TCPStore(address, port, world_size, is_master=True, **how)
        about = dict(address=address, port=port, world_size=world_size, backend=backend, seconds=self.timeout)
        calls = [
            self.pool.submit(
                self._ask,
                "POST",
                url + "/init_weight_transfer_engine",
                self.timeout + 10,
                {"init_info": about | {"rank_offset": offset}},
                self.once,
            )
            for url, offset in zip(self.urls, offsets, strict=True)
        ]
        joining = self.pool.submit(wire.join, self.store, 0, world_size, backend, address, self.timeout)
        done, _ = wait([joining, *calls], self.timeout + 15, return_when=FIRST_EXCEPTION)
        for call in done:
            call.result()
        if len(done) <= len(calls):
            raise ServerError(f"waited {self.timeout + 15:g} s for {', '.join(self.urls)} to join the weight transfer")
        self.group = joining.result()

    def _connect_nccl(self, address: str, world_size: int, offsets: list[int]) -> None:
        """vLLM's own engine, with its communicator: vLLM has to be installed beside the trainer. Not tried: no GPU."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        with socket.create_server((address, 0)) as listener:
            port = listener.getsockname()[1]
        about = {"master_address": address, "master_port": port, "world_size": world_size}
        calls = [
            self.pool.submit(
                self._ask,
                "POST",
                url + "/init_weight_transfer_engine",
                self.timeout,
                {"init_info": about | {"rank_offset": offset, "packed": False}},
                self.once,
            )
            for url, offset in zip(self.urls, offsets, strict=True)
        ]
        self.group = trainer_init(about)
        for call in calls:
            call.result()

    def begin_push(self) -> None:
        """The servers pause; sequences under way are kept. Connects again after a failure. Of adapters: nothing yet."""
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
        self._all("POST", "/start_weight_update", using=self.once)

    def send_bucket(self, named: list[tuple[str, Tensor]]) -> None:
        """Send whole tensors, on any device, to every server; returns when they are in place. Matrices travel in the
        server's dtype. Peak extra memory: the bucket once more, packed."""
        if self.adapter is not None:
            self.tensors |= {name: tensor.detach().cpu().contiguous() for name, tensor in named}
            return
        bucket, what = wire.pack(self.convert(named), self.weight_dtype, self.device)
        if self.engine == "nccl":
            size = what.pop("size")
            calls = self._begin("POST", "/update_weights", {"update_info": what}, self.once)
            for _, tensor in wire.unpack(bucket[:size], what["names"], what["dtype_names"], what["shapes"]):
                self.group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        else:
            calls = self._begin("POST", "/update_weights", {"update_info": what}, self.once)
            wire.broadcast(self.group, bucket, self.timeout, calls)
        for call in calls:
            call.result()

    def finish_push(self, version: int) -> None:
        """Close the update: the servers see to it that every weight came, take the version, and go on sampling.
        ServerError names layers whose weights were left out."""
        if self.adapter is not None:
            self._load_adapter(version)
            return
        label = {"weight_version": f"{self.run or 'run'}:{version}"}
        self._all("POST", "/finish_weight_update", label, using=self.once)
        if self.asleep:
            self._all("POST", "/wake_up?tags=kv_cache")
            self.asleep = False
        self._all("POST", "/resume")
        self.version = version

    def abort_push(self) -> None:
        """Give up a push. The servers stay paused, as their weights may be half-new; the next push starts over."""
        if self.device is not None and self.group is not None and self.device.type == "cuda":
            self.group.abort() if self.engine == "torch" else self.group.destroy()
        self.group = self.store = None

    # ---- adapters alone ------------------------------------------------------------------------------------------

    def name_of(self, version: int) -> str:
        return f"{self.run}-{version}"

    def why_no_adapters(self, shapes: dict[str, tuple[int, int, int]]) -> str | None:
        """Why the servers cannot be given adapters of these (rank, inputs, outputs), by layer, in a folder: tried, with
        one that is zero."""
        rank = max(rank for rank, _, _ in shapes.values())
        for url, info, weights in zip(self.urls, self.server_info(), self._all("GET", "/weight_info"), strict=True):
            if info.lora_rank < rank:
                started = f"for ranks up to {info.lora_rank}" if info.lora_rank else "without --enable-lora"
                return f"{url} was started {started}, and here --lora_r is {rank}"
            if weights["weight_version"] != self.base_label:
                return f"{url} has the weights {weights['weight_version']} of an earlier push: start it anew"
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
            return str(error)
        return None

    def _load_adapter(self, version: int) -> None:
        """Put what came into a folder of a new name, as PEFT does, which the servers must see; and drop the oldest."""
        from safetensors.torch import save_file

        folder = Path(tempfile.mkdtemp(prefix=f"{self.name_of(version)}-"))
        self.folders[version] = folder
        save_file(self.tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(self.adapter), encoding="utf-8")
        body = {"lora_name": self.name_of(version), "lora_path": str(folder)}
        self._all("POST", "/v1/load_lora_adapter", body, using=self.once)
        self.version, self.tensors = version, {}
        for old in sorted(self.folders)[: -self.versions - 1]:
            self._unload_adapter(old)

    def _unload_adapter(self, version: int) -> None:
        self._all("POST", "/v1/unload_lora_adapter", {"lora_name": self.name_of(version)})
        shutil.rmtree(self.folders.pop(version), ignore_errors=True)

    # ---- taking turns, and the end -------------------------------------------------------------------------------

    def sleep(self) -> None:
        """The servers drop weights and KV cache, and give their memory back. The next push wakes them."""
        self._all("POST", "/sleep?level=2")
        self.asleep = True

    def close(self) -> None:
        """Drop the transfer group and the adapters."""
        for version in list(self.folders):
            try:
                self._unload_adapter(version)
            except ServerError:  # it is gone
                shutil.rmtree(self.folders.pop(version), ignore_errors=True)
        self.abort_push()
        self.pool.shutdown(wait=False)
