"""The look of `rlbuffer doctor` at everything that a run needs: settings, this host, the server. Changes nothing."""

from __future__ import annotations

import errno
import platform
import re
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import rlbuffer
from rlbuffer.config.addresses import parse_listen
from rlbuffer.config.loading import Loaded
from rlbuffer.config.mistakes import Mistake
from rlbuffer.config.settings import RunSettings
from rlbuffer.run.diagnosis import Diagnosis, Health, doubtful, failed, well
from rlbuffer.run.host_checks import Parts
from rlbuffer.run.pythons import gpus_here
from rlbuffer.run.server_checks import on_server
from rlbuffer.state.text import plural

LOW_DISK_BYTES = 10 * 2**30
"""Free space from which it is worth a warning: two checkpoints of a model of 0.6B take as much."""
FULL_DISK_BYTES = 2**28
"""Free space from which the server's file and the logs are at their end."""
WEIGHTS_ANSWER_SECONDS = 2.0
SUBJECTS = {
    "home": "make it writable for this user, or name another: home in the config file, RLBUFFER_HOME, --home DIR",
    "trainer.output": "make it writable for this user, or name another folder, or leave it out",
    "model.path": "model.path names the directory of a Hugging Face model: hf download NAME --local-dir DIR makes one",
    "model": "`rlbuffer config example` prints a [model.config] that works",
    "redis_url": "redis://HOST:PORT/DB, rediss://HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, "
    "redis+cluster://HOST:PORT,HOST:PORT or unix:///PATH; leave it out for the embedded server",
    "redis_password_file": "name a file that holds the password, or set RLBUFFER_REDIS_PASSWORD",
}
"""Beginning of a setting's name -> what to do about a mistake in it that does not say so itself."""


def diagnose(loaded: Loaded, mistakes: Sequence[Mistake], parts: Parts) -> Iterator[Diagnosis]:
    """Looks at one thing after the other.

    Args:
        loaded: settings.
        mistakes: what cannot work in them, or hardly as meant.
        parts: those that shall run here, as in :mod:`rlbuffer.run.host_checks`.
    """
    settings = loaded.settings
    wrong = {mistake.text: mistake.settings[0] for mistake in mistakes if not mistake.works}
    if not wrong:
        where = str(loaded.file) if loaded.file else "no config file (all defaults)"
        yield well("settings", f"{where}, {plural(len(loaded.sources), 'setting')} given")
    for mistake in mistakes:
        if mistake.works:
            yield doubtful("settings", mistake.text, "change one of them, or leave it: the run works")
    for text, setting in wrong.items():
        yield failed(_subject(setting), text, _fix(setting))
    subjects = set(map(_subject, wrong.values()))
    if "home" not in subjects:
        yield from _disk(settings)
    if "model" not in subjects and (settings.model.path or settings.model.config):
        yield well("model", f"{settings.model.path or 'a fresh ' + str(settings.model.config.get('model_type'))}")
    yield from _packages(settings, parts)
    yield _gpus()
    yield from _ports(settings, parts, wrong.values())
    if "server" not in subjects:
        yield from on_server(loaded)


def _subject(setting: str) -> str:
    first = setting.partition(".")[0]
    if first in ("redis_url", "redis_password_file", "RLBUFFER_SERVER_BIN"):
        return "server"
    return first if first in ("home", "model") else "settings"


def _fix(setting: str) -> str:
    names = [name for name in SUBJECTS if setting == name or setting.startswith(f"{name}.")]
    if names:
        return SUBJECTS[max(names, key=len)]
    name = f" {setting}" if setting and "." in setting else " SETTING"
    return f"change what is named: `rlbuffer config explain{name}` says what may stand there"


def _disk(settings: RunSettings) -> Iterator[Diagnosis]:
    """Free space of the folders that are written to, once per disk."""
    seen = set()
    for folder in (settings.home_dir, settings.output_dir):
        absolute = folder.absolute()
        there = next(f for f in (absolute, *absolute.parents) if f.exists())
        device = there.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(there).free
        text = f"{free / 2**30:.1f} GiB free at {folder}"
        fix = "free some, keep fewer checkpoints (trainer.checkpoint.keep), or name another home or trainer.output"
        if free < FULL_DISK_BYTES:
            yield failed("disk", text, fix)
        elif free < LOW_DISK_BYTES:
            yield doubtful("disk", text, fix)
        else:
            yield well("disk", text)


def _packages(settings: RunSettings, parts: Parts) -> Iterator[Diagnosis]:
    yield well("python", f"rlbuffer {rlbuffer.__version__} on Python {platform.python_version()}")
    yield _torch()
    version = _version("vllm")
    workers = [name for name, options in settings.worker.items() if options.sampler == "vllm"]
    asked = f"for {', '.join(workers)}" if workers else "no worker here asks for it"
    yield well("vllm", f"{version or 'not installed'}; {asked}")


def _torch() -> Diagnosis:
    version = _version("torch")
    if not version:
        text = "not installed: the trainer and workers with the sampler transformers need it; serve and inspect do not"
        return doubtful("torch", text, "pip install 'rlbuffer[train]'")
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
    builds = re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= '([^']+)'", text, re.MULTILINE)
    if not builds and gpus_here():
        fix = "install a build for this host's driver: https://pytorch.org/get-started/locally"
        return doubtful(
            "torch", f"{version} is built without CUDA, and this host has {plural(gpus_here() or 0, 'GPU')}", fix
        )
    shown = " ".join(f"{kind} {number}" for kind, number in builds) or "CPU only"
    return well("torch", f"{version} ({shown})")


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _gpus() -> Diagnosis:
    there = gpus_here()
    if there is None:
        return well("gpus", "there are some; how many is not known without asking the driver")
    return well("gpus", f"{there}" if there else "none: everything runs on the CPU")


def _ports(settings: RunSettings, parts: Parts, wrong: Collection[str]) -> Iterator[Diagnosis]:
    """Nobody else listens where this host is to answer. Only weights are needed: who has no metrics works on."""
    weights, metrics = settings.weights.listen, settings.metrics.listen
    if {"run", "train"} & set(parts) and weights and "weights.listen" not in wrong:
        yield _port("weights.listen", weights, failed, ("/", "versions", "a weights server is at work there"))
    if metrics and "metrics.listen" not in wrong:
        ours = ("/metrics", "rlbuffer_server_up", "a batcher of rlbuffer answers there")
        yield _port("metrics.listen", metrics, doubtful, ours)


def _port(
    setting: str, listen: str, verdict: Callable[[str, str, str], Diagnosis], ours: tuple[str, str, str]
) -> Diagnosis:
    """The line on `listen`: free or not. `ours`: path, field of its answer and words, when one of ours is there."""
    host, port = parse_listen(listen)
    path, field, words = ours
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _answers(host, port, path, field):
            return well("ports", f"{setting} = {listen}: {words}")
        fix = f"choose another port ({setting}), or end what listens there: ss -ltnp 'sport = :{port}'"
        if error.errno != errno.EADDRINUSE:
            fix = f"name an address of this host, or none ({setting}): ip addr shows them"
        return verdict("ports", f"{setting} = {listen}: {(error.strerror or str(error)).lower()}", fix)
    return well("ports", f"{setting} = {listen} is free")


def _answers(host: str, port: int, path: str, field: str) -> bool:
    place = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    try:
        with urllib.request.urlopen(f"http://{place}:{port}{path}", timeout=WEIGHTS_ANSWER_SECONDS) as answer:
            return field.encode() in answer.read(2**20)
    except urllib.error.HTTPError as error:
        return error.headers.get("WWW-Authenticate") == "Bearer"
    except (OSError, ValueError):
        return False


def is_failed(diagnoses: Iterable[Diagnosis]) -> bool:
    """A run cannot work."""
    return any(diagnosis.verdict == Health.FAILURE for diagnosis in diagnoses)
