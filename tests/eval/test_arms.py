"""Arms: every field of Sampling under arms.toml's names, and nothing else."""

import pytest

from anydepth.eval.arms import Arm
from anydepth.types import Sampling


def test_parse():
    arm = Arm.parse({"name": "B1-0.5", "policy": "gate_cdf", "exit_threshold": 0.5, "fill": "last_exited"})
    assert arm.backend == "engine" and arm.fill == "last_exited"
    assert arm.sampling() == Sampling(exit_policy="gate_cdf", exit_threshold=0.5)
    assert arm.passed() == {"fill": "last_exited", "policy": "gate_cdf", "exit_threshold": 0.5}


def test_late_signals_are_options_of_the_engine():
    arm = Arm.parse({"name": "B3", "exit_threshold": 0.5, "signals": "delayed", "lateness": 1, "batch_invariant": True})
    assert arm.engine == {"signals": "delayed", "lateness": 1, "batch_invariant": True}
    assert arm.options == {"exit_threshold": 0.5}


def test_what_a_task_brings_holds_unless_the_arm_says_otherwise():
    caps = {"max_tokens": 96, "stop": ("\n",)}
    assert Arm.parse({"name": "a"}).sampling(**caps) == Sampling(**caps)
    assert Arm.parse({"name": "a", "max_tokens": 7}).sampling(**caps) == Sampling(max_tokens=7, stop=("\n",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "a", "exit_treshold": 0.5}, "arm 'a': unknown field 'exit_treshold'; did you mean 'exit_threshold'"),
        ({"name": "a", "exit_policy": "never"}, "unknown field 'exit_policy'"),
        ({"name": "a", "exit_threshold": 2}, "arm 'a': exit_threshold is 2; allowed"),
        ({"name": "a", "backend": "engin"}, "unknown backend 'engin'; did you mean 'engine'"),
        ({"name": "a", "lateness": -1}, "lateness is -1; allowed: whole turns from 0"),
        ({"name": "a", "lateness": True}, "lateness is True; allowed"),
        ({"name": "a", "lateness": "1"}, "lateness is '1'; allowed"),
        ({"name": "a", "batch_invariant": 1}, "batch_invariant is 1; allowed: true or false"),
        ({"name": "a", "signals": True}, "signals is True; allowed: a string"),
        ({"name": "a", "segments": True}, "segments is True; allowed: a whole number or a list"),
        ({"name": "../a"}, "name is '../a'"),
        ({"name": ""}, "name is ''"),
        ({"depth": 1}, "needs a name"),
    ],
)
def test_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        Arm.parse(given)
