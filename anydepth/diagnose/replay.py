"""Answers once more, token by token and depth by depth, with a look at what decided: a pass of its own, so that the
runs that are judged carry no diagnostics.

The engine itself does it: each answer is scored as a continuation of its prompt. Its first token was read off the
prompt at full depth; scored, the prompt's last token is a decode row that is read at full depth, which is the same
positions through the same segments. Shape suffixes: see `models.base`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anydepth.engine.engine import Engine
from anydepth.engine.sampling import raw_logprobs
from anydepth.exits.base import Policy
from anydepth.exits.gate_cdf import ReleasedArithmetic
from anydepth.exits.load import load_policy
from anydepth.models.base import Model
from anydepth.types import Chunk, Output, Sampling


class Seen(NamedTuple):
    """One output of a replayed answer: its logits [V] at its depth, and the gate's cumulative exit probability after
    each round that ran but the last one, R (none where the model has no gate)."""

    answer: int
    output: int
    logits_V: Tensor
    cdf: tuple[float, ...]


class WatchedModel:
    """A model that keeps what `readout` returns, by depth, until it is taken; all else is the model's own."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kept: list[tuple[int, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def readout(self, k: int, h_Nd: Tensor) -> Tensor:
        logits_NV = self._model.readout(k, h_Nd)
        self._kept.append((k, logits_NV))
        return logits_NV

    def take(self, depths: Sequence[int]) -> list[Tensor]:
        """The logits of rows read at these depths, in the order of the turn's rows."""
        kept, self._kept = self._kept, []
        if self._model.shape.shared_weights:  # whatever their depths, rows are read together
            return [row for _, logits_NV in kept for row in logits_NV]
        by_depth = {k: iter(logits_NV) for k, logits_NV in kept}
        return [next(by_depth[depth]) for depth in depths]


class Recorded(Policy):
    """Reads every output at its recorded depth, and keeps the gate's exit probability of every round that is run.

    A request says by its seed whose depths are its own. State columns: that number, the output's index, then the state
    of gate_cdf.
    """

    name = "recorded"
    needs = "signal"

    def __init__(self, depths: Sequence[Sequence[int]], *, gate_dtype: str) -> None:
        self._depths, self._gate = depths, load_policy("gate_cdf", gate_dtype=gate_dtype)
        self.cdf: dict[tuple[int, int], list[float]] = defaultdict(list)

    def parameters(self, sampling: Sampling, bounds: tuple[int, int], segments: int) -> tuple[float, ...]:
        assert sampling.seed is not None
        return (float(sampling.seed), *self._gate.parameters(Sampling(), bounds, segments))

    def start(self, parameters_NP: Tensor) -> Tensor:
        number_N1 = parameters_NP[:, :1]
        return torch.cat((number_N1, -torch.ones_like(number_N1), self._gate.start(parameters_NP[:, 1:])), 1)

    def decide(self, state_NS: Tensor, depth_N: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        _, gate = self._gate.decide(state_NS[:, 2:], depth_N, seen)
        released = isinstance(self._gate, ReleasedArithmetic)
        cdf = (gate[:, 1] if released else 1.0 - gate[:, 0]).tolist()
        output_N = state_NS[:, 1] + (depth_N == 1)
        leave = []
        for n, (number, output, depth) in enumerate(zip(state_NS[:, 0], output_N, depth_N, strict=True)):
            at = int(number), int(output)
            self.cdf[at].append(cdf[n])
            leave.append(int(depth) == self._depths[at[0]][at[1]])
        moved = torch.cat((state_NS[:, :1], output_N.unsqueeze(1), gate), 1)
        return torch.tensor(leave, device=depth_N.device), moved


def replay(
    model: Model, answers: Sequence[Output], *, fill: str, gate_dtype: str = "float32", concurrency: int = 1
) -> Iterator[Seen]:
    """Every output of the answers in the order in which they come out, `concurrency` answers at a time."""
    watched = WatchedModel(model)
    engine = Engine(watched, fill=fill, gate_dtype=gate_dtype, max_batch=concurrency)
    shape = model.shape
    gated = shape.has_gate and shape.segments > 1
    recorded = Recorded([answer.depths for answer in answers], gate_dtype=gate_dtype) if gated else None
    numbers, outputs = {}, defaultdict[str, Iterator[int]](lambda: iter(range(shape.max_positions + 1)))
    for number, answer in enumerate(answers):
        ask = Sampling(trace=answer.depths, seed=number)
        request = engine.prepare(answer.prompt_ids, ask, forced=[answer.token_ids], streaming=False)
        request.policy = recorded or request.policy
        numbers[engine.submit(request).id] = number
    while not engine.idle:
        for chunk, logits_V in _read(engine.step(), watched):
            number, output = numbers[chunk.request_id], next(outputs[chunk.request_id])
            # Under `full` rounds run on after the readout; they belong to the same output and come before this chunk.
            cdf = tuple(recorded.cdf.pop((number, output), ())) if recorded else ()
            yield Seen(number, output, logits_V, cdf)


def _read(chunks: Iterable[Chunk], watched: WatchedModel) -> Iterator[tuple[Chunk, Tensor]]:
    """Chunks of a turn, which come in the order of its rows, each with the logits it was read from."""
    chunks = list(chunks)
    rows = watched.take([chunk.depth or 0 for chunk in chunks])
    for chunk, logits_V in zip(chunks, rows, strict=True):
        assert chunk.token_id is not None and chunk.logprob is not None
        own = raw_logprobs(logits_V.unsqueeze(0), torch.tensor([chunk.token_id], device=logits_V.device))
        assert abs(float(own) - chunk.logprob) < 1e-6, "these are another row's logits"
        yield chunk, logits_V
