"""larder on a Ray cluster: a server of several replicas, batches of prompts and texts, and sweeps over nodes.

Needs ``pip install 'larder[ray]'`` on every node, and the model at the same path or by the same name on each.

- :func:`app` is a Ray Serve application with the routes of ``larder serve``.
- :func:`generate` and :func:`evaluate` are stages of a Ray Data pipeline.
- :func:`sweep` spreads ``larder eval sweep`` and ``larder lab sweep`` over nodes.
"""

from __future__ import annotations

from ._data import Evaluator, Generator, evaluate, generate
from ._serve import app
from ._sweep import sweep

__all__ = ["Evaluator", "Generator", "app", "evaluate", "generate", "sweep"]
