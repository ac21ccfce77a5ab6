"""From ids that come one by one to text that can be shown at once: whole characters, and an end at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class IncrementalDecoder:
    """Turns ids that come one by one into text that can be printed at once: a character comes when all its bytes have.

    A token of a byte-level vocabulary may hold part of a UTF-8 character. Decoders show an unfinished one at the end as
    one U+FFFD, so a U+FFFD at the end is held back; anywhere else it is final.

    Args:
        decode: ids to text, such as `tokenizers.Tokenizer.decode`.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # The ids since some border between characters. Those of the step before stay as context, because some
        # tokenizers treat the first token of a text differently.
        self._ids: list[int] = []
        self._given = 0  # characters of decode(self._ids) that were given out
        self._border = 0  # self._ids[:border] decode to whole characters

    def push(self, token: int) -> str:
        """The text that is certain after one more token; may be empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            certain = text[:-1]
            piece = certain[self._given :]
            self._given = max(self._given, len(certain))
            return piece
        piece = text[self._given :]
        self._ids = self._ids[self._border :]
        self._border = len(self._ids)
        self._given = len(self._decode(self._ids))
        return piece

    def flush(self) -> str:
        """What was held back, when no more tokens come; then it begins anew."""
        rest = self._decode(self._ids)[self._given :] if self._ids else ""
        self._ids, self._given, self._border = [], 0, 0
        return rest


class StopStrings:
    """Passes text on up to the first of some strings; what may be the beginning of one is held back.

    Args:
        stop: strings, none of them empty.

    Attributes:
        found: the string that ended the text, or None.

    Raises:
        ValueError: a string is empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str) or any(not text for text in stop):
            raise ValueError(f"stop={stop!r}: expected a list of strings that are not empty")
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that is certainly before any stop string, after one more piece; nothing once one was found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        # Of strings that begin at one place, the longest counts; it may still be on its way.
        hits = [(text.index(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if hits:
            place, _, self.found = min(hits)
            self._held = ""
            return text[:place]
        keep = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How much of the text's end is a beginning of `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        rest, self._held = self._held, ""
        return rest


class TextStream:
    """`IncrementalDecoder` and `StopStrings` in a row, for one sequence.

    Args:
        decode: ids to text.
        stop: strings that end the text and are not part of it.
        stop_ids: tokens that end it.

    Attributes:
        ended: a stop string or stop token has come; further tokens are ignored.
        tokens: how many came, the one that ended it included.
    """

    def __init__(self, decode: Decode, *, stop: Sequence[str] = (), stop_ids: Sequence[int] = ()) -> None:
        self._decoder = IncrementalDecoder(decode)
        self._stop = StopStrings(stop)
        self._stop_ids = frozenset(stop_ids)
        self.ended = False
        self.tokens = 0

    def push(self, token: int) -> str:
        """The text that is certain after one more token; may be empty."""
        if self.ended:
            return ""
        self.tokens += 1
        if token in self._stop_ids:
            piece = self.flush()
            self.ended = True
            return piece
        piece = self._stop.push(self._decoder.push(token))
        self.ended = self._stop.found is not None
        return piece

    def flush(self) -> str:
        """What was held back, when no more tokens come; nothing after a stop string."""
        if self.ended:
            return ""
        piece = self._stop.push(self._decoder.flush())
        self.ended = self._stop.found is not None
        return piece if self.ended else piece + self._stop.flush()
