"""Write docs/report.png: what `autoplan report docs/pipeline.json` looks like in a browser (Debian's chromium)."""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

from autoplan.plan import Plan
from autoplan.report.page import page

ROOT = Path(__file__).resolve().parent.parent
BROWSER = runpy.run_path(str(ROOT / "tests" / "support" / "chromium.py"))
WIDTH, HEIGHT = 1000, 1500


def main() -> int:
    if BROWSER["found"]() is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "plan.html"
        file.write_text(page(Plan.load(ROOT / "docs" / "pipeline.json")), encoding="utf-8")
        with BROWSER["Chromium"](Path(name) / "profile") as browser:
            browser.open(file, width=WIDTH, height=HEIGHT)
            picture = browser.picture({"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT})
    (ROOT / "docs" / "report.png").write_bytes(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
