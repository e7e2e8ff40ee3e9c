"""A config that works, modules and files beside it, and what is put into it that cannot work."""

from __future__ import annotations

from pathlib import Path

GOOD = {
    "batcher": "row_tokens = 1024",
    "model.config": 'model_type = "qwen3"\nvocab_size = 13',
    "trainer": "steps = 3",
    "worker.a": 'env = "vcopy"',
}
"""Section -> lines of a config that works."""

FILES = {
    "own.py": (
        "def make(*, size=3, seed=0): ...\nvalue = 3\ndef loss(tokens, options): ...\n"
        "def one(first): ...\nasync def waits(first, second): ...\nclass Judge:\n    def __init__(self, model): ...\n"
    ),
    "broken.py": "def make(:\n",
    "lacking.py": "import no_such_package\ndef make(): ...\n",
    "raising.py": "import os\nraise RuntimeError('no key')\ndef make(): ...\n",
    "misspelt.py": "from rlbuffer.worker.envs import Promptt\ndef make(): ...\n",
    "leaving.py": "import os\nos._exit(7)\n",
    "endless.py": "n = 0\nwhile True:\n    n += 1\n",
    "bare/config.json": '{"model_type": "qwen3"}',
    "torn/config.json": '{"model_type": "qwen3", ',
    "torn/model.safetensors": "",
    **{
        f"{name}/adapter_config.json": (
            f'{{"peft_type": "{name.upper()}", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], '
            '"base_model_name_or_path": "some/base"}'
        ).replace("SFT", "LORA")
        for name in ("sft", "ia3")
    },
    "sft/adapter_model.safetensors": "",
    "text.jsonl": '{"prompt": "3 + 4 =", "answer": 7}\n',
    "ids.jsonl": '{"prompt": [1, 2], "answer": 3}\n{"prompt": [1, 99], "answer": 3}\n',
    "blank": "\n",
}
"""File -> its text."""


def lay_out(folder: Path) -> None:
    """Writes the files."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def written(*changes: tuple[str, str]) -> Path:
    """``rlbuffer.toml``: the good config with lines put into its sections; ``-NAME`` leaves one out. A setting that is
    given again is replaced."""
    sections, head = dict(GOOD), ""
    for section, lines in changes:
        if section.startswith("-"):
            del sections[section[1:]]
        elif section:
            new = [line.partition(" = ")[0] for line in lines.split("\n")]
            kept = [x for x in sections.get(section, "").split("\n") if x.partition(" = ")[0] not in new]
            sections[section] = "\n".join([*kept, lines])
        else:
            head += f"{lines}\n"
            sections = {k: v for k, v in sections.items() if not (lines == "worker = 3" and k == "worker.a")}
    path = Path("rlbuffer.toml")
    path.write_text(head + "".join(f"[{name}]\n{lines}\n" for name, lines in sections.items()))
    return path


VALUES = [
    ("batcher", "max_agee = 1", "batcher.max_agee", 3),
    ("traner", "steps = 1", "traner", 12),
    ("trainer", "max_age = 1", "trainer.max_age", 8),
    ("worker.a", "grup_size = 1", "worker.a.grup_size", 10),
    ("eval.e", 'env = "vcopy"\nevry = 2', "eval.e.evry", 13),
    ("", "worker = 3", "worker", 1),
    ("", 'run = "Math"', "run", 1),
    ("batcher", "max_age = -1", "batcher.max_age", 3),
    ("batcher", "budgets = { a = 0.8, b = 0.4 }", "batcher.budgets", 3),
    ("batcher", "step_groups = 1\nstep_rollouts = 1", "batcher.step_groups", 3),
    ("batcher", 'adapters = { "" = { batch_size = 1 } }', "batcher.adapters", 3),
    ("trainer.optimizer", 'learning_rate = "fast"', "trainer.optimizer.learning_rate", 12),
    ("trainer.optimizer", "betas = [0.9]", "trainer.optimizer.betas.1", 12),
    ("trainer.loss", "correction = { tiss = {} }", "trainer.loss.correction", 12),
    ("worker.a", "temperature = 0", "worker.a.temperature", 10),
    ("worker.b", "group_size = 4", "worker.b.env", 12),
    ("batcher", 'advantage = "grpo"\nadvantage_scale = "batch"', "batcher.advantage_scale", 4),
    ("batcher", "max_age = false", "batcher.max_age", 3),
    ("", "seed = 18446744073709551616", "seed", 1),
    ("trainer.loss", "options = { clip_low = 20.0 }", "trainer.loss.options.clip_low", 12),
    ("batcher", 'row_tokens = "8k"', "batcher.row_tokens", 2),
    ("worker.a", "temperature = inf", "worker.a.temperature", 10),
    ("trainer.loss", 'correction = ["tis"]', "trainer.loss.correction", 12),
    ("trainer.loss", 'options = "x"', "trainer.loss.options", 12),
    ('worker."../x"', 'env = "vcopy"', "worker.../x", 12),
    ("", 'run = ".."', "run", 1),
    ("", 'home = ""', "home", 1),
    ("trainer", "gpus = [-1]", "trainer.gpus.0", 8),
    ("trainer.loss", 'name = "gspoo"', "trainer.loss.name", 12),
    ("trainer.loss", 'name = "gspo"\noptions = { dual_clip = 3.0 }', "trainer.loss.options", 13),
    ("trainer.loss", 'name = "tis"\nold_logprobs = "inference"', "trainer.loss.old_logprobs", 13),
    ("trainer.loss", 'columns = ["x"]', "trainer.loss.columns", 12),
    ("trainer.loss", "correction = { icepop = { low = 6.0 } }", "trainer.loss.correction.icepop.high", 12),
    ("trainer.loss", 'name = "own.loss"', "trainer.loss.name", 12),
    ("server", 'maxmemory = "lots"', "server.maxmemory", 12),
    ("metrics", 'listen = "9464"', "metrics.listen", 12),
    ("weights", 'listen = "h:65536"', "weights.listen", 12),
    ("weights", 'url = "host:9465"', "weights.url", 12),
    ("weights", 'url = "http://0.0.0.0:1"', "weights.url", 12),
    ("trainer.optimizer", "min_learning_rate = 1.0", "trainer.optimizer.min_learning_rate", 12),
    ("trainer.optimizer", 'schedule = "wsd_sqrt"\nwarmup_updates = 3', "trainer.optimizer.decay_from_update", 12),
    ("score.s", "replicas = 2", "score.s", 12),
    ("score.s", 'model = "initial"\ncolumn = "logprobs"', "score.s.column", 13),
    ("score.s", 'model = "initial"\ngives = ["reward"]', "score.s.gives", 13),
    ("score.s", 'reward = "own:loss"\ngives = ["rewards"]', "score.s.gives.0", 13),
]
"""(section, lines, the setting that is refused, line of the file)."""
