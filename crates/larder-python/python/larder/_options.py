"""Keyword arguments as the options of the engine: JSON with the names of the command's flags."""

from __future__ import annotations

import json
import os
from typing import Any


def as_json(options: dict[str, Any]) -> str:
    """The options that are given, as JSON."""
    given = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
    return json.dumps(given, default=_plain)


def _plain(value: Any) -> Any:
    """Paths as text, and numbers of numpy as numbers."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r} cannot be an option")


def with_underscores(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON fields with the names of Python."""
    return {name.replace("-", "_"): value for name, value in fields.items()}
