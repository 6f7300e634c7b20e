"""Batch-invariant mode: the logits of a request have the same bits whatever else is in the batch.

`Invariant` runs a model in row blocks (`ops.invariant`) and is a model itself, so runner and scheduler know nothing of
it. Which row counts may be used is measured on the machine at hand when it is made: `REFERENCE` rows, and every count
that gives the same bits at every place. Where not even `REFERENCE` rows do, rows are run one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anydepth.dtypes import dtype_name
from anydepth.exits.base import Policy
from anydepth.models.base import KV, Model
from anydepth.ops.invariant import KV_BLOCK, BlockKV, RowBlocks, attend_each
from anydepth.ops.kv import TurnKV, join

REFERENCE = 32
COUNTS = (1, 4, 8, 16, 32, 64)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Invariant:
    """`model` in row blocks; a `models.base.Model` for the runner. `counts` has the row counts of each part.

    ValueError where the mode has not been measured, or where this machine's attention fails the measurement. It holds
    for the number of threads and the (packed or plain) weights there are when it is made, or measured again.
    """

    def __init__(self, model: Model) -> None:
        if model.device.type != "cpu":
            raise ValueError(
                f"batch_invariant=True on device {str(model.device)!r}; it has been measured on CPUs only: give "
                f"device='cpu', or leave it out"
            )
        if model.dtype not in DTYPES:
            allowed = ", ".join(map(dtype_name, DTYPES))
            raise ValueError(f"batch_invariant=True with dtype {dtype_name(model.dtype)!r}; allowed: {allowed}")
        self._model = model
        self.shape, self.dtype, self.device = model.shape, model.dtype, model.device
        self.embed, self.cost, self.pack, self.slots = model.embed, model.cost, model.pack, model.slots
        self.declines, self.over_vocabulary = model.declines, model.over_vocabulary
        self.measure()

    def measure(self) -> None:
        """Find the row counts that may be used with the weights as they are now."""
        model, depths = self._model, sorted({*self.shape.headed, self.shape.segments})  # each with a readout of its own
        with torch.inference_mode():
            _check_attention(model)
            self._segment = RowBlocks(_counts(model, lambda h: model.segment(1, h, _Alone(model, len(h)))))
            self._readout = RowBlocks(_counts(model, lambda h: torch.cat([model.listed(k, h) for k in depths], 1)))
            self._project = self._segment  # which a looped model has no use for
            if not self.shape.shared_weights:
                self._project = RowBlocks(_counts(model, lambda h: _keys_values(model, range(1), h).flatten(1)))
            # One number a row shows little of how it was summed, so no second count is tried.
            gate = _counts(model, lambda h: model.signal(1, h), (REFERENCE,)) if self.shape.has_gate else (1,)
            self._signal = RowBlocks(gate)

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """Row counts of the blocks in use: (1,) is one row at a time."""
        return {"segment": self._segment.counts, "readout": self._readout.counts, "signal": self._signal.counts}

    def segment(self, k: int, h_Nd: Tensor, kv: KV) -> Tensor:
        assert isinstance(kv, TurnKV)
        return join([b.drop(self._model.segment(k, b.of(h_Nd), BlockKV(kv, b))) for b in self._segment.cut(len(h_Nd))])

    def signal(self, k: int, h_Nd: Tensor) -> Tensor:
        return self._signal.run(lambda h: self._model.signal(k, h), h_Nd)

    def readout(self, k: int, h_Nd: Tensor) -> Tensor:
        return self.over_vocabulary(k, self.listed(k, h_Nd))

    def listed(self, k: int, h_Nd: Tensor) -> Tensor:
        return self._readout.run(lambda h: self._model.listed(k, h), h_Nd)

    def answers(self, k: int, h_Nd: Tensor, logits_NC: Tensor) -> Tensor:
        return self._signal.run(lambda h, logits: self._model.answers(k, h, logits), h_Nd, logits_NC)

    def keys_values(self, layers: range, h_Nd: Tensor, positions_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        made = self._project.run(lambda h, at: _keys_values(self._model, layers, h, at), h_Nd, positions_N)
        return [(made[:, place, 0], made[:, place, 1]) for place in range(len(layers))]


def in_blocks(policy: Policy) -> Policy:
    """The same policy, deciding for REFERENCE rows at a time: a sigmoid's bits depend on how many it is taken of."""
    decide, blocks = policy.decide, RowBlocks((REFERENCE,))

    def decided(state_NS: Tensor, depth_N: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        leave, state = [], []
        for b in blocks.cut(len(depth_N)):
            parts = decide(b.of(state_NS), b.of(depth_N), b.of(seen))
            leave.append(b.drop(parts[0]))
            state.append(b.drop(parts[1]))
        return join(leave), join(state)

    policy.decide = decided  # type: ignore[method-assign]
    return policy


class _Alone:
    """A KV for measurements: every row, at the last position, sees only what it wrote itself."""

    def __init__(self, model: Model, rows: int) -> None:
        self.positions = torch.full((rows,), model.shape.max_positions - 1)

    def attend(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        return q_NHD + (k_NGD + v_NGD).repeat_interleave(q_NHD.shape[1] // k_NGD.shape[1], 1)


def _keys_values(model: Model, layers: range, h_Nd: Tensor, positions_N: Tensor | None = None) -> Tensor:
    """K and V of every layer, [N, layers, 2, G, D]; by default at the last position."""
    if positions_N is None:
        positions_N = torch.full((len(h_Nd),), model.shape.max_positions - 1)
    return torch.stack([torch.stack(both, 1) for both in model.keys_values(layers, h_Nd, positions_N)], 1)


def _counts(model: Model, part: Callable[[Tensor], Tensor], others: tuple[int, ...] = COUNTS) -> tuple[int, ...]:
    """Row counts whose blocks give every row the bits it has among REFERENCE rows; (1,) if those depend on its place
    there. Rows moved on by one place tell that of every place from its neighbour's."""
    kept, compared, draw = sorted({REFERENCE, *others}), 0, torch.Generator().manual_seed(0)
    # Rounded to 8 bits, a sum in another order shows once in some thousand numbers.
    enough = 1 << (16 if model.dtype == torch.bfloat16 else 12)
    while compared < enough:
        h = _normal(model, draw, REFERENCE, model.shape.hidden)
        wanted = part(h)
        compared += wanted.numel()
        if not torch.equal(part(h.roll(1, 0)), wanted.roll(1, 0)):
            return (1,)
        kept = [count for count in kept if _same(part, h, wanted, count)]
    return tuple(kept)


def _same(part: Callable[[Tensor], Tensor], h_Nd: Tensor, wanted_N: Tensor, count: int) -> bool:
    """Whether blocks of `count` rows give every row the wanted bits."""
    times = -(-count // len(h_Nd))
    blocks = zip(h_Nd.repeat(times, 1).split(count), torch.cat([wanted_N] * times).split(count), strict=True)
    return all(torch.equal(part(h), wanted) for h, wanted in blocks)


def _normal(model: Model, draw: torch.Generator, *size: int) -> Tensor:
    """Random numbers that use all bits of the model's dtype: in shorter ones sums may be exact, in any order."""
    wide = torch.float64 if model.dtype == torch.float64 else torch.float32
    return torch.randn(*size, generator=draw, dtype=wide).to(model.dtype)


def _check_attention(model: Model) -> None:
    """ValueError unless a row's attention has the same bits alone, among others, and in a longer padded context."""
    shape, draw = model.shape, torch.Generator().manual_seed(0)
    longest = min(16, -(-shape.max_positions // KV_BLOCK)) * KV_BLOCK
    for length in {1, KV_BLOCK - 5, longest - 3} & set(range(1, longest)):
        q = _normal(model, draw, 1, shape.heads, shape.head_dim)
        k, v = (_normal(model, draw, 1, longest, shape.kv_heads, shape.head_dim) for _ in "kv")
        k[:, length:], v[:, length:] = 0, 0
        mask = torch.zeros(1, 1, 1, longest, dtype=model.dtype)
        mask[..., length:] = float("-inf")
        own = -(-length // KV_BLOCK) * KV_BLOCK
        wanted = attend_each(q, k[:, :own], v[:, :own], mask[..., :own])
        for context in {own, min(own + KV_BLOCK, longest), longest}:
            ks, vs, masks = k[:, :context], v[:, :context], mask[..., :context]
            several = attend_each(
                q.repeat(3, 1, 1), ks.repeat(3, 1, 1, 1), vs.repeat(3, 1, 1, 1), masks.repeat(3, 1, 1, 1)
            )
            sharing = attend_each(q.repeat(REFERENCE, 1, 1), ks, vs, masks.repeat(REFERENCE, 1, 1, 1))
            for found in (several, sharing):
                if not torch.equal(found, wanted.expand_as(found)):
                    raise ValueError(
                        f"batch_invariant=True: on this machine attention over {length} positions has other bits "
                        f"among {len(found)} rows padded to {context} positions; leave it out"
                    )
