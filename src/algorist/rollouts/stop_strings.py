"""Stop strings: has the newest token just completed one?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from algorist.errors import EngineError

_REPLACEMENT = "�"


class StopStrings:
    """Looks for stop strings in the decoded tail of a completion.

    A string of n bytes spans at most n tokens that show, so the last ``window`` tokens suffice. Most tokens are ruled
    out by their own text, once per token id.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str] | None) -> None:
        if decode is None:
            raise EngineError(
                f"stop_strings {list(strings)} need a tokenizer, but the engine was made without one; pass tokenizer="
            )
        if any(not s for s in strings):
            raise EngineError("a stop string is empty; expected at least one character")
        self.strings = tuple(strings)
        self.window = max(len(s.encode()) for s in strings) + 8
        self._decode = decode
        self._last = {s[-1] for s in strings}
        self._ruled_out: dict[int, bool] = {}

    def may_end(self, token: int) -> bool:
        """Return False when ``token`` alone shows that it cannot end a stop string."""
        if any(c.isspace() for c in self._last):
            return True
        if token not in self._ruled_out:
            text = self._decode([token])
            self._ruled_out[token] = bool(text) and _REPLACEMENT not in text and not (self._last & set(text))
        return not self._ruled_out[token]

    def just_ended(self, tail: list[int]) -> bool:
        """Return whether the last token of ``tail`` completes a stop string."""
        if not tail:
            return False
        with_last, before = self._decode(tail), self._decode(tail[:-1])
        return any(with_last.count(s) > before.count(s) for s in self.strings)
