"""Chromium without a window, spoken to through a pipe in its DevTools protocol.

The pipe (`--remote-debugging-pipe`: messages on descriptors 3 and 4, a zero byte after each) needs
neither a port nor a library.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60
"""Seconds to wait for an answer."""


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser that has no network."""

    def __init__(self, write: int, read: int):
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            more = os.read(self._read, 2**20)
            assert more, "the browser is gone"
            self._buffer += more
        text, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(text)

    def begin(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """A JavaScript expression's value, waited for; user gestures are allowed in it."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < end, f"never came true: {expression}"
            time.sleep(0.02)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, requests that failed."""
        found = []
        for event in self.events:
            name, params = event.get("method"), event.get("params", {})
            if name == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(str(params["entry"]))
            elif name == "Network.loadingFailed":
                found.append(str(params))
        return found

    def requested(self) -> list[str]:
        sent = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]


@contextlib.contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """A browser that finds no host, gone at the end."""
    their_read, write = os.pipe()
    read, their_write = os.pipe()
    # Out of the way of 3 and 4, which become copies of them in turn.
    far = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (their_read, their_write)]
    for end in (their_read, their_write):
        os.close(end)
    their_read, their_write = far
    words = [
        program,
        "--headless=new",
        "--remote-debugging-pipe",
        "--no-sandbox",  # root, as in containers, can't have one; the page is our own
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}",
    ]
    # Descriptors 3 and 4 are the protocol's; what we were given may have any numbers.
    script = f'exec 3<&{their_read} 4>&{their_write} && exec "$0" "$@"'
    process = subprocess.Popen(
        ["bash", "-c", script, *words],
        pass_fds=(their_read, their_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_read)
    os.close(their_write)
    page = Browser(write, read)
    try:
        page.begin()
        yield page
        page._session = None
        page.call("Browser.close")
    finally:
        os.close(write)
        os.close(read)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
