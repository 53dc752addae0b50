"""The trainer's end of a weight push: buckets packed, announced, and read or received by the servers' workers.

Weights travel as bytes: the tensors of a bucket are packed into one flat uint8 buffer, their names, dtypes, shapes and
checksums are announced over HTTP, and the server's workers read the buffer where it lies, if they are on this machine
(shared.py). Else it is broadcast in a torch process group of this process and the workers - one group a server, so that
a dead server is known by its address. The whole bucket must be gathered before `send_bucket` is called: nothing here
takes part in a collective of the trainer. It travels while the caller gathers the next one. What both ends must do
alike is in wire.py; the other end is transfer.py. A step of a push is never asked again: pushes begin anew instead.
"""

import concurrent.futures
import contextlib
import itertools
import secrets
import socket
import threading
import uuid
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from urllib.parse import urlsplit

import torch

from safety import addresses
from safety.calls import warn_once
from serving import shared, wire
from serving.changes import Changes
from serving.rendezvous import Rendezvous
from serving.servers import ServerError, Servers
from serving.wire import (
    broadcast,
    checksums,
    fold,
    in_thread,
    layout,
    local_address,
    not_finite,
    open_group,
    pack,
    some,
    wait_for,
)

# Steps of a push of whole weights; those of adapters alone are below /adapters.
ROUTES = {"connect": "/init_weight_transfer_engine", "start": "/start_weight_update", "bucket": "/update_weights"}
ROUTES |= {"finish": "/finish_weight_update", "abort": "/abort_weight_update"}
BEAT_SECONDS = 10.0  # after which a run says again that it holds its adapter's name; serving/adapters.py waits LEASE


@dataclass
class Described:
    """A bucket that the servers have."""

    what: dict[str, list]  # names, dtypes, shapes
    starts: list[int]
    checksums: list[int]
    moves: list[torch.Tensor] | None  # where words of the trainer's bucket lie in it (wire.moved); None: hard to say


@dataclass
class Link:
    """What is open to one server for pushing weights."""

    url: str
    session: str
    store: Rendezvous
    group: object = None
    shares: bool = False  # its workers read this process's memory


def is_here(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    return local_address(host, 1) in {address[0] for *_, address in socket.getaddrinfo(host, 1)}


def drop_group(link: Link, abort: bool):
    link.store.close()
    if abort and link.group is not None:
        link.group.abort()
    link.group = link.store = None


class Pusher(Servers):
    """Servers whose weights this process sets, and what a push in progress holds."""

    def __init__(
        self,
        urls: list[str],
        token: str | None,
        timeout: float,
        over: str,
        changes_only: bool,
        ca: str | None,
        client_cert: str | None,
    ):
        super().__init__(urls, token, timeout, ca, client_cert)
        self.over = over
        self.convert = lambda named: named  # (name, tensor) pairs as the trainer has them -> as a checkpoint has them
        self.receives_weights = True  # whether pushes go through this process
        self.weight_dtype: torch.dtype | None = None  # of the servers
        self.changes = Changes() if changes_only else None
        # Per server, the name it took when this run's trainer connected. Where it answers with another one it was
        # started anew or belongs to another trainer, whatever number its weights have. None: not looked at.
        self.instances: dict[str, str] | None = None
        # Adapters alone travel: their name on the servers, and [rank, inputs, outputs] of each by its layer.
        self.adapter: str | None = None
        # The run that holds the adapter's name there, 32 hexadecimal digits; None: whoever connects last has it.
        self.owner: str | None = None
        self.run: str | None = None  # the run's name, for those whom a server refuses on its behalf
        self._beating: threading.Event | None = None  # set to end the thread that says that this run is there
        self.adapter_shapes: dict[str, list[int]] = {}
        self.versions = 1  # of the adapter that are sampled with at a time
        self.used: dict[str, float] = {}  # of all servers by this run's requests, as of the last push
        self.server_seconds: dict[str, float] = {}  # of the last push, at the first server: receive, check, load
        self._links, self._infos = [], []  # open connections; what the servers say of themselves
        self._device: torch.device | None = None
        self._transport = torch.device("cpu")  # where the packed bucket lies
        self._buffers: list = []  # with `bytes` and `place`, as Shared; one is packed while the other travels
        self._checksums: list[int] | None = None  # of what was sent in the push under way
        self._sending: concurrent.futures.Future | None = None  # the bucket under way
        self._described: list[Described] = []  # with `changes`, the buckets that the servers keep
        self._push, self._base = "", None  # the push under way or last; the complete one that it changes
        self._sent_buckets = self.sent_bytes = 0  # of the push under way or last

    def connect_weights(self, device: torch.device | str = "cpu"):
        """Open a process group with every server; drops older ones, also those of another trainer.

        Weights are read from shared memory where trainer and server are on one machine and not on different GPUs, which
        is asked by letting the workers read a random number there. NCCL where they have different GPUs. Else gloo,
        through host memory.
        """
        self._drop_groups()
        self._device, self._infos = torch.device(device), self.server_info()
        self._check_apart()
        self.weight_dtype = getattr(torch, self._infos[0]["dtype"])
        backend = self._pick_backend()
        self._transport = self._device if backend == "nccl" else torch.device("cpu")
        self._buffers = [None, None]
        probe = shared.probe() if backend == "gloo" and self.over != "gloo" else None
        futures = []
        for url, info in zip(self.urls, self._infos, strict=True):
            address = local_address(urlsplit(url).hostname, addresses.place_of(url)[2])  # loopback for loopback
            link = Link(url, uuid.uuid4().hex, Rendezvous(secrets.token_hex(32), address, self.timeout))
            self._links.append(link)
            init = {"secret": link.store.secret, "address": address, "port": link.store.port, "backend": backend}
            init |= {"timeout": self.timeout, "world_size": 1 + info["world_size"], "keep": self.changes is not None}
            init |= {"probe": probe and probe.place}
            who = {"run": self.run} if self.adapter is None else {"owner": self.owner, "versions": self.versions}
            path, body = self._route("connect", {"session": link.session, "init_info": init} | who)
            futures.append(in_thread(self._call, url, "POST", path, body, self.timeout + 10))
            futures.append(in_thread(self._open, link, init, probe))
        try:
            from serving import answers

            joined = self._gather(futures, "the transfer groups")[::2]
            what = (f"POST {path}", answers.checked)
            forms = [
                self._checked(link.url, *what, answer, answers.Connected)
                for link, answer in zip(self._links, joined, strict=True)
            ]
        except BaseException:
            self.close()
            raise
        self.instances = {link.url: form.instance for link, form in zip(self._links, forms, strict=True)}
        self._check_memory()
        if self.owner is not None and self.adapter is not None and self._beating is None:
            self._beating = threading.Event()
            threading.Thread(target=self._beat, args=(self._beating,), daemon=True).start()

    def _beat(self, ended: threading.Event):
        """In a thread: hold the adapter's name."""
        while not ended.wait(BEAT_SECONDS):
            self._say("lease")

    def _say(self, step: str):
        """Of the adapter's name, to every server; one that is gone is met elsewhere."""
        body = {"adapter": self.adapter, "owner": self.owner}
        for url in self.urls:
            with contextlib.suppress(ServerError):
                self._call(url, "POST", f"/adapters/{step}", body, min(self.timeout, BEAT_SECONDS), again=False)

    def begin_push(self):
        """Open an update. The servers pause, unless adapters alone travel; sequences under way are kept. Connects again
        after a failure."""
        if not self._links:
            if self._device is None:
                raise ServerError("begin_push before connect_weights: call connect_weights(device) once, on rank 0")
            self.connect_weights(self._device)
        self._sending = None  # of a push that was given up
        what = {} if self.adapter is None else {"modules": self.adapter_shapes}
        self._step("start", [what for _ in self._links])
        self._checksums, self._push = [], uuid.uuid4().hex
        self._sent_buckets = self.sent_bytes = 0

    def send_bucket(self, named: list[tuple[str, torch.Tensor]]):
        """Send whole tensors, on any device, to every server. Returns when they are packed and on their way: they may
        change then. An error on the way is raised by the next call, which waits for the arrival.

        They travel in the dtypes of `wire.travels_as`. Peak extra memory: two buckets, one that travels and one that is
        packed. FloatingPointError naming tensors that hold nan or inf, before anything of the bucket is sent; ends the
        push.
        """
        self._check_open()
        if not named:
            return
        given, named = named, self.convert(named)
        dtypes = [wire.travels_as(tensor, self.weight_dtype) for _, tensor in named]
        shapes = [list(tensor.shape) for _, tensor in named]
        starts, _, total = layout(dtypes, shapes)
        bucket = self._take_buffer(total)
        packed = pack(named, dtypes, bucket, starts)
        bad, sums = not_finite(packed), checksums(bucket, starts)  # reads it back, so it is complete when handed over
        self._settle()
        if bad:  # also what fitted float32 and does not fit a server's float16
            reason = f"nan or inf in {some(bad)}"
            self.abort_push(reason)
            raise FloatingPointError(
                f"{reason}, as {str(self.weight_dtype).removeprefix('torch.')}: these weights were not pushed. Look at "
                "loss and gradient norm of the last steps, and resume from a checkpoint before them with a lower "
                "learning rate."
            )
        what = {"names": [name for name, _ in named], "dtypes": [str(d).removeprefix("torch.") for d in dtypes]}
        described = Described(what | {"shapes": shapes}, starts, sums, None)
        if self.changes is not None:
            described.moves = wire.rearranged(given, named, self.convert, self.weight_dtype, bucket)
            self._described[self._sent_buckets : self._sent_buckets + 1] = [described]
        self._send(described, bucket, None)

    def can_change(self, number: int) -> bool:
        """Whether bucket `number` of the push under way may be sent by `send_changes`, as far as this process knows."""
        known = self._described[number : number + 1]
        return not self.receives_weights or (self._base is not None and bool(known) and known[0].moves is not None)

    def send_changes(self, found: torch.Tensor):
        """Instead of `send_bucket`: what has changed of the servers' bucket since the last push, as `Changes.find`
        gives it. The checksums announced are of the whole tensors, as they are then."""
        self._check_open()
        described, found = self._described[self._sent_buckets], found.to(self._transport)
        places = wire.moved(found >> 32, *described.moves)
        old, new = found.view(torch.int16).view(-1, 4)[:, :2].unbind(1)
        described.checksums = wire.changed_checksums(described.checksums, described.starts, places, new, old)
        bucket = wire.pack_changes(places, new, self._take_buffer(wire.layout_changes(len(places))[2]))
        self._settle()
        self._send(described, bucket, len(places))

    def finish_push(self, version: int):
        """Close the update: every server checks that each of its parameters came exactly once, empties its caches,
        takes `version` and goes on sampling. ServerError names parameters that are missing, unknown or misshapen."""
        from serving import answers

        self._settle()
        if self._checksums is None:
            raise ServerError("finish_push outside a push: call begin_push first")
        sums, self._checksums = self._checksums, None
        finished = self._step("finish", [{"weight_version": version} for _ in self._links])
        used: Counter = Counter()
        for link, answer in zip(self._links, finished, strict=True):
            what = f"POST {self._route('finish', {})[0]}"
            form = self._checked(link.url, what, answers.checked, answer, answers.Finished)
            used.update(form.used)
            if form.checksum != fold(sums) or form.policy_version != version:
                raise ServerError(
                    f"{link.url} has version {form.policy_version}, checksum {form.checksum:016x} after the "
                    f"push of version {version}, checksum {fold(sums):016x}: the weights did not arrive as sent."
                )
        self.used = dict(used)
        if self._transport.type == "cuda":  # torch's allocator has them for the next push, and passes until then
            self._buffers = [None, None]
        self._base = None if self.changes is None else self._push
        self.server_seconds = finished[0]["seconds"]

    def abort_push(self, reason: str = "the trainer gave up"):
        """Tell the servers, as far as they can still be told, that the push will not be completed. They answer 503 to
        requests until a complete one arrives; of adapters they go on with the version before. Never raises."""
        links, self._checksums = self._links, None
        self.close()
        path, body = self._route("abort", {"reason": reason[:2000]})
        calls = [(link.url, "POST", path, body | {"session": link.session}, 5) for link in links]
        concurrent.futures.wait([in_thread(self._call, *call) for call in calls], timeout=10)

    def close(self):
        """Drop the transfer groups, and let go of the adapter's name; the next push is of all weights."""
        self._drop_groups()
        if self._beating is not None:
            self._beating.set()
            self._beating = None
            self._say("release")

    def _drop_groups(self):
        links, self._links = self._links, []
        self._described, self._base = [], None
        # In threads: a gloo group waits for its pending sends before it goes. Waited for, but not for long: a process
        # that ends while a thread takes a group down is aborted.
        abort = self._transport.type == "cuda"
        concurrent.futures.wait([in_thread(drop_group, link, abort) for link in links], timeout=5)

    def _route(self, step: str, body: dict) -> tuple[str, dict]:
        """Path and body of a step of a push."""
        if self.adapter is None:
            return ROUTES[step], body
        return f"/adapters/{step}", body | {"adapter": self.adapter}

    def _check_apart(self):
        """One server under two names would take each for another trainer."""
        known: dict[str, str] = {}
        for url, info in zip(self.urls, self._infos, strict=True):
            if (other := known.setdefault(info["server"], url)) != url:
                raise ServerError(f"{other} and {url} are one and the same server; give it once in --server_urls.")

    def _check_memory(self):
        """Say which servers of this machine cannot read this process's memory."""
        if self._transport.type == "cuda" or self.over == "gloo":
            return
        cannot = [link.url for link in self._links if not link.shares]
        if self.over == "memory" and cannot:
            self.close()
            raise ServerError(
                f"{', '.join(cannot)} cannot read this process's memory: another machine, container or user, or not "
                "Linux. Leave --push_over memory out."
            )
        for url in cannot:
            if is_here(urlsplit(url).hostname):
                warn_once(f"{url} cannot read this process's memory (another container or user?): weights go by gloo.")

    def _open(self, link: Link, init: dict, probe: shared.Shared | None):
        if init["backend"] == "nccl":
            torch.cuda.set_device(self._device)  # the thread's own setting
        world, backend, limit, address = (init[key] for key in ("world_size", "backend", "timeout", "address"))
        try:
            link.group = open_group(link.store, link.store.secret, 0, world, backend, limit, address)
            link.store.close()  # all have come
            link.shares = probe is not None and wire.all_equal(link.group, world, probe.bytes, limit)
        except (RuntimeError, TimeoutError, PermissionError) as error:
            raise ServerError(f"{link.url} did not join the transfer group ({init['backend']}): {error}") from error

    def _pick_backend(self) -> str:
        """Of the process groups. NCCL wants a GPU of its own at each end."""
        nccl = self._device.type == "cuda" and all(info["device"] == "cuda" for info in self._infos)
        if nccl:
            mine = str(torch.cuda.get_device_properties(self._device).uuid)
            nccl = not any(mine in info["devices"] for info in self._infos)
        if self.over == "nccl" and not nccl:
            raise ServerError("--push_over nccl wants trainer and servers on different GPUs; leave it out")
        return "nccl" if nccl and self.over in ("auto", "nccl") else "gloo"

    def _check_open(self):
        if self._checksums is None:
            self._settle()  # why there is no push any more
            raise ServerError("send_bucket outside a push: call begin_push first")

    def _send(self, described: Described, bucket: torch.Tensor, changed: int | None):
        """The buffer taken last on its way: a bucket, or so many words that have `changed` of one that servers keep."""
        memory = [self._buffers[0].place if link.shares else None for link in self._links]
        update = described.what | {"checksums": described.checksums, "push": self._push}
        update |= {"base": self._base, "changed": changed}
        self._checksums += described.checksums
        self._sent_buckets, self.sent_bytes = self._sent_buckets + 1, self.sent_bytes + len(bucket)
        bodies = [{"update_info": update | {"memory": place}} for place in memory]
        self._sending = in_thread(self._step, "bucket", bodies, bucket)

    def _take_buffer(self, size: int) -> torch.Tensor:
        """The buffer that was not used last: the other one may still travel. Kept from push to push, as fresh memory
        costs several times what copying into it does."""
        self._buffers.reverse()
        if self._buffers[0] is None or len(self._buffers[0].bytes) < size:
            self._buffers[0] = None  # goes before the larger one comes
            self._buffers[0] = self._make_buffer(size)
        return self._buffers[0].bytes[:size]

    def _make_buffer(self, size: int):
        if any(link.shares for link in self._links):
            try:
                return shared.Shared(max(size, wire.ALIGN))
            except OSError as error:
                warn_once(f"no {size / 1e6:.0f} MB of shared memory ({error.strerror}): weights go by gloo.")
        return SimpleNamespace(bytes=torch.empty(size, dtype=torch.uint8, device=self._transport), place=None)

    def _settle(self):
        """Wait until the bucket under way has arrived; raises what went wrong. `_step` keeps the time."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def _step(self, step: str, bodies: list[dict], bucket: torch.Tensor | None = None) -> list[dict]:
        """One step of a push on all servers. Whatever goes wrong ends the push: the groups may be out of step."""
        (path, common), links = self._route(step, {}), self._links
        try:
            bodies = [body | common | {"session": link.session} for link, body in zip(links, bodies, strict=True)]
            futures = [
                in_thread(self._call, link.url, "POST", path, body, self.timeout + 10)
                for link, body in zip(links, bodies, strict=True)
            ]
            if bucket is not None:
                receivers = [b["update_info"]["memory"] is None for b in bodies]
                self._broadcast(bucket, list(itertools.compress(links, receivers)), futures)
            return self._gather(futures, f"{path} on " + ", ".join(link.url for link in links))
        except BaseException as error:
            if self._links is links:  # else it was given up, and another push may have begun
                self.abort_push(reason=str(error))
            raise

    def _broadcast(self, bucket: torch.Tensor, links: list[Link], announcements: list):
        if self._transport.type == "cuda":
            torch.cuda.set_device(self._transport)  # the thread's own setting

        def refused():  # a server that turned the announcement down will never receive: say its reason at once
            for future in announcements:
                if future.done():
                    future.result()

        works = [broadcast(link.group, bucket) for link in links]
        for link, work in zip(links, works, strict=True):
            try:
                wait_for(work, self.timeout, f"{link.url} to receive {len(bucket) / 1e6:.1f} MB", refused)
            except (RuntimeError, TimeoutError) as error:
                if isinstance(error, ServerError):
                    raise
                concurrent.futures.wait(announcements, timeout=5)  # its own account of the matter, if it has one
                refused()
                raise ServerError(self._diagnose(link.url, "a weight bucket", error)) from error
