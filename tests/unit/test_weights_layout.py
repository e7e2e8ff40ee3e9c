"""Lists of files."""

from __future__ import annotations

import json

import pytest

from rlbuffer.errors import WeightsError
from rlbuffer.weights.layout import MAX_FILES, ListedFile, parse_list

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
