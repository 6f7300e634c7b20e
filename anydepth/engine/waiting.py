"""Who waits, in which order they come in, and who gives way: by priority, then by arrival. Imports no torch.

The order is bent in one place: while a large request waits for pages, smaller ones behind it may take slots that would
stand empty, but no more than BYPASSES of them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator

from anydepth.engine.plan import Sequence

BYPASSES = 8
LOOKAHEAD = 8  # waiting requests that are looked at in one turn


def rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


class Waiting:
    """Sequences without a slot, new and preempted ones alike, the first to come in first."""

    def __init__(self) -> None:
        self._ranked: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ranked)

    @property
    def first(self) -> Sequence:
        return self._ranked[0]

    def add(self, sequence: Sequence) -> None:
        insort(self._ranked, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        self._ranked.remove(sequence)

    def take(self, admit: Callable[[Sequence], bool]) -> None:
        """Offer `admit` one sequence after the other and let those go that it takes. Ends at a sequence that is not
        taken and has been overtaken BYPASSES times."""
        refused: list[Sequence] = []
        for sequence in self._ranked[:LOOKAHEAD]:
            if admit(sequence):
                self._ranked.remove(sequence)
                for other in refused:
                    other.overtaken += 1
            else:
                refused.append(sequence)
            if any(other.overtaken >= BYPASSES for other in refused):
                return


def fits_host(sequences: Iterable[tuple[Sequence, int]], pages: int, slots: int, host_pages: int) -> bool:
    """Whether all of these can come to their end, whatever they need on the way: (sequence, pages it may need).

    Going by rank, those that fit slots and pool together need nobody to give way but those behind them. All others, and
    those that are out already, may have to be kept in host memory whole.
    """
    outside, room = 0, pages
    for sequence, most in sorted(sequences, key=lambda pair: pair[0].rank):
        if most <= room and slots and not sequence.stored:
            room, slots = room - most, slots - 1
        else:
            room, outside = 0, outside + most
    return outside <= host_pages
