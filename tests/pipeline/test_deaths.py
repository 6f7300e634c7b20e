"""Workers die, queues fill, replicas share the work."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from random import Random

import pytest

from anydepth.pipeline import serve
from anydepth.pipeline.replica import Replica
from anydepth.pipeline.router import QueueFullError, Router
from anydepth.pipeline.worker import Worker
from anydepth.types import Chunk, Sampling
from tests.pipeline.making import (
    asks,
    assert_nothing_held,
    assert_same,
    engine_answers,
    made,
    outputs_of,
    prepared,
    router_of,
)

TWO = (((1, 2), "here"), ((3, 4), "here"))


def test_500_requests_and_two_deaths(tmp_path):
    """A process is killed and a thread fails, in different replicas and at different stages."""
    stages = ((1, 2), "here"), ((3, 4), "process")
    manifest = made(tmp_path, *stages, heads=True, replicas=2, fill="deferred", queue=50)
    asked = asks(Random(8), 500, heads=True)
    wanted, ended, reasons = engine_answers(manifest, asked), {}, {}
    with router_of(manifest, tmp_path) as router:
        doomed = {120: (0, 1), 300: (1, 0)}
        for chunk in router.run(prepared(router, asked)):
            if chunk.output is None:
                continue
            assert chunk.request_id not in ended, "answered twice"
            ended[chunk.request_id] = chunk.output
            if chunk.finish_reason == "error":
                reasons[chunk.request_id] = router.reason(chunk.request_id)
            if len(ended) in doomed:
                number, stage = doomed.pop(len(ended))
                router.settle()  # the second must not find its replica down
                router.replicas[number].links[stage].kill()
        assert_nothing_held(router)
        assert [replica.restarts for replica in router.replicas] == [1, 1]
        assert router.reason("0") is None
    assert ended.keys() == wanted.keys() and not doomed
    assert 0 < len(reasons) <= 2 * manifest.max_batch
    for reason in reasons.values():
        assert ("worker 2 of 2 has died" in reason and "exit code -9" in reason) or "worker 1 of 2 has died" in reason
    for id, output in ended.items():
        if id in reasons:
            assert output.token_ids == wanted[id].token_ids[: len(output.token_ids)]
        else:
            assert_same(output, wanted[id])


def test_nothing_stays_behind_after_the_end(tmp_path, monkeypatch):
    """No thread, no socket and no name of one, also of a process that was killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(threading.enumerate()), sockets()
    with router_of(made(tmp_path, ((1, 2, 3), "here"), ((4,), "process")), tmp_path) as router:
        router.submit([1, 2])
        router.step()
        router.replicas[0].links[1].kill()
        assert wait_for(lambda: router.step(0.1) is not None and router.replicas[0].restarts == 1, 60.0)
        assert_nothing_held(router)
        assert len(list(tmp_path.glob("anydepth-*/*"))) == 4, "doors of router, thread and two processes"
    assert not list(tmp_path.glob("anydepth-*"))
    assert wait_for(lambda: set(threading.enumerate()) == before[0])
    assert wait_for(lambda: sockets() == before[1])


def test_a_connection_that_breaks_between_living_workers_is_made_again(tmp_path, monkeypatch):
    """One request: whoever sent its row has nothing more to send, and must hear of the end all the same."""
    lines, dial = [], serve.dial
    monkeypatch.setattr(serve, "dial", lambda *to: lines.append(dial(*to)) or lines[-1])
    manifest = made(tmp_path, ((1, 2, 3), "here"), ((4,), "process"))
    asked = [([1, 2], {"max_tokens": 60, "ignore_eos": True})]
    wanted = engine_answers(manifest, asked)["0"]
    with router_of(manifest, tmp_path) as router:
        ended = list[Chunk]()
        router.submit([1, 2], Sampling(max_tokens=60, ignore_eos=True), id="first")
        assert wait_for(lambda: ended.extend(router.step(0.1)) or ended, 20.0)
        with socket.fromfd(lines[-1].fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.shutdown(socket.SHUT_RDWR)
        assert wait_for(lambda: ended.extend(router.step(0.1)) or router.idle, 20.0)
        assert ended[-1].finish_reason == "error"
        assert "worker 2 of 2 has died" in (reason := router.reason("first"))
        assert "worker 1 could not reach it: the connection ended" in reason
        assert_nothing_held(router)
        assert router.replicas[0].restarts == 1
        assert_same(outputs_of(router.run(prepared(router, asked)))["0"], wanted)


def sockets():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in found if link.startswith("socket:")}


def wait_for(true, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_others_of_a_replica_go_on_after_a_fault(tmp_path, monkeypatch, stage):
    """A fault inside a worker, in the middle of a batch, is a death; its neighbours' pages come back."""
    manifest = made(tmp_path, ((1,), "here"), ((2, 3), "here"), ((4,), "here"), max_batch=3)
    asked = asks(Random(9), 30)
    wanted, run, calls = engine_answers(manifest, asked), Worker.run, []

    def faulty(self, batch):
        calls.append(self.part.own[0])
        if self.part.own[0] == (1, 2, 4)[stage] and calls.count(self.part.own[0]) == 9:
            raise FloatingPointError("planted")
        return run(self, batch)

    monkeypatch.setattr(Worker, "run", faulty)
    with router_of(manifest, tmp_path) as router:
        outputs = [chunk.output for chunk in router.run(prepared(router, asked)) if chunk.output]
        failed = [output for output in outputs if output.finish_reason == "error"]
        assert len(outputs) == 30 and 0 < len(failed) <= 3
        assert all("FloatingPointError: planted" in router.reason(output.request_id) for output in failed)
        for output in outputs:
            if output not in failed:
                assert_same(output, wanted[output.request_id])
        assert_nothing_held(router)


def test_a_pipeline_whose_worker_cannot_start_again_is_given_up(tmp_path):
    manifest = made(tmp_path, *TWO, max_batch=2)
    with router_of(manifest, tmp_path) as router:
        for request in prepared(router, asks(Random(1), 12)):
            router.submit(request)
        router.step()
        (tmp_path / "parts" / "segment-3.safetensors").write_bytes(b"gone")
        router.replicas[0].links[1].kill()
        ended = {}
        while not router.idle:
            ended |= {chunk.request_id: chunk.finish_reason for chunk in router.step() if chunk.finish_reason}
        reasons = [router.reason(id) for id, why in ended.items() if why == "error"]
        assert len(ended) == 12 and len(reasons) >= 10
        assert all("has died" in reason for reason in reasons)
        assert "segment-3.safetensors is not the file" in reasons[-1] and "no pipeline is left" in reasons[-1]


def test_a_worker_that_cannot_start_is_an_error_at_once(tmp_path):
    manifest = made(tmp_path, *TWO)
    (tmp_path / "parts" / "segment-2.safetensors").write_bytes(b"corrupt")
    with pytest.raises(
        RuntimeError, match=r"worker 1 of 2 has died: ValueError: .*segment-2\.safetensors is not the file"
    ):
        Router(manifest, tmp_path / "parts")


def test_a_full_queue_says_so_and_run_waits_for_room(tmp_path):
    manifest = made(tmp_path, *TWO, queue=2, max_batch=2)
    taken = []

    def source(router):
        for request in prepared(router, [([1, 2], {"max_tokens": 3})] * 9):
            taken.append(request.id)
            yield request

    with router_of(manifest, tmp_path) as router:
        router.submit([1, 2])
        router.submit([1, 2])
        with pytest.raises(QueueFullError, match="2 requests wait"):
            router.submit([1, 2])
        while not router.idle:
            router.step()
        chunks = router.run(source(router))
        next(chunks)
        assert len(taken) <= 2 * manifest.queue + manifest.max_batch
        assert sum(chunk.output is not None for chunk in chunks) == 9 and len(taken) == 9


def test_micro_batches_are_shared_out_and_never_more_than_the_workers_can_take(tmp_path, monkeypatch):
    manifest = made(tmp_path, *TWO, max_batch=6, micro_batch=8, kv_pages=200)
    sizes, run = [], Worker.run

    def watched(self, batch):
        sizes.append(len(batch.rows))
        return run(self, batch)

    monkeypatch.setattr(Worker, "run", watched)
    with router_of(manifest, tmp_path) as router:
        list(router.run(prepared(router, [([n], {"max_tokens": 60, "ignore_eos": True}) for n in range(6)])))
        # Of six rows three travel together, so that both workers have some.
        assert sorted(sizes)[len(sizes) // 2] == 3
        assert 2 <= router.replicas[0].peak_in_flight <= manifest.in_flight


@pytest.mark.parametrize(
    ("routing", "seated"), [("round_robin", [[0, 2, 4], [1, 3]]), ("least_loaded", [[0], [1, 2, 3, 4]])]
)
def test_routing(tmp_path, monkeypatch, routing, seated):
    """The one that is next in turn, or the one with the fewest: the first replica's request stays, the others end."""
    manifest = made(tmp_path, *TWO, replicas=2, routing=routing, kv_pages=100)
    where, seat = {}, Replica.seat

    def watched(self, key, request):
        where.setdefault(id(self), []).append(key)
        seat(self, key, request)

    monkeypatch.setattr(Replica, "seat", watched)
    with router_of(manifest, tmp_path) as router:
        router.submit([1], Sampling(max_tokens=120, ignore_eos=True))
        for _ in range(4):
            id_ = router.submit([1], Sampling(max_tokens=1)).id
            while not any(chunk.request_id == id_ for chunk in router.step()):
                pass
        assert not router.idle, "the long one must outlast the others"
    assert list(where.values()) == seated


def test_a_request_waits_while_its_pages_are_taken(tmp_path):
    manifest = made(tmp_path, *TWO, kv_pages=8, max_batch=6)  # 32 positions
    asked = [([1, 2, 3], {"max_tokens": 18, "ignore_eos": True})] * 5  # 20 each
    with router_of(manifest, tmp_path) as router:
        for request in prepared(router, asked):
            router.submit(request)
        most = 0
        while not router.idle:
            router.step()
            most = max(most, len(router.replicas[0].sequences))
        assert most == 1
        assert_nothing_held(router)
