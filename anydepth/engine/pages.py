"""Which page belongs to whom. Host-only; the tensors behind the page ids are the runner's."""

from __future__ import annotations


class Pages:
    """Ids 1 .. count of equal pages of `size` positions (0 is the null page and belongs to nobody).

    A page id stands for the same positions in every plane, so a request needs ceil(positions / size) ids in all.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count, 0, -1))

    @property
    def in_use(self) -> int:
        return self.count - len(self._free)

    def needed(self, positions: int) -> int:
        """Pages for that many positions. needed(17) == 2 with 16 positions a page."""
        return -(-positions // self.size)

    def can_take(self, count: int) -> bool:
        return count <= len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out `count` pages; what they hold is undefined."""
        assert self.can_take(count)
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, pages: tuple[int, ...]) -> None:
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.count
