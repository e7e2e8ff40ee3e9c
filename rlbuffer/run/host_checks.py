"""Checks of the things that the settings name and this host must have: models, modules, packages, folders.

Looked at without importing any of it, so that a mistake is said at once, before torch is loaded and before anything is
started. The parts that shall run here decide which checks are made: a batcher needs no model, a worker no loss.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlbuffer.config.batcher import ESTIMATOR_NAMES, ORDERS
from rlbuffer.config.dotted import Seen, is_installed, look_up
from rlbuffer.config.mistakes import Mistake, placed
from rlbuffer.config.model_checks import (
    EXAMPLE,
    config_of,
    context_of,
    router_loss,
    which_model,
    wrong_config,
    wrong_directory,
    wrong_tokenizer,
)
from rlbuffer.config.refusal import Places
from rlbuffer.config.settings import (
    INITIAL_MODEL,
    EvaluationSettings,
    RunSettings,
    ScoreSettings,
    WorkerSettings,
    gives_nothing,
)
from rlbuffer.errors import ConfigError, ServerUnreachable
from rlbuffer.process.files import owner_of
from rlbuffer.run.pythons import gpus_here, python_of, wrong_pythons
from rlbuffer.state.text import plural

Parts = Collection[str]
"""Parts that shall run here: ``serve``, ``train``, ``worker`` or ``worker.NAME``, ``score`` or ``score.NAME``, and
``run``, which wants workers."""
EVERYTHING: Parts = ("run", "serve", "worker", "score", "train")
"""Parts that `rlbuffer run` starts."""
FILE_OPTIONS: Mapping[str, tuple[str, ...]] = {"jsonl": ("path",)}
"""Options of envs that name a file."""
MOST_LINES = 8
"""Lines of a file that are named."""
ENV_MEMBERS = ("vocab_size", "eos_token_ids", "max_new_tokens", "prompt", "render")
"""Members that an env must have; its name may come from its class."""
PACKAGES: Mapping[str, tuple[str, str]] = {
    "reasoning_gym": ("reasoning_gym", "envs"),
    "verifiers": ("verifiers", "verifiers"),
    "transformers": ("transformers", "train"),
    "vllm": ("vllm", "vllm"),
    "openai": ("httpx", "openai"),
}
"""Env or sampler -> the module that it needs, and the extra that brings it."""


def on_host(settings: RunSettings, places: Places, parts: Parts, folders: Sequence[str] = ()) -> Iterator[Mistake]:
    """Everything that `parts` need and that is not there. Modules are also looked for in `folders`."""
    look = _Look(settings, places, folders)
    if parts:
        yield from look.server(parts)
    if parts and (not settings.redis_url or {"run", "train"} & set(parts)):
        yield from look.home()
    if "run" in parts and not settings.worker:
        text = f"there is no [worker.NAME] section: nothing would be sampled ({EXAMPLE} has two)."
        yield Mistake(text, ("worker",))
    if "serve" in parts:
        yield from look.batcher()
    if "train" in parts:
        yield from look.trainer()
    if "run" in parts:
        for error in wrong_pythons(settings, sys.executable):
            yield placed(error, places)
    sampled = [name for name in settings.worker if {"worker", f"worker.{name}"} & set(parts)]
    for name in sampled:
        yield from look.worker(name, settings.worker[name])
    for name, evaluation in settings.eval.items() if sampled else ():
        yield from look.env(f"eval.{name}", evaluation)
    for name, scoring in settings.score.items():
        if {"score", f"score.{name}"} & set(parts):
            yield from look.scorer(name, scoring)


@dataclass(frozen=True, slots=True)
class _Look:
    settings: RunSettings
    places: Places
    folders: Sequence[str]

    def _say(self, setting: str, text: str) -> Mistake:
        return placed(ConfigError(text, setting=setting), self.places)

    def home(self) -> Iterator[Mistake]:
        """The folders that the embedded server and the trainer write to, and the server's program."""
        try:
            yield from self.folder("home", self.settings.home_dir)
        except ConfigError as error:
            yield placed(error, self.places)
        if self.settings.trainer.output is not None:
            yield from self.folder("trainer.output", self.settings.trainer.output)
        if not self.settings.redis_url:
            from rlbuffer.store.server.binary import SERVER_BIN, find_binary

            try:
                find_binary()
            except ServerUnreachable as error:
                yield Mistake(str(error), (SERVER_BIN,))

    def folder(self, setting: str, path: Path) -> Iterator[Mistake]:
        """A folder that is written to, or will be made."""
        absolute = path.expanduser().absolute()
        there = next(folder for folder in (absolute, *absolute.parents) if os.access(folder, os.F_OK))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written to" if there.is_dir() else "is no directory"
            yield self._say(setting, f"{setting} = {str(path)!r}: {there} {why} ({owner_of(there)})")

    def gpus(self, setting: str, gpus: Sequence[int | str], device: str, ranks: int = 0) -> Iterator[Mistake]:
        """Devices that this host does not have; `ranks` need one each."""
        if device == "cpu":
            return
        there = gpus_here()
        if there is None:
            return
        if there == 0:
            if device == "cuda":
                yield self._say(f"{setting}.device", f"{setting}.device = 'cuda': this host has no GPU")
            return
        beyond = [gpu for gpu in gpus if isinstance(gpu, int) and gpu >= there]
        if beyond:
            text = f"{setting}.gpus = {list(gpus)}: this host has {plural(there, 'GPU')}, numbered from 0"
            yield self._say(f"{setting}.gpus", text)
        elif there < ranks and not gpus:
            text = f"{setting}.world_size = {ranks}: ranks need a GPU each, and this host has {there}"
            yield self._say(f"{setting}.world_size", text)

    def server(self, parts: Parts) -> Iterator[Mistake]:
        """The files and names in the server's address."""
        from rlbuffer.store.server import tls
        from rlbuffer.store.server.address import check_place, is_memory, options_of, redacted, source_of

        settings = self.settings
        url = settings.redis_url
        if not url:
            return
        if is_memory(url):
            if len(set(parts)) > 1:
                text = f"redis_url = {url!r} is a server inside of one process: no other process of a run reaches it"
                yield self._say("redis_url", text)
            return
        try:
            source = source_of(self.places("redis_url"))
            options = options_of(url, source)
            tls.check_options(options, redacted(url), source)
            check_place(url, options, source)
        except ConfigError as error:
            yield Mistake(str(error), ("redis_url",))
        file = settings.redis_password_file
        if file is not None and not os.environ.get("RLBUFFER_REDIS_PASSWORD") and not file.expanduser().is_file():
            text = f"redis_password_file = {str(file)!r}: there is no such file"
            yield self._say("redis_password_file", text)
        elif (
            file is not None
            and file.expanduser().is_file()
            and not file.expanduser().read_text(errors="replace").strip()
        ):
            yield self._say("redis_password_file", f"redis_password_file = {str(file)!r} is empty")

    def batcher(self) -> Iterator[Mistake]:
        """Selectors and estimators of the user's own."""
        batcher = self.settings.batcher
        if batcher.order not in ORDERS:
            yield from self.path("batcher.order", batcher.order, "group, rng")
        named = [("batcher.advantage", batcher.advantage)]
        named += [(f"batcher.envs.{env}.advantage", o.advantage) for env, o in batcher.envs.items() if o.advantage]
        for setting, path in named:
            if path not in ESTIMATOR_NAMES:
                yield from self.path(setting, path, "rewards, lengths, group")

    def trainer(self) -> Iterator[Mistake]:
        """The model, a loss of the user's own, and the packages that the settings ask for."""
        trainer, model = self.settings.trainer, self.settings.model
        yield from self.model()
        if why := router_loss(config_of(Path(model.path).expanduser()) if model.path else model.config):
            yield self._say("model", why)
        if ":" in trainer.loss.name:
            yield from self.path("trainer.loss.name", trainer.loss.name, "tokens, options")
        yield from self.gpus("trainer", trainer.gpus, trainer.device, trainer.world_size)
        try:
            multiprocessing.get_context("spawn").Lock()
        except OSError as error:
            shm = Path("/dev/shm")
            yield Mistake(
                f"ranks cannot share locks in {shm} ({(error.strerror or '').lower()}; {owner_of(shm)}). Mount a "
                "writable tmpfs there: --shm-size of a container, an emptyDir of medium Memory in Kubernetes.",
                ("trainer",),
            )
        for setting, is_wanted, module, extra in (
            ("trainer", True, "torch", "train"),
            ("trainer", True, "transformers", "train"),
            ("trainer.lora.rank", bool(trainer.lora.rank), "peft", "lora"),
            ("trainer.reports.tensorboard", trainer.reports.tensorboard, "tensorboard", "tensorboard"),
            ("trainer.reports.wandb_project", bool(trainer.reports.wandb_project), "wandb", "wandb"),
        ):
            if is_wanted and not is_installed(module):
                yield self._say(setting, f"{setting} needs the module {module}: {_install(extra)}")

    def worker(self, name: str, options: WorkerSettings) -> Iterator[Mistake]:
        """Its Python, its sampler, its env."""
        from rlbuffer.worker.samplers.options import check_options

        if options.sampler != "openai":
            yield from self.gpus(
                f"worker.{name}", options.gpus, "auto" if options.sampler == "vllm" else options.device
            )
        try:
            python = python_of(name, options, sys.executable)
        except ConfigError as error:
            yield placed(error, self.places)
            return
        try:
            check_options(options.sampler, options.sampler_options)
        except ConfigError as error:
            yield placed(error, self.places, f"worker.{name}.sampler_options")
        if python != sys.executable:
            return  # what that one can import is its own affair: `rlbuffer run` asks it
        module, extra = PACKAGES[options.sampler]
        if not is_installed(module):
            setting = f"worker.{name}.sampler"
            yield self._say(setting, f"{setting} = {options.sampler!r} needs the module {module}: {_install(extra)}")
        yield from self.env(f"worker.{name}", options)
        if options.env in FILE_OPTIONS:
            yield from self.lengths(name, options)

    def lengths(self, name: str, options: WorkerSettings) -> Iterator[Mistake]:
        """Prompts of a file that leave no room for a completion: they are skipped."""
        from rlbuffer.worker.envs.jsonl import too_long

        row_tokens, model = self.settings.batcher.row_tokens, self.settings.model
        context = context_of(config_of(Path(model.path).expanduser()) if model.path else model.config)
        served = options.sampler_options.get("max_model_len")
        limits = {"batcher.row_tokens": row_tokens, "the model's context": context, "max_model_len": served}
        limit, what = min((n, what) for what, n in limits.items() if isinstance(n, int) and n > 0)
        lines, count = too_long(options.env_options, limit)
        if not lines:
            return
        shown = ", ".join(map(str, lines[:MOST_LINES])) + ", ..." * (len(lines) > MOST_LINES)
        path, setting = options.env_options.get("path"), f"worker.{name}.env_options.path"
        text = (
            f"{setting}: {len(lines)} of {plural(count, 'prompt')} of {path} leave no room for a completion and are "
            f"skipped: {what} is {limit} tokens (lines {shown})"
        )
        yield replace(self._say(setting, text), works=len(lines) < count)

    def env(self, section: str, options: WorkerSettings | EvaluationSettings) -> Iterator[Mistake]:
        """The env of a section, with its options."""
        from rlbuffer.worker.envs import ADAPTERS, BUILT_IN, check_name

        name, given = options.env, options.env_options
        try:
            check_name(name)
        except ConfigError as error:
            yield placed(error, self.places, f"{section}.env")
            return
        if name in BUILT_IN:
            if section.startswith("eval."):
                yield from self.made(section, options)
            else:
                yield from self.vocabulary(section, options)
            return
        seen = look_up(ADAPTERS.get(name, name), self.folders, ENV_MEMBERS)
        why_not = seen.why_not
        if not why_not and seen.is_async:
            why_not = f"is async ({seen.place}): the factory is called, and what it returns is the env"
        if not why_not and seen.lacks:
            why_not = f"is no env: it has no {', '.join(seen.lacks)} ({seen.place})"
        if why_not:
            yield self._say(f"{section}.env", f"{section}.env = {name!r} {why_not}")
            return
        if name in PACKAGES and not is_installed(PACKAGES[name][0]):
            module, extra = PACKAGES[name]
            yield self._say(f"{section}.env", f"{section}.env = {name!r} needs the module {module}: {_install(extra)}")
        yield from self.options(section, name, given, seen)

    def options(self, section: str, env: str, given: Mapping[str, Any], seen: Seen) -> Iterator[Mistake]:
        """Options that the env's factory does not take, and files that are not there."""
        from rlbuffer.state.text import no_such_option

        for option in given if seen.keywords is not None else ():
            unknown = no_such_option(f"env {env}", [option], seen.keywords or ())
            if unknown:
                yield self._say(f"{section}.env_options.{option}", unknown)
        for option in seen.required:
            if option not in given:
                setting = f"{section}.env_options.{option}"
                yield self._say(setting, f"{setting} is required: env {env} has no default for it")
        for option in FILE_OPTIONS.get(env, ()):
            setting = f"{section}.env_options.{option}"
            if option not in given:
                continue
            if not isinstance(given[option], str):
                yield self._say(setting, f"{setting} = {given[option]!r} is no path")
            elif not Path(given[option]).expanduser().is_file():
                yield self._say(setting, f"{setting} = {given[option]!r}: there is no such file")
        if env in FILE_OPTIONS:
            yield from self.lines(section, given)
        tokenizer = given.get("tokenizer")
        if env in (*PACKAGES, *FILE_OPTIONS) and tokenizer:
            why = wrong_tokenizer(Path(str(tokenizer)).expanduser())
            if why:
                setting = f"{section}.env_options.tokenizer"
                yield self._say(setting, f"{setting} = {tokenizer!r} {why}")

    def lines(self, section: str, given: Mapping[str, Any]) -> Iterator[Mistake]:
        """A data set in a file: its lines and the rewards."""
        from rlbuffer.worker.envs.jsonl import mistakes

        for error in mistakes(given):
            yield placed(error, self.places, f"{section}.env_options")
        rewards = given.get("rewards")
        for name, option in rewards.items() if isinstance(rewards, Mapping) else ():
            kind = str(option.get("kind", name) if isinstance(option, Mapping) else name)
            if ":" in kind:
                yield from self.path(f"{section}.env_options.rewards.{name}", kind, "answered")

    def made(self, section: str, options: WorkerSettings | EvaluationSettings) -> Iterator[Mistake]:
        """A built-in env is made: that takes nothing."""
        from rlbuffer.worker.envs import make_env

        try:
            make_env(options.env, **options.env_options)
        except (ConfigError, TypeError, ValueError) as error:
            yield placed(ConfigError(str(error)), self.places, f"{section}.env_options")
            return
        yield from self.vocabulary(section, options)

    def vocabulary(self, section: str, options: WorkerSettings | EvaluationSettings) -> Iterator[Mistake]:
        """Token ids of a built-in env that the model does not have."""
        from rlbuffer.worker.envs import make_env

        try:
            uses = make_env(options.env, **options.env_options).vocab_size
        except (ConfigError, TypeError, ValueError):
            return  # said already
        config = self.settings.model.config
        if self.settings.model.path:
            config = config_of(Path(self.settings.model.path).expanduser())
        has = config.get("vocab_size")
        if isinstance(has, int) and has < uses:
            place = "model.path" if self.settings.model.path else "model.config.vocab_size"
            text = f"env {options.env} uses {uses} token ids, the model knows {has} ({self.places(place)})"
            yield placed(ConfigError(text), self.places, f"{section}.env")

    def model(self) -> Iterator[Mistake]:
        """``[model]``: one of path and config, and a model there."""
        model = self.settings.model
        if bool(model.path) == bool(model.config):
            yield self._say("model", which_model(model.path))
        elif model.path:
            yield from self.directory("model.path", model.path)
        else:
            for key, why in wrong_config(model.config):
                yield self._say(f"model.config.{key}", why)

    def directory(self, setting: str, path: str) -> Iterator[Mistake]:
        """A directory with a Hugging Face model."""
        for why in wrong_directory(Path(path).expanduser()):
            yield self._say(setting, f"{setting}: {why}")

    def scorer(self, name: str, options: ScoreSettings) -> Iterator[Mistake]:
        """Its model, its function, its GPUs."""
        if not options.adds:
            yield placed(ConfigError(gives_nothing(name)), self.places, f"score.{name}")
        if options.model == INITIAL_MODEL:
            yield from self.model()
        elif options.model:
            yield from self.directory(f"score.{name}.model", options.model)
        if options.model:
            yield from self.gpus(f"score.{name}", options.gpus, options.device)
        if options.reward:
            yield from self.path(f"score.{name}.reward", options.reward, "rollout, group", may_be_async=True)

    def path(self, setting: str, path: str, takes: str, *, may_be_async: bool = False) -> Iterator[Mistake]:
        """A function of the user's own, which is called with `takes`."""
        seen = look_up(path, self.folders)
        why_not, count = seen.why_not, len(takes.split(", "))
        if not why_not and seen.is_async and not may_be_async:
            why_not = f"is async ({seen.place}): it is called with ({takes}), and nobody awaits it"
        if not why_not and seen.positional is not None and not seen.is_class:
            least, most = seen.positional
            if not least <= count <= most:
                why_not = f"does not fit ({seen.place}): it is called with ({takes})"
        if not why_not and seen.is_class and seen.required:
            why_not = (
                f"needs {', '.join(seen.required)} to be made ({seen.place}): a class is called with nothing first"
            )
        if why_not:
            yield self._say(setting, f"{setting} = {path!r} {why_not}")


def _install(extra: str) -> str:
    return f"pip install 'rlbuffer[{extra}]'"
