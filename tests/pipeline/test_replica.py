"""What a replica believes of messages that come late, and how many it sends; its workers are played."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest

from anydepth.engine.requests import Requests
from anydepth.exits.load import load_policy
from anydepth.pipeline.export import outline
from anydepth.pipeline.manifest import Manifest, Stage
from anydepth.pipeline.messages import Batch, Broken, Gone, Hello, Join, Joined, Reads, Row, Stop, Token
from anydepth.pipeline.replica import TRIES, Replica
from anydepth.pipeline.serve import work
from anydepth.reference.weights import tiny_config
from anydepth.types import Sampling

STAGES = tuple(Stage(segments=own, place="here", device=("cpu",)) for own in ((1, 2), (3, 4)))
MANIFEST = Manifest(
    model="m", segments=(1, 2, 3, 4), stages=STAGES, readouts=(1, 2, 3, 4), max_batch=40, micro_batch=1, kv_pages=400
)


class Played:
    """A worker that only listens."""

    def __init__(self):
        self.heard, self.killed = [], False

    def kill(self):
        self.killed = True

    def send(self, message):
        self.heard.append(message)

    @property
    def batches(self):
        return [message for message in self.heard if isinstance(message, Batch)]


@pytest.fixture
def replica():
    it = Replica(MANIFEST, 4, start=lambda stage, life: Played())
    come_up(it)
    return it


def come_up(replica):
    for stage, life in enumerate(replica.lives):
        if replica.addresses[stage] is None:
            replica.hear(stage, life, Hello(stage))
    for stage, life in enumerate(replica.lives):
        assert replica.links[stage].heard[-1] == Join(replica.epoch, 1 if stage == 0 else None)
        replica.hear(stage, life, Joined(replica.epoch))
    assert replica.up


def seat(replica, count, **sampling):
    shape = outline(tiny_config("layered"), (1, 2, 3, 4)).shape
    requests = Requests(shape, load=load_policy, tokenizer=None, eos_ids=frozenset(), certificate=None)
    for key in range(count):
        replica.seat(key, requests.make([1, 2], Sampling(first_token="policy", **sampling)))


def read(replica, batch, token_id=3, epoch=None):
    tokens = [Token(row.key, row.output, token_id, 4, None, 4) for row in batch.rows if row.read]
    return Reads(replica.epoch if epoch is None else epoch, batch.number, tuple(tokens), True)


def test_no_more_batches_than_the_workers_can_take(replica):
    seat(replica, 20)
    replica.feed()
    link = replica.links[0]
    assert len(link.batches) == MANIFEST.in_flight == 4
    replica.feed()
    assert len(link.batches) == 4
    replica.hear(1, 0, read(replica, link.batches[0]))
    replica.feed()
    assert len(link.batches) == 5


def test_words_of_an_earlier_start_are_not_believed(replica):
    """Tokens that a worker read before another one's death, and last words of one that was replaced."""
    seat(replica, 1)
    replica.feed()
    _, first = replica.links[0].batches  # a prompt without its last token, and that token
    chunks, why = replica.hear(1, 0, Gone("shot"))
    assert [chunk.finish_reason for chunk in chunks] == ["error"] and "worker 2 of 2 has died: shot" in why
    come_up(replica)
    seat(replica, 1)
    replica.feed()
    before = set(replica._in_flight)
    late = read(replica, replica.links[0].batches[-1], epoch=0)
    assert replica.hear(0, 0, late) == ([], "")
    assert replica.hear(1, 0, read(replica, first)) == ([], "")
    assert replica.hear(1, 0, Gone("shot again")) == ([], "")
    assert replica._in_flight == before and replica.up and replica.restarts == 1 and len(replica.sequences) == 1


def test_a_second_death_while_the_first_is_mended(replica):
    replica.hear(0, 0, Gone("first"))
    replica.hear(1, 0, Gone("second"))
    assert not replica.up and replica.epoch == 2
    replica.hear(0, 1, Hello("again"))
    assert not replica.up and not replica.links[0].heard
    come_up(replica)
    assert replica.restarts == 2


def test_whom_the_one_before_cannot_reach_is_started_again(replica):
    seat(replica, 1)
    replica.feed()
    replica.hear(0, 0, Broken(7, "of another start"))
    assert replica.up and not replica.links[1].killed
    assert replica.hear(0, 0, Broken(0, "reset")) == ([], "")
    assert replica.links[1].killed and not replica.links[0].killed and not replica.up
    chunks, why = replica.hear(1, 0, Gone("shot"))
    assert [chunk.finish_reason for chunk in chunks] == ["error"]
    assert why == "worker 2 of 2 has died: shot (worker 1 could not reach it: reset)"
    come_up(replica)
    assert replica.lives == [0, 1] and not replica.links[1].killed
    assert "reach" not in replica.hear(1, 1, Gone("shot"))[1]


def test_a_worker_that_can_never_be_reached_is_given_up(replica):
    replica.hear(1, 0, Gone("shot"))
    for life in range(1, TRIES + 1):
        assert replica.lost is None
        replica.hear(1, life, Hello("behind a wall"))
        replica.hear(1, life, Joined(replica.epoch))
        replica.hear(0, 0, Broken(replica.epoch, "no route"))
        assert replica.links[1].killed and not replica.up
        replica.hear(1, life, Gone("shot"))
    assert "no route" in replica.lost and replica.lives[1] == TRIES + 1


def test_a_worker_drops_batches_of_another_epoch():
    ran, said, inbox = [], [], queue.SimpleQueue()
    part = SimpleNamespace(own=(4,))
    worker = SimpleNamespace(epoch=0, segments=4, part=part, run=lambda batch: (ran.append(batch.epoch) or batch, []))
    worker.join = lambda epoch: setattr(worker, "epoch", epoch)
    row = Row(0, 0, 1, 0, 4)
    for message in (
        Join(2, None),
        *(Batch(epoch=epoch, number=epoch, released=(), seats=(), rows=(row,)) for epoch in (1, 2, 3)),
        Stop(),
    ):
        inbox.put(message)
    work(worker, inbox, SimpleNamespace(to_router=said.append, connect=lambda join: True))
    assert ran == [2] and said == [Joined(2), Reads(2, 2, (), True)]
