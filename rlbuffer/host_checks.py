"""What the settings name and this host must have: models, modules, packages, folders.

Looked at without importing any of it, so that a mistake is said at once, before torch is loaded and before anything is
started. Which of it is needed depends on what shall run here: a batcher needs no model, a worker no loss.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlbuffer.advantages import ESTIMATORS
from rlbuffer.config import ORDERS
from rlbuffer.cross_checks import Mistake, Places, placed
from rlbuffer.dotted import Seen, is_installed, look_up
from rlbuffer.errors import ConfigError
from rlbuffer.placement import python_of
from rlbuffer.settings import INITIAL_MODEL, EvaluationSettings, RunSettings, WorkerSettings

Parts = Collection[str]
"""What shall run here: ``serve``, ``train``, ``worker`` or ``worker.NAME``, ``score`` or ``score.NAME``, and ``run``,
which wants workers."""
EVERYTHING: Parts = ("run", "serve", "worker", "score", "train")
"""What `rlbuffer run` starts."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""Files of which a model's directory has one."""
FILE_OPTIONS: Mapping[str, tuple[str, ...]] = {"jsonl": ("path",)}
"""Options of envs that name a file."""
PACKAGES: Mapping[str, tuple[str, str]] = {
    "reasoning_gym": ("reasoning_gym", "envs"),
    "verifiers": ("verifiers", "verifiers"),
    "transformers": ("transformers", "train"),
    "vllm": ("vllm", "vllm"),
    "openai": ("httpx", "openai"),
}
"""Env or sampler -> the module that it needs, and the extra that brings it."""


def on_host(settings: RunSettings, places: Places, parts: Parts, folders: Sequence[str] = ()) -> Iterator[Mistake]:
    """What is not there and `parts` need: every mistake of it. Modules are also looked for in `folders`."""
    look = _Look(settings, places, folders)
    if parts:
        yield from look.server()
    if parts and (not settings.redis_url or {"run", "train"} & set(parts)):
        yield from look.home()
    if "run" in parts and not settings.worker:
        text = "there is no [worker.NAME] section: nothing would be sampled. See the example rlbuffer.toml."
        yield Mistake(text, ("worker",))
    if "serve" in parts:
        yield from look.batcher()
    if "train" in parts:
        yield from look.trainer()
    sampled = [name for name in settings.worker if {"worker", f"worker.{name}"} & set(parts)]
    for name in sampled:
        yield from look.worker(name, settings.worker[name])
    for name, evaluation in settings.eval.items() if sampled else ():
        yield from look.env(f"eval.{name}", evaluation)
    for name, scoring in settings.score.items():
        if {"score", f"score.{name}"} & set(parts):
            if not scoring.adds:
                yield placed(ConfigError(gives_nothing(name)), places, f"score.{name}")
            if scoring.model == INITIAL_MODEL:
                yield from look.model()
            elif scoring.model:
                yield from look.directory(f"score.{name}.model", scoring.model)
            if scoring.reward:
                yield from look.path(f"score.{name}.reward", scoring.reward)


@dataclass(frozen=True, slots=True)
class _Look:
    settings: RunSettings
    places: Places
    folders: Sequence[str]

    def _say(self, setting: str, text: str) -> Mistake:
        return placed(ConfigError(text, setting=setting), self.places)

    def home(self) -> Iterator[Mistake]:
        """The folders that the embedded server and the trainer write to."""
        for setting, path in (("home", self.settings.home), ("trainer.output", self.settings.trainer.output)):
            if path is None:
                continue
            wanted = path.expanduser().absolute()
            there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                why = "cannot be written to" if there.is_dir() else "is no directory"
                yield self._say(setting, f"{setting} = {str(path)!r}: {there} {why}")

    def server(self) -> Iterator[Mistake]:
        """What the address of the server names."""
        from rlbuffer.store import tls
        from rlbuffer.store.address import is_memory, options_of, redacted, source_of

        settings = self.settings
        url = settings.redis_url
        if not url or is_memory(url):
            return
        try:
            source = source_of(self.places("redis_url"))
            tls.check_options(options_of(url, source), redacted(url), source)
        except ConfigError as error:
            yield Mistake(str(error), ("redis_url",))
        file = settings.redis_password_file
        if file is not None and not os.environ.get("RLBUFFER_REDIS_PASSWORD") and not file.expanduser().is_file():
            text = f"redis_password_file = {str(file)!r}: there is no such file"
            yield self._say("redis_password_file", text)

    def batcher(self) -> Iterator[Mistake]:
        """Selectors and estimators of the user's own."""
        batcher = self.settings.batcher
        named = [("batcher.order", batcher.order), ("batcher.advantage", batcher.advantage)]
        named += [(f"batcher.envs.{env}.advantage", o.advantage) for env, o in batcher.envs.items() if o.advantage]
        for setting, path in named:
            if path not in (*ORDERS, *ESTIMATORS):
                yield from self.path(setting, path)

    def trainer(self) -> Iterator[Mistake]:
        """The model, a loss of the user's own, and the packages that the settings ask for."""
        trainer, model = self.settings.trainer, self.settings.model
        yield from self.model()
        if why := router_loss(_config_of(Path(model.path).expanduser()) if model.path else model.config):
            yield self._say("model", why)
        if ":" in trainer.loss:
            yield from self.path("trainer.loss", trainer.loss)
        for setting, is_wanted, module, extra in (
            ("trainer", True, "torch", "train"),
            ("trainer", True, "transformers", "train"),
            ("trainer.lora.rank", bool(trainer.lora.rank), "peft", "lora"),
            ("trainer.tensorboard", trainer.tensorboard, "tensorboard", "tensorboard"),
            ("trainer.wandb_project", bool(trainer.wandb_project), "wandb", "wandb"),
        ):
            if is_wanted and not is_installed(module):
                yield self._say(setting, f"{setting} needs the module {module}: {_install(extra)}")

    def worker(self, name: str, options: WorkerSettings) -> Iterator[Mistake]:
        """Its Python, its sampler, its env."""
        from rlbuffer.worker.samplers import check_options

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
        seen = look_up(ADAPTERS.get(name, name), self.folders)
        if seen.why_not:
            yield self._say(f"{section}.env", f"{section}.env = {name!r} {seen.why_not}")
            return
        if name in PACKAGES and not is_installed(PACKAGES[name][0]):
            module, extra = PACKAGES[name]
            yield self._say(f"{section}.env", f"{section}.env = {name!r} needs the module {module}: {_install(extra)}")
        yield from self.options(section, name, given, seen)

    def options(self, section: str, env: str, given: Mapping[str, Any], seen: Seen) -> Iterator[Mistake]:
        """Options that the env's factory does not take, and files that are not there."""
        from rlbuffer.worker.envs.lookup import no_such_option

        for option in given if seen.keywords is not None else ():
            unknown = no_such_option(f"env {env}", [option], seen.keywords or ())
            if unknown:
                yield self._say(f"{section}.env_options.{option}", unknown)
        for option in FILE_OPTIONS.get(env, ()):
            setting = f"{section}.env_options.{option}"
            if not isinstance(given.get(option), str):
                yield self._say(setting, f"{setting} is required: env {env} reads it")
            elif not Path(given[option]).expanduser().is_file():
                yield self._say(setting, f"{setting} = {given[option]!r}: there is no such file")
        tokenizer = given.get("tokenizer")
        if env in PACKAGES and not tokenizer:
            yield self._say(
                f"{section}.env_options", f"{section}.env_options.tokenizer is required: env {env} needs it"
            )
        if env in (*PACKAGES, *FILE_OPTIONS) and tokenizer and not Path(str(tokenizer)).expanduser().is_dir():
            setting = f"{section}.env_options.tokenizer"
            yield self._say(setting, f"{setting} = {tokenizer!r} is not a directory")

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
            config = _config_of(Path(self.settings.model.path).expanduser())
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
            kind = model.config.get("model_type")
            if not isinstance(kind, str) or not kind:
                yield self._say("model.config.model_type", NO_MODEL_TYPE)
            else:
                why = _unknown_type(kind)
                if why:
                    yield self._say("model.config.model_type", f"model.config.model_type = {kind!r} {why}")

    def directory(self, setting: str, path: str) -> Iterator[Mistake]:
        """A directory with a Hugging Face model."""
        directory = Path(path).expanduser()
        if not directory.is_dir():
            yield self._say(setting, f"{setting}: {directory} is not a directory")
            return
        kind = _config_of(directory).get("model_type")
        if not (directory / "config.json").is_file():
            yield self._say(setting, f"{setting}: {directory} has no config.json: it is no Hugging Face model")
        elif not isinstance(kind, str):
            yield self._say(setting, f"{setting}: {directory / 'config.json'} names no model_type")
        elif _unknown_type(kind):
            yield self._say(
                setting, f"{setting}: {directory / 'config.json'}: model_type {kind!r} {_unknown_type(kind)}"
            )
        if not any(next(directory.glob(pattern), None) for pattern in WEIGHTS):
            yield self._say(setting, f"{setting}: {directory} has no weights (model.safetensors)")

    def path(self, setting: str, path: str) -> Iterator[Mistake]:
        """A function of the user's own."""
        why_not = look_up(path, self.folders).why_not
        if why_not:
            yield self._say(setting, f"{setting} = {path!r} {why_not}")


def gives_nothing(scorer: str) -> str:
    """What to say of a scorer that adds nothing."""
    return f"score.{scorer} gives nothing: set model (a directory, or `initial`), or reward (package.module:function)"


NO_MODEL_TYPE = 'model.config: model_type is missing, e.g. "qwen3"'


def which_model(path: str) -> str:
    """What to say when neither or both of path and config are set."""
    how = "both are set" if path else "neither is set"
    return (
        f"model: exactly one of path and config is needed; {how}. Give [model] path = a Hugging Face model's "
        f"directory, or [model.config] for a fresh model (rlbuffer.toml of the project has one)"
    )


def router_loss(config: Mapping[str, Any]) -> str:
    """Why a model with this Hugging Face config is not trained as it asks; "" where it does not ask.

    The loss is a product of means over a batch, so no sum over micro-batches and ranks gives it.
    """
    text = config.get("text_config")
    where = next((c for c in (config, text) if isinstance(c, Mapping) and c.get("output_router_logits")), None)
    if where is None:
        return ""
    return (
        f"model: output_router_logits = true asks for the router auxiliary loss of experts (router_aux_loss_coef = "
        f"{where.get('router_aux_loss_coef')}), which rlbuffer train does not compute: set it to false in the model's "
        "config to train without that loss, or compute it in a trainer of your own"
    )


def _config_of(directory: Path) -> dict[str, Any]:
    """``config.json``; {} where there is none that can be read."""
    try:
        read = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _unknown_type(kind: str) -> str:
    """The end of a sentence when transformers has no such model; "" when it has, or is not here to be asked."""
    from importlib.util import find_spec

    spec = None if "transformers" in sys.modules else find_spec("transformers")
    where = (
        list(spec.submodule_search_locations or ())
        if spec
        else list(getattr(sys.modules.get("transformers"), "__path__", ()))
    )
    if not where:
        return ""
    models = Path(where[0]) / "models"
    known = [path.name for path in models.iterdir() if path.is_dir()] if models.is_dir() else []
    if not known or kind in known or kind.replace("-", "_") in known:
        return ""
    for file in models.glob("auto/*.py"):
        if f'"{kind}"' in file.read_text(encoding="utf-8", errors="replace"):
            return ""
    near = get_close_matches(kind, known, n=1)
    return f"is not a model that transformers knows.{f' Did you mean {near[0]}?' if near else ''}"


def _install(extra: str) -> str:
    return f"pip install 'rlbuffer[{extra}]'"
