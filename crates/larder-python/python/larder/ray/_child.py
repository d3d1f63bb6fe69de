"""``larder`` as a child of a Ray worker: it ends when its standard input does, so also when the worker or its node is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from .._command import main

# Seconds that a server has to end its answers.
_GRACE = 10.0


def _end_with_parent() -> None:
    """Waits for the end of standard input, which the worker keeps open, and then ends the process."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main())
