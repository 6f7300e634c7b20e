"""Which page belongs to whom. Host-only; the tensors behind the page ids are the runner's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from anydepth.engine.prefix import PrefixTree


class Pages:
    """Ids 1 .. count of equal pages of `size` positions (0 is the null page and belongs to nobody).

    A page id stands for the same positions in every plane, so a request needs ceil(positions / size) ids in all. Pages
    of prompt beginnings may have several holders, who only read them (`sharing`). One without a holder stays known
    until it is needed for something else, the longest unused first.
    """

    def __init__(self, count: int, size: int, *, sharing: bool = False) -> None:
        self.count, self.size, self.sharing = count, size, sharing
        self.holders = [0] * (count + 1)
        self.evicted = self.shared_tokens = self.copied = 0
        self._free = list(range(count, 0, -1))
        self._prefixes = PrefixTree(size) if sharing else None
        self._unheld: dict[int, None] = {}  # known beginnings nobody holds, the longest unused first

    @property
    def in_use(self) -> int:
        return self.count - self.available

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and those kept only for what they hold."""
        return len(self._free) + len(self._unheld)

    @property
    def known(self) -> int:
        """Pages known to hold a prompt beginning."""
        return len(self._prefixes) if self._prefixes is not None else 0

    def needed(self, positions: int) -> int:
        """Pages for that many positions. needed(17) == 2 with 16 positions a page."""
        return -(-positions // self.size)

    def can_take(self, count: int) -> bool:
        return count <= self.available

    def freed_by(self, holdings: Iterable[Sequence[int]]) -> int:
        """How many more pages could be taken if these holders gave theirs back."""
        given = Counter(page for pages in holdings for page in pages)
        return sum(self.holders[page] == count for page, count in given.items())

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages; what they hold is undefined."""
        assert self.can_take(count)
        while len(self._free) < count:
            self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self.holders[page] = 1
        return taken

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder less for each. The end of a prompt is forgotten before its beginning."""
        for page in reversed(list(pages)):
            self.holders[page] -= 1
            assert self.holders[page] >= 0
            if self.holders[page] == 0:
                if self._prefixes is not None and page in self._prefixes:
                    self._unheld[page] = None
                else:
                    self._free.append(page)

    def find(self, ids: Sequence[int], limit: int) -> tuple[list[int], int]:
        """(pages, positions) of the longest known beginning of ids[:limit]; nothing is held by that."""
        return self._prefixes.match(ids, limit) if self._prefixes is not None else ([], 0)

    def hold(self, pages: Iterable[int]) -> None:
        """One holder more for each of the pages that `find` gave."""
        for page in pages:
            self.holders[page] += 1
            self._unheld.pop(page, None)

    def publish(self, ids: Sequence[int], pages: Sequence[int]) -> None:
        """The K/V of prompt beginning `ids` stands in `pages` from now on, at full depth."""
        if self._prefixes is not None:
            self._prefixes.add(ids, pages)

    def forget(self) -> None:
        """Nothing is known any more of what stands in which page."""
        self._free += self._unheld
        self._unheld.clear()
        if self._prefixes is not None:
            self._prefixes = PrefixTree(self.size)

    def _evict(self) -> None:
        """Forget the longest unused beginning, with what can only be reached through it."""
        assert self._prefixes is not None
        for page in self._prefixes.forget(next(iter(self._unheld))):
            if self.holders[page] == 0:
                del self._unheld[page]
                self._free.append(page)
                self.evicted += 1
