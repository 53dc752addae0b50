"""How the trainer and a server's workers find each other for a weight push, without letting anybody else in.

A process group needs a store, in which each end leaves the addresses it listens on. torch's TCPStore asks nobody who he
is. Here every connection to the store begins with both ends proving that they know a secret, which the trainer makes up
for each connection to a server and hands over on the HTTP route that wants the server's token. Once the group stands,
its members prove it again through the group itself (wire.open_group): a process group of gloo listens on ports
of its own, which ask nobody either.

Proofs are HMAC-SHA256 of fresh random numbers, so one that was overheard is of no use. What travels afterwards is not
encrypted: see SECURITY.md. Nothing is unpickled: requests are JSON, values bytes in hex.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta

import torch.distributed as dist

NONCE = 32  # bytes
LARGEST = 1 << 20  # bytes of a message; an address has hundreds
PROOF_SECONDS = 10.0
STRANGERS = 256  # connections at once that have proved nothing yet; more are closed


def proof(secret: str, who: str, data: bytes = b"") -> bytes:
    """32 bytes that only who knows `secret` can make; another for every `who` and `data`."""
    return hmac.digest(secret.encode(), who.encode() + b"\0" + data, "sha256")


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def end(connection: socket.socket) -> None:
    """Close it so that a thread that waits for it notices."""
    with contextlib.suppress(OSError):  # the other end was first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """`size` bytes. `deadline`, of time.monotonic(), is for all of them; else the socket's limit is for each piece."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (piece := connection.recv(size - len(data))):
            raise ConnectionError("the other end closed the connection")
        data += piece
    return bytes(data)


def send_message(connection: socket.socket, message) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive_message(connection: socket.socket):
    (size,) = struct.unpack("!I", receive(connection, 4))
    if size > LARGEST:
        raise ConnectionError(f"a message of {size} bytes; at most {LARGEST} are taken")
    return json.loads(receive(connection, size))


class Rendezvous(dist.Store):
    """The trainer's end. Values by key, and waiting for them, is all that torch's process groups ask of a store."""

    def __init__(self, secret: str, address: str, timeout: float):
        """Takes workers' connections on `address` only; `port` says where. A key is waited for `timeout` seconds."""
        super().__init__()
        self.secret, self.limit = secret, timeout
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.listener = socket.create_server((address, 0), family=family(address), backlog=128)
        self.port = self.listener.getsockname()[1]
        self.strangers = threading.BoundedSemaphore(STRANGERS)
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = bytes(value)
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self.limit if timeout is None else timeout.total_seconds()
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), seconds):
                absent = [key for key in keys if key not in self.values]
                raise TimeoutError(f"waited {seconds:g} s for the ends of a transfer group ({', '.join(absent)})")

    def close(self) -> None:
        """Nobody can connect any more; connections that stand, end with the workers that opened them."""
        end(self.listener)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed
                return
            if self.strangers.acquire(blocking=False):
                threading.Thread(target=self._answer, args=(connection,), name="rendezvous", daemon=True).start()
            else:
                end(connection)

    def _answer(self, connection: socket.socket) -> None:
        """One connection, from its proof to its end."""
        try:
            try:
                known = self._prove(connection)
            finally:
                self.strangers.release()
            while known:
                name, *arguments = receive_message(connection)
                send_message(connection, self._serve(name, arguments))
        except (OSError, ValueError, TypeError, KeyError):  # gone, too slow, or not what `Joined` sends
            pass
        finally:
            end(connection)

    def _prove(self, connection: socket.socket) -> bool:
        challenge, deadline = secrets.token_bytes(NONCE), time.monotonic() + PROOF_SECONDS
        connection.sendall(challenge)
        theirs, answer = receive(connection, NONCE, deadline), receive(connection, NONCE, deadline)
        if not hmac.compare_digest(answer, proof(self.secret, "worker", challenge + theirs)):
            return False
        connection.sendall(proof(self.secret, "trainer", challenge + theirs))
        connection.settimeout(None)
        return True

    def _serve(self, name: str, arguments: list):
        """{"value": ...} or {"error": what `Joined` raises}."""
        try:
            if name == "set":
                key, value = arguments
                return {"value": self.set(key, bytes.fromhex(value))}
            if name == "get":
                return {"value": self.get(*arguments).hex()}
            if name == "check":
                return {"value": self.check(*arguments)}
            keys, seconds = arguments
            return {"value": self.wait(keys, None if seconds is None else timedelta(seconds=seconds))}
        except TimeoutError as error:
            return {"error": str(error)}


class Joined(dist.Store):
    """A worker's end: asks the trainer's."""

    def __init__(self, secret: str, address: str, port: int, timeout: float):
        """PermissionError if what listens there does not know the secret; OSError if nothing does."""
        super().__init__()
        self.connection = socket.create_connection((address, port), timeout=timeout)
        self.turn = threading.Lock()
        try:
            challenge, mine = receive(self.connection, NONCE), secrets.token_bytes(NONCE)
            self.connection.sendall(mine + proof(secret, "worker", challenge + mine))
            answer = receive(self.connection, NONCE)
        except ConnectionError as error:
            raise PermissionError(f"the trainer at {address}:{port} refused the secret of this session") from error
        if not hmac.compare_digest(answer, proof(secret, "trainer", challenge + mine)):
            raise PermissionError(f"what listens on {address}:{port} is not the trainer: it does not know the secret")
        self.connection.settimeout(timeout + 10)  # the trainer's end gives up first, and says so

    def _ask(self, *request):
        with self.turn:
            send_message(self.connection, request)
            answer = receive_message(self.connection)
        if "error" in answer:
            raise TimeoutError(answer["error"])
        return answer["value"]

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, bytes(value).hex())

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._ask("get", key))

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, None if timeout is None else timeout.total_seconds())

    def close(self) -> None:
        end(self.connection)
