"""A worker at work: messages in, tokens to the router and batches to the next worker out, until it is told to end.

The loop is one for all places; what differs is the Outlet. In another process everything goes over
`multiprocessing.connection`: one connection to the router, and one from each worker to the next. Whoever connects has
to know the pipeline's key, and messages are unpickled only then.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from anydepth.pipeline.messages import (
    Ask,
    Batch,
    Broken,
    Gone,
    Hello,
    Join,
    Joined,
    Kill,
    Reads,
    Stop,
    packed,
    unpacked,
)
from anydepth.pipeline.worker import Worker

HANDSHAKE_S = 30.0  # for each answer until both ends know the other to have the key


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker is made from: its artifacts and sizes. It goes to other processes and hosts as it is."""

    artifacts: str
    segments: tuple[int, ...]
    dtype: str | None
    device: str
    slots: int
    pages: int
    page_size: int
    fill: str
    threads: int

    def make(self) -> Worker:
        """Load the worker's own artifacts."""
        from anydepth.pipeline.export import read_artifact
        from anydepth.pipeline.part import Part

        own = [read_artifact(self.artifacts, segment) for segment in self.segments]
        part = Part(own, dtype=self.dtype, device=self.device)
        return Worker(part, slots=self.slots, pages=self.pages, page_size=self.page_size, fill=self.fill)


class Outlet(Protocol):
    """Where a worker's messages go."""

    to_router: Callable[[Any], None]

    def connect(self, join: Join) -> bool:
        """From now on batches go to the worker that follows; whether it can be reached."""

    def onward(self, batch: Batch) -> None: ...


def work(worker: Worker, inbox: queue.SimpleQueue[Any], outlet: Outlet) -> None:
    """Handle messages until Stop. Batches of another epoch are dropped: their requests have ended."""
    while not isinstance(message := inbox.get(), Stop):
        match message:
            case Join(epoch):
                worker.join(epoch)
                if outlet.connect(message):
                    outlet.to_router(Joined(epoch))
            case Broken():
                outlet.to_router(message)
            case Ask():
                outlet.to_router(worker.held())
            case Kill():
                raise RuntimeError("killed")
            case Batch() if message.epoch == worker.epoch:
                batch, tokens = worker.run(unpacked(message))
                done = worker.part.own[-1] == worker.segments
                if not done:
                    outlet.onward(batch)
                if tokens or done:
                    outlet.to_router(Reads(batch.epoch, batch.number, tuple(tokens), done))


class Doors(NamedTuple):
    """The address of a worker that is a thread: its inbox for those in the same process, a listener's for others."""

    inbox: queue.SimpleQueue[Any]
    address: Any


class Sockets:
    """The outlet of a worker towards another process. `to_router`: what takes messages to the router. That a connection
    was made and then broke is put into the worker's own `inbox`."""

    def __init__(self, to_router: Callable[[Any], None], inbox: queue.SimpleQueue[Any], key: bytes) -> None:
        self.to_router, self._inbox, self._key = to_router, inbox, key
        self._next: Connection | None = None

    def connect(self, join: Join) -> bool:
        self.close()
        if join.following is None:
            return True
        try:
            self._next = dial(join.following, self._key)
        except (OSError, EOFError, AuthenticationError) as error:
            self.to_router(Broken(join.epoch, f"{type(error).__name__}: {error}"))
            return False
        last = Broken(join.epoch, "the connection ended")  # nothing else ever comes back
        threading.Thread(target=receive, args=(self._next, self._inbox.put, last), daemon=True).start()
        return True

    def onward(self, batch: Batch) -> None:
        if self._next is not None:
            with contextlib.suppress(OSError):  # then `receive` ends, too
                send(self._next, packed(batch))

    def close(self) -> None:
        """End the connection; `receive` hears of that, and the last user closes it."""
        if self._next is not None:
            with (
                contextlib.suppress(OSError),
                socket.fromfd(self._next.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy,
            ):
                copy.shutdown(socket.SHUT_RDWR)
        self._next = None


class Door:
    """Where others connect: whoever knows the key is handed to `enter`, in a thread of its own. `where`: a folder of
    this machine, in which the door gets a name, or this machine's address, at which it gets a port that other hosts can
    reach."""

    def __init__(self, where: Path | str, key: bytes, enter: Callable[[Connection], None]) -> None:
        self._key, self._enter, self._open = key, enter, True
        if isinstance(where, Path):
            name = str(where / secrets.token_hex(6))
            self._listener = Listener(name, family="AF_UNIX", backlog=16)
        else:
            self._listener = Listener((where, 0), family="AF_INET", backlog=16)
        self.address = self._listener.address
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):
                threading.Thread(target=self._let_in, args=(self._listener.accept(),), daemon=True).start()

    def _let_in(self, line: Connection) -> None:
        try:
            limit(line, HANDSHAKE_S)
            deliver_challenge(line, self._key)
            answer_challenge(line, self._key)
            limit(line, 0)
        except Exception:  # whatever a stranger says
            line.close()
        else:
            if self._open:
                self._enter(quick(line))

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            Client(self.address).close()  # which is what the thread waits for
        self._thread.join(timeout=10)
        self._listener.close()


def letting_in(inbox: queue.SimpleQueue[Any]) -> Callable[[Connection], None]:
    """What puts all that comes over a connection into an inbox, in a thread of its own."""

    def enter(line: Connection) -> None:
        threading.Thread(target=receive, args=(line, inbox.put), daemon=True).start()

    return enter


def serve(order: Order, router: Any, number: int, key: bytes, where: Path | str) -> None:
    """The main function of a worker's process: connect to the router as worker `number`, load, and work."""
    import torch

    torch.set_num_threads(order.threads)
    line = dial(router, key)
    line.send_bytes(pickle.dumps(number))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        worker = order.make()
        with contextlib.closing(Door(where, key, letting_in(inbox))) as door:
            threading.Thread(target=receive, args=(line, inbox.put, Stop()), daemon=True).start()
            send(line, Hello(door.address))
            work(worker, inbox, Sockets(partial(send, line), inbox, key))
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(line, Gone(f"{type(error).__name__}: {error}"))
        raise
    finally:
        line.close()


def receive(line: Connection, put: Callable[[Any], None], last: Any = None) -> None:
    """Put what comes in, and `last` when the other end has gone."""
    try:
        while True:
            put(pickle.loads(line.recv_bytes()))
    except (EOFError, OSError):
        if last is not None:
            put(last)


def send(line: Connection, message: Any) -> None:
    # torch would replace the pickler of Connection.send by one that shares memory between processes.
    line.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def dial(address: Any, key: bytes) -> Connection:
    """Connect to a Door. OSError, EOFError or AuthenticationError where that fails or takes too long."""
    try:
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as plain:
            limit(plain, HANDSHAKE_S)
            plain.connect(address)
            line = Connection(plain.detach())
        answer_challenge(line, key)
        deliver_challenge(line, key)
    except BlockingIOError:
        raise TimeoutError(f"{address} has not answered for {HANDSHAKE_S:.0f} s") from None
    limit(line, 0)
    return quick(line)


def limit(line: Any, seconds: float) -> None:
    """Let whatever waits for the other end fail with BlockingIOError after so long; 0: never."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.fromfd(line.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            copy.setsockopt(socket.SOL_SOCKET, option, timeval)


def quick(line: Any) -> Any:
    """Without the delay by which TCP waits for more to send."""
    with contextlib.suppress(OSError), socket.fromfd(line.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
        if copy.family == socket.AF_INET and isinstance(copy.getpeername(), tuple):
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line
