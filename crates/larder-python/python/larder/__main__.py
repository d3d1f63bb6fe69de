"""``python -m larder``: the command."""

from ._command import main

main()
