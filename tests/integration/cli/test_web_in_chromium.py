"""Hostile rollouts in a real web browser: nothing that they say is obeyed, and no request leaves a page."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from pathlib import Path

import hostile_pages
import pytest
from hostile_pages import Browser
from store_runs import Run

import rlbuffer
from rlbuffer.testing import make_group
from rlbuffer_cli.main import main

RUN = "talks"
PAGES = ("", "groups", "group?id=talk.7", "rollout?id=talk.7&rollout=talk.7/0", "rollout?id=talk.7&rollout=1")
pytestmark = pytest.mark.skipif(hostile_pages.chromium() is None, reason="Chromium is not installed")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    made = Browser(tmp_path)
    yield made
    made.close()


def test_a_page_that_obeys_is_seen_to(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "control.html"
    page.write_text(f"<title>control</title>{hostile_pages.HOSTILE}")
    assert "<title>owned</title>" in browser.visit(page.as_uri())
    assert {f"http://evil.example/{name}" for name in "isflx"} <= browser.requests()


def test_no_request_leaves_a_page_of_the_web_or_an_exported_one(browser: Browser, tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    exported = tmp_path / "page.html"
    with rlbuffer.connect(url, run=RUN) as buffer:
        buffer.writer("w-0").push(hostile_pages.hostile_group())
        assert main(["inspect", "talk.7", "--html", str(exported), "--redis", url, "--run", RUN]) == 0
        with hostile_pages.served(buffer) as pages:
            for path in PAGES:
                dom = browser.visit(pages.url + path)
                assert f"run {RUN}</title>" in dom
                assert "talk" in dom
                assert len(dom) < 3_000_000
            browser.visit(f"{pages.url}groups")
            assert "talk.7" in browser.value("document.body.innerText")
            browser.value("document.forms[0].where.value = 'env:other'; document.forms[0].requestSubmit()")
            browser.sees("location.search.includes('where=env%3Aother') && document.forms.length == 1")
            assert browser.value("document.forms[0].where.value") == "env:other"
            assert "talk.7" not in browser.value("document.body.innerText")
            own = f"http://127.0.0.1:{pages.server_address[1]}/"
            assert "<title>talk.7 of run talks</title>" in browser.visit(exported.as_uri())
            picture = base64.b64decode(browser.ask("Page.captureScreenshot")["data"])
            assert picture.startswith(b"\x89PNG")
            assert [each for each in browser.requests() if not each.startswith((own, exported.as_uri()))] == []


def test_the_labels_of_curves_and_the_last_column_of_a_table_can_be_read(browser: Browser, tmp_path: Path) -> None:
    run, long = Run(f"memory://{uuid.uuid4().hex}", tmp_path), "-".join(["long"] * 24)
    run.step("a.0", "b.0")
    run.step("a.1", "b.1")
    run.push(make_group(env="a", group_id=long, prompt_id=long, worker=long))
    with rlbuffer.connect(run.url, run=run.store.run) as buffer, hostile_pages.served(buffer) as pages:
        browser.ask("Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False)
        browser.visit(pages.url)
        browser.sees("document.querySelectorAll('svg text').length > 0")
        assert browser.value("document.querySelector('svg text').getBoundingClientRect().height") >= 11
        browser.visit(f"{pages.url}groups")
        browser.sees("document.querySelectorAll('tbody tr').length == 5")
        assert browser.value("Math.max(...[...document.querySelectorAll('tbody tr')].map(r => r.clientHeight))") < 150
    run.close()
