"""How workers are started and reached: what an actor is told, and connections that fail."""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from anydepth.pipeline import serve
from anydepth.pipeline.links import Actor, Hub
from anydepth.pipeline.messages import Broken, Join, Stop
from anydepth.pipeline.serve import Order

ORDER = Order(
    artifacts="parts", segments=(1,), dtype=None, device="cpu", slots=1, pages=1, page_size=4, fill="full", threads=1
)


@pytest.mark.parametrize(
    ("device", "gpus", "told"), [("cuda:1", 1, "cuda:0"), ("cuda", 1, "cuda:0"), ("cpu", 0, "cpu")]
)
def test_an_actor_calls_its_only_gpu_the_first(monkeypatch, device, gpus, told):
    """Ray is played: it notes what it is asked for and what the actor is sent."""
    seen = {}
    actor = SimpleNamespace(serve=SimpleNamespace(remote=lambda order, *rest: seen.update(device=order.device)))
    begin = SimpleNamespace(remote=lambda: actor)
    host = SimpleNamespace(options=lambda **asked: seen.update(gpus=asked["num_gpus"]) or begin)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(remote=lambda kind: host, get=lambda running: None))
    hub = SimpleNamespace(address="", key=b"", expect=lambda link: 1)
    Actor(replace(ORDER, device=device), lambda said: None, hub, None)
    assert seen == {"device": told, "gpus": gpus}


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_who_says_nothing_or_nonsense_keeps_nobody_out(monkeypatch, host):
    """Strangers, and one who knows the key and gives a number that nobody expects, come before the worker."""
    monkeypatch.setattr(serve, "HANDSHAKE_S", 1.0)
    hub, came = Hub(host), queue.SimpleQueue()
    with contextlib.closing(hub), contextlib.ExitStack() as open_:
        silent, loud = (open_.enter_context(stranger(hub.address)) for _ in range(2))
        loud.sendall(b"\xff" * 100)
        odd = open_.enter_context(in_a_thread(serve.dial, hub.address, hub.key))
        odd.send_bytes(pickle.dumps(77))
        number = hub.expect(SimpleNamespace(connected=came.put))
        line = open_.enter_context(in_a_thread(serve.dial, hub.address, hub.key))
        line.send_bytes(pickle.dumps(number))
        worker = open_.enter_context(came.get(timeout=5))
        for here, there in ((line, worker), (worker, line)):  # neither is held to the time that strangers have
            threading.Timer(1.2, here.send_bytes, (b"still here",)).start()
            assert there.recv_bytes() == b"still here"
        for stranger_ in (silent, loud):
            assert cut_off(stranger_)


@pytest.mark.parametrize("kind", ["gone", "silent", "another key"])
def test_a_worker_that_cannot_reach_the_next_does_not_join(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(serve, "HANDSHAKE_S", 0.3)
    inbox, said = queue.SimpleQueue(), []
    with contextlib.ExitStack() as open_:
        if kind == "another key":
            address = open_.enter_context(contextlib.closing(serve.Door(tmp_path, b"theirs", print))).address
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            address = open_.enter_context(listener).getsockname()
            if kind == "gone":
                listener.close()
        for message in (Join(3, address), Stop()):
            inbox.put(message)
        worker = SimpleNamespace(epoch=0, join=lambda epoch: None)
        serve.work(worker, inbox, serve.Sockets(said.append, inbox, b"ours"))
    (broken,) = said
    reason = {"gone": "ConnectionRefused", "silent": "has not answered", "another key": "AuthenticationError"}
    assert isinstance(broken, Broken) and broken.epoch == 3 and reason[kind] in broken.reason


def stranger(address):
    line = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    line.connect(address)
    return line


def in_a_thread(function, *arguments):
    """What it returns, within five seconds."""
    results = queue.SimpleQueue()
    threading.Thread(target=lambda: results.put(function(*arguments)), daemon=True).start()
    return results.get(timeout=5)


def cut_off(line):
    """Whether the other end closes the connection within five seconds."""
    line.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        while line.recv(1000):
            pass
    return True
