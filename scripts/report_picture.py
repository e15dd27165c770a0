"""Write docs/report.png: what `autoplan report` makes of README's plan of 70 billion parameters on 64 GPUs, its panels
in two columns, in a browser (Debian's chromium)."""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

import autoplan
from autoplan.report.page import page

ROOT = Path(__file__).resolve().parent.parent
BROWSER = runpy.run_path(str(ROOT / "tests" / "support" / "chromium.py"))
WIDTH, HEIGHT = 2160, 1400
# The page in two columns, without what is text alone.
ARRANGED = """(() => {
  document.querySelectorAll("main > section").forEach(panel => {
    if (["changes", "proof", "assumptions", "strategy"].includes(panel.getAttribute("aria-labelledby"))) panel.remove();
    panel.style.breakInside = "avoid";
  });
  document.querySelector(".scatter").parentElement.nextElementSibling.remove();
  document.querySelector("main").style.cssText = "max-width: none; columns: 2; column-gap: 1rem";
  document.querySelector(".figures").style.gridTemplateColumns = "repeat(6, 1fr)";
  return Math.ceil(document.querySelector("main").getBoundingClientRect().bottom);
})()"""


def main() -> int:
    if BROWSER["found"]() is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 1
    plan = autoplan.plan("llama3-70b", gpus="8x8xH100", global_batch=256, seq=4096)
    # The browser may write into its profile while it ends.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        file = Path(name) / "plan.html"
        file.write_text(page(plan), encoding="utf-8")
        with BROWSER["Chromium"](Path(name) / "profile") as browser:
            browser.open(file, width=WIDTH, height=HEIGHT)
            browser.call("Emulation.setScrollbarsHidden", hidden=True)
            height = browser.run(ARRANGED)
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False
            )
            picture = browser.picture({"x": 0, "y": 0, "width": WIDTH, "height": height})
    (ROOT / "docs" / "report.png").write_bytes(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
