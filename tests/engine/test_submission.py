"""How turns reach the device: what is refused, that none of it can be seen, and the books of graphs and buffers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from anydepth.engine.completions import ALL_LINES, Buffer, Buffers
from anydepth.engine.engine import Engine
from anydepth.engine.graphs import Graphs
from anydepth.engine.submission import Streams, Submission, default_submission
from anydepth.types import Sampling
from tests.helpers import drain, twins

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def answers(signals: str, submission: Submission | None, requests: int = 5) -> list:
    engine = Engine(twins(seed=2)[0], signals=signals, submission=submission, max_batch=8, page_size=4)
    asks = [Sampling(max_tokens=7 + n, exit_threshold=0.6, logprobs="raw") for n in range(requests)]
    outputs = drain(engine, [engine.prepare([3 + n, 4, 5], ask, id=str(n)) for n, ask in enumerate(asks)])
    return [(outputs[str(n)].token_ids, outputs[str(n)].depths) for n in range(requests)]


@pytest.mark.parametrize("signals", ["delayed", "exact", "resident"])
def test_nothing_of_it_can_be_seen(signals):
    ways = [Submission(static_buffers=False)] + [Submission(padding=True)] * (signals == "resident")
    for submission in ways:
        assert answers(signals, submission) == answers(signals, None)


def test_padding_rows_change_no_page_and_no_state():
    """Five rows are padded to eight: what belongs to nobody stays as it was."""
    engine = Engine(twins(seed=2)[0], signals="resident", submission=Submission(padding=True), page_size=4, kv_pages=40)
    pool = engine.slots.pool
    requests = [engine.prepare([3 + n, 4, 5], Sampling(max_tokens=5)) for n in range(5)]
    before = (
        pool.data[:, :, : pool.page_size].clone(),
        [row[engine.slots.padding].clone() for row in engine.slots.rows()],
    )
    drain(engine, requests)
    assert torch.equal(before[0], pool.data[:, :, : pool.page_size]) and (before[0] == 0).all()
    numbers = engine.slots.state.numbers_S8[engine.slots.padding]
    assert numbers[1:4].tolist() == [0, 0, 0], "a padding row moved on"


@pytest.mark.parametrize(
    "submission, signals, message",
    [
        (Submission(streams=3), "exact", "streams is 3; allowed: 1, 2"),
        (Submission(static_buffers="no"), "exact", "static_buffers is 'no'; allowed: True, False"),
        (Submission(padding=1), "resident", "padding is 1; allowed: True, False"),
        (Submission(streams=2), "exact", "streams=2, graphs=False need a CUDA device; this model is on 'cpu'"),
        (Submission(graphs=True, padding=True), "resident", "graphs=True need a CUDA device"),
        (Submission(padding=True), "exact", "padding=True, graphs=False go with signals='resident'"),
        (Submission(static_buffers=False), "sync", "is for late signals; signals 'sync' submits nothing ahead"),
    ],
)
def test_what_cannot_be_is_refused(submission, signals, message):
    with pytest.raises(ValueError, match=message):
        Engine(twins()[0], signals=signals, submission=submission)


def test_a_submission_is_no_mapping():
    with pytest.raises(ValueError, match="allowed: a Submission, or None"):
        Engine(twins()[0], signals="resident", submission={"padding": True})


def test_graphs_need_padding():
    with pytest.raises(ValueError, match="graphs need padding=True"):
        Submission(graphs=True).check("resident", CUDA)


def test_the_default_is_all_that_can_be_done():
    assert default_submission("resident", CPU) == Submission()
    assert default_submission("sync", CUDA) == Submission()
    assert default_submission("exact", CUDA) == Submission(streams=2)
    assert default_submission("resident", CUDA) == Submission(streams=2, padding=True, graphs=True)
    for signals in ("sync", "delayed", "exact", "resident"):
        default_submission(signals, CUDA).check(signals, CUDA)


def test_one_stream_needs_no_device():
    wrote = []
    Streams(Submission(), CPU).beside(lambda *given, **more: wrote.append((given, more)), ((0, None),), logprob=None)
    assert wrote == [((((0, None),),), {"logprob": None})]


def test_a_buffer_in_flight_is_not_given_out_and_one_that_was_read_is():
    for static in (True, False):
        buffers = Buffers(4, CPU, static=static)
        first, second = buffers.take(), buffers.take()
        assert first is not second and buffers.in_flight == 2
        buffers.give_back(first)
        assert (buffers.take() is first) == static


@pytest.mark.parametrize("lines", [((ALL_LINES, 3),), ((0, 2), (1, None), (2, 4))])
def test_outcomes_are_copied_to_contiguous_memory(lines, monkeypatch):
    """A GPU's copy to any other place would make the host wait."""
    copied, copy = [], torch.Tensor.copy_

    def counted(target, *given, **more):
        copied.append(target)
        return copy(target, *given, **more)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    buffer = Buffer(5, CPU)
    for start in (10, 100):  # used again, with fewer numbers than before
        numbers = [
            (line, None if n is None else torch.arange(start, start + (3 * n if line == ALL_LINES else n)))
            for line, n in lines
        ]
        numbers = [(line, v.view(3, -1) if line == ALL_LINES else v) for line, v in numbers]
        buffer.clear()
        buffer.write(numbers)
        got = buffer.read("numbers")
        for line, values in numbers:
            assert values is None or (got if line == ALL_LINES else got[line][: len(values)]) == values.tolist()
    assert copied and all(target.is_contiguous() for target in copied)


class Books(Graphs):
    """Graphs whose captures are calls, of 100 bytes each."""

    def __init__(self, budget_bytes: int, *, fails: bool = False) -> None:
        super().__init__(budget_bytes, CUDA)
        self.fails, self.bytes, self.captures = fails, 0, 0

    def _new_graph(self):
        return SimpleNamespace(replay=lambda: None, pool=lambda: "pool")

    def _capturing(self, graph):
        if self.fails:
            raise RuntimeError("no capture today")
        self.captures, self.bytes = self.captures + 1, self.bytes + 100
        return nullcontext()

    def _reserved_bytes(self):
        return self.bytes


def test_a_turn_is_captured_the_second_time_and_replayed_from_then_on():
    graphs, ran = Books(1000), []
    for n in range(4):
        given = graphs.run("key", torch.tensor([n, 0]), lambda slots: ran.append(slots) or slots)
    assert len(ran) == 2 and graphs.replayed == 3 and graphs.captures == 1
    assert given.tolist() == [3, 0] and given is ran[1], "the graph reads the rows' slots where it was captured"


def test_beyond_the_budget_turns_run_eagerly():
    graphs, ran = Books(150), []
    for key in "abcabcabc":
        graphs.run(key, torch.tensor([1]), lambda slots: ran.append(slots))
    assert graphs.captures == 2 and graphs.used_bytes == 200 and len(ran) == 3 + 2 + 2 and graphs.replayed == 4


def test_a_capture_that_fails_is_said_once_and_runs_eagerly():
    graphs, ran = Books(1000, fails=True), []
    with pytest.warns(UserWarning, match="could not be captured as a CUDA graph and runs eagerly: no capture today"):
        for _ in range(4):
            graphs.run("key", torch.tensor([1]), lambda slots: ran.append(slots))
    assert len(ran) == 4 and graphs.replayed == 0
