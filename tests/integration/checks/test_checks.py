"""Each check of settings and of the host breaks once: by its name, the settings that it names, and how bad it is."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

import pytest
from wrong_configs import lay_out, written

from rlbuffer.checks import host, server  # noqa: F401 - the latter makes its checks
from rlbuffer.checks.check import CHECKS, EVERYTHING, Context, Level, Parts
from rlbuffer.checks.loading import load
from rlbuffer.config import loading
from rlbuffer.config.explain import known_settings, tables
from rlbuffer.errors import ConfigError
from rlbuffer.store.server.binary import SERVER_BIN

WARNING, FAILURE = Level.WARNING, Level.FAILURE

SETTINGS = [
    ("group-size", FAILURE, [("batcher", "min_group_size = 99")]),
    ("group-size", FAILURE, [("batcher.envs.vcopy", "min_group_size = 99")]),
    ("group-size", WARNING, [("worker.a", "group_size = 1")]),
    ("same-env", WARNING, [("worker.b", 'env = "vcopy"\nenv_options = { seed = 5 }')]),
    ("publish-age", FAILURE, [("trainer.publish", "every = 9")]),
    (
        "publish-age",
        FAILURE,
        [("batcher.envs.vcopy", "max_age = 1"), ("batcher", "max_age = 3"), ("trainer.publish", "every = 3")],
    ),
    ("env-names", WARNING, [("batcher", 'remainder = "proportionl"')]),
    ("env-names", WARNING, [("batcher", 'remainder = "repeat"')]),
    ("env-names", WARNING, [("batcher", "envs = { vcopyy = { max_age = 2 } }")]),
    ("env-names", WARNING, [("batcher", "budgets = { code = 0.5 }")]),
    ("env-names", WARNING, [("batcher", "budgets = { vcopy = 1.0 }"), ("worker.b", 'env = "repeat"')]),
    ("loss", WARNING, [("trainer.loss", "options = { clip_low = 0.001 }")]),
    ("loss", WARNING, [("trainer.loss", 'old_logprobs = "recomputed"')]),
    ("loss", WARNING, [("trainer.loss", "correction = { sequence_tis = {} }"), ("batcher", "row_tokens = 2400")]),
    ("loss", WARNING, [("trainer.loss", "correction = { sequence_mask = {} }"), ("batcher", "row_tokens = 2400")]),
    ("schedule", FAILURE, [("trainer.optimizer", 'schedule = "wsd_sqrt"\ndecay_from_update = 9')]),
    ("schedule", WARNING, [("trainer.optimizer", 'schedule = "cosine"\nwarmup_updates = 50')]),
    ("deterministic", FAILURE, [("", "deterministic = true"), ("batcher", "max_age = 1\nlookahead = 2")]),
    ("deterministic", FAILURE, [("", "deterministic = true"), ("worker.b", 'env = "repeat"')]),
    ("deterministic", FAILURE, [("", "deterministic = true"), ("batcher", "fill_timeout_seconds = 3.0")]),
    (
        "deterministic",
        FAILURE,
        [("", "deterministic = true"), ("worker.a", "groups_in_flight = 3"), ("batcher", "step_groups = 4")],
    ),
    ("deterministic", FAILURE, [("", "deterministic = true"), ("eval.e", 'env = "vcopy"')]),
    ("agents", FAILURE, [("gateway", 'engines = ["http://h:8000"]'), ("trainer.lora", "rank = 8")]),
    ("agents", FAILURE, [("gateway", 'engines = ["http://h:8000"]'), ("trainer.lora", 'path = "sft"')]),
    ("samples", WARNING, [("eval.e", 'env = "vcopy"\nsamples = 4')]),
    ("reference", FAILURE, [("trainer.loss", "kl_beta = 0.1")]),
    ("memory", FAILURE, [("server", 'maxmemory = "20kb"')]),
    ("memory", FAILURE, [("server", 'maxmemory = "20kb"'), ("batcher", "step_groups = 2")]),
    ("memory", WARNING, [("server", 'maxmemory = "8mb"'), ("batcher", "step_groups = 64\nrow_tokens = 200000")]),
    ("memory", WARNING, [("server", 'maxmemory = "8mb"'), ("batcher", "step_rollouts = 4000\nrow_tokens = 2400")]),
    ("gpus", FAILURE, [("worker.a", 'gpus = [0, 1, 2]\nreplicas = 2\ndevice = "cuda"')]),
    ("gpus", FAILURE, [("trainer", 'gpus = [0]\nworld_size = 2\ndevice = "cuda"')]),
    ("gpus", FAILURE, [("trainer", 'gpus = [0, 0]\nworld_size = 2\ndevice = "cuda"')]),
]
"""(check, how bad, what is put into the good config)"""

RATE = ("trainer.optimizer", "learning_rate = 1e-5")
HOST = [
    ("run-name", [("", 'run = "-math"')]),
    ("home", [("", 'home = "own.py/home"')]),
    ("home", [("trainer", 'output = "own.py/out"')]),
    ("home", [("archive", 'dir = "own.py"')]),
    ("home", [("archive", 'dir = "own.py/archive"')]),
    ("server-address", [("", 'redis_url = "localhost:6379"')]),
    ("server-address", [("", 'redis_url = "redis://h:1/0?socket_timeout=1"')]),
    ("server-address", [("", 'redis_url = "rediss://h:1/0?ssl_ca_certs=no.crt"')]),
    ("server-address", [("", 'redis_url = "redis://h/math"')]),
    ("server-address", [("", 'redis_url = "redis://h:99999"')]),
    ("server-address", [("", 'redis_url = "memory://"')]),
    ("server-address", [("", 'redis_url = "redis://h:1"\nredis_password_file = "no"')]),
    ("server-address", [("", 'redis_url = "redis://h:1"\nredis_password_file = "blank"')]),
    ("ports", [("weights", 'listen = "203.0.113.7:9465"')]),  # nobody's (RFC 5737)
    ("model", [("-model.config", "")]),
    ("model", [("model", 'path = "nowhere"'), RATE]),
    ("model", [("model.config", "output_router_logits = true")]),
    ("model", [("model.config", 'model_type = ""')]),
    ("model", [("model.config", "model_type = 3")]),
    ("model", [("model.config", "hidden_size = -1")]),
    ("model", [("model.config", "num_attention_heads = 1.5")]),
    ("model", [("model.config", "intermediate_size = [64, 0]")]),
    *(("model", [("-model.config", ""), ("model", f'path = "{name}"'), RATE]) for name in ("nowhere", "bare", "torn")),
    ("model", [("-model.config", ""), ("model", 'path = "Qwen/Qwen3-0.6B"'), RATE]),
    *(("model", [("-model.config", ""), ("model", f'path = "{name}"'), RATE]) for name in ("sft", "ia3")),
    ("adapter", [("trainer.lora", 'path = "nowhere"')]),
    ("adapter", [("trainer.lora", 'path = "ia3"')]),
    ("adapter", [("trainer.lora", 'path = "sft"\nrank = 8')]),
    ("adapter", [("trainer.lora", 'path = "sft"\nrank = 0')]),
    ("adapter", [("trainer.lora", 'path = "sft"\nalpha = 16.0')]),
    ("adapter", [("trainer.lora", 'path = "sft"\ntargets = ["q_proj", "v_proj"]')]),
    ("workers", [("-worker.a", "")]),
    ("scorer-models", [("score.s", 'model = "nowhere"')]),
]
"""(check, what is put into the good config): failures where everything shall run."""
ELSEWHERE = {
    *(
        "packages",
        "deltas",
        "devices",
        "shared-locks",
        "functions",
    ),  # below, test_placement, test_odd_hosts, test_imports
    *("server", "failover", "server-memory", "persistence", "clock", "run"),  # test_doctor, test_sentinels
    "learning",  # test_what_teaches
    "learning-rate",  # below
    "server-settings",  # test_doctor
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLBUFFER_REDIS_PASSWORD", raising=False)
    lay_out(tmp_path)


def troubles(changes: list[tuple[str, str]], parts: Parts = ()) -> set[tuple[str, Level]]:
    """Warnings and failures of all checks but the one that imports; each has a setting that was given, and no check
    names others than it says."""
    loaded = loading.load(written(*changes), environ={})
    levels, found = (("settings", "host") if parts else ("settings",)), set()
    for check in (check for check in CHECKS if check.level in levels and check.name != "functions"):
        for finding in check.found(Context(loaded=loaded, parts=frozenset(parts))):
            if finding.level is not Level.OK:
                found.add((check.name, finding.level))
                assert loading.located(loaded.sources, *finding.settings) or changes[0][0].startswith("-")
            for setting in finding.settings:
                assert any(is_in(setting, pattern) for pattern in check.settings), finding
    return found


def is_in(setting: str, pattern: str) -> bool:
    """One is the other, or inside of it; NAME stands for any."""
    return all(a in ("NAME", b) for a, b in zip(pattern.split("."), setting.split("."), strict=False))


@pytest.mark.parametrize(("check", "level", "changes"), SETTINGS, ids=lambda value: str(value)[:60])
def test_settings_that_do_not_go_together(check: str, level: Level, changes: list[tuple[str, str]]) -> None:
    assert troubles(changes) == {(check, level)}


@pytest.mark.parametrize(("check", "changes"), HOST, ids=lambda value: str(value)[:60])
def test_what_this_host_does_not_have(check: str, changes: list[tuple[str, str]]) -> None:
    assert troubles(changes, EVERYTHING) == {(check, FAILURE)}


def test_a_pretrained_model_without_a_learning_rate() -> None:
    changes = [("-model.config", ""), ("model", 'path = "sft"')]
    assert ("learning-rate", WARNING) in troubles(changes, EVERYTHING)
    assert troubles(changes, ["serve", "worker"]) == set()
    assert troubles([*changes, RATE], EVERYTHING) == {("model", FAILURE)}


def test_a_server_program_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_BIN, "no-such-server")
    with pytest.raises(ConfigError) as caught:
        load(written(), environ={}, parts=("train",))
    assert caught.value.setting == SERVER_BIN
    load(written(("", 'redis_url = "redis://h"')), environ={}, parts=("train",))


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_installed", lambda module: module != "wandb")
    assert troubles([("trainer.reports", 'wandb_project = "p"')], EVERYTHING) == {("packages", FAILURE)}


def test_without_zstandard_versions_go_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_installed", lambda module: module != "zstandard")
    assert troubles([("weights", 'url = "http://h:9465"')], ["worker"]) == {("deltas", Level.WARNING)}
    assert troubles([], ["worker"]) == set()


def test_the_config_that_the_mistakes_are_put_into_has_none() -> None:
    assert troubles([], EVERYTHING) == set()


def told(*changes: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(written(*changes), environ={}, parts=("train",))
    return str(caught.value)


def test_an_adapter_is_named_with_its_base_and_a_setting_that_contradicts_it_with_both_values() -> None:
    where = "rlbuffer.toml"
    text = told(("-model.config", ""), ("model", 'path = "sft"'))
    assert text.startswith(where)
    assert "model.path: sft is a LoRA adapter of some/base, not a whole model" in text
    assert 'Set model.path = "some/base" and trainer.lora.path = "sft"' in text
    assert "is an adapter (IA3) of some/base" in told(("-model.config", ""), ("model", 'path = "ia3"'))
    text = told(("trainer.lora", 'path = "sft"\nrank = 8'))
    assert "trainer.lora.rank = 8, but the adapter at sft has 4" in text
    assert "trainer.lora.targets = ['k_proj'], but the adapter at sft has ['q_proj']" in told(
        ("trainer.lora", 'path = "sft"\ntargets = ["k_proj"]')
    )
    assert 'The adapter is for path = "some/base"' in told(("-model.config", ""), ("trainer.lora", 'path = "sft"'))


def test_a_run_of_agents_alone_needs_no_worker() -> None:
    assert troubles([("-worker.a", ""), ("gateway", 'engines = ["http://h:1"]')], EVERYTHING) == set()


def test_settings_that_say_what_the_adapter_says_are_fine() -> None:
    same = 'path = "sft"\nrank = 4\nalpha = 8\ntargets = ["q_proj"]'
    assert troubles([("trainer.lora", same)], EVERYTHING) == set()


def test_a_model_may_have_a_size_for_each_layer() -> None:
    config = 'model_type = "gemma3n_text"\nintermediate_size = [64, 64]'
    assert troubles([("model.config", config)], EVERYTHING) == set()


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ([("", 'home = "there"')], FAILURE),
        ([("", 'redis_url = "redis://h"'), ("archive", 'dir = "there"')], WARNING),
        ([("", 'redis_url = "redis://h"')], None),
    ],
)
def test_a_full_disk_ends_what_needs_it_and_no_batcher_that_archives(
    monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], level: Level | None
) -> None:
    monkeypatch.setattr(host, "FULL_DISK_BYTES", 2**62)
    assert troubles(changes, ("serve",)) == ({("home", level)} if level else set())


def test_a_file_system_that_tells_no_size_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (0, 0, 0))
    assert troubles([("", 'home = "there"')], EVERYTHING) == set()


def test_a_command_needs_on_its_host_only_what_it_uses() -> None:
    changes = [("-model.config", ""), ("score.s", 'model = "nowhere"')]
    assert troubles(changes) == set()
    for part, check in (("train", "model"), ("score.s", "scorer-models"), ("score.t", ""), ("serve", "")):
        assert {name for name, _ in troubles(changes, (part,))} == {check} - {""}


def test_every_check_is_broken_once_and_names_settings_that_there_are() -> None:
    assert {name for name, *_ in (*SETTINGS, *HOST)} | ELSEWHERE == {check.name for check in CHECKS}
    there = {*known_settings(), *(table.name.removesuffix(".NAME") for table in tables())}
    assert {name for check in CHECKS for name in check.settings} <= there
    assert all(re.fullmatch(r"[a-z-]+", check.name) and check.about for check in CHECKS)


def test_a_port_that_somebody_has_may_be_this_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [("metrics", f'listen = "127.0.0.1:{taken.getsockname()[1]}"')]
        assert ("ports", Level.WARNING) in troubles(given, ["serve"])
    assert "ports" not in {check for check, _ in troubles(given, ["serve"])}
