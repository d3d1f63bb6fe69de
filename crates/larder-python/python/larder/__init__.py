"""Mixture-of-Experts language models that are larger than memory.

>>> import larder
>>> with larder.load(larder.demo(), cache="8x") as model:
...     print("".join(model.generate("The old man", max_tokens=8)))

Computing releases the interpreter's lock, Ctrl-C ends it with KeyboardInterrupt, and errors are :class:`Error`, with the sentence that the
``larder`` command prints.
"""

from __future__ import annotations

from ._larder import Error, __version__
from ._model import Model, Stats, demo, load
from ._stream import Answer, AsyncStream, Piece, Stream
from ._trace import Trace, read_trace

__all__ = [
    "Answer",
    "AsyncStream",
    "Error",
    "Model",
    "Piece",
    "Stats",
    "Stream",
    "Trace",
    "__version__",
    "demo",
    "load",
    "read_trace",
]
