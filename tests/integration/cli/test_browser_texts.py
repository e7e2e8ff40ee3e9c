"""Rollouts of a run with a model's directory: read as text, in the browser and its plain twin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browsing import Person, browse
from byte_tokenizer import END, ids, save_byte_tokenizer
from store_runs import Run

import rlbuffer
from rlbuffer_cli.main import main

EVIL = "\x1b[2J\u202eevil\x9b31m"


@pytest.fixture(autouse=True)
def group(run: Run, tmp_path: Path) -> None:
    """A group of two rollouts without text, whose tokens are UTF-8."""
    tokenizer = save_byte_tokenizer(tmp_path / "model")
    rollouts = []
    for answer in (f"it is 🙂\nsure{END}", f"{EVIL}{END}"):
        tokens = ids(tokenizer, answer)
        rollouts.append(
            rlbuffer.Rollout.from_completion(
                prompt_ids=ids(tokenizer, "What?\n"),
                token_ids=tokens,
                logprobs=np.full(len(tokens), -0.5),
                reward=float(len(rollouts)),
                policy_version=0,
            )
        )
    run.push(rlbuffer.Group(group_id="a.0", env="a", prompt_id="p", rollouts=rollouts, planned_size=2))


def test_tokens_are_text_by_the_tokenizer_of_the_model(run: Run, tmp_path: Path) -> None:
    async def tour(person: Person) -> None:
        shown = await person.sees("group a.0", "prompt    What?", "it is 🙂\\nsure")
        assert shown.count("What?") == 1, "the prompt stands there once"
        await person.press("j", "enter")
        await person.sees("── user · 6 tokens ──", "it is 🙂………\\n", "sure", "plain: tokens decoded with")
        assert not any("<|end|>" in line for line in person.lines()), "a special token is none of the words"
        await person.press("G")
        await person.sees("text '<|end|>'", "id 256")
        await person.press("2")
        await person.sees("sure<|end|>")
        await person.press("n")
        await person.sees("\\u202e", "\\x1b")
        for line in person.lines():
            assert line.isprintable(), repr(line)

    config = {"model": {"path": str(tmp_path / "model")}, "home": str(tmp_path)}
    with rlbuffer.connect(run.url, run=run.store.run, config=config) as buffer:
        assert [view.group_id for view in buffer.groups("text:/🙂\\nsure/ rollout.reward:0")] == ["a.0"]
        browse(buffer, tour, size=(140, 30), identifier="a.0")


def test_the_plain_twin_decodes_too_and_a_wrong_directory_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    at = ["--redis", run.url, "--run", run.store.run]
    assert main(["inspect", "a.0", *at, "--tokenizer", "model"]) == 0
    out = capsys.readouterr().out
    assert "  prompt    What?\n" in out
    assert "it is 🙂\\nsure" in out
    assert main(["inspect", "a.0/1", *at, "--tokenizer", "model"]) == 0
    out = capsys.readouterr().out
    assert "  user      What?\n  assistant \\x1b[2J\\u202eevil\\x9b31m\n" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert main(["inspect", "a.0", *at, "--tokenizer", "nowhere"]) == 2
    assert "Error: --tokenizer nowhere: nowhere has no tokenizer.json" in capsys.readouterr().err
