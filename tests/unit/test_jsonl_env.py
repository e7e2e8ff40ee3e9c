"""The jsonl env: prompts as ids or text, every one once an epoch, scored by what the settings name."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import save_tokenizer

from rlbuffer.errors import ConfigError
from rlbuffer.worker.envs import Prompt, make_env, with_tokenizer, wrong_env

IDS = {"vocab_size": 13, "eos_token_ids": [12]}


def env_of(directory: Path, *lines: Any, **options: Any) -> Any:
    path = directory / "data.jsonl"
    full = [line if not isinstance(line, dict) else {"prompt": [1], "answer": "1"} | line for line in lines]
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in full))
    return make_env("jsonl", path=str(path), **options)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tokenizer(tmp_path_factory.mktemp("plain"), template=None))


def test_a_line_becomes_a_prompt_with_its_answer_name_and_further_fields(tmp_path: Path) -> None:
    env = env_of(tmp_path, {"prompt": [1, 11], "answer": "1", "id": "one", "level": 3}, "", **IDS)
    prompt = env.prompt(0)
    assert (prompt.prompt_id, prompt.tokens.tolist(), prompt.answer) == ("one", [1, 11], "1")
    assert prompt.tokens.dtype == np.int32
    assert prompt.metadata == {"level": 3, "epoch": 0, "data": env.digest}
    assert env.prompt(5).metadata["epoch"] == 5


LINES = b'{"prompt": [1], "answer": "1"}\r\n\r\n{"prompt": [2], "answer": "2", "id": "two"}\r\n'
FILES = {
    "data.jsonl": LINES,
    "data.jsonl.gz": gzip.compress(LINES),
    "data.jsonl.bz2": bz2.compress(LINES),
    "data.xz": lzma.compress(LINES),
    "compressed under a plain name.jsonl": gzip.compress(LINES),
    "with a mark.jsonl": BOM_UTF8 + LINES,
    "a list.json": b'[\n  {"prompt": [1], "answer": "1", "id": "line-1"},\n'
    b'  {"prompt": [2], "answer": "2", "id": "two"}]',
}


@pytest.mark.parametrize("name", FILES)
def test_a_data_set_may_be_compressed_or_a_list_and_its_first_bytes_say_so(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    env = make_env("jsonl", path=str(tmp_path / name), shuffle=False, **IDS)
    assert [(env.prompt(n).prompt_id, env.prompt(n).tokens.tolist()) for n in range(2)] == [
        ("line-1", [1]),
        ("two", [2]),
    ]


def test_the_digest_is_of_the_prompts_and_not_of_what_packed_them(tmp_path: Path) -> None:
    digests = set()
    for name in ("data.jsonl", "data.jsonl.gz", "data.xz"):
        (tmp_path / name).write_bytes(FILES[name])
        digests.add(make_env("jsonl", path=str(tmp_path / name), **IDS).digest)
    assert digests == {hashlib.sha256(LINES).hexdigest()[:12]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(LINES, mtime=0)[:30], "gzip, and is cut off"),
        (b"\x28\xb5\x2f\xfd" + LINES, "zstd"),
        (LINES.decode().encode("utf-16"), "UTF-16"),
        (b"[1, 2", r"x:1 is no JSON object"),
        (b"[1, 2]", r"x:1 is no JSON object"),
        (b'{"prompt": ' + b"[" * 1000, r"x:1 is no JSON object"),
        (b"\xff\xfa", r"x:1 is no JSON object"),
    ],
)
def test_a_file_that_is_no_data_set_is_one_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ConfigError, match=words) as caught:
        make_env("jsonl", path=str(tmp_path / "x"), **IDS)
    assert "\n" not in str(caught.value)
    assert caught.value.setting == "env_options.path"


def test_a_pipe_is_no_data_set_since_every_worker_reads_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(ConfigError, match="every worker reads"):
            make_env("jsonl", path=path, **IDS)


def test_a_prompt_without_a_name_goes_by_its_line(tmp_path: Path) -> None:
    env = env_of(tmp_path, "", {"prompt": [1]}, {"prompt": [2]}, shuffle=False, **IDS)
    assert [env.prompt(n).prompt_id for n in range(2)] == ["line-2", "line-3"]


def test_epochs_and_places_come_from_the_ticket_number_alone(tmp_path: Path) -> None:
    lines = [{"prompt": [i], "id": str(i)} for i in range(10)]
    env, other = env_of(tmp_path, *lines, seed=4, **IDS), env_of(tmp_path, *lines, seed=4, **IDS)
    ids = [env.prompt(n).prompt_id for n in range(20)]
    assert [other.prompt(n).prompt_id for n in reversed(range(20))][::-1] == ids
    assert sorted(ids[:10]) == sorted(ids[10:]) == [str(i) for i in range(10)]
    assert ids[:10] != ids[10:]
    assert ids != [env_of(tmp_path, *lines, seed=5, **IDS).prompt(n).prompt_id for n in range(20)]


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"path": 3}, "path = 3: must be text"),
        ({"tokenizer": 3}, "tokenizer = 3: must be text"),
        ({"rewards": []}, "rewards = []: must be a table"),
        ({"passes": 1.5}, "passes = 1.5: must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be 1 or more"),
        ({"eos_token_ids": 8}, "eos_token_ids = 8: must be a list"),
    ],
)
def test_an_option_of_another_kind_is_refused_in_plain_words(tmp_path: Path, option: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_env("jsonl", **{"path": tmp_path, **IDS, **option})
    assert str(refused.value).startswith(f"env_options.{why}")


def test_an_empty_table_is_no_length_reward(tmp_path: Path) -> None:
    env = env_of(tmp_path, {"prompt": [1]}, length={}, **IDS)
    assert env.score(env.prompt(0), np.array([1, 12], np.int32), finish_reason="stop").rewards == {"exact": 1.0}


def test_two_files_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    one = env_of(tmp_path, {"prompt": [1]}, **IDS).digest
    assert env_of(tmp_path, {"prompt": [1]}, **IDS).digest == one
    assert env_of(tmp_path, {"prompt": [2]}, **IDS).digest != one


def test_without_a_tokenizer_answers_are_ids_and_the_end_does_not_count(tmp_path: Path) -> None:
    env = env_of(tmp_path, {"prompt": [1], "answer": "1 2"}, **IDS)
    prompt = env.prompt(0)
    assert env.score(prompt, np.array([1, 2, 12], np.int32), finish_reason="stop").reward == 1.0
    assert env.score(prompt, np.array([1, 2, 3, 12], np.int32), finish_reason="stop").reward == 0.0
    assert env.render(np.array([1, 2, 12])) == "1 2 12"


def test_text_is_framed_by_the_chat_template_and_only_prompts_are_tokenised(tmp_path: Path, tokenizer: str) -> None:
    env = env_of(tmp_path, {"prompt": "3+4?", "answer": "7"}, tokenizer=tokenizer, system="Be brief.")
    prompt = env.prompt(0)
    assert env.render(prompt.tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert int(prompt.tokens.max()) < env.vocab_size
    answer = np.append(env._text.prompt("x")[:0], [env._text._tokenizer.convert_tokens_to_ids("7"), *env.eos_token_ids])
    score = env.score(prompt, answer.astype(np.int32), finish_reason="stop")
    assert (score.reward, score.successes) == (1.0, {"exact": True})


def test_without_a_template_text_is_the_prompt_as_it_stands(tmp_path: Path, plain: str, tokenizer: str) -> None:
    assert env_of(tmp_path, {"prompt": "3+4="}, tokenizer=plain).render(
        env_of(tmp_path, {"prompt": "3+4="}, tokenizer=plain).prompt(0).tokens
    ) == ("3+4=")
    env = env_of(tmp_path, {"prompt": "3+4="}, tokenizer=tokenizer, chat=False)
    assert env.render(env.prompt(0).tokens) == "3+4="


def test_rewards_and_lengths_are_those_of_the_settings(tmp_path: Path) -> None:
    env = env_of(
        tmp_path,
        {"prompt": [1], "answer": "5", "target_length": 2},
        rewards={"last": {"kind": "regex", "pattern": r"\d+", "compare": True, "weight": 2.0}},
        length={"form": "clip", "target": 9},
        **IDS,
    )
    prompt = env.prompt(0)
    score = env.score(prompt, np.array([5, 12], np.int32), finish_reason="stop")
    assert (score.reward, score.rewards) == (2.0, {"last": 1.0, "length": 0.0})
    assert env.score(prompt, np.array([4, 5, 12], np.int32), finish_reason="stop").reward == 0.0


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("{", IDS, "data.jsonl:2 is no JSON object: "),
        ("[1]", IDS, "data.jsonl:2 is no JSON object: "),
        ('{"answer": "1"}', IDS, "data.jsonl:2: there is no field 'prompt'; the line has 'answer'"),
        ({"prompt": None}, IDS, "data.jsonl:2: prompt must be token ids, or with a tokenizer "),
        ({"prompt": []}, IDS, "data.jsonl:2: prompt must be token ids, or with a tokenizer "),
        ({"prompt": [True]}, IDS, "data.jsonl:2: prompt must be token ids, or with a tokenizer "),
        ({"prompt": "text"}, IDS, "data.jsonl:2: prompt must be token ids, or with a tokenizer "),
        ({"prompt": [{"role": "user", "content": "x"}]}, IDS, "data.jsonl:2: prompt must be token ids, "),
        ({"prompt": [1]}, {**IDS, "fields": {"prompt": 3}}, "env_options.fields.prompt = 3: "),
        ({"prompt": [1]}, {**IDS, "fields": {"question": "q"}}, "env_options.fields.question: "),
        ({"prompt": [13]}, IDS, "data.jsonl:2: token ids must be in 0-12, got "),
        ({"prompt": [-1]}, IDS, "data.jsonl:2: token ids must be in 0-12, got "),
        ({"prompt": [1]}, {**IDS, "passes": -1}, "env_options.passes = -1: "),
        ({"prompt": [1]}, {**IDS, "on_error": "ignore"}, "env_options.on_error = 'ignore': "),
        ({"prompt": [1]}, {**IDS, "length": {"form": "max"}}, "env_options.length.target is required"),
        (
            {"prompt": [1]},
            {**IDS, "length": {"form": "max", "target": 1, "slack": 2}},
            "env_options.length.slack = 2: ",
        ),
        (
            {"prompt": [1]},
            {**IDS, "length": {"form": "max", "target": 1, "tagret": 1}},
            "env_options.length.tagret is ",
        ),
        ({"prompt": [1]}, {}, "jsonl: without a tokenizer, its own or that of model.path, the env needs "),
        ({"prompt": [1]}, {**IDS, "tokenizer": "nowhere"}, "tokenizer = 'nowhere' is not a directory"),
        ({"prompt": [1]}, {**IDS, "rewards": {"exat": 1}}, "reward exat: kind = 'exat' must be one of exact, regex, "),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_its_line(
    tmp_path: Path, line: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        env_of(tmp_path, {"prompt": [1]}, line, **options)
    assert str(error.value).removeprefix(f"{tmp_path}/").startswith(message)


def test_a_file_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.jsonl holds no prompt"):
        env_of(tmp_path, "", **IDS)
    with pytest.raises(ConfigError, match=r"no\.jsonl cannot be read: No such file or directory"):
        make_env("jsonl", path=str(tmp_path / "no.jsonl"), **IDS)
    with pytest.raises(ConfigError, match=r"no\.jsonl cannot be read"):  # before a run, whose model may say no size
        list(wrong_env("jsonl", {"path": str(tmp_path / "no.jsonl"), **IDS}, vocab_size=0))


@pytest.mark.parametrize(
    ("options", "message"), [({"chat": True}, "has no chat template"), ({"system": "x"}, "a system prompt needs a")]
)
def test_a_chat_without_a_template_is_refused(
    tmp_path: Path, plain: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        env_of(tmp_path, {"prompt": "x"}, tokenizer=plain, **options)


def test_a_prompt_that_was_made_elsewhere_is_scored_all_the_same(tmp_path: Path) -> None:
    env = env_of(tmp_path, {"prompt": [1], "answer": "5"}, **IDS)
    prompt = Prompt(prompt_id="x", tokens=np.array([1], np.int32), answer="9")
    assert env.score(prompt, np.array([9], np.int32), finish_reason="length").reward == 1.0


COMPARING: list[dict[str, Any]] = [{}, {"rewards": {"x": {"kind": "regex", "pattern": r"\d+", "compare": True}}}]


@pytest.mark.parametrize("rewards", COMPARING)
@pytest.mark.parametrize(
    "line", ['{"prompt": [1], "solution": "7"}', {"answer": None}, {"answer": ["7"]}, {"answer": {}}]
)
def test_a_line_without_an_answer_that_can_be_compared_is_refused(
    tmp_path: Path, line: Any, rewards: dict[str, Any]
) -> None:
    options = {**IDS, **rewards}
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: .*'answer'"):
        env_of(tmp_path, {}, line, **options)
    env_of(tmp_path, {}, line, rewards={"found": {"kind": "regex", "pattern": "7"}}, **IDS)


def test_prompts_answers_and_names_may_stand_under_other_names(tmp_path: Path) -> None:
    fields = {"prompt": "question", "answer": "solution", "id": "key"}
    line = '{"question": [1, 2], "solution": 7, "key": "k1", "answer": "no"}'
    prompt = env_of(tmp_path, line, fields=fields, **IDS).prompt(0)
    assert (prompt.prompt_id, prompt.tokens.tolist(), prompt.answer) == ("k1", [1, 2], 7)
    assert prompt.metadata["answer"] == "no"
    assert not {"question", "solution", "key"} & set(prompt.metadata)
    for name in fields:
        with pytest.raises(ConfigError, match=f"no field 'nowhere'.*{name} ="):
            env_of(tmp_path, line, fields=fields | {name: "nowhere"}, **IDS)


def test_a_prompt_may_be_messages(tmp_path: Path, tokenizer: str, plain: str) -> None:
    messages = [
        {"role": "user", "content": "3+4?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "And 1?"},
    ]
    env = env_of(tmp_path, {"prompt": messages}, tokenizer=tokenizer, system="Be brief.")
    said = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert env.render(env.prompt(0).tokens) == f"{system}{said}<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match="assistant's"):
        env_of(tmp_path, {"prompt": messages[:2]}, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="role and content"):
        env_of(tmp_path, {"prompt": [{"role": "user"}]}, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="chat template"):
        env_of(tmp_path, {"prompt": messages}, tokenizer=plain)
    with pytest.raises(ConfigError, match="system turn"):
        env_of(tmp_path, {"prompt": [{"role": "system", "content": "x"}]}, tokenizer=tokenizer, system="y")


@pytest.mark.parametrize(("ends", "more"), [([3, 2], [3]), (3, [3]), (None, [])])
def test_the_ends_of_the_generation_config_end_an_answer_too(tmp_path: Path, ends: Any, more: list[int]) -> None:
    directory = save_tokenizer(tmp_path / "kit")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    env = env_of(tmp_path, {"prompt": "3+4?", "answer": "7"}, tokenizer=str(directory))
    assert env.eos_token_ids == (2, *more)
    seven = env._text._tokenizer.convert_tokens_to_ids("7")
    for end in env.eos_token_ids:
        assert env.score(env.prompt(0), np.array([seven, end], np.int32), finish_reason="stop").reward == 1.0


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": ["x"]}'])
def test_a_generation_config_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    directory = save_tokenizer(tmp_path / "kit")
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        env_of(tmp_path, {"prompt": "x"}, tokenizer=str(directory))


class Takes:
    """Factories of a user, by what they make of a tokenizer."""

    @staticmethod
    def needed(*, tokenizer: str) -> None: ...

    @staticmethod
    def optional(*, tokenizer: str | None = None) -> None: ...

    @staticmethod
    def none(*, seed: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("name", "options", "takes"),
    [
        ("jsonl", {}, True),
        ("jsonl", {"tokenizer": ""}, True),
        ("jsonl", {"tokenizer": "own"}, False),
        ("jsonl", IDS, False),
        ("vcopy", {}, False),
        (f"{__name__}:Takes.needed", {}, True),
        (f"{__name__}:Takes.optional", {}, False),
        (f"{__name__}:Takes.none", {}, False),
        ("nosuch:env", {}, False),
    ],
)
def test_an_env_that_lacks_a_tokenizer_has_that_of_the_model(name: str, options: dict[str, Any], takes: bool) -> None:
    assert with_tokenizer(name, options, "models/a") == options | ({"tokenizer": "models/a"} if takes else {})
    assert with_tokenizer(name, options, "") == options


def test_a_check_makes_the_env_with_the_tokenizer_of_the_model(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "ab", "answer": "1"}))
    options = {"path": str(tmp_path / "data.jsonl")}
    assert list(wrong_env("jsonl", options, vocab_size=10**6, model_path=tokenizer)) == []
    with pytest.raises(ConfigError, match=r"its own or that of model\.path"):
        list(wrong_env("jsonl", options, vocab_size=10**6))
