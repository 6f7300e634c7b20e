"""The whole turn of `resident` is one function of tensors: it can be traced on tensors that hold no numbers."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from anydepth.engine import resident_turn
from anydepth.engine.resident_runner import ResidentSlots
from anydepth.engine.resident_turn import Kind, Prompts, run_turn
from anydepth.exits.load import load_policy
from anydepth.models.ouro import Ouro
from anydepth.ops.fill import load_fill
from anydepth.reference.weights import tiny_config

PLAIN = Kind(8)
ALL = Kind(8, planned=True, stops=True, sampled=True, max_k=5, top_p=True, logprobs=True, processed=True)


def trace(fill: str, kind: Kind, *, prompts: int, gate_dtype: str = "float32") -> torch.fx.GraphModule:
    """The turn of three decode rows, and of a chunk of two positions that ends its prompt for each of `prompts`."""
    with FakeTensorMode():
        model = Ouro(tiny_config(), dtype=torch.float32, device=torch.device("cpu"))
        chosen, policy = load_fill(fill, model.shape), load_policy("gate_cdf", gate_dtype=gate_dtype)
        slots = ResidentSlots(model, chosen, slots=5, pages=8, page_size=4, context=16)
        ones = torch.ones(1, (2 if gate_dtype == "bfloat16" else 1) * 4, dtype=torch.float64)
        states = torch.zeros(6, policy.start(ones).shape[1], dtype=torch.float64)
        chunks = [slots.map.chunk(n, 0, 2, 4) for n in range(prompts)]

        def ids(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64)

        ends = ids(2 * prompts), ids(2 * prompts), chunks, ids(prompts), ids(prompts)
        ending = Prompts(torch.zeros(2 * prompts, model.shape.hidden), *ends) if prompts else None

        def turn(state, asks, rows, ending, states):
            policies = ((0, policy, states),)
            given = run_turn(model, chosen, slots.map, policies, state, asks, rows, ending, kind)
            return [x for x in given if x is not None]

        return make_fx(turn)(slots.state, slots.asks, ids(3), ending, states)


@pytest.mark.parametrize("kind", [PLAIN, ALL])
@pytest.mark.parametrize("prompts", [0, 2])
@pytest.mark.parametrize("fill", ["full", "last_exited", "shared"])
def test_the_turn_is_traced_without_a_number_being_read(fill, prompts, kind):
    """Tracing stops at any host read. What comes out moves the state on, where it lies."""
    graph = trace(fill, kind, prompts=prompts).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert not any("item" in name.split(".") or "nonzero" in name for name in called)
    assert sum("index_copy_" in name for name in called) >= 3 + 2 * 2  # state, states, K/V of two layers


def test_the_released_gate_arithmetic_is_traced_too():
    assert trace("last_exited", PLAIN, prompts=0, gate_dtype="bfloat16").graph.nodes


@pytest.mark.parametrize("read", ["int(left.sum())", "left.tolist()", "bool(runs.any())", "h_Bd[left]"])
def test_a_host_read_stops_it(read, monkeypatch):
    """The same turn, with a read planted where its tokens are known."""
    import inspect

    source = inspect.getsource(run_turn)
    before = "    token, logprob = _choose("
    assert source.count(before) == 1
    made = {}
    planted = source.replace(before, f"    {read}\n{before}")
    exec(compile(planted, "<planted>", "exec"), vars(resident_turn), made)
    monkeypatch.setattr(run_turn, "__code__", made["run_turn"].__code__)
    with pytest.raises((DataDependentOutputException, torch._subclasses.fake_tensor.DynamicOutputShapeException)):
        trace("last_exited", PLAIN, prompts=0)
