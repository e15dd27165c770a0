"""The command line: one file a command, results on stdout, everything else on stderr.

Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 fault. No command imports torch before it needs it.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``autoplan`` script."""
    from autoplan.cli.application import application

    application()
