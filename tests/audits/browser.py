"""A real browser for tests: Chromium without a window, driven by its own protocol over two pipes,
so that nothing else is installed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0
"""Seconds after which a silent browser is a failure."""
FREE = 10
"""Our ends of the pipes are above this, out of the way of 3 and 4, which the browser reads and writes."""
KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
"""Keys that tests press, by the numbers that the protocol has for them."""
COMPLAINTS = {"Runtime.exceptionThrown", "Log.entryAdded"}


def executable() -> str | None:
    """The browser: what CHROMIUM names, or the first that is installed."""
    named = os.environ.get("CHROMIUM")
    found = [shutil.which(name) for name in ((named,) if named else NAMES)]
    return next((path for path in found if path), None)


@contextmanager
def browser(path: str) -> Iterator[Browser]:
    """A browser with a profile of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        running = Browser(path, profile)
        try:
            yield running
        finally:
            running.close()


class Browser:
    """One process and its pipes."""

    def __init__(self, path: str, profile: str) -> None:
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        arguments = [
            path,
            *options,
            "--disable-background-networking",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        self._process = os.posix_spawn(path, arguments, os.environ, file_actions=[*silent, *pipes])
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread, self._count = b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; what happens meanwhile is kept in `events`."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        self._send(message)
        while (answer := self._next()).get("id") != message["id"]:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _send(self, message: dict[str, Any]) -> None:
        text = memoryview(json.dumps(message).encode() + b"\0")
        while text:
            text = text[os.write(self._out, text) :]

    def wait(self, method: str, session: str) -> None:
        """Wait for an event of a page."""
        while not any(
            event.get("method") == method and event.get("sessionId") == session for event in self.events
        ):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._in], [], [], PATIENCE)[0]:
                raise TimeoutError(f"the browser said nothing for {PATIENCE:g} seconds")
            part = os.read(self._in, 1 << 16)
            if not part:
                raise ConnectionError("the browser ended")
            self._unread += part
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, path: Path, *, fragment: str = "", width: int = 1280, dark: bool = False) -> Page:
        """A page from disk."""
        return Page(self, path.resolve().as_uri() + fragment, width, dark)

    def close(self) -> None:
        """End the process and wait until it is gone."""
        with suppress(ConnectionError, OSError, RuntimeError, TimeoutError):
            self.call("Browser.close")
        until = time.monotonic() + 5
        while os.waitpid(self._process, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(self._process, signal.SIGKILL)
            time.sleep(0.02)
        os.close(self._out)
        os.close(self._in)


class Page:
    """A tab: what it shows, what it complains about, what it asks the network for."""

    def __init__(self, owner: Browser, url: str, width: int, dark: bool) -> None:
        self._owner = owner
        target = owner.call("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        self._session = owner.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call("Page.navigate", url=url)
        owner.wait("Page.loadEventFired", self._session)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command for this page."""
        return self._owner.call(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]["exception"].get("description")))
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has been drawn."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => "
            "setTimeout(done, 0))))"
        )

    def until(self, expression: str) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + 10
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of an element, on whatever is on top there."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}})")
        left, top, width, height = self.evaluate(
            f"(({{x, y, width, height}}) => [x, y, width, height])({found}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=left + width / 2,
                y=top + height / 2,
                button="left",
                clickCount=1,
            )
        self.settle()

    def press(self, key: str) -> None:
        """A key, as a user presses it."""
        text = "\r" if key == "Enter" else ""
        self.call(
            "Input.dispatchKeyEvent",
            type="keyDown",
            key=key,
            code=key,
            windowsVirtualKeyCode=KEYS[key],
            text=text,
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=KEYS[key])
        self.settle()

    def choose(self, selector: str, value: str) -> None:
        """Another option of a list."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.value = {json.dumps(value)}; {found}.dispatchEvent(new Event('change'))")

    def texts(self, selector: str) -> list[str]:
        """What elements say."""
        found: list[str] = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
        )
        return found

    def go(self, fragment: str) -> None:
        """Another place of the same page."""
        self.evaluate(f"location.hash = {json.dumps(fragment)}")
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of what is seen, or of the whole page."""
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])
        )

    @property
    def problems(self) -> list[str]:
        """Exceptions, errors and warnings of the console, and violations of the page's own policy."""
        self.settle()
        return [
            json.dumps(event["params"])
            for event in self._own(lambda event: event["method"] in COMPLAINTS or _complains(event))
        ]

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for, the page itself included."""
        self.settle()
        return [
            event["params"]["request"]["url"]
            for event in self._own(lambda event: event["method"] == "Network.requestWillBeSent")
        ]

    def _own(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        return [
            event for event in self._owner.events if event.get("sessionId") == self._session and wanted(event)
        ]

    def close(self) -> None:
        """Close the tab."""
        self._owner.call("Target.closeTarget", targetId=self._target)


def _complains(event: dict[str, Any]) -> bool:
    return event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in (
        "error",
        "warning",
        "assert",
    )


def _pipe() -> tuple[int, int]:
    """The reading and the writing end, neither of them inherited,
    both above the numbers that the browser wants.
    """
    ends = os.pipe()
    moved = (
        fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, FREE),
        fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, FREE),
    )
    for end in ends:
        os.close(end)
    return moved
