"""One thread, a fresh seed for every property test, and campaigns only where they are asked for."""

import secrets

import pytest
import torch

# Tiny tensors gain nothing from threads, and waiting for each other costs tenfold on a busy machine.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before hypothesis's own plugin reads it
def pytest_configure(config):
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(secrets.randbits(32))


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(
        f"property tests: --hypothesis-seed={config.option.hypothesis_seed} draws the same again"
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="a campaign: pytest -m slow"))
