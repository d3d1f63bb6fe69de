"""Models that are loaded."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Union

from . import _images, _larder
from ._options import as_json, with_underscores
from ._stream import AsyncStream, Stream

if TYPE_CHECKING:
    import numpy

    from ._images import Image


class Stats(NamedTuple):
    """Traffic of the expert cache and loss of the output, since a model was loaded. Those of the cache are 0 if all experts are resident."""

    slots: int
    """Slots of the expert cache that are in use."""
    hits: int
    """Wanted experts that were resident."""
    in_flight_hits: int
    """Wanted experts that were being read already."""
    misses: int
    """Wanted experts that had to be read."""
    evictions: int
    """Experts that were evicted."""
    hit_rate: float
    """Share of wanted experts that were resident."""
    read_bytes: int
    """Bytes of experts that were read."""
    wait_seconds: float
    """Seconds in which computing waited for reads."""
    compute_seconds: float
    """Seconds spent computing experts."""
    measured_tokens: int
    """Tokens that were decoded twice, to measure the loss of a lossy routing strategy."""
    output_kl: float
    """Mean KL divergence of the output at these tokens, in nats; 0 without one."""


def demo() -> str:
    """The folder of the demo model that the package has: a small model that writes English prose."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo")


def load(
    path_or_name: "Union[str, os.PathLike[str]]",
    *,
    cache: Optional[str] = None,
    scope: Optional[str] = None,
    scratch: Optional[int] = None,
    context: "Union[int, str, None]" = None,
    threads: Optional[int] = None,
    pin: Optional[bool] = None,
    exact: Optional[bool] = None,
    kv: Optional[str] = None,
    quality: "Union[str, float, None]" = None,
    routing: Optional[str] = None,
    measure_every: Optional[int] = None,
    eviction: Optional[str] = None,
    evictor: "Union[str, os.PathLike[str], None]" = None,
    prefetch: Optional[int] = None,
    reader: Optional[str] = None,
    check_reads: Optional[str] = None,
    prefill_tokens: Optional[int] = None,
    speculate: Optional[str] = None,
    mlock: Optional[bool] = None,
    no_store: Optional[bool] = None,
    device: Optional[str] = None,
    vram: Optional[str] = None,
    vram_kv: Optional[int] = None,
    flash_attn: Optional[bool] = None,
    vision: Optional[str] = None,
    mmproj: "Union[str, os.PathLike[str], None]" = None,
    image_tokens: Optional[int] = None,
    models: "Union[str, os.PathLike[str], None]" = None,
    cache_folder: "Union[str, os.PathLike[str], None]" = None,
) -> "Model":
    """Loads a model: a store, a folder with a checkpoint, a GGUF file, or a name on the Hugging Face hub.

    The arguments are the settings of ``larder run``, with underscores; what is left out is as there. ``models`` is the folder of downloaded
    models, by default that of the command, and ``cache_folder`` the user's cache folder. A ``larder.toml`` of the store is not read.
    """
    options = dict(locals())
    path = os.fspath(options.pop("path_or_name"))
    if quality is not None:
        options["quality"] = str(quality)
    return Model(_larder.Model.load(path, as_json(options)))


class Model:
    """A model that is loaded. Threads may share it: their calls wait for each other."""

    def __init__(self, model: _larder.Model) -> None:
        self._model = model

    def generate(
        self,
        prompt: "Union[str, Sequence[int]]",
        *,
        images: "Optional[Sequence[Image]]" = None,
        max_tokens: Optional[int] = None,
        temperature: Optional[float] = None,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        min_p: Optional[float] = None,
        repetition_penalty: Optional[float] = None,
        seed: Optional[int] = None,
        stop: "Union[str, Sequence[str], None]" = None,
        ignore_eos: Optional[bool] = None,
        format: "Union[str, Dict[str, Any], None]" = None,
        trace: Optional[bool] = None,
        trace_logits: Optional[bool] = None,
    ) -> Stream:
        """Generates what follows a prompt, a text or tokens, from an empty context: an iterator over pieces of text with their tokens.

        ``max_tokens`` is 256 by default. Sampling that is left out is as the model's files recommend; ``temperature=0`` always takes the
        likeliest token. With ``format`` the text keeps to one: ``"json"``,
        ``"regex:…"``, or inline as ``{"json": schema}``, ``{"regex": …}`` or ``{"grammar": …}``. ``trace`` records the experts of each
        token and ``trace_logits`` the router logits too, for :attr:`Stream.trace`.

        ``images`` stand before a text, as a message of the model's chat template if it has one; among tokens, each stands where there is
        the token for an image. An image is the content of a PNG, JPEG, WebP or GIF file, the path of one, or a picture of Pillow.
        """
        options, files = _sampling(locals()), _images.files(images)
        if isinstance(prompt, str):
            return Stream(self._model.generate(prompt, files, options))
        return Stream(self._model.generate_from(_tokens(prompt), files, options))

    def chat(
        self,
        messages: "Sequence[Dict[str, Any]]",
        *,
        tools: "Optional[Sequence[Dict[str, Any]]]" = None,
        template_variables: Optional[Dict[str, Any]] = None,
        images: "Optional[Sequence[Image]]" = None,
        max_tokens: Optional[int] = None,
        temperature: Optional[float] = None,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        min_p: Optional[float] = None,
        repetition_penalty: Optional[float] = None,
        seed: Optional[int] = None,
        stop: "Union[str, Sequence[str], None]" = None,
        ignore_eos: Optional[bool] = None,
        format: "Union[str, Dict[str, Any], None]" = None,
        trace: Optional[bool] = None,
        trace_logits: Optional[bool] = None,
    ) -> Stream:
        """Answers the last message of a chat, by the model's chat template.

        Messages are dictionaries with ``role`` and ``content``, tools are in OpenAI's form. Pieces tell by ``kind`` which part of the
        answer they are, and ``answer().message`` is the message to append. What a chat has in common with the one before is not computed
        again. The other arguments are those of :meth:`generate`.

        The content of a message may be a list of parts. A part ``{"type": "image"}`` shows the next of ``images``; if there is no such
        part, these stand before the last message. A part ``{"type": "image_url", "image_url": {"url": "data:…"}}`` has its own.
        """
        options, files = _sampling(locals()), _images.files(images)
        return Stream(self._model.chat(_chat(messages, tools, template_variables), files, options))

    def agenerate(self, prompt: "Union[str, Sequence[int]]", **options: Any) -> AsyncStream:
        """As :meth:`generate`, to be iterated with ``async for``."""
        return AsyncStream(self.generate(prompt, **options))

    def achat(self, messages: "Sequence[Dict[str, Any]]", **options: Any) -> AsyncStream:
        """As :meth:`chat`, to be iterated with ``async for``."""
        return AsyncStream(self.chat(messages, **options))

    def chat_prompt(
        self,
        messages: "Sequence[Dict[str, Any]]",
        *,
        tools: "Optional[Sequence[Dict[str, Any]]]" = None,
        template_variables: Optional[Dict[str, Any]] = None,
    ) -> str:
        """The text that the chat template makes of messages, in which marks stand for images."""
        return self._model.chat_prompt(_chat(messages, tools, template_variables))

    def tokenize(self, text: str, *, add_special: bool = True) -> List[int]:
        """The tokens of a text; with ``add_special``, also those with which the model's texts begin. Does not wait for other calls."""
        return self._model.tokenize(text, add_special)

    def detokenize(self, tokens: "Sequence[int]", *, skip_special: bool = True) -> str:
        """The text of tokens. Does not wait for other calls."""
        return self._model.detokenize(_tokens(tokens), skip_special)

    def logits(self, tokens: "Sequence[int]") -> "numpy.ndarray[Any, Any]":
        """The logits behind each token as float32, ``[tokens, vocab]``; of a model with an encoder, only those of the decoder's start."""
        import numpy

        return numpy.asarray(self._model.logits(_tokens(tokens)))

    def embed(self, texts: "Union[str, Sequence[str]]") -> "numpy.ndarray[Any, Any]":
        """The embeddings of texts as float32, ``[texts, hidden]``, each of length 1; of a single text, ``[hidden]``.

        As those of ``larder serve``: the direction of the mean of the hidden states behind the final norm.
        """
        import numpy

        listed = [texts] if isinstance(texts, str) else list(texts)
        embeddings: "numpy.ndarray[Any, Any]" = numpy.asarray(self._model.embed(listed))
        return embeddings.reshape(-1) if isinstance(texts, str) else embeddings

    def set_routing(self, routing: Optional[str] = None, *, quality: "Union[str, float, None]" = None) -> None:
        """Replaces the routing strategy, without either by the model's own."""
        self._model.set_routing(routing, None if quality is None else str(quality))

    def stats(self) -> Stats:
        """Counts since the model was loaded, as of the last step. Does not wait for other calls."""
        return Stats(**with_underscores(json.loads(self._model.stats())))

    def info(self) -> Dict[str, Any]:
        """Architecture, sizes, the memory plan, and what the command would have printed while the model was loaded (``notices``)."""
        return with_underscores(json.loads(self._model.info()))

    def close(self) -> None:
        """Frees the model, as soon as calls of other threads have ended."""
        self._model.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NO_OPTIONS = frozenset(("self", "prompt", "messages", "tools", "template_variables", "images"))


def _sampling(arguments: Dict[str, Any]) -> str:
    """The options of a generation."""
    options = {name: value for name, value in arguments.items() if name not in _NO_OPTIONS}
    if isinstance(options["stop"], str):
        options["stop"] = [options["stop"]]
    return as_json(options)


def _chat(messages: Any, tools: Any, template_variables: Any) -> str:
    return as_json({"messages": list(messages), "tools": tools and list(tools), "template_variables": template_variables})


def _tokens(tokens: Any) -> List[int]:
    """Tokens of a list or an array; those that cannot be any are refused by the engine."""
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return [_token(token) for token in tokens]


def _token(token: Any) -> int:
    number = int(token)
    if not 0 <= number < 1 << 32:
        raise _larder.Error(f"token {number} is not one of the model's")
    return number
