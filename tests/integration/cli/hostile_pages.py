"""A hostile rollout, and a headless Chromium that looks at its pages: `inspect --web`, and an exported page.

The rollout says everything that a worker could say to run a script, to fetch something, or to turn text around.
Chromium resolves no name but this machine's, and writes down every request.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import rlbuffer
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer_cli.web.server import Pages
from rlbuffer_cli.whole_run import WholeRun

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_SECONDS = 60
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
PROMPT = "Add 2 and 2.\n"
HOSTILE = (
    "4 <script>document.title='owned'</script><img src=http://evil.example/i onerror=\"document.title='owned'\">"
    "<style>@import 'http://evil.example/s'</style><iframe src=http://evil.example/f></iframe>"
    "<link rel=stylesheet href=http://evil.example/l><svg onload=\"fetch('http://evil.example/x')\">"
    "\x1b[2J\x1b]0;owned\x07 \u202eevil\u2066 \x9b31m "
)
LONG_TEXT = 1_000_000


def chromium() -> str | None:
    """The program; None where it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def hostile_group() -> rlbuffer.Group:
    """A group of a hostile rollout, and of one with a text of 1 MB."""
    text = PROMPT + HOSTILE
    mask = np.arange(len(text)) >= len(PROMPT)
    values = {
        "tokens": np.array([ord(c) for c in text], np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, -(np.arange(len(text)) % 5) / 2.0, 0.0).astype(np.float32),
        "version_spans": (VersionSpan(3, len(PROMPT), len(text)),),
        "turns": (Turn("user", 0, len(PROMPT)), Turn(HOSTILE[:40], len(PROMPT), len(text))),
        "rewards": {HOSTILE[2:50]: 0.0},
        "finish_reason": HOSTILE[2:40],
    }
    one = rlbuffer.Rollout(**values, rollout_id="talk.7/0", reward=0.0, text=text)
    long = rlbuffer.Rollout(**values, rollout_id="talk.7/1", reward=1.0, text=text + "<b>y" * (LONG_TEXT // 4))
    return rlbuffer.Group(
        "talk.7", "talk", HOSTILE[:250], (one, long), 2, answer=HOSTILE, metadata={HOSTILE: HOSTILE}, worker="w-0"
    )


@contextlib.contextmanager
def served(buffer: rlbuffer.Buffer) -> Iterator[Pages]:
    """The pages of `inspect --web`, while they are needed."""
    with Pages(WholeRun(buffer), 0) as pages:
        thread = threading.Thread(target=pages.serve_forever)
        thread.start()
        try:
            yield pages
        finally:
            pages.shutdown()
            thread.join()


class Browser:
    """A headless Chromium that is told what to do, over its pipe for debuggers."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "net.json"
        words = (f"--log-net-log={self._log}", f"--user-data-dir={folder / 'profile'}", "about:blank")
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", 'exec "$@" 3<&0 4>&1 1>&2', "sh", chromium(), *QUIET, "--remote-debugging-pipe", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._asked = 0
        self._session: dict[str, str] = {}
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self._session = {"sessionId": session}

    def ask(self, method: str, **params: Any) -> Any:
        """One command. -> its result."""
        self._asked += 1
        command = {"id": self._asked, "method": method, "params": params, **self._session}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\0")
        self._process.stdin.flush()
        while True:
            said = bytearray()
            while (byte := self._process.stdout.read(1)) != b"\0":
                assert byte, "Chromium has ended"
                said += byte
            answer = json.loads(said)
            if answer.get("id") == self._asked:
                return answer["result"]

    def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        return self.ask("Runtime.evaluate", expression=expression, userGesture=True)["result"].get("value")

    def sees(self, expression: str) -> None:
        """Waits until an expression is true in the page."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self.value(expression) is not True:
            assert time.monotonic() < until, self.value("document.body.innerText")
            time.sleep(0.05)

    def visit(self, url: str) -> str:
        """Opens a page. -> the page as it is then."""
        self.ask("Page.navigate", url=url)
        self.sees(f"document.readyState == 'complete' && location.href == {json.dumps(url)}")
        return str(self.value("document.documentElement.outerHTML"))

    def requests(self) -> set[str]:
        """Ends it. -> every address that a page has asked for; Chromium's own requests come from no page."""
        self._session = {}
        self.ask("Browser.close")
        self._process.communicate(timeout=PATIENCE_SECONDS)
        log = json.loads(self._log.read_text())
        number = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
        params = [event.get("params", {}) for event in log["events"] if event["type"] == number]
        return {str(each["url"]) for each in params if "url" in each and each.get("initiator") != "not an origin"}

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self._process.kill()
        self._process.communicate()
