"""Sixty wrong configurations: `rlbuffer config check` finds every mistake of each, at once and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlbuffer.errors import ConfigError
from rlbuffer.host_checks import EVERYTHING
from rlbuffer.loading import load

GOOD = {
    "batcher": "row_tokens = 1024",
    "model.config": 'model_type = "qwen3"\nvocab_size = 13',
    "trainer": "steps = 3",
    "worker.a": 'env = "vcopy"',
}
"""Section -> lines of a config that works; a mistake adds lines to a section, or puts others in their place."""
MODULES = {
    "own.py": "def make(*, size=3, seed=0): ...\nvalue = 3\ndef loss(tokens, settings): ...\nclass Env: ...\n",
    "broken.py": "def make(:\n",
    "lacking.py": "import no_such_package\ndef make(): ...\n",
    "nameless/config.json": "{}",
    "nameless/model.safetensors": "",
    "kit/__init__.py": "raise RuntimeError('a check runs nobody\\'s code')\n",
    "kit/envs.py": "raise RuntimeError('a check runs nobody\\'s code')\ndef make(): ...\n",
}

TABLE = [
    # names
    ("batcher", "max_agee = 1", ["batcher.max_agee is not a setting. Did you mean batcher.max_age?"]),
    ("traner", "steps = 1", ["traner is not a setting. Did you mean trainer?"]),
    ("trainer", "max_age = 1", ["trainer.max_age is not a setting. Did you mean batcher.max_age?"]),
    ("worker.a", "grup_size = 1", ["worker.a.grup_size is not a setting. Did you mean worker.a.group_size?"]),
    ("eval.e", 'env = "vcopy"\nevry = 2', ["eval.e.evry is not a setting. Did you mean eval.e.every?"]),
    ("", "worker = 3", ["worker is a table ([worker]), got 3"]),
    # values
    ("", 'run = "Math"', ["run = 'Math': string should match pattern"]),
    ("batcher", "max_age = -1", ["batcher.max_age = -1 must not be negative"]),
    ("batcher", "max_uses = 0", ["batcher.max_uses = 0 must be at least 1"]),
    ("batcher", "close_fill = 1.5", ["batcher.close_fill = 1.5 must lie between 0 and 1"]),
    ("batcher", 'flat = "often"', ["batcher.flat = 'often': must be keep, drop or a fraction between 0 and 1"]),
    ("batcher", "budgets = { a = 0.8, b = 0.4 }", ["batcher.budgets sum to 1.2"]),
    ("batcher", "budgets = { a = [[5, 0.2], [2, 0.4]] }", ["batcher.budgets.a = [[5, 0.2], [2, 0.4]] must name steps"]),
    ("batcher", "step_groups = 1\nstep_rollouts = 1", ["batcher.step_rollouts and batcher.step_groups exclude"]),
    ("batcher", "group_timeout_seconds = 0", ["batcher.group_timeout_seconds = 0.0 must be a positive number"]),
    ("batcher", 'advantage = "best"', ["batcher.advantage = 'best' is not an estimator"]),
    ("batcher", 'order = "best"', ["batcher.order = 'best' must be newest_first"]),
    ("batcher", 'adapters = { "" = { batch_size = 1 } }', ["batcher.adapters names the adapter ''"]),
    ("trainer", "world_size = 0", ["trainer.world_size = 0: input should be greater than or equal to 1"]),
    ("trainer", 'learning_rate = "fast"', ["trainer.learning_rate = 'fast': input should be a valid number"]),
    ("trainer", 'schedule = "sine"', ["trainer.schedule = 'sine': input should be 'constant'"]),
    ("trainer", "betas = [0.9]", ["trainer.betas.1 is required"]),
    ("trainer", 'correction = ["tiss"]', ["trainer.correction.0 = 'tiss': input should be 'tis'"]),
    ("worker.a", "temperature = 0", ["worker.a.temperature = 0: input should be greater than 0"]),
    ("worker.a", "top_p = 1.1", ["worker.a.top_p = 1.1: input should be less than or equal to 1"]),
    ("worker.a", 'sampler = "sglang"', ["worker.a.sampler = 'sglang': input should be 'transformers'"]),
    ("worker.b", "group_size = 4", ["worker.b.env is required"]),
    ("server", 'maxmemory = "lots"', ["server.maxmemory = 'lots' is not a size"]),
    ("server", 'appendfsync = "sometimes"', ["server.appendfsync = 'sometimes': input should be 'everysec'"]),
    # addresses
    ("", 'redis_url = "localhost:6379"', ["localhost:6379 is not the address of a server."]),
    ("", 'redis_url = "redis://h:1/0?socket_timeout=1"', ["has an option that cannot be set there: socket_timeout."]),
    ("", 'redis_url = "rediss://h:1/0?ssl_ca_certs=no.crt"', ["ssl_ca_certs in rediss://h:1/0?ssl_ca_certs=no.crt"]),
    (
        "",
        'redis_url = "redis://h:1"\nredis_password_file = "no"',
        ["redis_password_file = 'no': there is no such file"],
    ),
    ("weights", 'listen = "9465"', ["weights.listen = '9465' must be HOST:PORT"]),
    ("weights", 'url = "host:9465"', ["weights.url = 'host:9465' must begin with http:// or https://"]),
    ("weights", 'relays = ["ftp://host"]', ["weights.relays = 'ftp://host' must begin with http:// or https://"]),
    ("", 'home = "own.py/home"', ["home = 'own.py/home': "]),
    # together
    ("trainer", "publish_every = 9", ["publish_every = 9 leaves the newest weights up to 8 versions behind"]),
    ("batcher", "min_group_size = 99", ["min_group_size = 99, but the workers' group_size = 16"]),
    ("batcher", "row_tokens = 3", ["row_tokens = 3, but the shortest rollout of vcopy has 6 tokens"]),
    (
        "worker.a",
        "gpus = [0, 1, 2]\nreplicas = 2",
        ["worker.a.gpus = [0, 1, 2] cannot be dealt equally over 2 replicas"],
    ),
    ("trainer", "gpus = [0]\nworld_size = 2", ["trainer.gpus = [0]: trainer.world_size = 2 ranks need one each"]),
    ("trainer", "min_learning_rate = 1.0", ["trainer.min_learning_rate = 1 is above trainer.learning_rate = 0.001"]),
    ("trainer", 'schedule = "wsd_sqrt"\nstable = 9', ["trainer.stable = 9: with schedule = wsd_sqrt the rate falls"]),
    # losses
    ("trainer", 'loss = "gspoo"', ["trainer.loss = 'gspoo' is not a loss ... Did you mean gspo?"]),
    (
        "trainer",
        'loss = "gspo"\nclip_ceiling = 4.0\ndual_clip = 3.0',
        ["trainer.clip_ceiling = 4.0 does nothing", "trainer.dual_clip = 3.0 does nothing"],
    ),
    ("trainer", "mask_low = 0.3", ["trainer.mask_low = 0.3 does nothing: trainer.loss = 'clip' does not read it."]),
    ("trainer", "loss_options = { tau = 1 }", ["trainer.loss_options = {'tau': 1} does nothing"]),
    (
        "trainer",
        'loss = "tis"\nold_logprobs = "inference"',
        ["trainer.old_logprobs = 'inference', but tis weighs tokens"],
    ),
    ("trainer", 'loss = "own:no_loss"', ["trainer.loss = 'own:no_loss' cannot be imported ... own.py has no no_loss"]),
    ("model.config", "output_router_logits = true", ["model: output_router_logits = true asks for the router auxili"]),
    ("trainer", 'loss_columns = ["x"]', ["trainer.loss_columns = ('x',) does nothing: trainer.loss = 'clip' does not"]),
    (
        "batcher",
        'advantage = "grpo"\nadvantage_scale = "batch"',
        ["batcher.advantage = 'grpo' divides by each group's deviation"],
    ),
    # envs and modules
    ("worker.a", 'env = "vcoppy"', ["env 'vcoppy' is not one of vcopy ... Did you mean vcopy?"]),
    (
        "worker.b",
        'env = "nowhere:make"',
        ["worker.b.env = 'nowhere:make' cannot be imported: there is no module nowhere"],
    ),
    ("worker.b", 'env = "own:mak"', ["own.py has no mak. Did you mean make?"]),
    ("worker.b", 'env = "own:value"', ["worker.b.env = 'own:value' is not callable"]),
    ("worker.b", 'env = "broken:make"', ["broken.py:1: invalid syntax"]),
    ("worker.b", 'env = "lacking:make"', ["lacking.py:1 imports no_such_package, which is not installed"]),
    ("worker.b", 'env = "kit.env:make"', ["cannot be imported: there is no module kit.env"]),
    ("worker.b", 'env = "own:make"\nenv_options = { sedd = 1 }', ["sedd is not an option. Did you mean seed?"]),
    ("worker.a", "env_options = { sedd = 1 }", ["env vcopy: sedd is not an option. Did you mean seed?"]),
    ("worker.a", 'env_options = { seed = "x" }', ["env vcopy cannot be made with {'seed': 'x'}: "]),
    ("worker.b", 'env = "jsonl"', ["worker.b.env_options.path is required: env jsonl reads it"]),
    (
        "worker.b",
        'env = "jsonl"\nenv_options = { path = "no.jsonl" }',
        ["worker.b.env_options.path = 'no.jsonl': there"],
    ),
    ("eval.e", 'env = "nowhere:make"', ["eval.e.env = 'nowhere:make' cannot be imported"]),
    ("batcher", 'order = "own:order"', ["batcher.order = 'own:order' cannot be imported ... own.py has no order"]),
    ("score.s", 'reward = "own:judge"', ["score.s.reward = 'own:judge' cannot be imported"]),
    ("score.s", "replicas = 2", ["score.s gives nothing"]),
    # samplers
    ("worker.a", 'sampler = "openai"', ["sampler_options.servers: name at least one server"]),
    ("worker.a", 'sampler = "openai"\nsampler_options = { server = "http://h" }', ["sampler_options.server is not an"]),
    ("worker.a", "sampler_options = { seed = 5 }", ["sampler_options: seed: the transformers sampler has no options"]),
    ("worker.a", 'python = "no-such-python"', ["worker.a.python = 'no-such-python' is not a program on this host"]),
    # models
    ("model", 'path = "nowhere"', ["model: exactly one of path and config is needed; both are set"]),
    ("model.config", 'model_type = "qwen33"', ["model.config.model_type = 'qwen33' is not a model that transformers"]),
    ("model.config", 'model_type = "qwen3"\nvocab_size = 5', ["env vcopy uses 13 token ids, the model knows 5"]),
    ("-model.config", "", ["model: exactly one of path and config is needed; neither is set"]),
    ("-model.config", '[model]\npath = "nowhere"', ["model.path: nowhere is not a directory"]),
    (
        "-model.config",
        '[model]\npath = "kit"',
        [
            "model.path: kit has no config.json: it is no Hugging Face model",
            "model.path: kit has no weights (model.safetensors)",
        ],
    ),
    ("-model.config", '[model]\npath = "nameless"', ["model.path: nameless/config.json names no model_type"]),
    ("-worker.a", "", ["there is no [worker.NAME] section: nothing would be sampled."]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in MODULES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    return tmp_path


def written(*changes: tuple[str, str]) -> Path:
    """The good config with sections changed; ``-NAME`` leaves one out. A setting that is given again is replaced."""
    sections = dict(GOOD)
    head, tail = "", ""
    for section, lines in changes:
        if section.startswith("-"):
            del sections[section[1:]]
            tail += f"{lines}\n"
        elif section:
            new = [line.partition(" = ")[0] for line in lines.split("\n")]
            kept = [x for x in sections.get(section, "").split("\n") if x.partition(" = ")[0] not in new]
            sections[section] = "\n".join([*kept, lines])
        else:
            head += f"{lines}\n"
            sections = {k: v for k, v in sections.items() if not (lines == "worker = 3" and k == "worker.a")}
    path = Path("rlbuffer.toml")
    path.write_text(head + "".join(f"[{name}]\n{lines}\n" for name, lines in sections.items()) + tail)
    return path


def found(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load(path, environ={}, parts=EVERYTHING)
    return str(refused.value)


def test_the_config_that_the_mistakes_are_put_into_has_none(folder: Path) -> None:
    extra = ("worker.b", 'env = "own:make"\nenv_options = { size = 4 }'), ("trainer", 'loss = "own:loss"')
    assert load(written(*extra), environ={}, parts=EVERYTHING).settings.trainer.loss == "own:loss"
    load(written(("worker.b", 'env = "kit.envs:make"')), environ={}, parts=EVERYTHING)


@pytest.mark.parametrize(("section", "lines", "said"), TABLE, ids=lambda value: str(value)[:40])
def test_a_wrong_config_is_found_with_its_mistakes_and_no_other(
    folder: Path, section: str, lines: str, said: list[str]
) -> None:
    text = found(written((section, lines)))
    assert text.startswith(f"{len(said)} mistakes in the settings:\n") == (len(said) > 1), text
    for mistake in said:
        for part in mistake.split(" ... "):
            assert part in text


def test_the_table_has_sixty_rows_and_more() -> None:
    assert len(TABLE) >= 60


def test_all_mistakes_of_one_file_are_told_at_once(folder: Path) -> None:
    """One of each kind, in one file: names, values, addresses, combinations, losses, modules, the model."""
    path = written(
        ("batcher", "max_agee = 1\nclose_fill = 2.0\nmax_uses = 0"),
        ("", 'redis_url = "localhost:6379"'),
        ("server", 'maxmemory = "lots"'),
        ("trainer", 'loss = "gspo"\ndual_clip = 3.0\nsteps = 0'),
        ("worker.a", "gpus = [0]\nreplicas = 2"),
        ("worker.b", 'env = "nowhere:make"'),
        ("worker.c", 'env = "vcoppy"'),
        ("-model.config", '[model]\npath = "nowhere"'),
    )
    text = found(path)
    assert text.startswith("11 mistakes in the settings:\n  rlbuffer.toml:4  batcher.max_agee is not a setting.")
    for part in (
        "batcher.close_fill = 2.0 must lie",
        "batcher.max_uses = 0 must be",
        "localhost:6379 is not the address",
        "maxmemory = 'lots'",
        "dual_clip = 3.0 does nothing",
        "trainer.steps = 0: input",
        "cannot be dealt equally",
        "there is no module nowhere",
        "env 'vcoppy' is not one of",
        "model.path: nowhere is not a directory",
    ):
        assert part in text


def test_a_package_that_is_not_installed_is_named_with_what_brings_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbuffer.host_checks.is_installed", lambda module: module in ("torch", "transformers"))
    text = found(
        written(
            ("trainer", "tensorboard = true\nlora = { rank = 4 }"),
            ("worker.b", 'env = "reasoning_gym"'),
            ("worker.a", 'sampler = "vllm"'),
        )
    )
    assert [line.partition("  ")[2] for line in text.split("\n")[1:]] == [
        "rlbuffer.toml:9  trainer.lora.rank needs the module peft: pip install 'rlbuffer[lora]'",
        "rlbuffer.toml:8  trainer.tensorboard needs the module tensorboard: pip install 'rlbuffer[tensorboard]'",
        "rlbuffer.toml:12  worker.a.sampler = 'vllm' needs the module vllm: pip install 'rlbuffer[vllm]'",
        "rlbuffer.toml:15  worker.b.env = 'reasoning_gym' needs the module reasoning_gym: pip install 'rlbuffer[envs]'",
        "rlbuffer.toml:15  worker.b.env_options.tokenizer is required: env reasoning_gym needs it",
    ]


def test_what_may_only_follow_from_another_mistake_is_not_told(folder: Path) -> None:
    text = found(written(("batcher", "max_age = -3"), ("trainer", "publish_every = 3")))
    assert text == "rlbuffer.toml:3  batcher.max_age = -3 must not be negative"
    text = found(written(("-worker.a", "[worker.b]\ngroup_size = 4")))
    assert text == "rlbuffer.toml:9  worker.b.env is required"


def test_a_command_needs_on_its_host_only_what_it_uses(folder: Path) -> None:
    path = written(("-model.config", ""), ("worker.b", 'env = "nowhere:make"'), ("batcher", 'order = "own:order"'))
    load(path, environ={})
    load(path, environ={}, parts=("worker.a",))
    for part, text in (("worker.b", "worker.b.env ="), ("train", "model: "), ("serve", "batcher.order =")):
        with pytest.raises(ConfigError, match=f"^(rlbuffer.toml:[0-9]+  )?{text}"):
            load(path, environ={}, parts=(part,))


CALL = """\
import json, sys
from rlbuffer_cli.main import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted({"torch", "transformers", "vllm"} & set(sys.modules))]))
"""


@pytest.mark.parametrize(
    ("command", "head"),
    [
        (["config", "check"], "Error: 5 mistakes in the settings:"),
        (["run"], "Error: 5 mistakes in the settings:"),
        (["train"], "Error: 2 mistakes in the settings:"),
        (["worker", "b"], "Error: 2 mistakes in the settings:"),
        (["serve"], "Error: 2 mistakes in the settings:"),
    ],
)
def test_a_command_says_what_is_wrong_before_it_loads_torch_or_starts_anything(
    folder: Path, command: list[str], head: str
) -> None:
    written(
        ("", f'home = "{folder}/home"'),
        ("server", 'maxmemory = "lots"'),
        ("batcher", 'order = "own:order"'),
        ("worker.b", 'env = "own:mak"'),
        ("trainer", "tensorboard = false"),
        ("-model.config", ""),
        ("score.s", 'reward = "nowhere:judge"'),
    )
    done = subprocess.run([sys.executable, "-c", CALL, *command], capture_output=True, text=True, check=True)
    assert done.stderr.startswith(head), done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [3, []]
    assert not (folder / "home").exists()
