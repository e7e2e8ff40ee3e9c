"""The server of weights: read-only, complete versions only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from weights_places import content, make_version

from rlbuffer.config.settings import RunSettings, WeightsSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.files import load_state, open_weights, publish
from rlbuffer.weights.places import announced
from rlbuffer.weights.serving import FileServer, make_app, serve_beside

ANY = "127.0.0.1:0"


def at(policy: PolicyVersion, url: str) -> PolicyVersion:
    return replace(policy, location=f"{url}/{Path(policy.location).name}")


def test_what_a_trainer_publishes_is_loaded_from_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings(home=tmp_path / "a", weights=WeightsSettings(listen=ANY, url="http://to.be.set/"))
    state = {"a.weight": torch.arange(6.0).reshape(2, 3)}
    policy = publish(settings.output_dir / "weights", 3, state=state, config={"model_type": "qwen3"}, keep=2)
    name = Path(policy.location).name
    assert announced(settings, policy.location) == f"http://to.be.set/{name}"
    assert announced(RunSettings(), policy.location) == policy.location
    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path / "b"))
    with serve_beside(settings) as server:
        directory = open_weights(at(policy, server.url))
        assert httpx.get(server.url).json() == {"versions": [name]}
    assert directory == tmp_path / "b" / "weights-cache" / name
    assert load_state(directory)["a.weight"].tolist() == state["a.weight"].tolist()


def test_a_file_is_given_in_ranges(tmp_path: Path) -> None:
    policy = make_version(tmp_path, 4)
    with FileServer(make_app(tmp_path), ANY) as server:
        url = f"{at(policy, server.url).location}/model.safetensors"
        answer = httpx.get(url, headers={"Range": "bytes=1000-"})
        assert (answer.status_code, answer.headers["Content-Range"]) == (206, "bytes 1000-2999999/3000000")
        assert answer.content == content(4)[1000:]
        assert httpx.get(url).content == content(4)
        assert httpx.get(url, headers={"Range": "bytes=3000000-"}).status_code == 416


PATHS = (
    "/secret.txt",
    "/../secret.txt",
    "/{name}/../../secret.txt",
    "/{name}/%2e%2e%2fsecret.txt",
    "/{name}/..%2f..%2fsecret.txt",
    "/{name}/link.txt",
    "/{name}/.hidden",
    "/{name}/folder",
    "/{name}/",
    "/.tmp-{name}/model.safetensors",
    "/v00000009-0123456789ab/model.safetensors",
    "/v00000008-0123456789ab/secret.txt",
)


def test_nothing_but_the_files_of_complete_versions_is_given(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "weights", 4)
    directory = Path(policy.location)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "weights" / "secret.txt").write_text("secret")
    (directory / "link.txt").symlink_to(tmp_path / "secret.txt")
    (directory / ".hidden").write_text("secret")
    (directory / "folder").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.txt").write_text("secret")
    (tmp_path / "weights" / "v00000008-0123456789ab").symlink_to(tmp_path / "elsewhere")
    half = tmp_path / "weights" / f".tmp-{directory.name}"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    with FileServer(make_app(tmp_path / "weights"), ANY) as server:
        for path in PATHS:
            answer = httpx.get(server.url + path.format(name=directory.name))
            assert answer.status_code == 404, path
            assert b"secret" not in answer.content.replace(b"secret.txt", b"")
        assert httpx.get(server.url).json()["versions"] == [directory.name]
        for method in ("PUT", "POST", "DELETE"):
            assert httpx.request(method, f"{server.url}/{directory.name}/config.json").status_code == 405


def test_with_a_token_nobody_reads_without_it(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 4)
    with FileServer(make_app(tmp_path / "trainer", token="s3cret"), ANY) as server:
        told = at(policy, server.url)
        for token in ("", "other"):
            with pytest.raises(WeightsError, match="it wants another token: set RLBUFFER_WEIGHTS_TOKEN as at the trai"):
                VersionCache(tmp_path / f"cache{token}", token=token).localized(told)
        assert httpx.get(server.url).status_code == 401
        local = VersionCache(tmp_path / "cache", token="s3cret").localized(told)
    assert open_weights(local) == Path(local.location)


def test_an_address_that_is_taken_is_said_with_its_setting(tmp_path: Path) -> None:
    with FileServer(make_app(tmp_path), ANY) as server:
        listen = server.url.removeprefix("http://")
        with pytest.raises(ConfigError) as caught:
            FileServer(make_app(tmp_path), listen)
    assert caught.value.setting == "weights.listen"
    assert listen in str(caught.value)
