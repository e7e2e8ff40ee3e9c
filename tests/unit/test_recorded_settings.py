"""The settings that an archive keeps of the trainer: each one is on this list, none is an address or a secret, and each
can be changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from rlbuffer.config.recorded import RECORDED, recorded, settings_of
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError

KEPT = {
    *("run", "seed", "deterministic", "model.path", "model.config", "model.dtype"),
    *("trainer.world_size", "trainer.steps", "trainer.output", "trainer.parallel", "trainer.gpus", "trainer.device"),
    *("trainer.layout", "trainer.gradient_checkpointing", "trainer.replay_experts", "trainer.temperature"),
    *("trainer.timeout_seconds", "trainer.checkpoint.every", "trainer.checkpoint.keep", "trainer.publish.every"),
    *("trainer.optimizer.learning_rate", "trainer.optimizer.betas", "trainer.optimizer.weight_decay"),
    *("trainer.optimizer.gradient_clip", "trainer.optimizer.schedule", "trainer.optimizer.warmup_updates"),
    *("trainer.optimizer.decay_from_update", "trainer.optimizer.min_learning_rate", "trainer.optimizer.passes"),
    *("trainer.optimizer.updates_per_pass", "trainer.loss"),
    *("trainer.lora.rank", "trainer.lora.alpha", "trainer.lora.targets", "trainer.lora.path"),
    *("trainer.reports.example_every", "trainer.reports.tensorboard", "trainer.reports.wandb_project"),
    "trainer.reports.check_ranks",
}
"""A new setting of the trainer or the model comes here once somebody has judged that everybody who may read the archive
may read it. The options of a loss are its own numbers."""
SECRETS = {
    "redis_url": "redis://:hidden@buffer:6379",
    "redis_password_file": "/hidden/password",
    "weights": {"listen": "10.0.0.1:8081", "url": "http://hidden:8081"},
    "gateway": {"engines": ["http://hidden:8000"], "url": "http://hidden:8400"},
    "metrics": {"listen": "10.0.0.1:9464"},
    "worker": {"a": {"env": "jsonl", "env_options": {"api_key": "hidden"}, "sampler_options": {"url": "hidden"}}},
    "eval": {"b": {"env": "jsonl", "env_options": {"token": "hidden"}}},
}


def names(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in table.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and name != "loss":
            yield from names(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_setting_that_is_kept_is_on_the_list() -> None:
    assert {name for name in names(RunSettings) if name.partition(".")[0] in RECORDED} == KEPT


def test_no_address_password_or_key_is_kept() -> None:
    kept = repr(recorded(RunSettings.model_validate(SECRETS)))
    assert "hidden" not in kept
    assert "10.0.0.1" not in kept


def test_a_change_that_is_refused_stands_behind_its_flag_as_it_was_typed() -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(recorded(RunSettings()), changes={"trainer.steps": -1})
    assert str(refused.value).startswith("--set trainer.steps = -1: must be ")
