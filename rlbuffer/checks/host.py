"""What must be on this host: folders, files, packages, GPUs, other Pythons, and the functions that settings name."""

from __future__ import annotations

import errno
import multiprocessing
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rlbuffer
from rlbuffer.checks.check import Context, Finding, Level, check, failure, ok, refused, warning
from rlbuffer.checks.imports import Asked, wrong
from rlbuffer.config.addresses import parse_listen
from rlbuffer.config.batcher import ESTIMATOR_NAMES, ORDERS
from rlbuffer.config.loading import folders_of
from rlbuffer.config.models import EXAMPLE, config_of, context_of, router_loss, which_model
from rlbuffer.config.placement import environment_of, gpus_here, python_of
from rlbuffer.config.settings import INITIAL_MODEL, EvaluationSettings, ModelSettings, WorkerSettings, gives_nothing
from rlbuffer.errors import ConfigError, ServerUnreachable
from rlbuffer.process.files import owner_of
from rlbuffer.state.text import did_you_mean, plural
from rlbuffer.store.server import tls
from rlbuffer.store.server.address import check_place, is_memory, options_of, redacted, source_of
from rlbuffer.store.server.binary import SERVER_BIN, find_binary

FULL_DISK_BYTES = 2**28
"""Free space from which the server's file and the logs are at their end."""
IMPORT_SECONDS = 120.0
"""Longest that another Python may take to import rlbuffer: a cold network disk must fit."""
PACKAGES: Mapping[str, tuple[str, str]] = {
    "reasoning_gym": ("reasoning_gym", "envs"),
    "verifiers": ("verifiers", "verifiers"),
    "transformers": ("transformers", "train"),
    "vllm": ("vllm", "vllm"),
    "openai": ("httpx", "openai"),
}
"""Env or sampler -> the module that it needs, and the extra that brings it."""
STARTS = ("run", "serve", "worker", "score", "train")


# -- folders and the server's address ----------------------------------------------------------------------------------
@check("home", "its folders can be written to, and have room", "home", "trainer.output", level="host", parts=STARTS)
def home(c: Context) -> Iterator[Finding]:
    """The folders that the embedded server and the trainer write to."""
    if c.settings.redis_url and not {"run", "train"} & c.parts:
        return
    try:
        folders = {"home": c.settings.home_dir, "trainer.output": c.settings.output_dir}
    except ConfigError as error:
        yield refused(error)
        return
    for setting, path in folders.items():
        absolute = path.expanduser().absolute()
        there = next(folder for folder in (absolute, *absolute.parents) if os.access(folder, os.F_OK))
        free = shutil.disk_usage(there).free
        text = f"{setting} = {str(path)!r}: {free / 2**30:.1f} GiB free"
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written to" if there.is_dir() else "is no directory"
            text = f"{setting} = {str(path)!r}: {there} {why} ({owner_of(there)})"
            yield failure(text, setting, fix="Make it writable for this user, or name another")
        elif free < FULL_DISK_BYTES:
            yield failure(
                text, setting, fix="Free some, keep fewer checkpoints (trainer.checkpoint.keep), or name another"
            )
        elif setting == "home" or c.settings.trainer.output is not None:
            yield ok(text)
        if c.settings.trainer.output is None:
            return


@check(
    "server-address",
    "the server's address can be read, and its files are there",
    *("redis_url", "redis_password_file"),
    level="host",
    parts=STARTS,
)
def server_address(c: Context) -> Iterator[Finding]:
    """The files and names in the server's address; of the embedded server, its program."""
    url, file = c.settings.redis_url, c.settings.redis_password_file
    if not url:
        try:
            find_binary()
        except ServerUnreachable as error:
            yield failure(str(error), SERVER_BIN)
        return
    if is_memory(url):
        if len(c.parts) > 1:
            text = f"redis_url = {url!r} is a server inside of one process: no other process of a run reaches it"
            yield failure(text, "redis_url")
        return
    try:
        source = source_of(c.loaded.place("redis_url"))
        options = options_of(url, source)
        tls.check_options(options, redacted(url), source)
        check_place(url, options, source)
    except ConfigError as error:
        yield failure(str(error), "redis_url")
    if file is not None and not os.environ.get("RLBUFFER_REDIS_PASSWORD"):
        named = file.expanduser()
        if not (named.is_file() and named.read_text(errors="replace").strip()):
            yield failure(f"redis_password_file = {str(file)!r} is no file with a password", "redis_password_file")


@check("ports", "nobody else listens where weights are served", "weights.listen", level="host", parts=["run"])
def ports(c: Context) -> Iterator[Finding]:
    """A weights server of ours may be at work there."""
    listen = c.settings.weights.listen
    with suppress(ConfigError):  # said already
        host, port = parse_listen(listen) if listen else ("", 0)
        if not port:
            return
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and _serves_weights(host, port):
                yield ok(f"weights.listen = {listen}: a weights server is at work there")
                return
            fix = f"Choose another port, or end what listens there: ss -ltnp 'sport = :{port}'"
            if error.errno != errno.EADDRINUSE:
                fix = "Name an address of this host: ip addr shows them"
            text = f"weights.listen = {listen}: {(error.strerror or str(error)).lower()}"
            yield failure(text, "weights.listen", fix=fix)
        else:
            yield ok(f"weights.listen = {listen} is free")


def _serves_weights(host: str, port: int) -> bool:
    place = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    try:
        with urllib.request.urlopen(f"http://{place}:{port}/", timeout=2.0) as answer:
            return b"versions" in answer.read(2**20)
    except urllib.error.HTTPError as error:
        return error.headers.get("WWW-Authenticate") == "Bearer"
    except (OSError, ValueError):
        return False


# -- model -------------------------------------------------------------------------------------------------------------
@check(
    "model",
    "exactly one of model.path and model.config is set, and a model",
    "model.path",
    "model.config",
    level="host",
    parts=["train"],
)
def model(c: Context) -> Iterator[Finding]:
    """The policy, by its files alone."""
    chosen = c.settings.model
    setting = "model.path" if chosen.path else "model.config"
    if bool(chosen.path) == bool(chosen.config):
        yield failure(which_model(chosen.path), "model")
        return
    if chosen.path:
        yield from _directory("model.path", chosen.path)
    elif why := _unknown_type(chosen.config.get("model_type")):
        yield failure(f"model.config.model_type {why}", "model.config.model_type")
    if why := router_loss(config_of(chosen)):
        yield failure(why, setting)


def _directory(setting: str, path: str) -> Iterator[Finding]:
    """Every reason why no Hugging Face model can be loaded from a directory."""
    directory = Path(path).expanduser()
    fix = "Nothing is downloaded: `hf download NAME --local-dir DIR` fetches a model; give the directory's path"
    if not (directory / "config.json").is_file():
        what = "has no config.json" if directory.is_dir() else "is not a directory"
        yield failure(f"{setting}: {directory} {what}", setting, fix=fix)
        return
    if why := _unknown_type(config_of(ModelSettings(path=path)).get("model_type")):
        yield failure(f"{setting}: {directory / 'config.json'}: model_type {why}", setting)
    files = [*directory.glob("*.safetensors"), *directory.glob("*.safetensors.index.json")]
    if not files:
        pickled = ". pytorch_model.bin may hold code and is not read: save the model again with save_pretrained"
        hint = pickled if next(directory.glob("pytorch_model*.bin"), None) else ""
        yield failure(f"{setting}: {directory} has no weights (model.safetensors){hint}", setting)


def _unknown_type(kind: object) -> str:
    """The end of a sentence when transformers has no such causal language model; "" when it has, or is not here."""
    if not isinstance(kind, str) or not kind:
        return 'is missing, e.g. "qwen3"'
    spec = find_spec("transformers")
    models = Path(next(iter(spec.submodule_search_locations or ()))) / "models" if spec is not None else None
    if models is None or not models.is_dir():
        return ""
    text = (models / "auto" / "modeling_auto.py").read_text(encoding="utf-8", errors="replace")
    causal = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = (.*?)^\)", text, re.MULTILINE | re.DOTALL)
    known = re.findall(r'\("([\w-]+)", ', causal[1]) if causal else []
    if kind in known or not known:
        return ""
    return f"= {kind!r} is no causal language model of transformers.{did_you_mean(kind, known)}"


# -- devices, packages, other Pythons ----------------------------------------------------------------------------------
@check(
    "devices",
    "GPUs that settings ask for are here",
    *("trainer.device", "trainer.gpus", "trainer.world_size", "worker.NAME.device", "worker.NAME.gpus"),
    *("score.NAME.device", "score.NAME.gpus"),
    level="host",
    parts=("train", "worker", "score"),
)
def devices(c: Context) -> Iterator[Finding]:
    """Devices that this host does not have. Where nobody knows how many there are, nothing is said."""
    trainer, there = c.settings.trainer, gpus_here()
    asked: list[tuple[str, Sequence[int | str], str]] = []
    if "train" in c.parts:
        asked.append(("trainer", trainer.gpus, trainer.device))
    for name, worker in c.workers.items():
        if worker.sampler != "openai":
            asked.append((f"worker.{name}", worker.gpus, "auto" if worker.sampler == "vllm" else worker.device))
    asked += [(f"score.{name}", scorer.gpus, scorer.device) for name, scorer in c.scorers.items() if scorer.model]
    if there is None:
        return
    for section, gpus, device in asked:
        beyond = [gpu for gpu in gpus if isinstance(gpu, int) and gpu >= there]
        if there == 0:
            if device == "cuda":
                yield failure(f"{section}.device = 'cuda': this host has no GPU", f"{section}.device")
        elif beyond and device != "cpu":
            text = f"{section}.gpus = {list(gpus)}: this host has {plural(there, 'GPU')}, numbered from 0"
            yield failure(text, f"{section}.gpus")
        elif section == "trainer" and device != "cpu" and not gpus and there < trainer.world_size:
            text = f"trainer.world_size = {trainer.world_size}: ranks need a GPU each, and this host has {there}"
            yield failure(text, "trainer.world_size")


@check(
    "packages",
    "the packages are installed that settings ask for",
    *("trainer.lora.rank", "trainer.reports.tensorboard", "trainer.reports.wandb_project"),
    *("worker.NAME.sampler", "worker.NAME.env", "eval.NAME.env"),
    level="host",
)
def packages(c: Context) -> Iterator[Finding]:
    """Modules that are not there, without importing any."""
    trainer = c.settings.trainer
    wanted: list[tuple[str, str, str]] = []
    if "train" in c.parts:
        wanted += [("trainer", "torch", "train"), ("trainer", "transformers", "train")]
        wanted += [("trainer.lora.rank", "peft", "lora")] * bool(trainer.lora.rank)
        wanted += [("trainer.reports.tensorboard", "tensorboard", "tensorboard")] * trainer.reports.tensorboard
        wanted += [("trainer.reports.wandb_project", "wandb", "wandb")] * bool(trainer.reports.wandb_project)
    for name, worker in c.workers.items():
        if not worker.python:  # what that one can import is its own affair: `rlbuffer run` asks it
            wanted.append((f"worker.{name}.sampler", *PACKAGES[worker.sampler]))
            if worker.env in PACKAGES:
                wanted.append((f"worker.{name}.env", *PACKAGES[worker.env]))
    lacking = [(setting, module, extra) for setting, module, extra in wanted if not is_installed(module)]
    for setting, module, extra in lacking:
        yield failure(f"{setting} needs the module {module}", setting, fix=f"pip install 'rlbuffer[{extra}]'")
    yield ok(f"rlbuffer {rlbuffer.__version__} on Python {platform.python_version()}")
    there = gpus_here()
    yield ok("there are GPUs; how many is not known" if there is None else f"{plural(there, 'GPU')} here")
    for package in ("torch", "vllm"):
        if is_installed(package) and package not in {module for _, module, _ in lacking}:
            yield _version(package, there)


def is_installed(module: str) -> bool:
    """True when the top-level `module` could be imported; it is not imported."""
    return module in sys.modules or find_spec(module) is not None


def _version(package: str, gpus: int | None) -> Finding:
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version(package)
        spec = find_spec("torch")
        file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
        text = file.read_text(encoding="utf-8") if package == "torch" and file is not None and file.is_file() else ""
        builds = " ".join(f"{a} {b}" for a, b in re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= '([^']+)'", text, re.MULTILINE))
        if gpus and text and not builds:
            fix = "Install a build for this host's driver: https://pytorch.org/get-started/locally"
            return warning(f"torch {version} is built without CUDA, and this host has {plural(gpus, 'GPU')}", fix=fix)
        return ok(f"{package} {version}" + f" ({builds or 'CPU only'})" * bool(text))
    return ok(f"{package}: which version is not known")


@check("shared-locks", "ranks can share locks in /dev/shm", "trainer.world_size", level="host", parts=["train"])
def shared_locks(c: Context) -> Iterator[Finding]:
    """A container's /dev/shm may be read-only."""
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as error:
        shm = Path("/dev/shm")
        text = f"ranks cannot share locks in {shm} ({(error.strerror or '').lower()}; {owner_of(shm)})"
        fix = "Mount a writable tmpfs there: --shm-size of a container, an emptyDir of medium Memory in Kubernetes"
        yield failure(text, "trainer.world_size", fix=fix)


@check("pythons", "another Python has this rlbuffer", "worker.NAME.python", level="host", parts=["run", "worker"])
def pythons(c: Context) -> Iterator[Finding]:
    """Other Pythons that are not there or lack this rlbuffer."""
    for name, options in (c.settings.worker if "run" in c.parts else c.workers).items():
        try:
            python = python_of(name, options, sys.executable)
        except ConfigError as error:
            yield refused(error)
            continue
        is_asked = bool(options.python) and "run" in c.parts
        if is_asked and (why := _probe(python, environment_of(options, 0, python))):
            setting = f"worker.{name}.python"
            extra = "train" if options.sampler == "transformers" else options.sampler
            install = f"{options.python} -m pip install 'rlbuffer[{extra}]=={rlbuffer.__version__}'"
            yield failure(f"{setting} = {options.python!r} {why}", setting, fix=f"Install it there: {install}")


def _probe(python: str, environment: Mapping[str, str]) -> str:
    """What is wrong with a Python, as the end of a sentence; "" when nothing is."""
    program = "import rlbuffer.run.members, rlbuffer; print(rlbuffer.__version__)"
    try:
        answer = subprocess.run(
            [python, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
            env=environment,
        )
    except OSError as error:
        return f"cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"did not import rlbuffer within {IMPORT_SECONDS:.0f} s"
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        return f"cannot import rlbuffer ({lines[-1]})"
    version = answer.stdout.strip()
    return "" if version == rlbuffer.__version__ else f"has rlbuffer {version}, this is {rlbuffer.__version__}"


# -- workers, scorers, functions ---------------------------------------------------------------------------------------
@check("workers", "a run has a worker", "worker", level="host", parts=["run"])
def workers(c: Context) -> Iterator[Finding]:
    """Nothing would be sampled."""
    if not c.settings.worker:
        fix = f"Add one ({EXAMPLE} has two)"
        yield failure("there is no [worker.NAME] section: nothing would be sampled", "worker", fix=fix)


@check(
    "scorer-models",
    "a scorer adds something, of a model that is here",
    "score.NAME.model",
    "score.NAME.reward",
    level="host",
    parts=["score"],
)
def scorer_models(c: Context) -> Iterator[Finding]:
    """Scorers without anything to add, and models that are not there."""
    for name, options in c.scorers.items():
        if not options.adds:
            yield failure(gives_nothing(name), f"score.{name}")
        elif options.model == INITIAL_MODEL and "train" not in c.parts:
            yield from model(c)
        elif options.model and options.model != INITIAL_MODEL:
            yield from _directory(f"score.{name}.model", options.model)


@check(
    "functions",
    "functions and envs can be imported, and take what they are given",
    *("batcher.order", "batcher.advantage", "batcher.envs.NAME.advantage", "trainer.loss.name", "score.NAME.reward"),
    *("worker.NAME.env", "worker.NAME.env_options", "worker.NAME.sampler_options", "eval.NAME.env"),
    *("eval.NAME.env_options", "batcher.row_tokens", "model.config"),
    level="host",
    parts=STARTS,
)
def functions(c: Context) -> Iterator[Finding]:
    """All that is to be imported, in one child; what it finds of envs it finds by their options and files."""
    for one in wrong(list(_asked(c)), folders_of(c.loaded.file)):
        level = Level.FAILURE if one.is_fatal else Level.WARNING
        yield Finding(level=level, text=one.text, settings=(one.setting,))


def _asked(c: Context) -> Iterator[Asked]:
    batcher, trainer = c.settings.batcher, c.settings.trainer
    if "serve" in c.parts:
        if batcher.order not in ORDERS:
            yield Asked("batcher.order", batcher.order, "group, rng")
        named = [("batcher.advantage", batcher.advantage)]
        named += [(f"batcher.envs.{env}.advantage", o.advantage) for env, o in batcher.envs.items() if o.advantage]
        for setting, path in named:
            if path not in ESTIMATOR_NAMES:
                yield Asked(setting, path, "rewards, lengths, group")
    if "train" in c.parts and ":" in trainer.loss.name:
        yield Asked("trainer.loss.name", trainer.loss.name, "tokens, options")
    for name, scorer in c.scorers.items():
        if scorer.reward:
            yield Asked(f"score.{name}.reward", scorer.reward, "rollout, group", may_be_async=True)
    for name, worker in c.workers.items():
        given: Mapping[str, Any] = {"sampler": worker.sampler, "options": worker.sampler_options}
        yield Asked(f"worker.{name}", "rlbuffer.worker.samplers.options:check_options", given=given)
        if not worker.python:
            yield _env(c, f"worker.{name}", worker, {"temperature": worker.temperature, "top_p": worker.top_p})
    for name, evaluation in c.settings.eval.items() if c.workers else ():
        yield _env(c, f"eval.{name}", evaluation, {"temperature": evaluation.temperature, "top_p": 1.0})


def _env(
    c: Context, section: str, options: WorkerSettings | EvaluationSettings, sampling: Mapping[str, float]
) -> Asked:
    config = config_of(c.settings.model)
    known = config.get("vocab_size")
    served = options.sampler_options.get("max_model_len") if isinstance(options, WorkerSettings) else None
    lengths = {"batcher.row_tokens": c.settings.batcher.row_tokens, "the model's context": context_of(config)}
    lengths["max_model_len"] = served if isinstance(served, int) else 0
    given = {
        "name": options.env,
        "options": options.env_options,
        "vocab_size": known if isinstance(known, int) else 0,
        "lengths": {what: length for what, length in lengths.items() if length > 0},
        "sampling": sampling,
    }
    return Asked(section, "rlbuffer.worker.envs.looking:wrong_env", given=given)
