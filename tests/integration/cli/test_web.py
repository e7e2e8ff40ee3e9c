"""`inspect --web`: every view by its links, nothing for strangers, and nothing that a hostile worker could do there."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlsplit

import pytest
from hostile_pages import served
from store_runs import Run
from test_html import Page

import rlbuffer
from rlbuffer.errors import ServerUnreachable
from rlbuffer.records.spans import Turn
from rlbuffer.testing import make_group
from rlbuffer_cli.tables import VIEWS
from rlbuffer_cli.web.pages import written
from rlbuffer_cli.web.server import HEADERS, Pages

EVIL = "\"'><script>alert(1)</script><img src=//evil onerror=x>\x1b[2J\u202e"


class Visitor:
    """A web browser at a server of pages."""

    def __init__(self, pages: Pages) -> None:
        self.pages, self.address = pages, urlsplit(pages.url)

    def get(self, path: str = "", *, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
        """(status, headers, body) of a path below the token, or of a whole one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.address.port, timeout=60)
        try:
            connection.request(method, path if path.startswith("/") else f"{self.address.path}{path}", headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.msg, reply.read().decode()
        finally:
            connection.close()

    def page(self, path: str = "") -> Page:
        status, _, body = self.get(path)
        assert status == 200, body
        return Page(body)

    def walk(self) -> dict[str, Page]:
        """Every page that a link leads to: path -> page."""
        seen: dict[str, Page] = {}
        ahead = [self.address.path]
        while ahead:
            path = ahead.pop()
            if path not in seen:
                seen[path] = self.page(path)
                ahead += [urldefrag(urljoin(path, link)).url for link in seen[path].links]
        return seen


def fill(run: Run) -> None:
    """Two steps, a dropped group, one that is ready and hostile, a worker with a failure."""
    run.step("a.0", "b.0")
    run.step("a.9")
    run.push("a.1")
    run.drop("stale", run.pool())
    group = make_group(env="a", group_id="a.2", size=2)
    first = replace(
        group.rollouts[0], text=EVIL, rollout_id=f"x{EVIL}", finish_reason=EVIL[:60], turns=(Turn(EVIL[:60], 0, 5),)
    )
    rollouts = (first, group.rollouts[1])
    run.push(replace(group, rollouts=rollouts, prompt_id=EVIL, answer=EVIL, metadata={EVIL: EVIL}))
    run.store.heartbeat("worker", EVIL, {"version": 3, "problems": [{"kind": "env_fails", "detail": EVIL}]})
    run.store.heartbeat("batcher", "leader", {"waiting": {"kind": "server", "detail": EVIL}})


@pytest.fixture
def visitor(run: Run, buffer: rlbuffer.Buffer) -> Iterator[Visitor]:
    fill(run)
    with served(buffer) as pages:
        yield Visitor(pages)


def test_every_view_is_reached_by_links_and_harmless(visitor: Visitor) -> None:
    seen = visitor.walk()
    kinds = {path.removeprefix(visitor.address.path).partition("?")[0] for path in seen}
    assert kinds == {"", *VIEWS, "compare", "group", "rollout", "step"}
    assert all(path.startswith(visitor.address.path) for path in seen), "no link leads elsewhere"
    text = "".join(page.text for page in seen.values())
    for words in (
        "✕ dropped stale",
        "dropped (stale: because)",
        "packed into step 1, rank",
        "closed by capacity: ",
        "sets the pace",
        "worker \"'><script>alert(1)</script>",
        "reward  0.5 at step 2, 0.5 to 0.5",
        "\\x1b[2J\\u202e",
    ):
        assert words in text
    tags = [tag for page in seen.values() for tag in page.tags]
    assert not {"script", "img", "iframe", "link", "object"} & {name for name, _ in tags}
    attributes = {name for _, attributes in tags for name in attributes}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "style", "action")}


def test_two_rollouts_stand_side_by_side_from_where_they_part(run: Run, buffer: rlbuffer.Buffer) -> None:
    def spoke(index: int, completion: str, reward: float) -> rlbuffer.Rollout:
        tokens = [ord(c) for c in f"12=ab{completion}"]
        made = rlbuffer.Rollout.from_completion(
            prompt_ids=tokens[:3],
            token_ids=tokens[3:],
            logprobs=[-1.0] * (len(tokens) - 3),
            reward=reward,
            policy_version=0,
        )
        return replace(made, rollout_id=f"a.0/{index}", text=f"12=ab{completion}")

    rollouts = (spoke(0, "cd", 1.0), spoke(1, "xyz", 0.0), spoke(2, "xyz", 0.0))
    run.push(rlbuffer.Group("a.0", "a", "12=", rollouts, 3, answer="abcd"))
    with served(buffer) as pages:
        visitor = Visitor(pages)
        (way,) = [link for link in visitor.page("group?id=a.0").links if link.startswith("compare?")]
        page = visitor.page(way)
        assert "they part at token 5" in page.text
        assert "both begin with the same 5 tokens" in page.text
        shown = [attributes["title"] for tag, attributes in page.tags if tag == "i" and attributes.get("title")]
        assert [title.partition(" ·")[0] for title in shown] == ["token 5", "token 6", "token 5", "token 6", "token 7"]
        rows = [attributes.get("class") for tag, attributes in page.tags if tag == "tr"]
        assert rows.count("same") == 7, "mean of the group, answer, prompt, turns, logprob, version and age are alike"
        assert "their tokens are the same" in visitor.page("compare?id=a.0&one=a.0/1&other=a.0/2").text
        assert visitor.get("compare?id=a.0&one=a.0/1&other=a.0/9")[0] == 404


def test_a_rollout_has_its_numbers_and_its_life_beside_its_text(visitor: Visitor) -> None:
    page = visitor.page("rollout?id=a.0&rollout=a.0/1")
    beside = page.text.partition("mean of the group")[2]
    assert "sampled by v" in beside
    assert "packed into step 1, rank" in beside


def test_the_tab_of_problems_has_their_number_on_every_page(visitor: Visitor) -> None:
    count = len(problem_rows(visitor))
    assert count
    for path in ("", "groups", "step?n=1", "group?id=a.0"):
        assert f"problems {count}" in visitor.page(path).text


def problem_rows(visitor: Visitor) -> list[str]:
    """Rows of the page of problems."""
    tags = visitor.page("problems").tags
    return [tag for tag, attributes in tags if tag == "tr" and "class" not in attributes][1:]


def test_a_curve_has_a_short_title_a_number_and_a_band(run: Run, buffer: rlbuffer.Buffer) -> None:
    for step in range(1, 8):
        run.step(f"a.{step}")
    with served(buffer) as pages:
        _, _, body = Visitor(pages).get("steps")
    assert body.count("<figure") == body.count('class="band"') == body.count('class="dot"') > 2
    assert "<figcaption>reward<b>0.500</b></figcaption>" in body
    assert [written(axis) for axis in ([15570.4, 3.0], [0.25, -0.5], [0.0004, 0.002])] == [
        ["15,570", "3"],
        ["0.250", "\u22120.500"],
        ["0.00040", "0.00200"],
    ]


def test_the_filter_and_the_order_of_a_table_stand_in_its_address(visitor: Visitor) -> None:
    page = visitor.page("groups?where=state%3Adropped")
    assert [link for link in page.links if link.startswith("group?")] == ["group?id=a.1"]
    assert "'stat' is not a field to filter by. Did you mean state?" in visitor.page("groups?where=stat%3Ax").text
    names = ["a.0", "a.1", "a.2", "a.9", "b.0"]
    for sort, ordered in (("group", names), ("-group", names[::-1])):
        links = [link for link in visitor.page(f"groups?sort={sort}").links if link.startswith("group?")]
        assert links == [f"group?id={name}" for name in ordered]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("group?id=nosuch", 404, "has no group 'nosuch'"),
        ("rollout?id=a.0&rollout=7", 404, "has no rollout '7'"),
        ("step?n=99", 404, "has no step 99: the last committed one is 2"),
        ("step?n=%C2%B2", 404, "a step has a number from 1: step?n=40"),
        ("step", 404, "a step has a number from 1: step?n=40"),
        ("nosuch", 404, ""),
        ("group/../steps", 404, ""),
        (f"groups?{'a=1&' * 50}", 400, "Max number of fields exceeded"),
        ("/", 404, ""),
        ("/wrong/", 404, ""),
        ("/../../etc/passwd", 404, ""),
        ("/%ff/", 404, ""),
    ],
)
def test_what_is_not_there_is_a_sentence_and_strangers_learn_nothing(
    visitor: Visitor, path: str, status: int, words: str
) -> None:
    answer, _, body = visitor.get(path)
    assert (answer, words in unescape(body)) == (status, True)
    assert bool(body) == bool(words)


def test_only_requests_for_loopback_and_only_those_that_read_are_answered(visitor: Visitor) -> None:
    port = visitor.address.port
    for host, status in (
        (f"127.0.0.1:{port}", 200),
        (f"localhost:{port}", 200),
        ("evil.example", 403),
        (f"evil.example:{port}", 403),
        ("127.0.0.1", 200),
    ):
        answer, _, body = visitor.get(Host=host)
        assert (answer, bool(body)) == (status, status == 200)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert visitor.get(method=method)[0] == 501
    assert visitor.pages.server_address[0] == "127.0.0.1"


def test_a_page_lets_nothing_be_run_fetched_framed_or_remembered(visitor: Visitor) -> None:
    for path in ("", "group?id=a.2", "nosuch"):
        _, headers, _ = visitor.get(path)
        assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert policy.endswith("base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
    assert len(visitor.pages.token) >= 32
    assert "127.0.0.1" not in headers["Server"]


def test_a_server_that_is_away_is_a_sentence(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise ServerUnreachable("cannot reach Redis")

    monkeypatch.setattr(visitor.pages.run.buffer.store, "trainer", away)
    status, _, body = visitor.get("steps")
    assert status == 503
    assert "✕ cannot reach Redis" in body


@pytest.mark.server
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_address_and_ends_when_asked_to(
    number: signal.Signals, redis_url: str, tmp_path: Path
) -> None:
    run = Run(redis_url, tmp_path)
    run.push("a.0")
    words = [sys.executable, "-m", "rlbuffer_cli", "inspect", "--web", "--redis", redis_url, "--run", run.store.run]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env=dict(os.environ),
        text=True,
    )
    assert process.stdout is not None
    try:
        url = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
        connection.request("GET", url.path)
        assert run.store.run in connection.getresponse().read().decode()
        connection.close()
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        run.close()
