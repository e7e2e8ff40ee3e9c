"""`rlbuffer config check` refuses what would bend the distribution that a worker samples from, wherever it is set."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from rlbuffer.checks.loading import load
from rlbuffer.config.sampling import REFUSED_SAMPLING
from rlbuffer.errors import ConfigError
from rlbuffer.worker.samplers import wrong_sampler

ALLOWED = ("temperature", "top_p", "max_new_tokens")
OF_A_MODEL = sorted(set(GenerationConfig().to_dict()) - set(ALLOWED))
"""All else that a `generation_config.json` may set."""


def mistakes(tmp_path: Path, lines: str) -> list[str]:
    """Mistakes that `config check` finds in a file, without the places."""
    path = tmp_path / "rlbuffer.toml"
    path.write_text(f'[model.config]\nmodel_type = "qwen3"\nvocab_size = 13\n{lines}\n')
    try:
        load(path, environ={}, parts=("worker",))
    except ConfigError as refused:
        told = [line.strip() for line in str(refused).split("\n") if "mistakes in the settings" not in line]
        return [line.partition("  ")[2] or line for line in told if "needs the module" not in line]
    return []


def test_a_worker_has_no_other_setting_of_sampling(tmp_path: Path) -> None:
    names = sorted({*OF_A_MODEL, *REFUSED_SAMPLING})
    told = mistakes(tmp_path, '[worker.a]\nenv = "vcopy"\n' + "\n".join(f"{name} = 1" for name in names))
    assert len(told) == len(names)
    for name, sentence in zip(names, told, strict=True):
        assert sentence.startswith(f"worker.a.{name} is not a setting")
        if name in REFUSED_SAMPLING:
            assert REFUSED_SAMPLING[name] in sentence


@pytest.mark.parametrize("sampler", ["transformers", "vllm", "openai"])
def test_a_samplers_options_are_no_way_round(sampler: str) -> None:
    for name in (*ALLOWED, *REFUSED_SAMPLING):
        with pytest.raises(ConfigError) as refused:
            list(wrong_sampler(sampler, {name: 1}, temperature=1.0, top_p=1.0))
        own = f"sampler_options.{name} is a setting of the worker itself: worker.NAME.{name}"
        assert str(refused.value) == (own if name in ALLOWED else f"sampler_options.{name}: {REFUSED_SAMPLING[name]}")
