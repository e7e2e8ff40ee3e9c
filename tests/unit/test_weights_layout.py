"""Lists of files, the order in which relays are asked, and refusals of settings of weights."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from rlbuffer.config.addresses import parse_listen
from rlbuffer.config.settings import RunSettings, WeightsSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.weights.cache import spread
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
    ("content", "message"),
    [
        ("[]", f"files.json of {NAME} is no list of files (TypeError)"),
        ('{"files": 3}', f"files.json of {NAME} is no list of files (AttributeError)"),
        ("\xff", f"files.json of {NAME} is no list of files (JSONDecodeError)"),
        ({"config.json": {"size": 2, "sha256": "f" * 64}}, f"files.json of {NAME} is of other weights"),
        ({"model.safetensors": {"size": 3, "sha256": "f" * 64}}, f"files.json of {NAME} is of other weights"),
        (
            WEIGHTS | {f"f{n}": {"size": 2, "sha256": "f" * 64} for n in range(MAX_FILES)},
            f"files.json of {NAME} is of other weights",
        ),
        (
            WEIGHTS | {"../config.json": {"size": 2, "sha256": "f" * 64}},
            f"files.json of {NAME} has an entry that cannot be: '../config.json'",
        ),
        (
            WEIGHTS | {".lock": {"size": 2, "sha256": "f" * 64}},
            f"files.json of {NAME} has an entry that cannot be: '.lock'",
        ),
        (
            WEIGHTS | {"config.json": {"size": -1, "sha256": "f" * 64}},
            f"files.json of {NAME} has an entry that cannot be: 'config.json'",
        ),
        (
            WEIGHTS | {"files.json": {"size": 1, "sha256": "f" * 64}},
            f"files.json of {NAME} has an entry that cannot be: 'files.json'",
        ),
    ],
)
def test_a_list_that_cannot_be_is_refused(content: object, message: str) -> None:
    text = content if isinstance(content, str) else json.dumps({"files": content})
    with pytest.raises(WeightsError) as caught:
        parse_list(text, name=NAME)
    assert str(caught.value) == message


def test_hosts_and_versions_spread_over_the_relays() -> None:
    relays = ["http://a", "http://b", "http://c"]
    orders = Counter(tuple(spread(relays, f"v{v}", host=f"host-{h}")) for v in range(30) for h in range(40))
    assert len(orders) == 6
    assert min(orders.values()) > 120  # 200 each, were it exact
    assert spread(relays, NAME, host="h") == spread(relays[::-1], NAME, host="h")
    assert spread(relays[:2], NAME, host="h") == [r for r in spread(relays, NAME, host="h") if r != "http://c"]


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("0.0.0.0:9465", ("0.0.0.0", 9465)), (":80", ("", 80)), ("[::1]:65535", ("::1", 65535))],
)
def test_an_address_to_listen_on_is_host_and_port(listen: str, expected: tuple[str, int]) -> None:
    assert parse_listen(listen) == expected


@pytest.mark.parametrize("listen", ["9465", "host", "host:", "host:x", "host:65536", "http://host"])
def test_anything_else_to_listen_on_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_listen(listen)
    assert str(caught.value) == f"weights.listen = {listen!r} must be HOST:PORT, e.g. 0.0.0.0:9465"


def test_an_address_of_weights_must_be_one_of_the_web() -> None:
    settings = RunSettings(weights=WeightsSettings(url="trainer:9465"))
    with pytest.raises(ConfigError) as caught:
        announced(settings, f"/weights/{NAME}")
    assert str(caught.value) == "weights.url = 'trainer:9465' must begin with http:// or https://"
