"""Which pages hold the K/V of which prompt beginnings. Host-only.

A tree over prompts: a node is one page, its `tokens` the positions of that page that are known (all of a page, or the
first few of a prompt's last one), its parent the page before it. Only prefilled positions stand here: they ran at full
depth, so their K/V depends on the tokens up to them and on nothing else. What a request decodes is never shared, since
it depends on the depths before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter


class _Node:
    __slots__ = ("children", "page", "parent", "tokens")

    def __init__(self, tokens: tuple[int, ...], page: int, parent: _Node | None) -> None:
        self.tokens, self.page, self.parent = tokens, page, parent
        self.children: list[_Node] = []  # in the order of their tokens

    def at(self, tokens: tuple[int, ...]) -> int:
        """Where a child of these tokens stands, or would stand."""
        return bisect_left(self.children, tokens, key=_TOKENS)

    def nearest(self, wanted: tuple[int, ...]) -> tuple[_Node | None, int]:
        """The child that has the longest beginning in common with `wanted`, and its length: a neighbour in order."""
        at, best, longest = self.at(wanted), None, 0
        for child in self.children[max(0, at - 1) : at + 1]:
            length = common_beginning(child.tokens, wanted)
            if length > longest:
                best, longest = child, length
        return best, longest


_TOKENS = attrgetter("tokens")


class PrefixTree:
    """Prompt beginnings by page of `size` positions. It knows nothing of who holds a page."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._root = _Node((), 0, None)
        self._of_page: dict[int, _Node] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._of_page

    def __len__(self) -> int:
        return len(self._of_page)

    def match(self, ids: Sequence[int], limit: int) -> tuple[list[int], int]:
        """(pages, positions) of the longest known beginning of ids[:limit], in order of positions. The last page may be
        known, or of use, in part only: 20 positions are two pages of 16, of the second the first 4."""
        node, pages, at = self._root, list[int](), 0
        while at < limit:
            child, common = node.nearest(tuple(ids[at : min(at + self.size, limit)]))
            if child is None:
                break
            pages.append(child.page)
            at += common
            if common < self.size:
                break
            node = child
        return pages, at

    def add(self, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Page n holds positions [n * size, (n + 1) * size) of a prompt that begins with `ids`. A beginning that is
        known already keeps its page."""
        node = self._root
        for n, page in enumerate(pages):
            tokens = tuple(ids[n * self.size : (n + 1) * self.size])
            if not tokens:
                return
            at = node.at(tokens)
            if at == len(node.children) or node.children[at].tokens != tokens:
                if page in self._of_page:
                    return  # it stands for another beginning: the prompt of whoever wrote it first
                self._of_page[page] = _Node(tokens, page, node)
                node.children.insert(at, self._of_page[page])
            node = node.children[at]

    def forget(self, page: int) -> list[int]:
        """Drop a page and all that follows it, which can no longer be reached; the pages dropped."""
        node = self._of_page[page]
        assert node.parent is not None
        del node.parent.children[node.parent.at(node.tokens)]
        dropped, todo = [], [node]
        while todo:
            node = todo.pop()
            dropped.append(node.page)
            del self._of_page[node.page]
            todo += node.children
        return dropped


def common_beginning(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = min(len(tokens), len(wanted))
    return next((n for n in range(length) if tokens[n] != wanted[n]), length)
