"""`rlbuffer config check` refuses what would bend the distribution that a worker samples from, wherever it is set."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from transformers import GenerationConfig

from rlbuffer.checks.loading import load
from rlbuffer.config.sampling import BENT, REFUSED_SAMPLING
from rlbuffer.errors import ConfigError
from rlbuffer.worker.envs.looking import wrong_env
from rlbuffer.worker.samplers.options import check_options

ALLOWED = ("temperature", "top_p", "max_new_tokens")
OF_A_MODEL = sorted(set(GenerationConfig().to_dict()) - set(ALLOWED))
"""All else that a `generation_config.json` may set."""
WORKERS = "the worker's samplers"
SERVER = 'sampler = "openai"\nsampler_options = { servers = "http://h" }'


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
            check_options(sampler, {name: 1})
        own = f"sampler_options.{name} is a setting of the worker itself: worker.NAME.{name}"
        assert str(refused.value) == (own if name in ALLOWED else f"sampler_options.{name}: {REFUSED_SAMPLING[name]}")


@pytest.mark.parametrize(
    ("section", "agent", "told"),
    [
        ("worker.a", "agent = { sampling = { top_k = 5 } }", "agent.sampling: sampling parameter top_k = 5 is not one"),
        (
            "worker.a",
            "agents = { player = { sampling = { extra_body = { logit_bias = 1 } } } }",
            f"agents.player.sampling: sampling parameter logit_bias = 1 is not one that {WORKERS} know: {BENT}",
        ),
        (
            "worker.a",
            "agent = { sampling = { temperature = 0.5 } }",
            "agent.sampling: sampling parameter temperature = 0.5 is not the worker's own, 1",
        ),
        (
            "eval.a",
            "agent = { sampling = { top_p = 0.5 } }",
            "agent.sampling: sampling parameter top_p = 0.5 is not the worker's own, 1",
        ),
        (
            "eval.a",
            'agent = { sampling = { temperature = "hot" } }',
            "agent.sampling: sampling parameter temperature = 'hot' is not the worker's own, 0",
        ),
    ],
)
def test_what_an_agent_of_verifiers_would_ask_for_in_vain_is_refused(
    section: str, agent: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    lines = f'[{section}]\nenv = "verifiers"\n[{section}.env_options]\ntaskset = "t"\ntokenizer = "{tmp_path}"\n{agent}'
    options = tomllib.loads(lines)[section.partition(".")[0]]["a"]["env_options"]
    sampling = {"temperature": float(section == "worker.a"), "top_p": 1.0}
    ((setting, said, _),) = wrong_env("verifiers", options, vocab_size=0, lengths={}, sampling=sampling)
    assert f"env_options.{told}".startswith(setting)
    assert told.partition(": ")[2] in said
