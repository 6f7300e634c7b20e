"""Policies of somebody's own, as exit_policy="tests.exits.own:Confident" finds them."""

from __future__ import annotations

import torch

from anydepth.exits import base

GAP, SIZE = 0.6, 0.15


class Confident(base.Policy):
    """Leaves where the two largest logits are far enough apart."""

    name = "confident"
    needs = "logits"

    def start(self, parameters_NP):
        return parameters_NP.new_zeros(len(parameters_NP), 1)

    def decide(self, state_NS, depth_N, seen):
        top = seen.topk(2, -1).values
        return top[:, 0] - top[:, 1] >= GAP, state_NS


class Positive(base.Policy):
    """Leaves where the hidden state's mean is large enough; counts the rounds it was asked in its state."""

    name = "positive"
    needs = "hidden"
    tallies = {"rounds_asked": 0}  # noqa: RUF012

    def start(self, parameters_NP):
        return parameters_NP.new_zeros(len(parameters_NP), 1)

    def decide(self, state_NS, depth_N, seen):
        return seen.mean(-1).abs() >= SIZE, torch.add(state_NS, 1)


class TooDeep(base.Policy):
    """Plans a depth that no model here has."""

    name = "too_deep"

    def planned(self, sampling, index, segments):
        return 9


class Undecided(base.Policy):
    """Neither plans a depth nor asks to see anything."""

    name = "undecided"


class Shy(base.Policy):
    """Never leaves; knows a number for each depth at which it may be asked, which R is not. Counts how often it is."""

    name = "shy"
    needs = "hidden"
    tallies = {"rounds_asked": 0}  # noqa: RUF012

    def parameters(self, sampling, bounds, segments):
        return (0.0,) * segments  # the count, and one for each inner depth

    def start(self, parameters_NP):
        return parameters_NP.clone()

    def decide(self, state_NS, depth_N, seen):
        leave = base.at_depth(state_NS[:, 1:], depth_N - 1) > 0
        return leave, torch.cat((state_NS[:, :1] + 1, state_NS[:, 1:]), 1)
