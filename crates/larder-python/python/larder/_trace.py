"""Routing traces as numpy arrays."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, Optional, Union

from . import _larder

if TYPE_CHECKING:
    import numpy


class Trace:
    """The experts that each token chose, recorded by ``generate(…, trace=True)`` or read with :func:`read_trace`.

    The arrays share the memory of the trace, are read-only and keep it.
    """

    def __init__(self, trace: _larder.Trace) -> None:
        self._trace = trace

    @property
    def ids(self) -> "numpy.ndarray[Any, Any]":
        """The chosen experts, ``[tokens, layers, top_k]``, in order of rank; 65535 where fewer were chosen."""
        return _array(self._trace.ids())

    @property
    def weights(self) -> "Optional[numpy.ndarray[Any, Any]]":
        """Their weights as float16, of the same shape, if the trace has them."""
        return _array_or_none(self._trace.weights())

    @property
    def logits(self) -> "Optional[numpy.ndarray[Any, Any]]":
        """The router logits, ``[tokens, layers, experts]``, if the trace has them."""
        return _array_or_none(self._trace.logits())

    @property
    def passes(self) -> "numpy.ndarray[Any, Any]":
        """Tokens of each forward pass: a prompt that was computed in one step is one entry."""
        return _array(self._trace.passes())

    @property
    def sequences(self) -> "numpy.ndarray[Any, Any]":
        """Tokens of each sequence."""
        return _array(self._trace.sequences())

    @property
    def decoded(self) -> "numpy.ndarray[Any, Any]":
        """Whether each token was generated, or else part of a prompt. A copy."""
        import numpy

        return numpy.array(self._trace.decoded(), dtype=bool)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self._trace.tokens

    @property
    def layers(self) -> int:
        """Layers with experts."""
        return self._trace.layers

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self._trace.experts

    @property
    def top_k(self) -> int:
        """Places for a token's experts in a layer."""
        return self._trace.top_k

    @property
    def meta(self) -> Dict[str, str]:
        """Text about the origin, by name."""
        return self._trace.meta

    def write(self, path: "Union[str, os.PathLike[str]]") -> None:
        """Writes it to a file for ``larder lab``; one that exists is replaced."""
        self._trace.write(os.fspath(path))

    def __len__(self) -> int:
        return self.tokens

    def __repr__(self) -> str:
        return f"<larder.Trace of {self.tokens} tokens, {self.top_k} of {self.experts} experts in {self.layers} layers>"


def read_trace(path: "Union[str, os.PathLike[str]]") -> Trace:
    """Reads a trace file of ``larder run --trace``, ``larder lab`` or :meth:`Trace.write`."""
    return Trace(_larder.read_trace(os.fspath(path)))


def _array(array: _larder.Array) -> "numpy.ndarray[Any, Any]":
    import numpy

    return numpy.asarray(array)


def _array_or_none(array: Optional[_larder.Array]) -> "Optional[numpy.ndarray[Any, Any]]":
    return None if array is None else _array(array)
