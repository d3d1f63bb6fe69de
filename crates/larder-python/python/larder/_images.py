"""Pictures for models that see."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, List, Optional, Protocol, Sequence, Union

if TYPE_CHECKING:

    class Savable(Protocol):
        """What can be saved as a PNG file, as pictures of Pillow can."""

        def save(self, fp: Any, format: Optional[str] = ...) -> object: ...

    Image = Union[bytes, bytearray, memoryview, str, os.PathLike[str], Savable]


def files(images: "Optional[Sequence[Image]]") -> "List[Union[bytes, str]]":
    """The content of the file of each picture, or its path."""
    if isinstance(images, (str, bytes, bytearray, memoryview, os.PathLike)) or hasattr(images, "save"):
        raise TypeError("images must be a list of them")
    return [] if images is None else [_file(image) for image in images]


def _file(image: Any) -> "Union[bytes, str]":
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, (str, os.PathLike)):
        return os.fsdecode(image)
    if hasattr(image, "save"):
        png = io.BytesIO()
        image.save(png, format="PNG")
        return png.getvalue()
    raise TypeError(f"{image!r} cannot be an image; give bytes, a path, or a picture of Pillow")
