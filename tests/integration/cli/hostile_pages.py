"""A hostile rollout, and a headless Chromium that looks at its pages: `inspect --web`, and an exported page.

The rollout says everything that a worker could say to run a script, to fetch something, or to turn text around.
Chromium resolves no name but this machine's, and writes down every request: `requests_of` reads them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import rlbuffer
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer_cli.web.server import Pages
from rlbuffer_cli.whole_run import WholeRun

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_SECONDS = 120
SIZE = (1000, 620)
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


def visit(url: str, folder: Path, *, picture: Path | None = None) -> str:
    """Opens a page; its requests go into ``folder/net.json``. -> the page as Chromium has it then."""
    program = chromium()
    assert program is not None, "Chromium is not installed"
    words = [f"--screenshot={picture}", f"--window-size={SIZE[0]},{SIZE[1]}"] if picture else ["--dump-dom"]
    where = (f"--user-data-dir={folder / 'profile'}", f"--log-net-log={folder / 'net.json'}")
    done = subprocess.run(
        [program, *QUIET, *where, *words, url], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    return done.stdout


def requests_of(folder: Path) -> set[str]:
    """Every address that the page asked for; Chromium's own requests come from no page."""
    log = json.loads((folder / "net.json").read_text())
    number = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    params = [event.get("params", {}) for event in log["events"] if event["type"] == number]
    return {str(each["url"]) for each in params if "url" in each and each.get("initiator") != "not an origin"}
