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
        browser.sees("document.querySelectorAll('tbody tr:not(.below)').length == 5")
        assert browser.value("Math.max(...[...document.querySelectorAll('tbody tr')].map(r => r.clientHeight))") < 150
    run.close()


@pytest.mark.parametrize("width", [400, 900, 1600])
def test_nothing_runs_out_of_the_window(browser: Browser, tmp_path: Path, width: int) -> None:
    run, long = Run(f"memory://{uuid.uuid4().hex}", tmp_path), "-".join(["long"] * 24)
    for step in range(1, 4):
        run.step(f"a.{step}", f"b.{step}")
    run.push(make_group(env="a", group_id=long, prompt_id=long, worker=long))
    run.store.heartbeat("worker", long, {"version": 3, "problems": [{"kind": "env_fails", "detail": long * 9}]})
    paths = ("", "groups", "steps", "processes", "envs", "problems", "step?n=2", f"group?id={long}")
    pairs = (f"rollout?id={long}&rollout={long}/0", f"compare?id={long}&one={long}/0&other={long}/1")
    with rlbuffer.connect(run.url, run=run.store.run) as buffer, hostile_pages.served(buffer) as pages:
        browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        for path in (*paths, *pairs):
            browser.visit(pages.url + path)
            assert browser.value("document.documentElement.scrollWidth") == width, path
            out = "[...document.querySelectorAll('main *, header *')].filter(e => !e.closest('.scroll, svg') && "
            assert browser.value(f"{out} e.getBoundingClientRect().right > innerWidth).length") == 0, path
    run.close()
