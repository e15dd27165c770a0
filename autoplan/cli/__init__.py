"""The command line: one file a command, results on stdout, everything else on stderr.

Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 fault. No command imports torch before it needs it.
"""

from __future__ import annotations

import atexit
import gc


def main() -> None:
    """Entry point of the ``autoplan`` script."""
    # A command lives for seconds and its objects as long: cycles are looked for a hundred times less often, and not at
    # the end, where going through a large model's graph once more takes two seconds and frees what the system frees.
    gc.set_threshold(70_000, 20, 50)
    atexit.register(gc.freeze)
    from autoplan.cli.streams import open_closed_streams

    open_closed_streams()  # first of all: what is opened before might get their numbers
    from autoplan.cli.application import application

    application()
