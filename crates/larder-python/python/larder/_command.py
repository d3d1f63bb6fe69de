"""The ``larder`` command."""

from __future__ import annotations

import signal
import sys

from . import _larder
from ._model import demo


def main() -> None:
    """Runs the command line of this process, and ends it with the command's exit code."""
    # Python's handler would keep Ctrl-C until the command returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    _larder.command(["larder", *sys.argv[1:]], demo())


if __name__ == "__main__":
    main()
