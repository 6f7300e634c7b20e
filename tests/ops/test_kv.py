"""Planes and pages: what is copied, where rows write, and what they may read."""

from __future__ import annotations

import math

import pytest
import torch

from anydepth.ops.fill import FILLS, load_fill
from anydepth.ops.kv import Group, KVMap, KVPool
from anydepth.types import EXACT_FILLS, Shape

SIZE, PAGES, PLANES, LAYERS = 4, 5, 3, 2
POSITIONS = (PAGES + 1) * SIZE  # of a plane, the null page included


def shape(looped=True) -> Shape:
    layers = (range(LAYERS),) * PLANES if looped else (range(1), range(1, LAYERS))
    return Shape(
        segments=len(layers),
        segment_layers=layers,
        shared_weights=looped,
        hidden=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        vocab=9,
        max_positions=16,
        has_gate=looped,
    )


def pool() -> KVPool:
    """Every number differs, so that any copy shows where it came from."""
    made = KVPool(shape(), PLANES, PAGES, SIZE, dtype=torch.float64, device=torch.device("cpu"))
    made.data[:] = torch.arange(made.data.numel(), dtype=torch.float64).view(made.data.shape)
    return made


def test_copies_are_of_the_position_itself_layer_by_layer_into_deeper_planes_only():
    """Three rows leave at depths 1, 2 and 3; all else stays as it was, neighbours and shallower planes too."""
    kv = pool()
    before, at = kv.data.clone(), [9, 14, 22]  # positions within a plane
    depth = torch.tensor([1, 2, 3])
    kv.copy_deeper(torch.tensor(at) + kv.offset(depth), depth)
    wanted = before.clone()
    for position, source in zip(at, (0, 1, 2), strict=True):
        for plane in range(source + 1, PLANES):
            wanted[:, :, plane * POSITIONS + position] = before[:, :, source * POSITIONS + position]
    assert torch.equal(kv.data, wanted)


def test_a_slots_positions_follow_its_pages_in_order():
    kv = KVMap(pool(), slots=2, max_positions=10)
    kv.seat(1, (5, 2, 3))
    assert kv.table[1].tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 12, 13]
    assert kv.table[0].tolist() == [0] * 10


def test_a_slot_grows_page_by_page():
    """Storage stays a slice while its pages lie in a row, and not a page longer."""
    kv = KVMap(pool(), slots=2, max_positions=16)
    kv.seat(0, (2,))
    kv.give(0, 1, (3,))
    assert kv.table[0, :8].tolist() == list(range(8, 16)) and kv.chunk(0, 0, 7, 1).storage_T == slice(8, 15)
    kv.give(0, 2, (1,))
    assert kv.table[0, 8:12].tolist() == [4, 5, 6, 7]
    assert kv.chunk(0, 0, 9, 2).storage_T.tolist() == [POSITIONS + n for n in (*range(8, 16), 4)]
    kv.seat(0, (5,))
    assert kv.chunk(0, 0, 4, 1).storage_T == slice(20, 24)


def test_rows_that_do_not_run_write_to_the_scratch_page():
    made = pool()
    kv = KVMap(made, slots=3, max_positions=16)
    kv.seat(0, (1,))
    kv.seat(1, (2,))
    ended = torch.tensor([[False], [True]])
    write, seen = kv.together(torch.tensor([0, 1]), torch.tensor([[2], [0]]), torch.tensor([1, 2]), 3, ended)
    assert write.tolist() == [6, made.scratch] and seen.storage_BT[0].tolist() == [4, 5, 6]
    assert made.scratch // SIZE == made.pages - 1


def test_each_row_reads_its_own_positions_in_its_own_plane_and_nothing_else():
    """A short row at depth 3 beside a long one at depth 1, everything else NaN: attention over equal keys is the mean
    of the values a row sees, and the short row's padding adds nothing."""
    made = KVPool(shape(), PLANES, PAGES, SIZE, dtype=torch.float64, device=torch.device("cpu"))
    made.data[:, :, SIZE:] = math.nan
    kv = KVMap(made, slots=3, max_positions=16)
    kv.seat(0, (4, 1))
    kv.seat(2, (3,))
    cells = {(0, 1): [16, 17, 18, 19, 4, 5], (2, 3): [12, 13]}  # (slot, depth): positions before the row's own
    for (_, depth), storage in cells.items():
        for n, at in enumerate(storage):
            made.data[:, 0, (depth - 1) * POSITIONS + at] = 1.0
            made.data[:, 1, (depth - 1) * POSITIONS + at] = float(n)
    turn = kv.turn([Group(torch.tensor([0, 2]), torch.tensor([6, 2]), torch.tensor([1, 3]), 1, 7)], [])
    assert turn.positions.tolist() == [6, 2] and turn.write_N.tolist() == [6, 2 * POSITIONS + 14]
    ones = torch.ones(2, 1, 4, dtype=torch.float64)
    out = turn.attend(1, torch.ones(2, 2, 4, dtype=torch.float64), ones, ones * 10)
    assert out[0, 0, 0].item() == pytest.approx((0 + 1 + 2 + 3 + 4 + 5 + 10) / 7)
    assert out[1, 0, 0].item() == pytest.approx((0 + 1 + 10) / 3)
    assert made.data[1, 1, 6].tolist() == [10.0] * 4 and made.data[0, 1, 6].isnan().all()


def test_one_plane_has_no_offset():
    kv = KVPool(shape(), 1, PAGES, SIZE, dtype=torch.float32, device=torch.device("cpu"))
    assert kv.offset(torch.tensor([1, 2, 3])).tolist() == [0, 0, 0]
    assert pool().offset(torch.tensor([1, 2, 3])).tolist() == [0, POSITIONS, 2 * POSITIONS]


def test_exact_fills_are_those_that_run_every_segment_or_keep_what_it_takes():
    assert tuple(name for name, fill in FILLS.items() if fill.runs_on or fill.defers) == EXACT_FILLS


def test_fills():
    """Planes a layer keeps, who runs on to R, who copies, and how a prompt is cut."""
    facts = {f.name: (f.planes(shape()), f.runs_on, f.copies, f.prefill_rows) for f in FILLS.values()}
    assert facts == {
        "full": (3, True, False, None),
        "last_exited": (3, False, True, None),
        "deferred": (3, False, False, None),
        "project": (3, False, True, None),
        "shared": (1, False, False, 1),
    }
    layered = shape(looped=False)
    assert (load_fill(None, shape()).name, load_fill(None, layered).name) == ("last_exited", "full")
    assert load_fill("full", layered).planes(layered) == 1
