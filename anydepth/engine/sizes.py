"""How much an engine holds: what was asked for, checked, or what suits the model and the machine."""

from __future__ import annotations

from typing import Any

import torch

from anydepth.models.base import Model
from anydepth.ops.fill import Fill
from anydepth.ops.kv import KVPool

DEFAULT_CONTEXT = 2048  # positions a slot that the default pool provides for
DEFAULT_POOL_BYTES = 4 << 30  # on a CPU, where untouched pages cost nothing
DEFAULT_HOST_BYTES = 4 << 30  # for preempted requests; taken only when it is needed
DEFAULT_PENDING = 256  # positions of a request that may wait under fill `deferred`


def check_whole(**options: Any) -> None:
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; allowed: whole numbers from 1")


def check_flags(**options: Any) -> None:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; allowed: True, False")


def default_pages(model: Model, planes: int, slots: int, page_size: int) -> int:
    """Pages for `slots` requests of 2,048 positions (less on a shorter model), as far as memory goes: 4 GiB on a CPU,
    half of what is free on a GPU. One request of that length always fits."""
    shape = model.shape
    a_slot = -(-min(shape.max_positions, DEFAULT_CONTEXT) // page_size)
    item = torch.empty((), dtype=model.dtype).element_size()
    page_bytes = 2 * shape.layers * planes * page_size * shape.kv_heads * shape.head_dim * item
    room = torch.cuda.mem_get_info(model.device)[0] // 2 if model.device.type == "cuda" else DEFAULT_POOL_BYTES
    return max(a_slot, min(slots * a_slot, room // page_bytes))


def host_pages(budget_bytes: int | None, pool: KVPool, context: int) -> int:
    """Pages that the host memory for preempted requests holds; ValueError for less than one request may need."""
    page_bytes = pool.data.nbytes // pool.pages
    longest = -(-context // pool.page_size)
    if budget_bytes is None:
        return max(longest, DEFAULT_HOST_BYTES // page_bytes)
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < longest * page_bytes:
        raise ValueError(
            f"host_kv_bytes is {budget_bytes!r}; one request of {context} positions may need "
            f"{longest * page_bytes} bytes when it is preempted: give at least that, or a smaller kv_pages"
        )
    return budget_bytes // page_bytes


def pending(positions: int | None, fill: Fill, context: int) -> int:
    """Positions of a request that may wait; 0 where the fill lets none wait."""
    if fill.defers:
        positions = DEFAULT_PENDING if positions is None else positions
        check_whole(pending_positions=positions)
        return min(positions, context)
    if positions is not None:
        raise ValueError(
            f"pending_positions is {positions!r}, but under fill {fill.name!r} no position waits: leave it out, or "
            f"give fill='deferred'"
        )
    return 0
