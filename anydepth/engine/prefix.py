"""Which pages hold the K/V of which prompt beginnings. Host-only.

A tree over prompts: a node is one page, its `tokens` the positions of that page that are known (all of a page, or the
first few of a prompt's last one), its parent the page before it. Only prefilled positions stand here: they ran at full
depth, so their K/V depends on the tokens up to them and on nothing else. What a request decodes is never shared, since
it depends on the depths before it.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Node:
    __slots__ = ("children", "page", "parent", "tokens")

    def __init__(self, tokens: tuple[int, ...], page: int, parent: _Node | None) -> None:
        self.tokens, self.page, self.parent = tokens, page, parent
        self.children: dict[int, list[_Node]] = {}  # by their first token


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
            wanted = ids[at : min(at + self.size, limit)]
            child, common = None, 0
            for other in node.children.get(wanted[0], ()):
                length = common_beginning(other.tokens, wanted)
                if length > common:
                    child, common = other, length
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
            siblings = node.children.setdefault(tokens[0], [])
            known = next((other for other in siblings if other.tokens == tokens), None)
            if known is None:
                if page in self._of_page:
                    return  # it stands for another beginning: the prompt of whoever wrote it first
                known = _Node(tokens, page, node)
                siblings.append(known)
                self._of_page[page] = known
            node = known

    def forget(self, page: int) -> list[int]:
        """Drop a page and all that follows it, which can no longer be reached; the pages dropped."""
        node = self._of_page[page]
        assert node.parent is not None
        siblings = node.parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del node.parent.children[node.tokens[0]]
        dropped, todo = [], [node]
        while todo:
            node = todo.pop()
            dropped.append(node.page)
            del self._of_page[node.page]
            todo += [child for children in node.children.values() for child in children]
        return dropped


def common_beginning(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = min(len(tokens), len(wanted))
    return next((n for n in range(length) if tokens[n] != wanted[n]), length)
