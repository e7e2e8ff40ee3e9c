"""Text of rollouts: decoded tokens first, then what was pushed, then ids; and why nothing can be decoded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import END, ids, save_byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from rlbuffer.client.texts import CONTINUED, Texts, tokenizer_directory
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.rollout import Rollout


def rollout(tokens: np.ndarray, text: str | None = None) -> Rollout:
    return Rollout.from_completion(
        prompt_ids=tokens[:1],
        token_ids=tokens[1:],
        logprobs=np.zeros(len(tokens) - 1),
        reward=None,
        policy_version=0,
        text=text,
    )


def test_tokens_are_decoded_and_a_character_of_several_tokens_stands_with_the_first(tmp_path: Path) -> None:
    tokens = ids(save_byte_tokenizer(tmp_path), f"ok 🙂\né{END}")
    made, texts = rollout(tokens, "as pushed"), Texts(tmp_path)
    assert texts.whole(made) == texts.decoded(made) == f"ok 🙂\né{END}"
    assert texts.pieces(made, 0, 99) == ["o", "k", " ", "🙂", *[CONTINUED] * 3, "\n", "é", CONTINUED, END]
    assert texts.pieces(made, 4, 8) == ["\ufffd", "\ufffd", "\ufffd", "\n"], "a window may begin inside a character"
    assert texts.part(made, 0, 2) == "ok"
    assert (texts.has_pieces(made), texts.origin(made)) == (True, f"tokens decoded with {tmp_path}")


def test_ids_that_the_tokenizer_does_not_know_stand_as_ids(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    assert Texts(tmp_path).pieces(rollout(np.array([5000, 2**31 - 1], np.int32)), 0, 2) == ["<5000>", "<2147483647>"]


def test_tokens_of_sentencepiece_keep_their_blank(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁two": 0, "▁words": 1}, unk_token="▁two"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = rollout(np.array([0, 1], np.int32))
    assert Texts(tmp_path).whole(made) == "two words"
    assert Texts(tmp_path).pieces(made, 0, 2) == [" two", " words"]


def test_without_a_tokenizer_the_pushed_text_counts_by_character_where_it_has_one_for_each_token() -> None:
    tokens, texts = np.arange(3, dtype=np.int32), Texts()
    assert texts.pieces(rollout(tokens, "abc"), 1, 3) == ["b", "c"]
    assert texts.part(rollout(tokens, "abc"), 1, 3) == "bc"
    assert texts.pieces(rollout(tokens, "longer"), 0, 3) == ["0", "1", "2"]
    assert (texts.part(rollout(tokens, "longer"), 0, 3), texts.whole(rollout(tokens, "longer"))) == (None, "longer")
    assert [texts.origin(rollout(tokens, text)) for text in ("longer", None)] == [
        "text as it was pushed",
        "token ids: no text was pushed",
    ]


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "has no tokenizer.json"), ("{}", "cannot be loaded: "), ("\x00", "cannot be loaded")]
)
def test_a_directory_that_decodes_nothing_says_why(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    texts, made = Texts(tmp_path), rollout(np.arange(3, dtype=np.int32))
    assert reason in texts.lacks
    assert texts.decoded(made) is None
    assert texts.origin(made) == f"token ids: no text was pushed; {texts.lacks}"


def test_code_of_the_directory_does_not_run(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("open('evil was here', 'w')\n")
    code = f"from rlbuffer.client.texts import Texts; assert not Texts({str(tmp_path)!r}).lacks; import sys; "
    code += "assert not {'transformers', 'torch', 'evil'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert not (tmp_path / "evil was here").exists()


def test_the_tokenizer_is_that_of_the_model_else_of_a_worker() -> None:
    worker = {"worker": {"w": {"env": "jsonl", "env_options": {"tokenizer": "words"}}}}
    for given, directory in (
        ({"model": {"path": "policy"}, **worker}, Path("policy")),
        (worker, Path("words")),
        ({}, None),
    ):
        assert tokenizer_directory(RunSettings.model_validate(given)) == directory
