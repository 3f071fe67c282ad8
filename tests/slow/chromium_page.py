"""Drives headless Chromium through its DevTools pipe: no driver, no package, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BINARY = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)


class Browser:
    """One page of one Chromium. ``requests`` and ``problems`` collect what the page asked for and what went wrong."""

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        child_reads, self._write = os.pipe()
        self._read, child_writes = os.pipe()
        flags = (
            "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe --no-first-run"
        )
        # Chromium talks on the file descriptors 3 and 4.
        shell = f'exec "$0" {flags} "--user-data-dir=$1" about:blank 3<&{child_reads} 4>&{child_writes}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, BINARY, str(profile)],
            pass_fds=(child_reads, child_writes),
            stderr=subprocess.DEVNULL,
        )
        os.close(child_reads)
        os.close(child_writes)
        self._buffer, self._number, self._session = b"", 0, None
        self.requests: list[str] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one DevTools command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until its script has run."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + 30
        while self.run("document.documentElement?.dataset.ready ?? ''") != "true":
            if time.monotonic() > deadline:
                raise TimeoutError(f"the page did not get ready; problems: {self.problems}")
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """Save the whole page, or its first ``height`` pixels, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 16)
            if not data:
                raise RuntimeError("Chromium ended")
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        return message
