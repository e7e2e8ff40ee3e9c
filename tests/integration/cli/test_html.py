"""Groups as one HTML page: what stands in it, and what a hostile worker's texts cannot do there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browsing import Person, browse
from store_runs import Run

import rlbuffer
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.testing import make_group
from rlbuffer_cli.main import main
from rlbuffer_cli.web.pages import LENSES, TITLED_TOKENS, file_name, policy, style

EVIL = "\"'><script>alert(1)</script><img src=//evil onerror=x>&lt;\x1b[2J\u202e\u2066\x9b\x00</title></style>-->]]>"
Export = Callable[..., str]
VOID = {"meta", "input", "br"}
ALLOWED = VOID | {
    *("html", "head", "title", "style", "body", "main", "h1", "h2", "h3", "p", "pre", "div", "details", "summary"),
    *("table", "thead", "tbody", "tr", "th", "td", "i", "nav", "a", "span", "section"),
    *("aside", "dl", "dt", "dd", "ol", "li"),
}


class Page(HTMLParser):
    """A page as a browser takes it apart: its elements, balanced, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    @property
    def links(self) -> list[str]:
        return [attributes["href"] or "" for tag, attributes in self.tags if tag == "a"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def check_harmless(html: str) -> Page:
    """Checks that a page has only elements of ours, no attribute that runs or fetches, and no control character."""
    page = Page(html)
    assert {tag for tag, _ in page.tags} <= ALLOWED
    names = {name for _, attributes in page.tags for name in attributes}
    known = {"lang", "charset", "http-equiv", "colspan", "content", "name", "class", "title", "id", "href", "open"}
    assert names <= known
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in page.tags), "no link leads out"
    assert all(character.isprintable() or character == "\n" for character in html)
    assert policy("none") in html
    assert html.count("<style>") == html.count("</style>") == 1
    return page


@pytest.fixture
def export(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    def write(*words: str) -> str:
        assert main(["inspect", *words, "--html", "-", "--redis", run.url, "--run", run.store.run]) == 0
        return capsys.readouterr().out

    return write


def push(run: Run, *rollouts: rlbuffer.Rollout, group_id: str = "talk.7", **fields: object) -> None:
    group = make_group(env="talk", group_id=group_id)
    group = replace(group, rollouts=rollouts, planned_size=len(rollouts), **fields)  # type: ignore[arg-type]
    run.push(group)


def talk(characters: str, prompt: int = 5, **fields: object) -> rlbuffer.Rollout:
    length = len(characters)
    mask = np.arange(length) >= prompt
    later = [VersionSpan(1, prompt + 1, length)] * (length > prompt + 1)
    values = {
        "tokens": np.array([ord(c) for c in characters], np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, -np.minimum(np.arange(length), 200) / 2.0, 0.0).astype(np.float32),
        "reward": 0.5,
        "version_spans": (VersionSpan(0, prompt, prompt + 1), *later),
        "turns": (Turn("user", 0, prompt), Turn("assistant", prompt, length, 0.25)),
        "text": characters,
        "columns": {"entropy": np.linspace(0, 2, length, dtype=np.float32)},
    }
    return rlbuffer.Rollout(**(values | fields))  # type: ignore[arg-type]


def test_a_page_has_the_prompt_the_rollouts_and_the_numbers_of_every_sampled_token(run: Run, export: Export) -> None:
    push(run, talk("2+2=\n4!"), talk("2+2=\n5"), answer="4", metadata={"level": 3})
    html = export("talk.7")
    page = check_harmless(html)
    assert "group talk.7   ● ready   env talk" in page.text
    assert '{"level": 3}' in page.text
    titles = [attributes["title"] for tag, attributes in page.tags if tag == "i" and "title" in attributes]
    assert titles[0] == "token 5 · id 52 · trained yes · logprob \u22122.5000 · p 0.082 · entropy 1.6667 · version v0"
    assert titles[1].endswith("version v1")
    assert len(titles) == 3
    assert "<i>2+2=\n</i>" in html
    assert '<i class="lo2 ma1 en2 ve1" title="token 5 ' in html
    assert "assistant · 2 tokens · reward 0.25" in page.text
    assert "nats, pushed as column `entropy`" in page.text
    assert "not kept per token" in page.text
    anchors = [attributes["id"] for tag, attributes in page.tags if "id" in attributes]
    assert anchors == list(LENSES)
    assert all(f"body:has(#{lens}:target)" in style() for lens in LENSES)


def test_one_rollout_or_the_groups_of_a_filter_are_exported(run: Run, export: Export) -> None:
    push(run, talk("2+2=\n4!"), talk("2+2=\n5"))
    push(run, talk("other: text"), group_id="talk.8")
    assert export("talk.7/1").count('class="tokens"') == 2
    html = export("--where", "text:/^2/")
    assert "group talk.7" in html
    assert "group talk.8" not in html
    assert "groups text:/^2/</title>" in html
    assert "no groups" in export("--where", "env:none")


def test_nothing_that_a_worker_wrote_is_obeyed_by_a_browser(run: Run, export: Export) -> None:
    rollout = talk(
        EVIL + "x" * 40,
        rewards={EVIL[:60]: 1.0},
        finish_reason=EVIL[:60],
        rollout_id=f"talk.7/0{EVIL[:60]}",
        turns=(Turn(EVIL[:60], 0, 9), Turn(EVIL[:60], 9, 20)),
        metadata={EVIL: EVIL},
    )
    large = talk("a" * 9, text=EVIL + "y" * 1_000_000, rollout_id="1")
    push(run, rollout, large, adapter=EVIL, answer=EVIL, metadata={EVIL: EVIL}, prompt_id=EVIL)
    html = export("talk.7")
    page = check_harmless(html)
    assert "<script>alert(1)</script>" in page.text, "it is shown as it was written"
    assert "\\x1b[2J\\u202e\\u2066\\x9b\\x00" in page.text
    assert len(html) < 500_000
    assert re.search(r"9\d\d,\d\d\d characters more", page.text)


def test_a_long_rollout_is_whole_and_has_no_numbers_to_point_at(run: Run, export: Export) -> None:
    push(run, talk("ab" * (TITLED_TOKENS // 2 + 1)))
    html = export("talk.7")
    page = check_harmless(html)
    assert "ab" * (TITLED_TOKENS // 2 - 2) in "".join(page.text.split())
    assert "token 5 " not in html
    assert len(html) < 10 * TITLED_TOKENS, "tokens of the same levels stand together"


def test_a_dropped_group_says_by_which_rule(run: Run, export: Export) -> None:
    push(run, talk("2+2=\n4!"))
    run.lead()
    run.drop("stale", run.pool())
    page = check_harmless(export("talk.7"))
    assert "dropped (stale: because)" in page.text
    assert "talk.7/0   reward 0.500" in page.text
    run.client.delete(*run.store.dropped_payloads(["talk.7"])["talk.7"])
    assert "its rollouts are no longer kept" in check_harmless(export("talk.7")).text


def test_a_file_is_written_and_one_that_cannot_be_is_an_error(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(run, talk("2+2=\n4!"))
    at = ["--redis", run.url, "--run", run.store.run]
    assert main(["inspect", "talk.7", "--html", str(tmp_path / "a.html"), *at]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"wrote {tmp_path}/a.html\n")
    check_harmless((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert main(["inspect", "talk.7", "--html", str(tmp_path / "no" / "a.html"), *at]) == 2
    assert f"Error: --html {tmp_path}/no/a.html: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("inspect", "talk.7", "--html"), ("export", "-o")])
def test_a_page_takes_the_place_of_a_planted_link(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    push(run, talk("2+2=\n4!"))
    precious, page = tmp_path / "precious", tmp_path / "a.html"
    precious.write_text("precious")
    page.symlink_to(precious)
    assert main([*command, str(page), "--redis", run.url, "--run", run.store.run]) == 0
    assert (precious.read_text(), page.is_symlink()) == ("precious", False)
    check_harmless(page.read_text(encoding="utf-8"))


def test_a_page_is_there_whole_or_not_at_all(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A group that cannot be shown comes after others that can."""
    push(run, talk("2+2=\n4!"))
    monkeypatch.setattr("rlbuffer_cli.web.pages.shown_group", lambda *words, **named: 1 / 0)
    (tmp_path / "a.html").write_text("the page of yesterday")
    assert main(["export", "-o", str(tmp_path / "a.html"), "--redis", run.url, "--run", run.store.run]) == 1
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a.html", "the page of yesterday")]
    assert "division by zero" in capsys.readouterr().err


def test_e_writes_what_is_on_the_screen_into_the_current_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(run, talk("2+2=\n4!"), talk("2+2=\n5", rollout_id="talk.7/b/../é"))
    monkeypatch.chdir(tmp_path)

    async def tour(person: Person) -> None:
        await person.sees("talk.7")
        await person.press("e")
        await person.sees("wrote ", "rlbuffer-talk.7.html")
        await person.press("enter")
        await person.sees("group talk.7")
        await person.press("j", "enter")
        await person.sees("(2 of 2 of its group)")
        await person.press("e")
        await person.sees("rlbuffer-talk.7-.html")

    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        browse(buffer, tour, size=(140, 30))
    assert (tmp_path / "rlbuffer-talk.7.html").read_text().count("<details") == 3
    assert (tmp_path / "rlbuffer-talk.7-.html").read_text().count("<details") == 2


def test_an_id_makes_a_file_name_whatever_is_in_it() -> None:
    assert file_name("../../etc/passwd") == "rlbuffer-..-..-etc-passwd.html"
    assert file_name(f"a/{EVIL * 9}").isascii()
    assert len(file_name("a" * 999)) < 140
