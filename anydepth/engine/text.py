"""Text out of token ids as they come: whole characters only, stop strings cut, what may become one held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"


class TextStream:
    """Incremental detokenizer of one answer.

    `eager=False` skips all work until `end` (nobody reads the pieces and no stop string can occur): `push` then returns
    "". Example: with stop "beta gamma", pieces "al", "pha be", "ta ga", "mma" deliver "al", "pha ", "", "".
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), *, eager: bool = True) -> None:
        self._decode, self._stop, self._eager = decode, tuple(stop), eager or bool(stop)
        self._ids: list[int] = []
        # Ids [_anchor, _done) are decoded already; they are decoded again with the new ones, because a tokenizer may
        # join words by what stands before them.
        self._anchor = self._done = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        self._ids.append(token)
        if not self._eager:
            return ""
        fresh = self._fresh()
        if fresh.endswith(INCOMPLETE):
            certain = self._held + fresh.rstrip(INCOMPLETE)
            return self._deliver(certain, final=False) if any(stop in certain for stop in self._stop) else ""
        if fresh:  # ids without a text of their own join nothing: the window keeps beginning before them
            self._anchor = self._done
        self._done = len(self._ids)
        return self._deliver(self._held + fresh, final=False)

    def end(self) -> str:
        """Everything held back, after the last token. Empty once a stop string has appeared."""
        if self.stopped:
            return ""
        if not self._eager:
            self.text = self._decode(self._ids)
            return self.text
        fresh = self._fresh()
        self._anchor = self._done = len(self._ids)
        return self._deliver(self._held + fresh, final=True)

    def _fresh(self) -> str:
        before = self._decode(self._ids[self._anchor : self._done])
        return self._decode(self._ids[self._anchor :])[len(before) :]

    def _deliver(self, text: str, *, final: bool) -> str:
        cut = min((at for at in (text.find(stop) for stop in self._stop) if at >= 0), default=-1)
        if cut >= 0:
            self.stopped, self._held = True, ""
            text = text[:cut]
        elif not final:
            held = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`. _overlap("alpha be", "beta") == 2"""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
