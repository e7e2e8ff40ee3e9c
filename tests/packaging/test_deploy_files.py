"""The files under deploy/ and compose.yaml: of their formats, and nothing in them that rlbuffer does not know.

Docker, Kubernetes and systemd do not run here. What they would start is parsed as the command line parses it, with the
settings that they would set. deploy/slurm is run, in tests/e2e/test_slurm.py.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from rlbuffer.config.loading import load
from rlbuffer.store.server.binary import find_binary
from rlbuffer_cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
AGENTS = KUBERNETES / "agents"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
WHO = re.compile(r"batcher|(worker|scorer) [a-z0-9-]+|gateway(-[0-9]+)?|rank [0-9]+")


def needed(name: str) -> Any:
    """A package of the development set; a machine of a developer's may lack it, CI may not."""
    return importlib.import_module(name) if os.environ.get("CI") == "true" else pytest.importorskip(name)


def program(name: str) -> str:
    """A program that a package of the development set brings along."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None and os.environ.get("CI") != "true":
        pytest.skip(f"needs {name}")
    assert path is not None
    return path


def check_command(words: Sequence[str]) -> None:
    """Fails on a command, option or value that `rlbuffer` does not have, and on a worker without a section."""
    assert words[0].rpartition("/")[2] == "rlbuffer", words
    assert words[1] in COMMANDS
    command = importlib.import_module(f"rlbuffer_cli.commands.{words[1].replace('-', '_')}").command
    context = command.make_context(words[1], list(words[2:]))
    if words[1] == "worker":
        assert context.params["name"] in load(ROOT / "rlbuffer.toml", environ={}).settings.worker
    if words[1] == "alive":
        assert WHO.fullmatch(" ".join(context.params["who"]))


def check_settings(variables: Mapping[str, str]) -> None:
    """Fails on a variable that is no setting."""
    load(ROOT / "rlbuffer.toml", environ={k: v for k, v in variables.items() if k.startswith("RLBUFFER_")})


def documents() -> Iterator[dict[str, Any]]:
    yaml = needed("yaml")
    for path in sorted(KUBERNETES.rglob("*.yaml"), key=lambda path: path.name):
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text())


def pods() -> Iterator[dict[str, Any]]:
    for document in documents():
        if document["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield document["spec"]["template"]["spec"]


# -- compose, container ----------------------------------------------------------------------------------------------
def test_compose_is_of_its_specification_and_starts_what_there_is() -> None:
    compose_spec, yaml = needed("compose_spec"), needed("yaml")
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "compose.yaml").read_text())  # of variables that are not set
    content = yaml.safe_load(text)
    compose_spec.PyCompose.from_json(json.dumps(content)).validate()
    for name, service in content["services"].items():
        if name == "redis":
            continue
        assert service["environment"]["RLBUFFER_WEIGHTS__URL"] == "http://trainer:9465", "no folder is shared"
        check_command(["rlbuffer", *service["command"]])
        check_settings(service["environment"] | {"RLBUFFER_CONFIG": ""})
        kind, *words = service["healthcheck"]["test"]
        if kind == "CMD":
            check_command(words)


def test_the_container_file_is_as_hadolint_wants_it() -> None:
    subprocess.run([program("hadolint"), DEPLOY / "Dockerfile"], check=True, timeout=60)


# -- Kubernetes ------------------------------------------------------------------------------------------------------
def test_every_manifest_is_of_its_schema() -> None:
    validate = needed("kubernetes_validate").validate
    kinds = []
    for document in documents():
        validate(document, "1.34", strict=True)
        kinds.append(document["kind"])
    assert {"Deployment", "StatefulSet", "Job", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= set(kinds)


def test_pods_start_what_there_is_with_settings_that_there_are() -> None:
    yaml = needed("yaml")
    kustomization, component = (
        yaml.safe_load((folder / "kustomization.yaml").read_text()) for folder in (KUBERNETES, AGENTS)
    )
    for folder, made in ((KUBERNETES, kustomization), (AGENTS, component)):
        there = {path.name for path in folder.iterdir() if path.is_file()}
        assert there == {"kustomization.yaml", *made["resources"]}
    generated = {made["name"]: made for made in kustomization["configMapGenerator"]}
    secrets = {made["name"] for each in (kustomization, component) for made in each["secretGenerator"]}
    settings = dict(line.split("=", 1) for line in generated["environment"]["literals"])
    config = settings.pop("RLBUFFER_CONFIG")
    seen = []
    for pod in pods():
        (container,) = pod["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        for volume in pod["volumes"]:
            assert volume.get("configMap", {}).get("name", "settings") in generated
            assert volume.get("secret", {}).get("secretName", "passwords") in secrets
            assert volume["name"] in mounted
        # Kubernetes names a variable after each service: RLBUFFER_..., and no setting, if one is called so.
        assert pod["enableServiceLinks"] is False
        if container["name"] == "redis":
            continue
        seen.append(container["args"][0])
        own = {each["name"]: each.get("value", "1") for each in container.get("env", [])}
        check_settings(settings | own)
        check_command(["rlbuffer", *(own[word[2:-1]] if word.startswith("$(") else word for word in container["args"])])
        assert (f"{mounted['settings']}/rlbuffer.toml", f"{mounted['passwords']}/redis-password") == (
            config,
            settings["RLBUFFER_REDIS_PASSWORD_FILE"],
        )
        probes = [container[name] for name in ("readinessProbe", "livenessProbe") if name in container]
        for probe in probes:
            if "httpGet" in probe:
                assert probe["httpGet"] == {"path": "/health", "port": container["ports"][0]["containerPort"]}
                continue
            words = probe["exec"]["command"]
            if words[0] == "sh":
                words = shlex.split(words[-1].replace("$REPLICA", own["REPLICA"]))[1:]
            check_command(words)
        assert probes
    assert seen == ["gateway", "serve", "train", "worker"]


@pytest.mark.parametrize("has_agents", [False, True])
def test_kustomize_puts_the_manifests_together(tmp_path: Path, has_agents: bool) -> None:
    yaml, validate = needed("yaml"), needed("kubernetes_validate").validate
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    folder = shutil.copytree(KUBERNETES, tmp_path / "mine")
    shutil.copy(ROOT / "rlbuffer.toml", folder)
    (folder / "redis-password").write_text("secret")
    if has_agents:
        (folder / "agents" / "gateway-token").write_text("secret")
        with (folder / "kustomization.yaml").open("a") as file:
            file.write("components: [agents]\n")
    made = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True, timeout=60)
    assert "image: rlbuffer\n" not in made.stdout
    whole = list(yaml.safe_load_all(made.stdout))
    for document in whole:
        validate(document, "1.34", strict=True)
    there = {(document["kind"], document["metadata"]["name"]) for document in whole}
    assert (("Service", "gateway") in there) == has_agents
    for document in whole:
        pod = document["spec"].get("template", {}).get("spec", {}) if "spec" in document else {}
        for volume in pod.get("volumes", ()):
            for kind, key in (("configMap", "name"), ("secret", "secretName")):
                if kind in volume:
                    assert (kind[0].upper() + kind[1:], volume[kind][key]) in there


def test_the_server_of_the_cluster_asks_for_the_password(tmp_path: Path) -> None:
    """The container's own command, with the embedded server's program by the name of the image's."""
    command = next(pod["containers"][0] for pod in pods() if pod["containers"][0]["name"] == "redis")
    (tmp_path / "valkey-server").symlink_to(find_binary().path)
    (tmp_path / "redis-password").write_text("s3cret")
    (script,) = command["args"]
    for there, here in (("/secrets", tmp_path), ("/data", tmp_path), ("/tmp/valkey.conf", tmp_path / "valkey.conf")):
        script = re.sub(rf"(?<=[\s]){there}|(?<=cat ){there}", str(here), script)
    script += " --port 0 --unixsocket s.sock --save ''"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    server = subprocess.Popen([*command["command"], script], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "s.sock").exists():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with redis.Redis(unix_socket_path=str(tmp_path / "s.sock"), password="s3cret") as client:
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        with redis.Redis(unix_socket_path=str(tmp_path / "s.sock")) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        assert "s3cret" not in Path(f"/proc/{server.pid}/cmdline").read_text()
    finally:
        server.terminate()
        assert server.wait(30) == 0


# -- systemd ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_there_is_with_settings_that_there_are(unit: Path) -> None:
    lines = [line.partition("=") for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#")]
    (start,) = [value for name, _, value in lines if name == "ExecStart"]
    check_command(start.replace("%i", "0" if "gateway" in unit.name else "vcopy").split())
    given = [word for name, _, value in lines if name == "Environment" for word in value.split()]
    settings = dict(word.split("=", 1) for word in given)
    assert settings.pop("RLBUFFER_CONFIG") == "/etc/rlbuffer/rlbuffer.toml"
    check_settings(settings)


def test_systemd_knows_every_line_of_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    for unit in UNITS:
        text = unit.read_text()
        assert "ExecStart=/opt/rlbuffer/bin/rlbuffer " in text
        (tmp_path / unit.name).write_text(text.replace("/opt/rlbuffer/bin/rlbuffer", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", *sorted(tmp_path.glob("*.service"))], capture_output=True, text=True, timeout=120
    )
    assert (checked.returncode, checked.stderr) == (0, "")


# -- Slurm -----------------------------------------------------------------------------------------------------------
def test_the_batch_file_and_the_image_s_steps_are_as_shellcheck_wants_them() -> None:
    files = [DEPLOY / "slurm" / "run.sbatch", ROOT / ".ci" / "image"]
    subprocess.run([program("shellcheck"), *files], check=True, timeout=60)
