"""Hostile rollouts in a real web browser: nothing that they say is obeyed, and no request leaves a page."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_pages
import pytest
from store_runs import Run

import rlbuffer
from rlbuffer.testing import make_group
from rlbuffer_cli.main import main

RUN = "talks"
PAGES = ("", "groups", "group?id=talk.7", "rollout?id=talk.7&rollout=talk.7/0", "rollout?id=talk.7&rollout=1")
needs_chromium = pytest.mark.skipif(hostile_pages.chromium() is None, reason="Chromium is not installed")


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def buffer(url: str) -> Iterator[rlbuffer.Buffer]:
    with rlbuffer.connect(url, run=RUN) as opened:
        opened.writer("w-0").push(hostile_pages.hostile_group())
        yield opened


class Browser:
    """A Chromium that is told what to do, over its pipe for debuggers."""

    def __init__(self, folder: Path) -> None:
        words = (*hostile_pages.QUIET, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank")
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", 'exec "$@" 3<&0 4>&1 1>&2', "sh", hostile_pages.chromium(), *words],
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
        until = time.monotonic() + hostile_pages.PATIENCE_SECONDS / 4
        while self.value(expression) is not True:
            assert time.monotonic() < until, self.value("document.body.innerText")
            time.sleep(0.05)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


def leaves(requests: set[str], own: str) -> set[str]:
    """Requests for anything but the page's own address."""
    return {request for request in requests if not request.startswith(own)}


@needs_chromium
def test_a_page_that_obeys_is_seen_to(tmp_path: Path) -> None:
    page = tmp_path / "control.html"
    page.write_text(f"<title>control</title>{hostile_pages.HOSTILE}")
    dom = hostile_pages.visit(page.as_uri(), tmp_path / "a")
    assert "<title>owned</title>" in dom
    asked = leaves(hostile_pages.requests_of(tmp_path / "a"), page.as_uri())
    assert {f"http://evil.example/{name}" for name in "isflx"} <= asked


@needs_chromium
@pytest.mark.parametrize("path", PAGES)
def test_no_request_leaves_a_page_of_the_web(buffer: rlbuffer.Buffer, tmp_path: Path, path: str) -> None:
    with hostile_pages.served(buffer) as pages:
        dom = hostile_pages.visit(pages.url + path, tmp_path / "a")
        requests = hostile_pages.requests_of(tmp_path / "a")
        assert leaves(requests, f"http://127.0.0.1:{pages.server_address[1]}/") == set()
    assert f"run {RUN}</title>" in dom
    assert "talk" in dom
    assert len(dom) < 3_000_000


@needs_chromium
def test_the_filter_of_the_web_shows_what_was_asked_for(buffer: rlbuffer.Buffer, tmp_path: Path) -> None:
    browser = Browser(tmp_path)
    try:
        with hostile_pages.served(buffer) as pages:
            browser.ask("Page.navigate", url=f"{pages.url}groups")
            browser.sees("document.forms.length == 1 && document.body.innerText.includes('talk.7')")
            browser.value("document.forms[0].where.value = 'env:other'; document.forms[0].requestSubmit()")
            browser.sees("location.search.includes('where=env%3Aother') && document.forms.length == 1")
            assert browser.value("document.forms[0].where.value") == "env:other"
            assert "talk.7" not in browser.value("document.body.innerText")
    finally:
        browser.close()


@needs_chromium
def test_no_request_leaves_an_exported_page(url: str, buffer: rlbuffer.Buffer, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    assert main(["inspect", "talk.7", "--html", str(page), "--redis", url, "--run", RUN]) == 0
    dom = hostile_pages.visit(page.as_uri(), tmp_path / "a")
    assert "<title>talk.7 of run talks</title>" in dom
    assert leaves(hostile_pages.requests_of(tmp_path / "a"), page.as_uri()) == set()
    hostile_pages.visit(page.as_uri(), tmp_path / "b", picture=picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_chromium
def test_the_labels_of_curves_and_the_last_column_of_a_table_can_be_read(tmp_path: Path) -> None:
    run, long = Run(f"memory://{uuid.uuid4().hex}", tmp_path), "-".join(["long"] * 24)
    run.step("a.0", "b.0")
    run.step("a.1", "b.1")
    run.push(make_group(env="a", group_id=long, prompt_id=long, worker=long))
    browser = Browser(tmp_path / "profile")
    try:
        with rlbuffer.connect(run.url, run=run.store.run) as buffer, hostile_pages.served(buffer) as pages:
            browser.ask("Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False)
            browser.ask("Page.navigate", url=pages.url)
            browser.sees("document.querySelectorAll('svg text').length > 0")
            assert browser.value("document.querySelector('svg text').getBoundingClientRect().height") >= 11
            browser.ask("Page.navigate", url=f"{pages.url}groups")
            browser.sees("document.querySelectorAll('tbody tr').length == 5")
            assert (
                browser.value("Math.max(...[...document.querySelectorAll('tbody tr')].map(r => r.clientHeight))") < 150
            )
    finally:
        browser.close()
        run.close()
