"""Variables as pods, shells and editors hand them over: with line's ends around them, and with links of Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbuffer.client.buffer import password_of
from rlbuffer.config.loading import load
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError
from rlbuffer.process.variables import is_service_link, secret
from rlbuffer.weights.cache import weights_token

AROUND = ["{}\n", "{}\r\n", "\ufeff{}", "\ufeff{}\r\n", " {} ", "{}\n\n", "\t{}\r"]


@pytest.mark.parametrize("form", AROUND)
@pytest.mark.parametrize(
    ("variable", "text", "setting"),
    [
        ("RLBUFFER_RUN", "math", "run"),
        ("RLBUFFER_REDIS_URL", "redis://host:6379/0", "redis_url"),
        ("RLBUFFER_SEED", "7", "seed"),
        ("RLBUFFER_DETERMINISTIC", "true", "deterministic"),
        ("RLBUFFER_HOME", "/data/home", "home"),
        ("RLBUFFER_BATCHER__MAX_AGE", "3", "batcher.max_age"),
        ("RLBUFFER_BATCHER__BUDGETS", "{a = 0.5}", "batcher.budgets.a"),
        ("RLBUFFER_TRAINER__OUTPUT", "/data/out", "trainer.output"),
        ("RLBUFFER_WEIGHTS__URL", "http://host:8000", "weights.url"),
    ],
)
def test_what_stands_around_a_variable_is_no_part_of_it(form: str, variable: str, text: str, setting: str) -> None:
    plain = dict(load(environ={variable: text}).values())
    assert dict(load(environ={variable: form.format(text)}).values()) == plain
    assert plain[setting] != dict(load(environ={}).values()).get(setting)


@pytest.mark.parametrize("blank", ["\n", "\r\n", " ", "\ufeff"])
def test_a_variable_of_nothing_but_blanks_is_not_set(blank: str) -> None:
    assert load(environ={"RLBUFFER_RUN": blank, "RLBUFFER_CONFIG": blank}).settings == load(environ={}).settings


def test_an_address_in_a_file_has_no_line_end() -> None:
    assert RunSettings(redis_url="redis://host:6379/0\r\n").redis_url == "redis://host:6379/0"
    assert RunSettings(redis_url="\n").redis_url is None


SECRETS = [
    ("s#3/cr t?é", "s#3/cr t?é"),
    ("hunter2\n", "hunter2"),
    ("hunter2\r\n", "hunter2"),
    ("\ufeffhunter2\n\n", "hunter2"),
    ("\n", ""),
    ("hunter2 \n", None),
    (" hunter2", None),
    ("hunter2\t", None),
    ("hunter2\nmore\n", None),
    ("hunter2\x00ret", None),
]


@pytest.mark.parametrize(("text", "meant"), SECRETS)
def test_a_secret_is_taken_as_it_was_meant_or_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, meant: str | None
) -> None:
    file = tmp_path / "password"
    file.write_text(text, newline="")
    if "\x00" not in text:
        monkeypatch.setenv("RLBUFFER_REDIS_PASSWORD", text)
        monkeypatch.setenv("RLBUFFER_WEIGHTS_TOKEN", text)
        for read in (lambda: password_of(RunSettings()), weights_token):
            check(read, meant, text)
        monkeypatch.delenv("RLBUFFER_REDIS_PASSWORD")
    if meant:
        assert password_of(RunSettings(redis_password_file=file)) == meant
    else:
        with pytest.raises(ConfigError) as refused:
            password_of(RunSettings(redis_password_file=file))
        assert "hunter2" not in str(refused.value)
    check(lambda: secret(text, "X"), meant, text)


def check(read: object, meant: str | None, text: str) -> None:
    assert callable(read)
    if meant is not None:
        assert read() == meant
        return
    with pytest.raises(ConfigError) as refused:
        read()
    assert text.strip() not in str(refused.value)
    assert "hunter2" not in str(refused.value)


def links_of(service: str, host: str = "10.96.0.7", port: int = 6379) -> dict[str, str]:
    """What Kubernetes puts into a pod's environment for a Service with one named port."""
    name = service.upper().replace("-", "_")
    shown = f"[{host}]" if ":" in host else host
    return {
        f"{name}_SERVICE_HOST": host,
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_REDIS_TLS": str(port),
        f"{name}_PORT": f"tcp://{shown}:{port}",
        f"{name}_PORT_{port}_TCP": f"tcp://{shown}:{port}",
        f"{name}_PORT_{port}_TCP_PROTO": "tcp",
        f"{name}_PORT_{port}_TCP_PORT": str(port),
        f"{name}_PORT_{port}_TCP_ADDR": host,
        f"{name}_PORT_53_UDP": f"udp://{shown}:53",
        f"{name}_PORT_53_UDP_PROTO": "udp",
        f"{name}_PORT_9_SCTP_ADDR": host,
    }


@pytest.mark.parametrize("host", ["10.96.0.7", "fd00::7"])
@pytest.mark.parametrize(
    "service", ["rlbuffer", "rlbuffer-redis", "rlbuffer-serve", "rlbuffer-run", "rlbuffer-service", "rlbuffer-port-2"]
)
def test_links_of_services_are_passed_over(service: str, host: str) -> None:
    links = links_of(service, host)
    assert [name for name, text in links.items() if not is_service_link(name, text)] == []
    assert load(environ=links) == load(environ={})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("RLBUFFER_PORT", "6379"),
        ("RLBUFFER_REDIS_PORT", "6379"),
        ("RLBUFFER_SERVICE", "tcp://10.0.0.1:1"),
        ("RLBUFFER_REDIS_HOST", "10.0.0.1"),
        ("RLBUFFER_RUNS", "a"),
        ("RLBUFFER_BATCHER__PORT", "tcp://10.0.0.1:1"),
    ],
)
def test_other_variables_that_are_no_settings_are_refused(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}  .* is not a setting"):
        load(environ={variable: text})


@pytest.mark.parametrize(
    ("written", "right", "setting"),
    [
        ("RLBUFFER_BATCHER_MAX_AGE", "RLBUFFER_BATCHER__MAX_AGE", "batcher.max_age"),
        ("RLBUFFER_TRAINER_LOSS_NAME", "RLBUFFER_TRAINER__LOSS__NAME", "trainer.loss.name"),
        ("RLBUFFER_TRAINER__LOSS_NAME", "RLBUFFER_TRAINER__LOSS__NAME", "trainer.loss.name"),
        ("RLBUFFER_WORKER_MY_ENV_GROUP_SIZE", "RLBUFFER_WORKER__MY_ENV__GROUP_SIZE", "worker.my_env.group_size"),
    ],
)
def test_one_underscore_for_a_dot_is_told_the_variable_that_is_right(written: str, right: str, setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(environ={written: "2"})
    assert f"Did you mean {right}? Two underscores stand for the dot of {setting}." in str(refused.value)


def test_a_setting_whose_name_ends_as_a_link_stays_one() -> None:
    given = {"RLBUFFER_WORKER__A__ENV": "repeat", "RLBUFFER_WORKER__A__ENV_OPTIONS__MY_PORT": "tcp://10.0.0.1:1"}
    assert load(environ=given).settings.worker["a"].env_options == {"my_port": "tcp://10.0.0.1:1"}
