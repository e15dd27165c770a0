"""``python -m autoplan.cli``: the same as ``autoplan``."""

from autoplan.cli import main

main()
