"""The small web server of metrics: ports, askers that are slow or many, and figures that fail."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
import urllib.request

import pytest

from rlbuffer.config.settings import MetricsSettings, RunSettings
from rlbuffer.errors import ConfigError
from rlbuffer.metrics import endpoint
from rlbuffer.metrics.endpoint import MetricsServer, serving
from rlbuffer.process.web_servers import MOST_AT_ONCE


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def port_of(server: MetricsServer) -> int:
    return int(server.url.rpartition(":")[2])


def test_each_process_of_a_host_takes_the_next_port() -> None:
    with MetricsServer("127.0.0.1:0", "serve", dict) as first:
        listen = f"127.0.0.1:{port_of(first)}"
        with MetricsServer(listen, "serve", lambda: {"leader": 0}) as second:
            assert port_of(first) < port_of(second) < port_of(first) + endpoint.PORTS
            assert get(f"{second.url}/metrics")[1].endswith("rlbuffer_leader 0.0\n")


def test_a_process_without_a_port_says_so_and_works_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint, "PORTS", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = RunSettings(run="r", metrics=MetricsSettings(listen=listen))
        with serving(settings, "serve", dict):
            pass
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"metrics.listen = '{listen}'" in record.getMessage()


def test_no_host_is_this_machine_only_and_the_address_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with serving(RunSettings(run="r", metrics=MetricsSettings(listen=":0")), "worker", dict, worker="w-0"):
        url = caplog.records[-1].fields["url"]
        assert url.startswith("http://127.0.0.1:")
        status = json.loads(get(url.replace("/metrics", "/status"))[1])
        assert status == {"process": "worker", "run": "r", "worker": "w-0", "metrics": {}}


def test_nothing_is_served_where_nothing_is_set() -> None:
    with serving(RunSettings(run="r"), "serve", dict):
        pass


def test_a_wrong_address_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        MetricsServer("9464", "serve", dict)
    assert str(caught.value) == "metrics.listen = '9464' must be HOST:PORT, e.g. 127.0.0.1:9464"


def test_figures_that_fail_are_an_answer_and_the_next_one_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([ValueError("secret"), {"leader": 1}])

    def values() -> dict[str, int]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with MetricsServer("127.0.0.1:0", "serve", values) as server:
        assert get(f"{server.url}/metrics") == (500, "ValueError\n")
        assert get(f"{server.url}/metrics")[0] == 200
        assert get(f"{server.url}/nosuch") == (404, "there are /metrics and /status\n")
    assert caplog.messages == ["the metrics could not be made: ValueError: secret"]


def test_askers_that_say_nothing_do_not_keep_others_waiting() -> None:
    with MetricsServer("127.0.0.1:0", "serve", lambda: {"leader": 1}) as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", port_of(server))
        for _ in range(MOST_AT_ONCE - 1):
            stack.enter_context(socket.create_connection(address))
        assert get(f"{server.url}/metrics")[0] == 200
