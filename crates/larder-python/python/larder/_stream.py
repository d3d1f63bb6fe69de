"""Text while it is generated."""

from __future__ import annotations

import json
from typing import Any, AsyncIterator, Dict, Iterator, List, NamedTuple, Optional, Tuple

from . import _larder
from ._options import with_underscores
from ._trace import Trace

# Most pieces that an asynchronous stream takes at a time.
_PIECES_MAX = 256


class Piece(str):
    """A piece of generated text: a string that has the tokens since the last piece.

    A token whose text is not certain yet, such as a part of a character, comes with the piece that has it. The tokens of all pieces of a
    text are all of its tokens, so the last piece may be an empty string with an end-of-text token.
    """

    __slots__ = {
        "kind": "``content``; in chats also ``reasoning``, ``tool-name`` or ``tool-arguments``.",
        "tokens": "The tokens.",
    }

    tokens: Tuple[int, ...]
    kind: str

    @property
    def text(self) -> str:
        """The text as a plain string."""
        return str.__str__(self)

    def __reduce__(self) -> Tuple[Any, ...]:
        return _piece, (str(self), self.tokens, self.kind)


def _piece(text: str, tokens: Any, kind: str) -> Piece:
    piece = Piece(text)
    piece.tokens = tuple(tokens)
    piece.kind = kind
    return piece


class Answer(NamedTuple):
    """A generated text, and how it came about."""

    text: str
    """The text; of a chat without reasoning and tool calls."""
    tokens: List[int]
    """All tokens, an end-of-text token included."""
    finish: str
    """The reason for the end: ``end-of-text``, ``stop-string``, ``length``, ``context`` or ``cancelled``."""
    prompt_tokens: int
    """Tokens of the prompt."""
    prefill_seconds: float
    """Seconds that the prompt took."""
    decode_seconds: float
    """Seconds that the answer took."""
    reused_tokens: Optional[int] = None
    """Of a chat: tokens of the prompt that the chat before had computed."""
    message: Optional[Dict[str, Any]] = None
    """Of a chat: the answer as a message, with reasoning and tool calls."""


class Stream(Iterator[Piece]):
    """An iterator over the pieces of a text that is being generated.

    The engine goes on by itself; it ends early when the stream is closed or freed.
    """

    def __init__(self, stream: _larder.Stream) -> None:
        self._stream = stream
        self._answer: Optional[Answer] = None
        self._trace: Optional[Trace] = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        for text, tokens, kind in self._stream.take(1):
            return _piece(text, tokens, kind)
        raise StopIteration

    def take(self, most: int = _PIECES_MAX) -> List[Piece]:
        """The pieces that are there, at most ``most``; waits for one. An empty list at the end."""
        return [_piece(*piece) for piece in self._stream.take(most)]

    def answer(self) -> Answer:
        """The whole text with its tokens; generates to the end if need be."""
        while self._answer is None:
            if self._stream.take(_PIECES_MAX):
                continue
            end = self._stream.answer()
            if end is None:
                raise _larder.Error("the text has no answer, because its generation failed")
            self._answer = Answer(**with_underscores(json.loads(end)))
        return self._answer

    @property
    def trace(self) -> Trace:
        """The experts of each token, of a text that was generated with ``trace=True`` or ``trace_logits=True``."""
        self.answer()
        if self._trace is None:
            trace = self._stream.trace()
            if trace is None:
                raise _larder.Error("no trace was recorded; generate with trace=True")
            self._trace = Trace(trace)
        return self._trace

    def close(self) -> None:
        """Ends the generation at the next layer, if it goes on."""
        self._stream.cancel()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(AsyncIterator[Piece]):
    """An asynchronous iterator over the pieces of a text; a thread waits for them, not the event loop."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ready: List[Piece] = []

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Piece:
        if not self._ready:
            self._ready = await self._in_thread(self._stream.take)
            self._ready.reverse()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.pop()

    async def answer(self) -> Answer:
        """The whole text with its tokens; generates to the end if need be."""
        result: Answer = await self._in_thread(self._stream.answer)
        return result

    async def _in_thread(self, call: Any) -> Any:
        import asyncio

        try:
            return await asyncio.get_running_loop().run_in_executor(None, call)
        except asyncio.CancelledError:
            self._stream.close()
            raise

    async def aclose(self) -> None:
        """Ends the generation at the next layer, if it goes on."""
        self._stream.close()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
