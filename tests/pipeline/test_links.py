"""How workers are started and reached: what an actor is told, and connections that fail."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from anydepth.pipeline.links import Actor
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
