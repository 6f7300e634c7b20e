"""Two single-threaded processes that sum one flat tensor a step: on a CPU faster than one process of two threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Peers:
    """This process's number among `count`."""

    rank: int
    count: int

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum over all processes, the same bits in each."""
        if self.count > 1:
            distributed.all_reduce(tensor)

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.count > 1:
            distributed.barrier()


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside: matrices this small gain nothing from more, and sums then have one order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def with_peers(
    work: Callable[[T, Peers, Callable[[str], None]], None], job: T, *, processes: int, report: Callable[[str], None]
) -> None:
    """Run `work(job, peers, report)` in this process and `processes - 1` others; `job` and `work` must pickle.

    The others end with this one: when it finishes, fails or is killed their next sum fails. Threads are set to one
    while it runs.
    """
    with one_thread():
        if processes == 1:
            work(job, Peers(rank=0, count=1), report)
            return
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder) / "meeting")
            context = multiprocessing.get_context("spawn")
            others = [
                context.Process(target=_join, args=(work, job, rank, processes, meeting), daemon=True)
                for rank in range(1, processes)
            ]
            for other in others:
                other.start()
            _meet(work, job, Peers(rank=0, count=processes), meeting, report)
            for other in others:
                other.join()


def _join(work: Callable[[T, Peers, Callable[[str], None]], None], job: T, rank: int, count: int, meeting: str) -> None:
    # An interrupt is the first process's to handle; this one ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        _meet(work, job, Peers(rank=rank, count=count), meeting, lambda line: None)
    except RuntimeError:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.is_alive():
            raise


def _meet(
    work: Callable[[T, Peers, Callable[[str], None]], None],
    job: T,
    peers: Peers,
    meeting: str,
    report: Callable[[str], None],
) -> None:
    # All processes are on this machine; its host name may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=peers.rank, world_size=peers.count)
    try:
        work(job, peers, report)
    finally:
        distributed.destroy_process_group()
