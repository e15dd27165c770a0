"""The command line: one file a command, results on stdout, everything else on stderr.

Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 fault. No command imports torch before it needs it.
"""

from __future__ import annotations

import gc


def main() -> None:
    """Entry point of the ``autoplan`` script."""
    # A command lives for seconds and its objects as long: cycles are looked for a hundred times less often.
    gc.set_threshold(70_000, 20, 50)
    from autoplan.cli.application import application

    application()
