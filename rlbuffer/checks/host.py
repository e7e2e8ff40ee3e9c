"""What must be on this host: folders, files, packages, GPUs, other Pythons, and the functions that settings name."""

from __future__ import annotations

import errno
import multiprocessing
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rlbuffer
from rlbuffer.checks.check import Context, Finding, Level, check, failure, ok, refused, warning
from rlbuffer.checks.imports import NamedFunction, Python, wrong
from rlbuffer.config.adapters import adapter_config, instead_of_a_model, wrong_start
from rlbuffer.config.addresses import parse_listen
from rlbuffer.config.batcher import ESTIMATOR_NAMES, ORDERS
from rlbuffer.config.loading import folders_of
from rlbuffer.config.models import EXAMPLE, NO_MODEL_TYPE, config_of, router_loss, which_model
from rlbuffer.config.placement import environment_of, gpus_here, python_of
from rlbuffer.config.settings import INITIAL_MODEL, EvaluationSettings, ModelSettings, WorkerSettings
from rlbuffer.errors import ConfigError, ServerUnreachable, clause, installed_by
from rlbuffer.process.file_locks import lacks_locks
from rlbuffer.process.files import owner_of
from rlbuffer.state.text import plural
from rlbuffer.store.server.address import check_tls, is_memory, options_of, redacted, source_of
from rlbuffer.store.server.binary import SERVER_BIN, find_binary

FULL_DISK_BYTES = 2**28
"""Free space from which the server's file and the logs are at their end."""
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
"""Numbers that every model's config calls so."""
STARTS = ("run", "serve", "worker", "gateway", "score", "train")


# -- folders and the server's address ----------------------------------------------------------------------------------
@check("home trainer.output archive.dir", parts=STARTS)
def home(c: Context) -> Iterator[Finding]:
    """The folders of a run can be written to, and have room."""
    folders, archive = dict[str, Path](), c.settings.archive.dir
    if "serve" in c.parts and archive is not None:
        folders["archive.dir"] = archive.expanduser()
    if not c.settings.redis_url or {"run", "train"} & c.parts:
        try:
            folders["home"] = c.settings.home_dir
        except ConfigError as error:
            yield refused(error)
            return
        if c.settings.trainer.output is not None:
            folders["trainer.output"] = c.settings.output_dir
    for setting, path in folders.items():
        there = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.access(folder, os.F_OK))
        total, _, free = shutil.disk_usage(there)
        is_full = total > 0 and free < FULL_DISK_BYTES  # a mounted store of objects may know of no size
        text = f"{setting} = {str(path)!r}: {free / 2**30:.1f} GiB free"
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written to" if there.is_dir() else "is no directory"
            text = f"{setting} = {str(path)!r}: {there} {why} ({owner_of(there)})"
            yield failure(text, setting, fix="Make it writable for this user, or name another")
        elif is_full and setting == "archive.dir":  # the batcher works on, and goes on writing later
            yield warning(text, setting, fix="Free some: what is not written may leave the server without it")
        elif is_full:
            fix = "Free some, keep fewer checkpoints (trainer.checkpoint.keep), or name another"
            yield failure(text, setting, fix=fix)
        elif setting == "home" and not c.settings.redis_url and lacks_locks(there):
            fix = "Name a folder on a disk of this host, or a server: redis_url"
            yield failure(f"home = {str(path)!r}: the filesystem of {there} has no flock", setting, fix=fix)
        else:
            yield ok(text)


@check("redis_url redis_password_file", parts=STARTS)
def server_address(c: Context) -> Iterator[Finding]:
    """The server's address can be read, and its files are there."""
    url = c.settings.redis_url
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
        check_tls(options, redacted(url), source)
    except ConfigError as error:
        yield failure(f"redis_url: {error}", "redis_url")
    from rlbuffer.client.buffer import password_of  # loads the server's client, which most commands have no use for

    try:
        password_of(c.settings)
    except ConfigError as error:
        yield failure(str(error), error.setting or "redis_url")


@check("weights.listen metrics.listen gateway.listen", parts=("serve", "train", "gateway"))
def ports(c: Context) -> Iterator[Finding]:
    """Nobody else listens where weights, metrics and agents are served.

    Who has a port may be a process of this run.
    """
    served = {"train": ("weights.listen", c.settings.weights.listen)}
    served["serve"] = ("metrics.listen", c.settings.metrics.listen)
    if c.settings.gateway.engines:
        served["gateway"] = ("gateway.listen", c.settings.gateway.listen)
    for setting, listen in (served[part] for part in served if part in c.parts):
        host, port = parse_listen(listen) if listen else ("", 0)
        if not port:
            continue
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            text = f"{setting} = {listen}: {(error.strerror or str(error)).lower()}"
            if error.errno == errno.EADDRINUSE:
                fix = f"Leave it where a process of this run is at work; else see who it is: ss -ltnp 'sport = :{port}'"
                yield warning(text, setting, fix=fix)
            else:
                yield failure(text, setting, fix="Name an address of this host: ip addr shows them")
        else:
            yield ok(f"{setting} = {listen} is free")


# -- model -------------------------------------------------------------------------------------------------------------
@check("model.path model.config", parts=["train"])
def model(c: Context) -> Iterator[Finding]:
    """Exactly one of model.path and model.config is set, and a model."""
    chosen = c.settings.model
    if bool(chosen.path) == bool(chosen.config):
        base = (adapter_config(c.settings.trainer.lora.path) or {}).get("base_model_name_or_path")
        is_known = base and c.settings.trainer.lora.path and not chosen.path
        yield failure(which_model(chosen.path), "model", fix=f'The adapter is for path = "{base}"' if is_known else "")
        return
    setting = "model.path" if chosen.path else "model.config"
    if chosen.path:
        yield from _directory("model.path", chosen.path)
    elif not isinstance(kind := chosen.config.get("model_type"), str) or not kind:
        yield failure(NO_MODEL_TYPE, "model.config")
    for name in SIZES & chosen.config.keys() if not chosen.path else ():
        value = chosen.config[name]
        sizes = value if isinstance(value, list) else [value]  # gemma3n_text has one for each layer
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            yield failure(f"model.config.{name} = {value!r} must be a whole number from 1 on", f"model.config.{name}")
    if why := router_loss(config_of(chosen)):
        yield failure(why, setting)


@check("weights.url", parts=("train", "worker"))
def deltas(c: Context) -> Iterator[Finding]:
    """Versions go to other hosts as deltas to the version before."""
    if c.settings.weights.url and not is_installed("zstandard"):
        fix = f"Install it: {installed_by('weights')}"
        yield warning("zstandard is not installed: every version goes to other hosts whole", "weights.url", fix=fix)


@check("trainer.lora.path trainer.lora.rank trainer.lora.alpha trainer.lora.targets", parts=("train", "score"))
def adapter(c: Context) -> Iterator[Finding]:
    """The adapter that training begins with is LoRA and nothing else, and no other setting contradicts it.

    The initial model of a scorer has it, too.
    """
    if "train" not in c.parts and all(scorer.model != INITIAL_MODEL for scorer in c.scorers.values()):
        return
    text, setting = wrong_start(c.settings.trainer.lora, c.loaded.sources)
    if text:
        yield failure(text, setting)


def _directory(setting: str, path: str) -> Iterator[Finding]:
    """Why no Hugging Face model can be loaded from a directory."""
    directory = Path(path).expanduser()
    what, fix = instead_of_a_model(setting, path)
    if what:
        yield failure(what, setting, fix=fix)
    elif not config_of(ModelSettings(path=path)).get("model_type"):
        text = f"{setting}: {directory} has no config.json with a model_type"
        fix = "Nothing is downloaded: `hf download NAME --local-dir DIR` fetches a model; give the directory's path"
        yield failure(text, setting, fix=fix)
    elif not any(next(directory.glob(f"*.{ending}"), None) for ending in ("safetensors", "safetensors.index.json")):
        text = f"{setting}: {directory} has no weights (model.safetensors)"
        yield failure(text, setting, fix="A pickled model is not read: save it again with save_pretrained")


# -- devices, packages, other Pythons ----------------------------------------------------------------------------------
@check(
    """trainer.device trainer.gpus trainer.world_size worker.NAME.device worker.NAME.gpus score.NAME.device
    score.NAME.gpus""",
    parts=("train", "worker", "score"),
)
def devices(c: Context) -> Iterator[Finding]:
    """GPUs that settings ask for are here.

    Where nobody knows how many there are, nothing is said.
    """
    trainer = c.settings.trainer
    asked: list[tuple[str, Sequence[int | str], str]] = []
    if "train" in c.parts:
        asked.append(("trainer", trainer.gpus, trainer.device))
    asked += [(f"worker.{name}", worker.gpus, worker.device) for name, worker in c.workers.items()]
    asked += [(f"score.{name}", scorer.gpus, scorer.device) for name, scorer in c.scorers.items() if scorer.model]
    for section, gpus, device in asked:
        there = gpus_here(are_named=bool(gpus))
        if there is None:
            return
        beyond = [gpu for gpu in gpus if isinstance(gpu, int) and gpu >= there]
        if there == 0:
            choice = f"device = {device!r}" if device == "cuda" else f"gpus = {list(gpus)}"
            if device == "cuda" or (gpus and device == "auto"):
                fix = f'Set {section}.device = "cpu" to do without'
                yield failure(f"{section}.{choice}: this host has no GPU", f"{section}.{choice.split()[0]}", fix=fix)
        elif beyond:
            text = f"{section}.gpus = {list(gpus)}: this host has {plural(there, 'GPU')}, numbered from 0"
            yield failure(text, f"{section}.gpus")
        elif section == "trainer" and device != "cpu" and not gpus and there < trainer.world_size:
            text = f"trainer.world_size = {trainer.world_size}: ranks need a GPU each, and this host has {there}"
            yield failure(text, "trainer.world_size")


@check("trainer.lora.rank trainer.lora.path trainer.reports.tensorboard trainer.reports.wandb_project")
def packages(c: Context) -> Iterator[Finding]:
    """The packages are installed that settings ask for."""
    trainer = c.settings.trainer
    wanted: list[tuple[str, str, str]] = []
    if "train" in c.parts:
        wanted += [("trainer", "torch", "train"), ("trainer", "transformers", "train")]
        lora = "trainer.lora.path" if trainer.lora.path else "trainer.lora.rank"
        wanted += [(lora, "peft", "lora")] * trainer.lora.is_used
        wanted += [("trainer.reports.tensorboard", "tensorboard", "tensorboard")] * trainer.reports.tensorboard
        wanted += [("trainer.reports.wandb_project", "wandb", "wandb")] * bool(trainer.reports.wandb_project)
    for setting, module, extra in wanted:
        if not is_installed(module):
            yield failure(f"{setting} needs the module {module}", setting, fix=installed_by(extra))
    yield ok(f"rlbuffer {rlbuffer.__version__} on Python {platform.python_version()}")
    there = gpus_here()
    yield ok("there are GPUs; how many is not known" if there is None else f"{plural(there, 'GPU')} here")
    for package in filter(is_installed, ("torch", "vllm")):
        with suppress(metadata.PackageNotFoundError):
            text = f"{package} {metadata.version(package)}"
            if there and text.endswith("+cpu"):
                fix = "Install a build for this host's driver: https://pytorch.org/get-started/locally"
                yield warning(f"{text} is built without CUDA, and this host has {plural(there, 'GPU')}", fix=fix)
            else:
                yield ok(text)


def is_installed(module: str) -> bool:
    """True when the top-level `module` could be imported; it is not imported."""
    return module in sys.modules or find_spec(module) is not None


@check("trainer.world_size", parts=["train"])
def shared_locks(c: Context) -> Iterator[Finding]:
    """Ranks can share locks in /dev/shm."""
    try:
        multiprocessing.get_context("spawn").Lock()
    except (OSError, ImportError) as error:  # a Python that was built where there are none has no such module
        shm = Path("/dev/shm")
        why = clause(error.strerror.lower() if isinstance(error, OSError) and error.strerror else error)
        text = f"ranks cannot share locks in {shm} ({why}; {owner_of(shm)})"
        fix = "Mount a writable tmpfs there: --shm-size of a container, an emptyDir of medium Memory in Kubernetes"
        if isinstance(error, ImportError):
            fix = "Use a Python that was built with semaphores: `import multiprocessing.synchronize` must work"
        yield failure(text, "trainer.world_size", fix=fix)


# -- workers, scorers, functions ---------------------------------------------------------------------------------------
@check("worker", parts=["run"])
def workers(c: Context) -> Iterator[Finding]:
    """A run has a worker, or a gateway for agents."""
    if not c.settings.worker and not c.settings.gateway.engines:
        fix = f"Add a worker ({EXAMPLE} has one), or `engines` in [gateway]"
        text = "there is no [worker.NAME] section, and no gateway for agents: nothing would be sampled"
        yield failure(text, "worker", fix=fix)


@check("score.NAME.model", parts=["score"])
def scorer_models(c: Context) -> Iterator[Finding]:
    """A scorer's model is here."""
    for name, options in c.scorers.items():
        if options.model == INITIAL_MODEL and "train" not in c.parts:
            yield from model(c)
        elif options.model and options.model != INITIAL_MODEL:
            yield from _directory(f"score.{name}.model", options.model)


@check(
    """batcher.order batcher.advantage batcher.envs.NAME.advantage trainer.loss.name score.NAME.reward
    worker.NAME.env worker.NAME.env_options worker.NAME.sampler worker.NAME.sampler_options worker.NAME.top_k
    worker.NAME.top_p worker.NAME.record_experts worker.NAME.temperature worker.NAME.python eval.NAME.env
    eval.NAME.env_options batcher.row_tokens model.config""",
    parts=STARTS,
)
def functions(c: Context) -> Iterator[Finding]:
    """Functions, envs and samplers can be imported by the Python that runs them, and take what they are given.

    All is imported in one child of each Python; of envs it is also tried what their options and files show.
    """
    folders, found = folders_of(c.loaded.file), []
    found += wrong(list(_asked(c)), folders)
    for name, worker in c.workers.items():
        if has_own_python(c, worker):
            try:
                program = python_of(name, worker, sys.executable)
            except ConfigError as error:
                yield refused(error)
                continue
            python = Python(f"worker.{name}.python", program, environment_of(worker, 0, program))
            found += wrong(list(_of_worker(c, name, worker)), folders, python)
    for one in found:
        fix = f"Install rlbuffer {rlbuffer.__version__} there" if one.setting.endswith(".python") else ""
        yield Finding(
            level=Level.FAILURE if one.is_fatal else Level.WARNING, text=one.text, settings=(one.setting,), fix=fix
        )


def has_own_python(c: Context, worker: WorkerSettings) -> bool:
    """`rlbuffer run` starts it with another Python; `rlbuffer worker` runs with its own."""
    return bool(worker.python) and "run" in c.parts


def _asked(c: Context) -> Iterator[NamedFunction]:
    batcher, trainer = c.settings.batcher, c.settings.trainer
    if "serve" in c.parts:
        if batcher.order not in ORDERS:
            yield NamedFunction("batcher.order", batcher.order, "group, rng")
        named = [("batcher.advantage", batcher.advantage)]
        named += [(f"batcher.envs.{env}.advantage", o.advantage) for env, o in batcher.envs.items() if o.advantage]
        for setting, path in named:
            if path not in ESTIMATOR_NAMES:
                yield NamedFunction(setting, path, "rewards, lengths, group")
    if "train" in c.parts and ":" in trainer.loss.name:
        yield NamedFunction("trainer.loss.name", trainer.loss.name, "tokens, options")
    for name, scorer in c.scorers.items():
        if scorer.reward:
            yield NamedFunction(f"score.{name}.reward", scorer.reward, "rollout, group", may_be_async=True)
    for name, worker in c.workers.items():
        if not has_own_python(c, worker):
            yield from _of_worker(c, name, worker)
    for name, evaluation in c.settings.eval.items() if c.workers else ():
        yield _env(c, f"eval.{name}", evaluation)


def _of_worker(c: Context, name: str, worker: WorkerSettings) -> Iterator[NamedFunction]:
    given: dict[str, Any] = {"name": worker.sampler, "options": worker.sampler_options}
    given |= {"temperature": worker.temperature, "top_p": worker.top_p, "top_k": worker.top_k}
    given |= {"records_experts": worker.record_experts, "is_deterministic": c.settings.deterministic}
    if worker.env != "command":  # its programs sample by the gateway
        yield NamedFunction(f"worker.{name}", "rlbuffer.worker.samplers:wrong_sampler", given=given)
    yield _env(c, f"worker.{name}", worker)


def _env(c: Context, section: str, options: WorkerSettings | EvaluationSettings) -> NamedFunction:
    config = config_of(c.settings.model)
    vocab_size = config.get("vocab_size")
    given = {
        "name": options.env,
        "options": options.env_options,
        "vocab_size": vocab_size if isinstance(vocab_size, int) else 0,
        "model_path": c.settings.model.path,
    }
    return NamedFunction(section, "rlbuffer.worker.envs:wrong_env", given=given)
