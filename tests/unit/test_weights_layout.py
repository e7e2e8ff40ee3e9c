"""Lists of files, and refusals of settings of weights."""

from __future__ import annotations

import json

import pytest

from rlbuffer.config.addresses import parse_listen
from rlbuffer.config.settings import RunSettings, WeightsSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.weights.layout import MAX_FILES, ListedFile, parse_list
from rlbuffer.weights.places import announced

NAME = "v00000005-0123456789ab"
GOOD = "0123456789ab" + "0" * 52
WEIGHTS = {"model.safetensors": {"size": 3, "sha256": GOOD}}


def test_a_list_gives_every_file_with_size_and_checksum() -> None:
    text = json.dumps({"files": WEIGHTS | {"config.json": {"size": 2, "sha256": "f" * 64}}})
    assert parse_list(text, name=NAME) == (
        ListedFile(name="model.safetensors", size=3, sha256=GOOD),
        ListedFile(name="config.json", size=2, sha256="f" * 64),
    )


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"files": 3}',
        "\xff",
        {"config.json": {"size": 2, "sha256": "f" * 64}},
        {"model.safetensors": {"size": 3, "sha256": "f" * 64}},
        WEIGHTS | {f"f{n}": {"size": 2, "sha256": "f" * 64} for n in range(MAX_FILES)},
        WEIGHTS | {"../config.json": {"size": 2, "sha256": "f" * 64}},
        WEIGHTS | {".lock": {"size": 2, "sha256": "f" * 64}},
        WEIGHTS | {"config.json": {"size": -1, "sha256": "f" * 64}},
        WEIGHTS | {"files.json": {"size": 1, "sha256": "f" * 64}},
    ],
)
def test_a_list_that_cannot_be_is_refused(content: object) -> None:
    text = content if isinstance(content, str) else json.dumps({"files": content})
    with pytest.raises(WeightsError):
        parse_list(text, name=NAME)


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("0.0.0.0:9465", ("0.0.0.0", 9465)), (":80", ("", 80)), ("[::1]:65535", ("::1", 65535))],
)
def test_an_address_to_listen_on_is_host_and_port(listen: str, expected: tuple[str, int]) -> None:
    assert parse_listen(listen) == expected


@pytest.mark.parametrize("listen", ["9465", "host", "host:", "host:x", "host:65536", "http://host"])
def test_anything_else_to_listen_on_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError):
        parse_listen(listen)


def test_an_address_of_weights_must_be_one_of_the_web() -> None:
    settings = RunSettings(weights=WeightsSettings(url="trainer:9465"))
    with pytest.raises(ConfigError):
        announced(settings, f"/weights/{NAME}")
