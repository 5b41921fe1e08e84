"""A headless Chromium that tests look at pages with: what it requested, said and laid out; gone afterwards."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = ("chromium",)
PATIENCE = 120.0
"""Seconds that an answer may take, of a machine that may be busy with much else."""
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu"),
    *("--hide-scrollbars", "--mute-audio", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--force-color-profile=srgb"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
SETTLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))"
HAND_OVER = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Puts two descriptors where Chromium looks for its pipes."""


def install() -> str:
    """Finds Chromium, and installs Debian's where there is none; the test is skipped where that can't be."""
    if (there := _found()) is not None:
        return there
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"needs {NAMES[0]}, and only root on Debian or Ubuntu may install it")
    said = ""
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (("install", "-y", "--no-install-recommends", *PACKAGES), ("update",)) * 2:
        words = ("apt-get", "-o", "DPkg::Lock::Timeout=120", *words)
        done = subprocess.run(words, env=quiet, capture_output=True, text=True, timeout=600, check=False)
        said = done.stderr.strip() or said
        if (there := _found()) is not None:
            return there
    pytest.skip(f"needs {NAMES[0]}, which can't be installed here: {said[-200:]}")


def _found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@dataclass
class Visit:
    """A page that is open.

    Attributes:
        requests: addresses that it asked for, itself and what it holds as ``data:`` apart.
        errors: what its scripts threw, and what the console has as an error or a warning.
    """

    browser: Browser
    session: str
    url: str
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    loaded: bool = False
    scripts: bool = True

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is waited for."""
        words = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        result = self.browser.call("Runtime.evaluate", words, self.session)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """Gives the page another width, and waits until it is laid out."""
        words = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.call("Emulation.setDeviceMetricsOverride", words, self.session)
        self.settle()

    def emulate(self, media: str = "", **features: str) -> None:
        """Shows the page as on paper (``print``), or by media features such as ``prefers_color_scheme="dark"``."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.browser.call("Emulation.setEmulatedMedia", {"media": media, "features": listed}, self.session)
        self.settle()

    def settle(self) -> None:
        """Waits until what a change of the page's width or colours set off is drawn; without scripts nothing does."""
        if self.loaded and self.scripts:
            self.ask(SETTLED)

    def screenshot(self, file: Path) -> None:
        """Writes the whole page as PNG."""
        words = {"captureBeyondViewport": True, "format": "png"}
        found = self.browser.call("Page.captureScreenshot", words, self.session)
        file.write_bytes(base64.b64decode(found["data"]))

    def hear(self, message: dict[str, Any]) -> None:
        """Takes in what the browser tells of this page."""
        method, words = message.get("method"), message.get("params", {})
        self.loaded = self.loaded or method == "Page.loadEventFired"
        if method == "Network.requestWillBeSent":
            url = words["request"]["url"]
            if url != self.url and not url.startswith("data:"):
                self.requests.append(url)
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(words["exceptionDetails"]))
        elif method == "Log.entryAdded" and words["entry"]["level"] in ("error", "warning"):
            self.errors.append(words["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and words["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(words["args"]))


class Browser:
    """Talks to a Chromium by its pipes, in its debugging protocol."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, of: int) -> None:
        self.process, self._to, self._of = process, to, of
        self._number, self._rest = 0, b""
        self._visits: dict[str, Visit] = {}

    def call(self, method: str, words: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """Asks for one thing, and waits for the answer; pages hear meanwhile what is told of them."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": words or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        return self._hear(lambda answer: answer.get("id") == number, method)

    def _hear(self, wanted: Any, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            while b"\0" not in self._rest:
                assert select.select([self._of], [], [], max(0.0, deadline - time.monotonic()))[0], f"{what}: silence"
                read = os.read(self._of, 1 << 20)
                assert read, "the browser has ended"
                self._rest += read
            text, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(text)
            visit = self._visits.get(message.get("sessionId", ""))
            if visit is not None:
                visit.hear(message)
            if wanted(message):
                assert "error" not in message, f"{what}: {message['error']}"
                return message.get("result", {})
        pytest.fail(f"{what} isn't answered")

    @contextmanager
    def visit(self, page: Path, width: int = 800, scripts: bool = True, **features: str) -> Iterator[Visit]:
        """Opens a file, with scripts or without, and waits until it is loaded and laid out."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        visit = self._visits[session] = Visit(self, session, page.absolute().as_uri(), scripts=scripts)
        try:
            for domain in ("Page", "Network", "Runtime", "Log"):
                self.call(f"{domain}.enable", session=session)
            if not scripts:
                self.call("Emulation.setScriptExecutionDisabled", {"value": True}, session)
            words = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            self.call("Emulation.setDeviceMetricsOverride", words, session)
            visit.emulate(**features)
            self.call("Page.navigate", {"url": visit.url}, session)
            if not visit.loaded:
                self._hear(lambda _: visit.loaded, "load")
            visit.settle()
            yield visit
        finally:
            del self._visits[session]
            self.call("Target.closeTarget", {"targetId": target})


@contextmanager
def running_browser() -> Iterator[Browser]:
    """The browser as long as the block runs, with a profile of its own; nothing that it asks for has an address."""
    program = install()
    theirs_in, to = os.pipe()
    of, theirs_out = os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]  # not 3 or 4, where they shall be
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank"]
        words = [sys.executable, "-c", HAND_OVER, *map(str, ends), program, *flags]
        home = os.environ | {"HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile}
        process = subprocess.Popen(
            words, pass_fds=ends, env=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        try:
            yield Browser(process, to, of)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(to)
            os.close(of)
