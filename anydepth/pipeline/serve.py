"""A worker at work: messages in, tokens to the router and batches to the next worker out, until it is told to end.

The loop is one for all places; what differs is the Outlet. In another process everything goes over
`multiprocessing.connection`: one connection to the router, and one from each worker to the next. Whoever connects has
to know the pipeline's key, and messages are unpickled only then.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from anydepth.pipeline.messages import (
    Ask,
    Batch,
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

    def connect(self, following: Any) -> None:
        """From now on batches go to that worker; None: nowhere."""

    def onward(self, batch: Batch) -> None: ...


def work(worker: Worker, inbox: queue.SimpleQueue[Any], outlet: Outlet) -> None:
    """Handle messages until Stop. Batches of another epoch are dropped: their requests have ended."""
    while not isinstance(message := inbox.get(), Stop):
        match message:
            case Join(epoch, following):
                worker.join(epoch)
                outlet.connect(following)
                outlet.to_router(Joined(epoch))
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
    """The outlet of a worker towards another process. `to_router`: what takes messages to the router."""

    def __init__(self, to_router: Callable[[Any], None], key: bytes) -> None:
        self.to_router, self._key = to_router, key
        self._next: Connection | None = None

    def connect(self, following: Any) -> None:
        if self._next is not None:
            self._next.close()
        self._next = None
        if following is not None:
            # A worker that has died since: the router will say which one follows instead.
            with contextlib.suppress(OSError, EOFError):
                self._next = dial(following, self._key)

    def onward(self, batch: Batch) -> None:
        if self._next is not None:
            with contextlib.suppress(OSError):
                send(self._next, packed(batch))


def serve(order: Order, router: Any, number: int, key: bytes, host: str | None = None) -> None:
    """The main function of a worker's process: connect to the router as worker `number`, load, and work. `host`: the
    address at which workers on other hosts reach this one; None: all are on this one."""
    import torch

    torch.set_num_threads(order.threads)
    line = dial(router, key)
    line.send_bytes(pickle.dumps(number))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        worker = order.make()
        with listen(key, host) as listener:
            threading.Thread(target=let_in, args=(listener, inbox), daemon=True).start()
            threading.Thread(target=receive, args=(line, inbox.put, Stop()), daemon=True).start()
            send(line, Hello(listener.address))
            work(worker, inbox, Sockets(partial(send, line), key))
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(line, Gone(f"{type(error).__name__}: {error}"))
        raise
    finally:
        line.close()


def let_in(listener: Listener, inbox: queue.SimpleQueue[Any]) -> None:
    """Let workers in: the one before this, and after its death the next one in its place."""
    for line in accepted(listener):
        threading.Thread(target=receive, args=(line, inbox.put), daemon=True).start()


def accepted(listener: Listener) -> Any:
    """Connections of those who know the key, until the listener is closed."""
    from multiprocessing import AuthenticationError

    while True:
        try:
            line = listener.accept()
        except (AuthenticationError, EOFError, ConnectionError):
            continue
        except OSError:
            return
        yield quick(line)


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
    return quick(Client(address, authkey=key))


def listen(key: bytes, host: str | None) -> Listener:
    """A listener on a port of `host`, or, without one, on a name of this machine."""
    if host is not None:
        return Listener((host, 0), family="AF_INET", backlog=8, authkey=key)
    name = Path(tempfile.gettempdir()) / f"anydepth-{os.getpid()}-{secrets.token_hex(4)}"
    return Listener(str(name), family="AF_UNIX", backlog=64, authkey=key)


def quick(line: Any) -> Any:
    """Without the delay by which TCP waits for more to send."""
    with contextlib.suppress(OSError), socket.fromfd(line.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
        if copy.family == socket.AF_INET and isinstance(copy.getpeername(), tuple):
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line
