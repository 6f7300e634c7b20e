"""The bound of a model with exit heads counts the products that are really made: of layers, probes, heads, of what a
shortlist that declines has cost, and of keys and values of skipped layers. Attention is left out on both sides."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from anydepth.bench.roofline import Machine, bound
from anydepth.engine.engine import Engine
from anydepth.models.heads import KINDS
from anydepth.types import Sampling
from tests.engine.test_heads import PROFILE, with_heads
from tests.helpers import drain

PRODUCTS = ("mm", "addmm", "mv")


def vector(matrix, x, *, out_shape=None, **options):
    return 2 * matrix[0] * matrix[1]


def multiplied(engine, requests):
    """FLOPs of the products of matrices with matrices and vectors; batched ones are attention's."""
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mv: vector})
    with counter:
        outputs = drain(engine, requests)
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in counts.items() if str(op).removeprefix("aten.") in PRODUCTS), outputs


def bounded(model, work):
    """The bound's FLOPs without attention's."""
    shape = model.shape
    attention = sum(
        4 * shape.heads * shape.head_dim * turn.attended * len(shape.segment_layers[turn.segment - 1]) for turn in work
    )
    return bound(model, work, Machine(1.0, 1.0)).flops - attention


@pytest.mark.parametrize("signals", ["sync", "exact"])
@pytest.mark.parametrize("fill", ["full", "project", "deferred"])
@pytest.mark.parametrize("policy", ["confidence", "probe", "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_bounded_is_what_is_multiplied(kind, policy, fill, signals):
    model, _, _ = with_heads(kind)
    engine = Engine(model, fill=fill, profiles=[PROFILE], max_batch=3, page_size=4, signals=signals)
    engine.work = []
    ask = Sampling(max_tokens=9, exit_policy=policy)
    requests = [engine.prepare(Random(n).choices(range(61), k=3 + n), ask) for n in range(4)]
    made, outputs = multiplied(engine, requests)
    assert bounded(model, engine.work) == made
    depths = {depth for output in outputs.values() for depth in output.depths[1:]}
    assert depths == {3} if policy == "never" else len(depths) > 1, "nobody left early"


def test_mixed_policies_are_bounded_too():
    model, _, _ = with_heads("shortlist")
    engine = Engine(model, fill="project", profiles=[PROFILE], page_size=4)
    engine.work = []
    asks = [{"exit_policy": "confidence"}, {"exit_policy": "probe"}, {"depth": 1}, {}]
    made, _ = multiplied(engine, [engine.prepare([5, 9, n], Sampling(max_tokens=8, **a)) for n, a in enumerate(asks)])
    assert bounded(model, engine.work) == made


def test_a_shortlist_costs_its_own_size_and_an_adapter_on_top():
    hidden, vocab, item = 32, 61, 8
    plain = 2 * hidden * vocab
    for kind, flops, answers in (
        ("norm", plain, 0),
        ("low_rank", plain + 2 * 2 * hidden * 4, 0),
        ("shortlist", 2 * hidden * 20, 2 * hidden),
    ):
        model, _, _ = with_heads(kind)
        assert model.cost("readout", 1, 0.0).flops_per_row == flops
        assert model.cost("readout", 1, 0.0).weight_bytes_per_turn == flops / 2 * item
        assert model.cost("answers", 1, 0.0).flops_per_row == answers
        assert model.cost("readout", 3, 0.0).flops_per_row == plain, "the last exit is the model's own"


def test_what_several_heads_multiply_by_is_read_once():
    """A turn under `full` whose rows are read at depths 1, 2 and 3: the unembedding once, two adapters."""
    model, _, _ = with_heads("low_rank")
    engine = Engine(model, fill="full", profiles=[PROFILE], page_size=4, max_batch=3)
    engine.work = []
    asks = [{"depth": 1}, {"depth": 2}, {}]
    drain(engine, [engine.prepare([5, 9, n], Sampling(max_tokens=4, **ask)) for n, ask in enumerate(asks)])
    turn = next(turn for turn in engine.work if {depth for _, depth, _ in turn.made} == {1, 2, 3})
    shape, item = model.shape, 8
    heads = shape.hidden * shape.vocab * item + 2 * (2 * shape.hidden * 4) * item
    rows = 3 * (shape.vocab + shape.hidden) * item  # logits written, embeddings read
    segment = model.cost("segment", 3, turn.kv_read / 3)
    others = 3 * segment.bytes_per_row + segment.weight_bytes_per_turn
    assert turn.prefill_rows == 0
    assert bound(model, [turn], Machine(1.0, 1.0)).bytes == pytest.approx(others + heads + rows)
