"""Settings of a whole run: what ``rlbuffer.toml`` may say, each with default, unit and reason.

The batcher's own settings are :class:`rlbuffer.config.batcher.BatcherConfig`. Values are found and traced by
:mod:`rlbuffer.config.loading`; nothing here reads a file or the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from rlbuffer.config import imports
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.table import (
    LARGEST_SEED,
    GivenPath,
    Gpu,
    Listen,
    Names,
    OptionalPath,
    OptionalText,
    Size,
    Table,
    Url,
)
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.records.columns import COLUMN_NAME, REQUIRED_COLUMNS
from rlbuffer.records.support import MOST_TOP_K

ROW_TOKENS = 8192
"""Default of `batcher.row_tokens`."""


def _run(name: str) -> str:
    if re.fullmatch(r"[a-z0-9_-][a-z0-9_.-]{0,63}", name) is None:
        raise ValueError("must be 1 to 64 of the characters a-z, 0-9, _ and -, and dots behind the first")
    return name


def _reward(name: str) -> str:
    if re.fullmatch(r"reward(s\..+)?", name) is None:
        raise ValueError("must be reward, or rewards.NAME")
    return name


class ServerSettings(Table):
    """``[server]``: the embedded server; ignored when `redis_url` is set."""

    maxmemory: Size = Field("2gb", description="Memory the embedded server may use; it never evicts.")
    appendfsync: Literal["everysec", "always", "no"] = Field(
        "everysec",
        description="When the append-only file reaches the disk. What may be lost of acknowledged writes: `always` "
        "nothing, but every push waits for the disk; `no` the newest at a power cut; `everysec` those, and some at "
        "kill -9 while a sync is slow.",
    )


class ModelSettings(Table):
    """``[model]``: the policy."""

    path: str = Field("", description="Directory with a Hugging Face model; empty: a fresh model from `config`.")
    config: Mapping[str, Any] = Field(
        default_factory=dict, description="Hugging Face config of a fresh model: model_type, hidden_size, ..."
    )
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        "float32",
        description="Dtype of products and published weights. With bfloat16 the trained weights stay in float32: an "
        "update below 1/256 of a weight would otherwise be lost.",
    )


class WeightsSettings(Table):
    """``[weights]``: how policy versions reach workers on other hosts; nothing set: through a shared directory."""

    listen: Listen = Field(
        "", description="HOST:PORT where the trainer's host serves its versions over HTTP; empty: it does not."
    )
    url: Url = Field(
        "",
        description="Address under which workers reach that server, which the trainer announces, or of a copy of its "
        "folder near them, which they ask first; empty: paths are announced.",
    )


def _of_the_likeliest(min_p: float, info: ValidationInfo) -> float:
    if min_p and not info.data.get("top_k"):
        raise ValueError("needs top_k above 0: without it nobody records which tokens are left")
    return min_p


TopK = Annotated[
    int,
    Field(
        ge=0,
        le=MOST_TOP_K,
        description="Draw from the likeliest so many tokens; the trainer computes with those that top_k, top_p and "
        "min_p left, which are recorded. 0: from all.",
    ),
]
TopP = Annotated[
    float, Field(gt=0, le=1, description="Nucleus; without top_k logprobs are of the whole vocabulary all the same.")
]
MinP = Annotated[
    float,
    Field(
        ge=0,
        lt=1,
        description="Leave out tokens with less than this share of the likeliest one's probability; needs top_k.",
    ),
    AfterValidator(_of_the_likeliest),
]


class GatewaySettings(Table):
    """``[gateway]``: answers agents of other programs, and records their rollouts; no engines: there is none."""

    engines: tuple[Annotated[Url, Field(min_length=1)], ...] = Field(
        (), description="URLs of the servers that sample, vLLM's or SGLang's; `rlbuffer run` starts a gateway then."
    )
    listen: Listen = Field(
        "127.0.0.1:8400",
        description="HOST:PORT where agents ask. Beyond this machine RLBUFFER_GATEWAY_TOKEN must be set, for whoever "
        "begins and ends rollouts.",
    )
    url: Url = Field(
        "", description="Address under which agents reach it, for their base URLs; empty: that of `listen`."
    )
    replicas: int = Field(1, ge=1, description="Processes that `rlbuffer run` starts; all listen on one port.")
    idle_seconds: float = Field(
        600.0, ge=1, le=840, description="An open rollout of which nothing is heard for so long fails as abandoned."
    )
    other_models: Literal["serve", "refuse"] = Field(
        "serve",
        description="What an agent gets that names a model which no engine serves: the policy's answer, or an error.",
    )
    forced_choices: Literal["refuse", "auto"] = Field(
        "refuse",
        description="What an agent gets that forces a call (tool_choice) or a form of the answer (response_format): an "
        "error, or an answer in which the model chooses as it would without.",
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; what agents ask for does not count.")
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    record_experts: bool = Field(
        False,
        description="Record the experts that took each token in (column routed_experts), where the engines say them.",
    )
    max_new_tokens: int = Field(
        0, ge=0, description="Longest answer in tokens, also where an agent asks for more; 0: as long as it asks for."
    )
    timeout_seconds: float = Field(600.0, gt=0, description="Longest that an engine may take for one answer.")


class MetricsSettings(Table):
    """``[metrics]``: the run's numbers over HTTP, for Prometheus."""

    listen: Listen = Field(
        "",
        description="HOST:PORT where `serve` answers `/metrics` for the whole run, leader or standby, e.g. "
        "127.0.0.1:9464. Where it cannot listen it says so and works on; port 0: any; empty: none.",
    )


class WorkerSettings(Table):
    """``[worker.NAME]``: one kind of worker."""

    env: str = Field(
        description="Env to sample: vcopy, repeat, jsonl, command (any program, by the gateway), reasoning_gym, "
        "verifiers, or `package.module:factory`."
    )
    env_options: Mapping[str, Any] = Field(default_factory=dict, description="Passed to the env's factory.")
    sampler: str = Field(
        "transformers",
        description="What generates tokens: `transformers` (a Hugging Face model in process), `vllm` (in process), "
        "`openai` (vLLM's servers), or `package.module:Class`.",
    )
    sampler_options: Mapping[str, Any] = Field(default_factory=dict, description="The sampler's own options.")
    self_check: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Compare a few sampled logprobs with a forward pass of the published weights before anything is "
        "pushed, and at every eighth load; auto: with engines that are not our own.",
    )
    replicas: int = Field(1, ge=1, description="Processes of this kind that `rlbuffer run` starts.")
    python: str = Field(
        "",
        description="Python that `rlbuffer run` starts these processes with, e.g. that of vLLM's environment; it needs "
        "rlbuffer of the same version. Empty: its own.",
    )
    gpus: tuple[Gpu, ...] = Field(
        (),
        description="GPUs, by number or UUID as nvidia-smi gives them, dealt over the replicas in order; empty: all "
        "that are visible.",
    )
    group_size: int = Field(16, ge=1, description="Rollouts per group.")
    groups_in_flight: int = Field(4, ge=1, description="Groups in flight at once; one batch of a batch sampler.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    record_experts: bool = Field(
        False,
        description="Record the experts that took each token in (column routed_experts), for models with experts: the "
        "trainer computes with the same ones. Layers x experts of a token, in bytes, for each token.",
    )
    rollout_timeout_seconds: float = Field(
        600.0, gt=0, description="Longest that one rollout may take, sampling and scoring together."
    )
    skip_after: int = Field(
        0,
        ge=0,
        description="Skip a prompt after so many visits in a row in which all its rollouts had the same reward; a "
        "tenth of its tickets is sampled all the same. 0: never.",
    )
    max_new_tokens: int = Field(0, ge=0, description="Longest completion in tokens; 0: what the env asks for.")
    device: Literal["auto", "cpu", "cuda"] = Field("cpu", description="Where the sampler runs.")


INITIAL_MODEL = "initial"
"""A scorer's model that is the run's own, as training begins."""


class ScoreSettings(Table):
    """``[score.NAME]``: processes that add what groups need before they can train."""

    model: str = Field(
        "",
        description="Adds its logprobs of the trained tokens as `column`: a directory with a Hugging Face model, or "
        "`initial`, the run's [model] as training begins, with the adapter at trainer.lora.path; empty: none.",
    )
    column: str = Field("ref_logprobs", description="What the model's logprobs are called.")
    reward: str = Field(
        "",
        description="Adds rewards: `package.module:function`, plain or async, which is given a rollout and its group "
        "and answers a number, or {name: number}; empty: none.",
    )
    gives: tuple[Annotated[str, AfterValidator(_reward)], ...] = Field(
        (), description="What `reward` adds, of what groups need: reward, rewards.NAME; empty: reward."
    )
    envs: tuple[str, ...] = Field((), description="Only groups of these envs; empty: all.")
    replicas: int = Field(1, ge=1, description="Processes of this kind that `rlbuffer run` starts.")
    gpus: tuple[Gpu, ...] = Field(
        (), description="GPUs, dealt over the replicas in order; empty: all that are visible."
    )
    concurrent: int = Field(16, ge=1, description="Rollouts that the function is asked about at once.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Of the model; auto: CUDA where there is one.")

    @field_validator("column")
    @classmethod
    def _further(cls, column: str) -> str:
        if column in REQUIRED_COLUMNS or not COLUMN_NAME.match(column):
            raise ValueError("is no name of a further column")
        return column

    @field_validator("gives")
    @classmethod
    def _rewards(cls, gives: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if gives and not info.data.get("reward"):
            raise ValueError("says what `reward` adds, which is not set")
        return gives

    @model_validator(mode="after")
    def _of_something(self) -> ScoreSettings:
        if not self.adds:
            raise ValueError("adds nothing: set model (a directory, or `initial`), or reward (package.module:function)")
        return self

    @property
    def adds(self) -> tuple[str, ...]:
        """The columns and rewards that these processes add, as groups name them in `needs`."""
        columns = (self.column,) if self.model else ()
        return (*columns, *((self.gives or ("reward",)) if self.reward else ()))


class EvaluationSettings(Table):
    """``[eval.NAME]``: how policy versions are measured on prompts that nothing trains on."""

    env: str = Field(description="Env to evaluate on: a built-in one, or `package.module:factory`.")
    env_options: Mapping[str, Any] = Field(
        default_factory=dict, description="Passed to the env's factory: another seed or file than the trained one's."
    )
    every: int = Field(10, ge=1, description="Policy versions between evaluations; version 0 is one.")
    prompts: int = Field(64, ge=1, description="Prompts, the same ones each time.")
    samples: int = Field(
        1,
        ge=1,
        description="Rollouts of each prompt, for mean@k and pass@k; more than one wants a temperature above 0.",
    )
    temperature: float = Field(0.0, ge=0, description="0: the likeliest token.")
    max_new_tokens: int = Field(0, ge=0, description="Longest completion in tokens; 0: what the env asks for.")


class ArchiveSettings(Table):
    """``[archive]``: what was trained and dropped, kept as Parquet files by `rlbuffer serve`."""

    dir: OptionalPath = Field(None, description="Folder of the archive, one per run; empty: none is kept.")


class RunSettings(Table):
    """Everything that ``rlbuffer.toml`` may say."""

    run: Annotated[str, AfterValidator(_run)] = Field("default", description="Name of the run on the server.")
    redis_url: OptionalText = Field(
        None,
        repr=False,
        description="redis://, unix://, redis+sentinel://, redis+cluster:// (rediss: TLS); empty: the embedded one.",
    )
    redis_password_file: OptionalPath = Field(
        None, description="File with the password of redis_url, where that has none; RLBUFFER_REDIS_PASSWORD wins."
    )
    home: GivenPath = Field(
        Path("~/.rlbuffer"), description="Where the embedded server, weights, checkpoints and metrics are kept."
    )
    seed: int = Field(
        0,
        ge=0,
        le=LARGEST_SEED,
        description="Of a fresh model's weights, of everything random in training, and of sampling: each worker draws "
        "from one of its own, and from another one after each start unless the run is `deterministic`.",
    )
    deterministic: bool = Field(
        False,
        description="The same settings train the same parameters, bit for bit: on policy, one worker, steps of as many "
        "groups as it samples at once.",
    )
    server: ServerSettings = ServerSettings()
    batcher: BatcherConfig = Field(default_factory=lambda: BatcherConfig(row_tokens=ROW_TOKENS))
    model: ModelSettings = ModelSettings()
    trainer: TrainerSettings = TrainerSettings()
    weights: WeightsSettings = WeightsSettings()
    archive: ArchiveSettings = ArchiveSettings()
    metrics: MetricsSettings = MetricsSettings()
    gateway: GatewaySettings = GatewaySettings()
    worker: Mapping[Names, WorkerSettings] = Field(default_factory=dict)
    score: Mapping[Names, ScoreSettings] = Field(default_factory=dict)
    eval: Mapping[Names, EvaluationSettings] = Field(default_factory=dict)

    @field_validator("batcher", mode="before")
    @classmethod
    def _of_any_length(cls, given: Any) -> Any:
        """A table need not say how long a row is, wherever it comes from. A stream has no rows."""
        if not isinstance(given, Mapping) or given.get("feeds") == "stream":
            return given
        return {"row_tokens": ROW_TOKENS, **given}

    def needs_of(self, env: str) -> tuple[str, ...]:
        """What the scorers of these settings add to groups of `env`, and those must have before they can train."""
        scorers = [scorer for scorer in self.score.values() if not scorer.envs or env in scorer.envs]
        return tuple(dict.fromkeys(add for scorer in scorers for add in scorer.adds))

    @property
    def home_dir(self) -> Path:
        """`home` as a path. Raises ConfigError where it begins with ``~`` and this process's user has no folder."""
        try:
            return self.home.expanduser()
        except RuntimeError:
            raise ConfigError(
                f"home = {str(self.home)!r}: this process's user has no folder of its own (no HOME, no entry in "
                "passwd). Name one: --home, RLBUFFER_HOME, or `home` in the settings.",
                setting="home",
            ) from None

    @property
    def run_dir(self) -> Path:
        """The folder of this run's weights, checkpoints and metrics, unless `trainer.output` says otherwise."""
        return self.home_dir / "runs" / self.run

    @property
    def output_dir(self) -> Path:
        """The folder that the trainer writes to. Another than the run's lets a second trainer replay its steps."""
        return self.trainer.output.expanduser() if self.trainer.output is not None else self.run_dir


_FOLDERS = "folders"
"""Beside the settings: where modules of the user's own are."""


def to_json(settings: RunSettings) -> str:
    """Settings as JSON, and where modules of the user's own are; :func:`from_json` is the inverse."""
    return json.dumps({**settings.model_dump(mode="json"), _FOLDERS: imports.FOLDERS})


def from_json(text: str) -> RunSettings:
    """The inverse of :func:`to_json`: modules of the user's own can be imported after it."""
    data = json.loads(text)
    imports.make_importable(data.pop(_FOLDERS, ()))
    return RunSettings.model_validate(data)
