"""A browser for tests: headless Chromium, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 60.0  # for an answer


class Browser:
    """One page of a browser. Chromium reads commands from file descriptor 3 and writes answers to 4."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        self._home = tempfile.mkdtemp(prefix="d3s-browser-")

        def as_three_and_four() -> None:
            first, second = os.dup(read_commands), os.dup(write_answers)
            os.dup2(first, 3)
            os.dup2(second, 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={self._home}", "about:blank"],
            preexec_fn=as_three_and_four, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_answers)
        self._numbers = itertools.count(1)
        self._received = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not select.select([self._answers], [], [], SECONDS)[0]:
                raise TimeoutError(f"no answer from {CHROMIUM} within {SECONDS:.0f} seconds")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise RuntimeError(f"{CHROMIUM} has ended")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, path: Path, width: int = 1000, height: int = 1400) -> None:
        """Loads a file, in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        os.close(self._commands)  # the browser then ends by itself
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        shutil.rmtree(self._home, ignore_errors=True)
