"""The router's side of each worker: how it is started, spoken to and, in a test, killed. One class a place.

Every link puts what its worker says into `put` of the router, and `Gone` when the worker has ended, whatever ended it.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import secrets
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from anydepth.pipeline.messages import Batch, Gone, Hello, Join, Kill, Stop, packed
from anydepth.pipeline.serve import Door, Doors, Order, Sockets, letting_in, receive, send, serve, work

Put = Callable[[Any], None]
END_S = 10.0  # for a worker to end by itself


class Link(Protocol):
    """A worker as the router sees it."""

    def send(self, message: Any) -> None:
        """To a worker that has gone, nothing."""

    def kill(self) -> None:
        """End the worker at once, from outside where its place allows that."""

    def close(self) -> None:
        """Tell it to end, and wait until it has."""


class Here:
    """A thread of this process. To other threads batches go as they are; with a hub, it can also be reached from, and
    reach, workers of other processes."""

    def __init__(self, order: Order, put: Put, hub: Hub | None) -> None:
        self._order, self._hub, self.to_router = order, hub, put
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sockets = None if hub is None else Sockets(put, self._inbox, hub.key)
        self._next: Callable[[Batch], None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            worker = self._order.make()
            with contextlib.ExitStack() as open_:
                address = None
                if self._hub is not None and self._sockets is not None:
                    open_.callback(self._sockets.close)
                    door = Door(self._hub.where, self._hub.key, letting_in(self._inbox))
                    open_.callback(door.close)
                    address = door.address
                self.to_router(Hello(Doors(self._inbox, address)))
                work(worker, self._inbox, self)
        except BaseException as error:
            traceback.print_exc()
            self.to_router(Gone(f"{type(error).__name__}: {error}"))
        else:
            self.to_router(Gone("it was told to end"))

    def connect(self, join: Join) -> bool:
        self._next = None
        if isinstance(join.following, Doors):
            self._next, join = join.following.inbox.put, join._replace(following=None)
        elif self._sockets is not None:
            self._next = self._sockets.onward
        return self._sockets is None or self._sockets.connect(join)

    def onward(self, batch: Batch) -> None:
        if self._next is not None:
            self._next(batch)

    def send(self, message: Any) -> None:
        self._inbox.put(message)

    def kill(self) -> None:
        self._inbox.put(Kill())

    def close(self) -> None:
        self._inbox.put(Stop())
        self._thread.join(timeout=END_S)


class Hub:
    """Where workers of other processes call in. `host`: this machine's address for other hosts, None without any."""

    def __init__(self, host: str | None) -> None:
        self.key = secrets.token_bytes(32)
        # A process that is killed leaves the name of its door behind; here it goes with the folder.
        self._folder = tempfile.TemporaryDirectory(prefix="anydepth-") if host is None else None
        self.where: Path | str = host if self._folder is None else Path(self._folder.name)  # type: ignore[assignment]
        self._expected: dict[int, Remote] = {}
        self._numbers = 0
        self._door = Door(self.where, self.key, self._enter)
        self.address = self._door.address

    def expect(self, link: Remote) -> int:
        """The number under which that link's worker will call."""
        self._numbers += 1
        self._expected[self._numbers] = link
        return self._numbers

    def _enter(self, line: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            link = self._expected.pop(pickle.loads(line.recv_bytes()), None)
            if link is not None:
                link.connected(line)

    def close(self) -> None:
        self._door.close()
        if self._folder is not None:
            self._folder.cleanup()


class Remote:
    """What a process of this machine and a Ray actor have in common: a connection to the worker. A subclass starts it
    and waits for its end."""

    def __init__(self, hub: Hub, put: Put) -> None:
        self._put = put
        self._line: Connection | None = None
        self._lock = threading.Lock()
        self._gone = False
        self.number = hub.expect(self)

    def connected(self, line: Connection) -> None:
        self._line = line
        threading.Thread(target=receive, args=(line, self._heard), daemon=True).start()

    def send(self, message: Any) -> None:
        if isinstance(message, Join) and isinstance(message.following, Doors):
            message = message._replace(following=message.following.address)
        if self._line is not None:
            with contextlib.suppress(OSError):
                send(self._line, packed(message) if isinstance(message, Batch) else message)

    def _heard(self, message: Any) -> None:
        if isinstance(message, Gone):
            self._end(message.reason)
        else:
            self._put(message)

    def _end(self, reason: str) -> None:
        """Say once that the worker has gone."""
        with self._lock:
            if self._gone:
                return
            self._gone = True
        self._put(Gone(reason))


class Process(Remote):
    """A process of its own on this machine, begun afresh (spawned), so that it holds nothing of this one's."""

    def __init__(self, order: Order, put: Put, hub: Hub) -> None:
        super().__init__(hub, put)
        target, arguments = serve, (order, hub.address, self.number, hub.key, hub.where)
        self._process = get_context("spawn").Process(target=target, args=arguments, daemon=True)
        self._process.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._process.join()
        self._end(f"its process ended with exit code {self._process.exitcode}")

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.send(Stop())
        self._process.join(timeout=END_S if self._line is not None else 0)
        self._process.kill()


class Actor(Remote):
    """An actor of a Ray cluster, on the host that has the resource `host` where one is named. The cluster is the one
    this process is connected to (`ray.init`); Ray starts the worker there and sees it end, batches do not go through
    it. On a GPU it asks for a whole one, and calls it cuda:0."""

    def __init__(self, order: Order, put: Put, hub: Hub, host: str | None) -> None:
        super().__init__(hub, put)
        import ray

        if order.device.startswith("cuda"):
            order = replace(order, device="cuda:0")  # whichever GPU of its host it gets, it sees no other
        self._ray: Any = ray
        options = {"num_cpus": order.threads, "num_gpus": int(order.device.startswith("cuda"))}
        needs = {host: 0.001} if host is not None else {}
        remote = self._ray.remote(RayHost).options(**options, resources=needs, max_restarts=0)
        self._actor = remote.remote()
        self._running = self._actor.serve.remote(order, hub.address, self.number, hub.key)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            self._ray.get(self._running)
            self._end("it was told to end")
        except Exception as error:
            self._end(f"its actor ended: {error}")

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def close(self) -> None:
        self.send(Stop())
        self._ray.wait([self._running], timeout=END_S if self._line is not None else 0)
        self._ray.kill(self._actor)


class RayHost:
    """What runs on a host of the cluster."""

    def serve(self, order: Order, router: Any, number: int, key: bytes) -> str:
        """Work until told to end; the host it was on."""
        import ray

        host: str = ray.util.get_node_ip_address()
        serve(order, router, number, key, host)
        return host
