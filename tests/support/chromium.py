"""Debian's headless Chromium, spoken to over its DevTools pipe: no driver, no network, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_DEADLINE_S = 60.0


def found() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser with one tab. ``errors`` is what the console and the page complained of since it was opened."""

    def __init__(self, profile: Path) -> None:
        path = found()
        assert path is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def wire() -> None:  # the browser reads commands on 3 and writes answers on 4; the pipes may lie there already
            reads, writes = os.dup(to_read), os.dup(to_write)
            high = max(reads, writes, 4) + 1
            os.dup2(reads, high)
            os.dup2(writes, high + 1)
            os.dup2(high, 3)
            os.dup2(high + 1, 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        self._process = subprocess.Popen(
            [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=wire,
            close_fds=False,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._buffer = 0, b""
        self.errors: list[str] = []
        self._loaded = False
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(timeout=_DEADLINE_S)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise AssertionError("the browser went away or does not answer")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, said = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        if method == "Runtime.exceptionThrown":
            self.errors.append(said["exceptionDetails"]["text"])
        if method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(str(said["args"]))

    def open(
        self, page: Path, *, width: int = 1100, height: int = 900, phone: bool = False, dark: bool = False
    ) -> None:
        """Load a file and wait until it stands."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="", features=scheme)
        self.errors, self._loaded = [], False
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._next()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def hover(self, selector: str) -> None:
        """Move the pointer onto the middle of the first element that ``selector`` finds."""
        at = self.run(
            f"(async () => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});"
            "const frame = () => new Promise(requestAnimationFrame); await frame(); await frame();"  # it has scrolled
            "const b = e.getBoundingClientRect();"
            "return [(b.left + b.right) / 2, (b.top + b.bottom) / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "End": 35, "Escape": 27}
        keys = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **keys)
        self.call("Input.dispatchKeyEvent", type="keyUp", **keys)

    def picture(self, clip: dict[str, float] | None = None) -> bytes:
        """The page as PNG."""
        more = {"clip": {**clip, "scale": 1}} if clip else {}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"])

    def printed(self) -> bytes:
        """The page as PDF, as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
