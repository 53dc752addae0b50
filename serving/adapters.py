"""The server's end of a push of LoRA adapters alone, and which of them a request gets.

A version of a policy is an adapter: each complete push makes a new one, beside those that are there, and the weights of
the model are never touched. So a push pauses nothing. A request is bound to the newest version when it begins, and to
the end: its log-probs are of one policy. A version goes when a newer one is there and its last sequence has ended. The
prefix cache tells adapters apart by name; each version has a name of its own, so what another one computed is never
taken for its own, and what others computed stays.

A push is announced with the shapes of all its matrices; what is missing, unknown, of another shape, damaged or not
finite breaks it off, and the version before goes on. vLLM's manager of adapters gets them from memory: its own routes
that load them from files stay closed. vLLM imports this module in every worker
(`--worker-extension-cls serving.adapters.Worker`), vllm_server.py for the routes.

Several runs can share a server, each with an adapter of its own. A trainer holds its adapter's name: it says so every
few seconds, and loses it LEASE seconds after it was last heard of. Another run cannot connect under that name
meanwhile, nor can whole weights be pushed, which would end all adapters.
"""

import asyncio
import contextlib
import itertools
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

import torch
from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, Field
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from serving import cpu_adapters
from serving.door import Door
from serving.transfer import (
    Connection,
    InitInfo,
    Pushes,
    PushStep,
    Session,
    TransferWorker,
    UpdateInfo,
    ask_workers,
    views,
)
from serving.wire import fold, some

LEASE = 60.0  # seconds after which a run that was not heard of has lost its adapter's name

# ---- in the workers --------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """A trainer's connection for one adapter, and what has come of the push under way."""

    connection: Connection
    shapes: dict[str, list[int]] = field(default_factory=dict)  # of all that was announced, by name
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    checksums: list[int] = field(default_factory=list)


def shapes_of(modules: dict[str, list[int]]) -> dict[str, list[int]]:
    """Of every matrix of adapters whose [rank, inputs, outputs] are given by module."""
    shapes = {}
    for name, (rank, inputs, outputs) in modules.items():
        shapes |= {f"{name}.lora_A.weight": [rank, inputs], f"{name}.lora_B.weight": [outputs, rank]}
    return shapes


def outputs_of(layer: torch.nn.Module) -> list[int]:
    """Of the parts of one of vLLM's layers, over all ranks of tensor parallelism."""
    if isinstance(layer, QKVParallelLinear):  # its own sizes count a head as often as ranks share it
        heads = (layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads)
        return [n * size for n, size in zip(heads, (layer.head_size, layer.head_size, layer.v_head_size), strict=True)]
    return list(getattr(layer, "output_sizes", [layer.output_size]))


class Held:
    """The adapters that a worker has, by number, and the lines on which others come, by the adapter's name."""

    def __init__(self, worker):
        self.worker, self.manager = worker, worker.model_runner.lora_manager
        self.manager._load_adapter = self._load  # instead of from files
        self.models: dict[int, LoRAModel] = {}
        self.lines: dict[str, Line] = {}
        mapper = getattr(self.manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        self.mapper = mapper and mapper.get_rename_mapper()  # from a checkpoint's names to the server's

    def fit(self, modules: dict[str, list[int]]) -> dict[str, list[str]]:
        """{"unknown", "misshapen"}: those of `modules` that this worker has no layer for, or one of another shape."""
        places, unknown, misshapen = self._places(), [], []
        for name, (_, *given) in modules.items():
            there, _ = parse_fine_tuned_lora_name(f"{name}.lora_A.weight", self.mapper)
            if there not in places:
                unknown.append(name)
            elif places[there] != tuple(given):
                misshapen.append(f"{name} {given[0]} -> {given[1]}, here {places[there][0]} -> {places[there][1]}")
        return {"unknown": unknown, "misshapen": misshapen}

    def _places(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of what can have an adapter here, by vLLM's names; parts of merged layers by their own.
        Embeddings, the output layer and experts have none."""
        manager, found = self.manager._adapter_manager, {}
        for name, layer in manager.modules.items():
            if isinstance(layer, BaseLinearLayerWithLoRA):
                base, parts = layer.base_layer, manager.packed_modules.get(name, [name])
                outputs = outputs_of(base) if len(parts) > 1 else [sum(outputs_of(base))]
                if len(parts) == len(outputs):
                    found |= {part: (base.input_size, size) for part, size in zip(parts, outputs, strict=True)}
        return found

    def connect(self, name: str, init_info: dict) -> None:
        """Join a trainer's group; what an earlier trainer of this adapter left is dropped."""
        self.abort(name)
        parallel = self.worker.vllm_config.parallel_config
        self.lines[name] = Line(Connection.open(InitInfo(**init_info), parallel, self.worker.device))

    def start(self, name: str, modules: dict[str, list[int]]) -> None:
        line = self.lines[name] = Line(self.lines[name].connection, shapes_of(modules))
        line.connection.receiver.start()

    def receive(self, name: str, update_info: dict) -> None:
        """One bucket, compared with its checksums and with what was announced."""
        line, info = self.lines[name], UpdateInfo(**update_info)
        try:
            bucket, starts, sizes = line.connection.receiver.receive(info)
        except ValueError:  # damaged, but all of it came
            raise
        except BaseException:
            self.abort(name)  # at once: NCCL's kernel waits on
            raise
        for key, tensor in views(bucket, starts, sizes, info, line.tensors):
            if line.shapes.get(key) != list(tensor.shape):
                raise ValueError(f"{key} has shape {list(tensor.shape)}, announced was {line.shapes.get(key, 'none')}")
            line.tensors[key] = tensor.to("cpu", self.manager.lora_config.lora_dtype, copy=True)
        line.checksums += info.checksums

    def finish(self, name: str, number: int) -> dict:
        """Put what has come in place as adapter `number`; {"checksum", "seconds" by phase}."""
        line, began = self.lines[name], time.perf_counter()
        if missing := sorted(line.shapes.keys() - line.tensors.keys()):
            raise ValueError(f"missing: {some(missing)}")
        rank = max(shape[0] for key, shape in line.shapes.items() if ".lora_A." in key)
        # B comes scaled: what vLLM is told of rank and alpha makes its own factor 1.
        self.models[number] = LoRAModel.from_lora_tensors(
            number, line.tensors, PEFTHelper(rank, rank, []), "cpu", weights_mapper=self.mapper
        )
        self.manager.add_adapter(LoRARequest(f"{name}/{number}", number, "memory"))
        seconds = dict(line.connection.receiver.seconds) | {"load": time.perf_counter() - began}
        line.shapes, line.tensors = {}, {}
        return {"checksum": fold(line.checksums), "seconds": seconds}

    def _load(self, request: LoRARequest) -> LoRAModel:
        """vLLM merges the parts of what it gets in place, so it gets a copy (of the lists, not of the matrices)."""
        if (model := self.models.get(request.lora_int_id)) is not None:
            return model.clone(request.lora_int_id)
        # Of a sequence that nobody waits for any more. An error here would end the engine.
        manager = self.manager
        return manager._adapter_manager.create_dummy_lora(request.lora_int_id, 1, manager.embedding_modules)

    def abort(self, name: str) -> None:
        """Forget a push that will not be completed, and its connection."""
        if line := self.lines.pop(name, None):
            line.connection.close()

    def drop(self, number: int) -> None:
        self.models.pop(number, None)
        self.manager.remove_adapter(number)

    def clear(self) -> None:
        for number in list(self.models):
            self.drop(number)


class Worker(TransferWorker):
    """Methods that vLLM mixes into its worker."""

    held_adapters: Held | None = None

    def adapter_step(self, step: str, *args):
        """A method of what this worker holds."""
        self.held_adapters = self.held_adapters or Held(self)
        return getattr(self.held_adapters, step)(*args)


if current_platform.is_cpu():
    cpu_adapters.use()


# ---- in the HTTP process: versions, and the routes of a push ---------------------------------------------------------


@dataclass(eq=False)
class Version:
    """An adapter that requests can be bound to."""

    number: int  # of the policy, as its trainer counts
    request: LoRARequest  # names it to vLLM
    adapter: "Adapter"
    instance: str  # of the connection it came through
    users: int = 0  # requests under way


class Adapter(Session):
    """Pushes of one adapter."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.newest = name, None
        self.owner: str | None = None  # the run that holds the name; None: whoever connects may push
        self.heard, self.leased = 0.0, False  # of it, by time.monotonic(); whether there ever was one
        self.slots = 1  # versions that its owner samples with at a time

    @property
    def held(self) -> bool:
        return self.owner is not None and time.monotonic() < self.heard + LEASE

    def take(self, owner: str | None) -> None:
        """HTTPException if another run holds the name."""
        if self.held and self.owner != owner:
            raise HTTPException(
                409,
                f"adapter {self.name} belongs to another run, heard of {time.monotonic() - self.heard:.0f} s ago. Give "
                f"this one another name (--adapter); a run that is gone loses its name after {LEASE:g} s",
            )
        self.owner, self.heard, self.leased = owner, time.monotonic(), self.leased or owner is not None

    def check(self, session: str):
        if self.session != session:
            raise HTTPException(
                409,
                f"another trainer has connected for adapter {self.name} since, or its last push broke off; a run that "
                f"was not heard of for {LEASE:g} s loses its name. Resume the run, under another name (--adapter) if "
                "this one has an owner now",
            )

    async def break_off(self, engine, reason: str):
        """The version before goes on; the trainer has to connect again."""
        self.active, self.session = False, None
        still = "none is served" if self.newest is None else f"version {self.newest.number} goes on"
        print(f"vllm_server: a push of adapter {self.name} broke off ({reason}); {still}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # of a dead engine, which tells by itself
            await asyncio.wait_for(ask_workers(engine, "adapter_step", "abort", self.name), self.timeout)


class Adapters:
    """All that were pushed to this server, and the requests that use them."""

    def __init__(self, engine, pushes: Pushes):
        self.engine, self.config, self.pushes = engine, engine.vllm_config.lora_config, pushes
        self.named: dict[str, Adapter] = {}
        self.versions: dict[int, Version] = {}  # by vLLM's number
        self.newest: Version | None = None  # of all adapters: what a request gets that names none
        self.numbers = itertools.count(1)
        self.tasks: set[asyncio.Task] = set()  # kept, or they may be collected
        # Twice what vLLM computes at a time: of a request for several samples some end long before the others.
        self.door = Door(2 * engine.vllm_config.scheduler_config.max_num_seqs)
        self.sample, engine.generate = engine.generate, self.generate  # under every route that samples
        self.end, engine.abort = engine.abort, self.abort

    async def ask(self, step: str, *args) -> list[list]:
        return await ask_workers(self.engine, "adapter_step", step, *args)

    def describe(self) -> dict | None:
        """For /server_info; None if the server was started without --enable-lora."""
        return self.config and {"max_rank": self.config.max_lora_rank, "slots": self.config.max_loras}

    def served(self) -> dict[str, list[int]]:
        """Versions that requests are bound to, by adapter; the newest is the last."""
        found: dict[str, list[int]] = {}
        for version in self.versions.values():
            found.setdefault(version.adapter.name, []).append(version.number)
        return found

    def runs(self) -> dict[str, dict]:
        """Who shares this server, by adapter, for /server_info."""
        versions, now = self.served(), time.monotonic()
        return {
            name: {"held": adapter.held, "heard_seconds_ago": round(now - adapter.heard, 1) if adapter.leased else None}
            | {"versions": versions.get(name, []), "pushing": adapter.active}
            | self.door.describe(name)
            for name, adapter in self.named.items()
        }

    def check_whole(self) -> None:
        """HTTPException if whole weights cannot be pushed, because of adapters in use."""
        if held := sorted(name for name, adapter in self.named.items() if adapter.held):
            raise HTTPException(
                409,
                f"this server's weights are shared by adapters of {some(held)}, and whole weights would end them: give "
                f"this run a server of its own, or have it push adapters alone (--use_peft). The name of a run that "
                f"is gone is free after {LEASE:g} s",
            )

    def check_slots(self, name: str, versions: int) -> None:
        """HTTPException if this many versions of an adapter have no room beside those of the runs that are here."""
        others = {other: adapter.slots for other, adapter in self.named.items() if adapter.held and other != name}
        needed = sum(others.values()) + versions + 1  # the one that a push brings
        if others and needed > self.config.max_loras:
            beside = some([f"{other} ({slots})" for other, slots in sorted(others.items())])
            raise HTTPException(
                409,
                f"adapter {name} needs {versions} slots, beside {beside} and one for what is pushed: {needed}, and "
                f"this server has {self.config.max_loras}. Start it with --max-loras {needed}, or wait until a run "
                "has ended",
            )

    def check_base(self) -> None:
        """HTTPException if this server does not have the weights that it was started with."""
        pushes = self.pushes
        if pushes.active or pushes.broken or pushes.replaced:
            by = f", by run {pushes.run}" * (pushes.run is not None)
            reason = pushes.broken or f"other weights than --model has were pushed to it{by}"
            raise HTTPException(
                409, f"this server does not have the weights that adapters belong to: {reason}. Start it anew"
            )

    def renew(self, adapter: Adapter) -> None:
        """Its run was heard of. One whose lease had lapsed counts for nothing meanwhile, so others may have its slots
        or the weights now: HTTPException then."""
        silent = time.monotonic() - adapter.heard
        if adapter.owner is not None and silent >= LEASE:
            try:
                self.check_base()
                self.check_slots(adapter.name, adapter.slots)
            except HTTPException as error:
                lapsed = f"this run was not heard of for {silent:.0f} s, and after {LEASE:g} s others may have its room"
                raise HTTPException(409, f"{lapsed}: {error.detail}") from error
        adapter.heard = time.monotonic()

    async def sweep(self) -> None:
        """Forget adapters of runs that have been gone for as long as a lease again."""
        for name, adapter in list(self.named.items()):
            if adapter.leased and not adapter.active and time.monotonic() > adapter.heard + 2 * LEASE:
                del self.named[name]
                if self.newest is adapter.newest:
                    others = (other.newest for other in self.named.values() if other.newest)
                    self.newest = max(others, key=lambda version: version.request.lora_int_id, default=None)
                adapter.newest = None
                self.tidy()
                await self.ask("abort", name)

    def pick(self, name: str | None) -> Version | None:
        """What a request is bound to that begins now and names this adapter. None: the weights alone."""
        if name is None:
            return self.newest
        adapter = self.named.get(name)
        if adapter is None or adapter.newest is None:
            raise HTTPException(
                409,
                f"no complete push of adapter {name} is here: none came since this server was started, its run was not "
                f"heard of for over {2 * LEASE:g} s, or whole weights were pushed since. A run that is resumed pushes "
                "its adapter again",
            )
        return adapter.newest

    async def generate(self, *args, lora_request: LoRARequest | None = None, **kwargs):
        """engine.generate, bound to a version: the one given, else the newest. In a mixed batch vLLM's CPU kernels gave
        others' adapters to requests without one, and what is served is the policy, whoever asks. Runs that share the
        server take turns."""
        version = self.versions[lora_request.lora_int_id] if lora_request else self.newest
        if version is None:
            async with contextlib.aclosing(self.sample(*args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
            return
        version.users += 1  # nothing was awaited since it was chosen
        given = dict(zip(("prompt", "sampling_params", "request_id"), args, strict=False)) | kwargs
        params, run = given["sampling_params"], version.adapter.name
        adds = getattr(params, "output_kind", None) is RequestOutputKind.DELTA
        how = run, getattr(params, "n", 1), given["request_id"]
        counted: Counter = Counter()  # tokens, by sample
        try:
            async with self.door.passing(*how):
                async with contextlib.aclosing(self.sample(*args, lora_request=version.request, **kwargs)) as outputs:
                    async for output in outputs:
                        for part in getattr(output, "outputs", ()):  # which a pooled prompt has not
                            counted[part.index] = counted[part.index] * adds + len(part.token_ids)
                        yield output
        finally:
            self.door.tokens[run] += counted.total()
            version.users -= 1
            self.tidy()

    async def abort(self, request_id, *args, **kwargs):
        """engine.abort, of what waits for its turn, too."""
        ended = {request_id} if isinstance(request_id, str) else set(request_id)
        self.door.turn_away(HTTPException(409, "ended before its turn"), lambda ticket: ticket.request_id in ended)
        await self.end(request_id, *args, **kwargs)

    def tidy(self) -> None:
        """Drop versions that nothing needs."""
        for number, version in list(self.versions.items()):
            if version.users == 0 and version is not version.adapter.newest:
                del self.versions[number]
                task = asyncio.ensure_future(self.ask("drop", number))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def clear(self) -> None:
        """Whole weights are pushed: no adapter fits them. What is under way was ended."""
        if self.versions:
            self.newest = None
            for adapter in self.named.values():
                adapter.newest = None
            self.versions.clear()
            self.door.turn_away(HTTPException(409, "whole weights were pushed meanwhile"), lambda ticket: True)
            await self.ask("clear")

    async def check(self, modules: dict[str, list[int]]) -> None:
        """ValueError unless adapters of these [rank, inputs, outputs] can be served."""
        if not modules:
            raise ValueError("an adapter of no layer")
        rank, most = max(shape[0] for shape in modules.values()), self.config.max_lora_rank
        if rank > most:
            larger = [known for known in get_args(MaxLoRARanks) if known >= rank]
            remedy = f"start it with --max-lora-rank {larger[0]}" if larger else "vLLM knows none as large"
            raise ValueError(f"rank {rank} is above the server's {most}; {remedy}")
        reports = await self.ask("fit", modules)
        # A worker of a pipeline has a part of the layers.
        unknown = [name for name in modules if all(name in report["unknown"] for report in reports[0])]
        if misshapen := [text for report in reports[0] for text in report["misshapen"]]:
            raise ValueError(f"of another shape than the server's model: {some(misshapen)}")
        if unknown:
            raise ValueError(f"vLLM serves no adapters of {some(unknown)}; name others (--lora_targets)")

    async def complete(self, adapter: Adapter, version: int) -> dict:
        """Make what has arrived the newest version."""
        number = next(self.numbers)
        try:
            reports = await self.ask("finish", adapter.name, number)
        except BaseException:
            with contextlib.suppress(Exception):  # of a dead engine
                await self.ask("drop", number)  # some workers may have it
            raise
        request = LoRARequest(f"{adapter.name}/{number}", number, "memory")
        adapter.newest = self.newest = Version(version, request, adapter, adapter.instance)
        self.versions[number] = adapter.newest
        self.tidy()
        return reports[0][0]


Shape = tuple[int, int, int]  # rank, inputs, outputs


class AdapterBody(BaseModel):
    adapter: str = Field(pattern=r"^[\w.-]{1,64}$")
    session: str


class InitBody(AdapterBody):
    init_info: dict
    owner: str | None = Field(None, pattern=r"^[0-9a-f]{32}$")  # the run that takes the name
    versions: int = Field(1, ge=1)  # of the adapter that are sampled with at a time


class LeaseBody(BaseModel):
    adapter: str
    owner: str


class CheckBody(BaseModel):
    modules: dict[str, Shape]


class StartBody(AdapterBody):
    modules: dict[str, Shape]


class UpdateBody(AdapterBody):
    update_info: dict


class FinishBody(AdapterBody):
    weight_version: int


class AbortBody(AdapterBody):
    reason: str = "the trainer gave up"


def adapter_routes(engine, adapters: Adapters) -> APIRouter:
    """The steps of a push, as those of whole weights (push_routes in transfer.py)."""
    router = APIRouter(prefix="/adapters")

    def enabled() -> None:
        if adapters.config is None:
            raise HTTPException(400, "start the server with --enable-lora")

    def step(body: AdapterBody, during_push: bool) -> PushStep:
        if body.adapter not in adapters.named:
            raise HTTPException(
                409,
                f"no trainer has connected for adapter {body.adapter} since this server was started, or its run was "
                f"not heard of for over {2 * LEASE:g} s: resume the run",
            )
        adapter = adapters.named[body.adapter]
        if adapter.session == body.session:
            adapters.renew(adapter)
        return PushStep(engine, adapter, body.session, during_push)

    @router.post("/check")
    async def check(body: CheckBody):
        enabled()
        try:
            await adapters.check(body.modules)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        return {}

    @router.post("/connect")
    async def connect(body: InitBody):
        enabled()
        adapter = adapters.named.get(body.adapter) or Adapter(body.adapter)
        async with adapter.lock:  # nothing is awaited for a new one: there are no two of a name
            adapters.check_base()
            adapters.check_slots(body.adapter, body.versions)
            adapter.take(body.owner)
            adapter.slots = body.versions
            adapters.named[body.adapter] = adapter
            await adapters.sweep()
            await adapter.connecting(engine, body.session, body.init_info)
            await adapters.ask("connect", adapter.name, body.init_info)
        return {"instance": adapter.instance}

    def leased(body: LeaseBody) -> Adapter:
        adapter = adapters.named.get(body.adapter)
        if adapter is None or adapter.owner != body.owner:
            raise HTTPException(409, f"adapter {body.adapter} is not held by this run")
        return adapter

    @router.post("/lease")
    async def lease(body: LeaseBody):
        adapters.renew(leased(body))
        return {}

    @router.post("/release")
    async def release(body: LeaseBody):
        leased(body).owner = None  # its newest version is served on
        return {}

    @router.post("/start")
    async def start(body: StartBody):
        async with step(body, during_push=False):
            adapters.check_base()
            await adapters.check(body.modules)
            adapter = adapters.named[body.adapter]
            adapter.active, adapter.since = True, time.monotonic()
            await adapters.ask("start", adapter.name, body.modules)
        return {}

    @router.post("/bucket")
    async def bucket(body: UpdateBody):
        async with step(body, during_push=True):
            await adapters.ask("receive", body.adapter, body.update_info)
        return {}

    @router.post("/finish")
    async def finish(body: FinishBody):
        async with step(body, during_push=True):
            report = await adapters.complete(adapters.named[body.adapter], body.weight_version)
            adapters.named[body.adapter].active = False
        return {"policy_version": body.weight_version} | report | {"used": adapters.door.used(body.adapter)}

    @router.post("/abort")
    async def abort(body: AbortBody):
        adapter = adapters.named.get(body.adapter)
        if adapter is not None:
            async with adapter.lock:
                if adapter.session == body.session and adapter.active:
                    adapter.alarm.cancel()
                    await adapter.break_off(engine, body.reason)
        return {}

    return router
