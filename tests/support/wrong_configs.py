"""A config that works, and more than a hundred mistakes that are put into it, each with what is said of it."""

from __future__ import annotations

GOOD = {
    "batcher": "row_tokens = 1024",
    "model.config": 'model_type = "qwen3"\nvocab_size = 13',
    "trainer": "steps = 3",
    "worker.a": 'env = "vcopy"',
}
"""Section -> lines of a config that works; a mistake adds lines to a section, or puts others in their place."""


def _headed(head: str) -> str:
    """The beginning of a safetensors file: the head's length, 8 bytes, then the head."""
    return len(head).to_bytes(8, "little").decode("latin-1") + head


_EMPTY = _headed("{}")
MODULES = {
    "own.py": (
        "def make(*, size=3, seed=0): ...\nvalue = 3\ndef loss(tokens, settings): ...\nclass Env: ...\n"
        "def one(first): ...\nasync def waits(first, second): ...\nclass Judge:\n    def __init__(self, model): ...\n"
    ),
    "broken.py": "def make(:\n",
    "lacking.py": "import no_such_package\ndef make(): ...\n",
    "raising.py": "import os\nraise RuntimeError('no key')\ndef make(): ...\n",
    "misspelt.py": "from rlbuffer.worker.envs import Promptt\ndef make(): ...\n",
    "nameless/config.json": "{}",
    "nameless/model.safetensors": _EMPTY,
    "torn/config.json": '{"model_type": "qwen3", ',
    "torn/model.safetensors": _EMPTY,
    "pointer/config.json": '{"model_type": "qwen3"}',
    "pointer/model.safetensors": "version https://git-lfs.github.com/spec/v1\nsize 3\n",
    "cut/config.json": '{"model_type": "qwen3"}',
    "cut/model.safetensors": _headed('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
    "parts/config.json": '{"model_type": "qwen3"}',
    "parts/model.safetensors.index.json": '{"weight_map": {"a": "model-1-of-2.safetensors"}}',
    "image/config.json": '{"model_type": "vit"}',
    "image/model.safetensors": _EMPTY,
    "kit/__init__.py": "open('imported', 'w')\n",
    "kit/envs.py": "open('imported', 'w')\ndef make(): ...\n",
    "text.jsonl": '{"prompt": "3 + 4 =", "answer": 7}\n',
    "ids.jsonl": '{"prompt": [1, 2], "answer": 3}\n{"prompt": [1, 99], "answer": 3}\n',
    "torn.jsonl": '{"prompt": [1], "answer": 2}\n{"prompt": [1\n',
    "named.jsonl": '{"prompt": [1], "solution": 2}\n',
    "blank": "\n",
}
IDS = "vocab_size = 13, eos_token_ids = [12]"

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
    (
        "trainer.optimizer",
        'learning_rate = "fast"',
        ["trainer.optimizer.learning_rate = 'fast': input should be a valid number"],
    ),
    ("trainer.optimizer", 'schedule = "sine"', ["trainer.optimizer.schedule = 'sine': input should be 'constant'"]),
    ("trainer.optimizer", "betas = [0.9]", ["trainer.optimizer.betas.1 is required"]),
    ("trainer.loss", 'correction = ["tiss"]', ["trainer.loss.correction.0 = 'tiss': input should be 'tis'"]),
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
    ("metrics", 'listen = "9464"', ["metrics.listen = '9464' must be HOST:PORT, e.g. 127.0.0.1:9464"]),
    ("weights", 'listen = "9465"', ["weights.listen = '9465' must be HOST:PORT"]),
    ("weights", 'url = "host:9465"', ["weights.url = 'host:9465' must begin with http:// or https://"]),
    ("weights", 'relays = ["ftp://host"]', ["weights.relays = 'ftp://host' must begin with http:// or https://"]),
    ("", 'home = "own.py/home"', ["home = 'own.py/home': "]),
    # together
    ("trainer.publish", "every = 9", ["trainer.publish.every = 9 leaves the newest weights up to 8 versions behind"]),
    ("batcher", "min_group_size = 99", ["min_group_size = 99, but the workers' group_size = 16"]),
    ("batcher", "row_tokens = 3", ["row_tokens = 3, but the shortest rollout of vcopy has 6 tokens"]),
    (
        "worker.a",
        "gpus = [0, 1, 2]\nreplicas = 2",
        ["worker.a.gpus = [0, 1, 2] cannot be dealt equally over 2 replicas"],
    ),
    ("trainer", "gpus = [0]\nworld_size = 2", ["trainer.gpus = [0]: trainer.world_size = 2, and each rank needs one"]),
    (
        "trainer.optimizer",
        "min_learning_rate = 1.0",
        ["trainer.optimizer.min_learning_rate = 1 is above learning_rate = 0.001"],
    ),
    (
        "trainer.optimizer",
        'schedule = "wsd_sqrt"\nstable = 9',
        ["trainer.optimizer.stable = 9: with schedule = wsd_sqrt the rate falls"],
    ),
    # losses
    ("trainer.loss", 'name = "gspoo"', ["trainer.loss.name = 'gspoo' is not a loss ... Did you mean gspo?"]),
    (
        "trainer.loss",
        'name = "gspo"\nclip_ceiling = 4.0\ndual_clip = 3.0',
        ["trainer.loss.clip_ceiling = 4.0 does nothing", "trainer.loss.dual_clip = 3.0 does nothing"],
    ),
    (
        "trainer.loss",
        "mask_low = 0.3",
        ["trainer.loss.mask_low = 0.3 does nothing: trainer.loss.name = 'clip' does not read it."],
    ),
    ("trainer.loss", "options = { tau = 1 }", ["trainer.loss.options = {'tau': 1} does nothing"]),
    (
        "trainer.loss",
        'name = "tis"\nold_logprobs = "inference"',
        ["trainer.loss.old_logprobs = 'inference', but tis weighs tokens"],
    ),
    (
        "trainer.loss",
        'name = "own:no_loss"',
        ["trainer.loss.name = 'own:no_loss' cannot be imported ... own.py has no no_loss"],
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
    (
        "worker.b",
        f'env = "jsonl"\nenv_options = {{ {IDS} }}',
        ["worker.b.env_options.path is required: env jsonl has no default for it"],
    ),
    (
        "worker.b",
        f'env = "jsonl"\nenv_options = {{ path = "no.jsonl", {IDS} }}',
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
    ("model.config", "output_router_logits = true", ["model: output_router_logits = true asks for the router auxili"]),
    (
        "trainer.loss",
        'columns = ["x"]',
        ["trainer.loss.columns = ('x',) does nothing: trainer.loss.name = 'clip' does not"],
    ),
    (
        "batcher",
        'advantage = "grpo"\nadvantage_scale = "batch"',
        ["batcher.advantage = 'grpo' divides by each group's deviation"],
    ),
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
    ("-worker.a", "", ["there is no [worker.NAME] section: nothing would be sampled "]),
    # numbers that are none, or not this one
    (
        "trainer.optimizer",
        "learning_rate = inf",
        ["trainer.optimizer.learning_rate = inf: input should be a finite number"],
    ),
    (
        "trainer.optimizer",
        "weight_decay = nan",
        ["trainer.optimizer.weight_decay = nan: input should be a finite number"],
    ),
    ("trainer", "timeout_seconds = inf", ["trainer.timeout_seconds = inf: input should be a finite number"]),
    (
        "trainer.optimizer",
        "learning_rate = true",
        ["trainer.optimizer.learning_rate = True: true is no value of this setting"],
    ),
    ("batcher", "max_age = false", ["batcher.max_age = False: false is no value of this setting"]),
    (
        "batcher",
        "group_timeout_seconds = 1e308",
        ["batcher.group_timeout_seconds = 1e+308: must lie between -9,007,199,254,740,991 and 9,007,199,254,740,991"],
    ),
    (
        "batcher",
        f"cost = [1, {10**20}]",
        [f"batcher.cost = [1, {10**20}]: must lie between"],
    ),
    (
        "batcher.envs.a",
        "max_age_seconds = 1e300",
        ["batcher.envs.a.max_age_seconds = 1e+300: must lie between"],
    ),
    ("trainer.optimizer", "betas = [0.9, 1.0]", ["trainer.optimizer.betas.1 = 1.0: input should be less than 1"]),
    ("trainer", "seed = 18446744073709551616", ["trainer.seed = 18446744073709551616: input should be less than or"]),
    ("trainer.loss", "clip_low = 20.0", ["trainer.loss.clip_low = 20.0: input should be less than or equal to 1"]),
    ("batcher", 'row_tokens = "8k"', ["batcher.row_tokens = '8k': input should be a valid integer"]),
    ("batcher", "budgets = { vcopy = nan }", ["batcher.budgets.vcopy = nan must be above 0"]),
    ("worker.a", "temperature = inf", ["worker.a.temperature = inf: input should be a finite number"]),
    ("worker.a", "skip_failed = nan", ["worker.a.skip_failed = nan: input should be a finite number"]),
    # lists, tables, names
    ("trainer.loss", 'correction = "tis"', ["trainer.loss.correction = 'tis': must be a list"]),
    ("trainer.loss", 'options = "x"', ["trainer.loss.options = 'x': must be a table"]),
    ("worker.a", 'needs = "reward"', ["worker.a.needs = 'reward': must be a list"]),
    (
        "worker.a",
        'needs = ["rewards."]',
        ["worker.a.needs: 'rewards.' is no name of a column, and none of reward, rewards.NAME"],
    ),
    ("worker.a", 'environment = { "A=B" = "1" }', ["worker.a.environment: 'A=B' is no name of a variable"]),
    ('worker."../x"', 'env = "vcopy"', ["worker: a name has 1 to 64 of A-Z a-z 0-9 _ . -, got '../x'"]),
    ("", 'run = ".."', ["run = '..': string should match pattern"]),
    ("", 'home = ""', ["home = '': must name a folder: write . for the current one"]),
    (
        "batcher",
        'remainder = "proportionl"',
        ["batcher.remainder = 'proportionl' is no env here. Did you mean proportional?"],
    ),
    # pairs
    (
        "trainer.loss",
        'name = "icepop"\nmask_low = 6.0',
        ["trainer.loss.mask_low = 6 is not below trainer.loss.mask_high = 5"],
    ),
    ("worker.a", "skip_visits = 2\nskip_failed = 1.0", ["worker.a.skip_failed = 1 is not below worker.a.skip_solved"]),
    ("trainer.loss", "kl_beta = 0.1", ["trainer.loss.kl_beta = 0.1 needs ref_logprobs, and env vcopy gives none"]),
    (
        "score.s",
        'model = "initial"\ncolumn = "logprobs"',
        ["score.s.column = 'logprobs' is no name of a further column"],
    ),
    (
        "score.s",
        'model = "initial"\ngives = ["reward"]',
        ["score.s.gives does nothing: it says what score.s.reward adds, which is not set"],
    ),
    ("score.s", 'reward = "own:loss"\ngives = ["rewards"]', ["score.s.gives: 'rewards' is none of reward"]),
    ("server", 'maxmemory = "20kb"', ["the run does not fit the server's memory"]),
    # GPUs
    ("trainer", "gpus = [0, 0]\nworld_size = 2", ["trainer.gpus = [0, 0] names a GPU twice: ranks need one each"]),
    ("trainer", "gpus = [-1]", ["trainer.gpus.0 = -1: must be the number of a GPU, from 0 on, or its UUID"]),
    ("score.s", 'reward = "own:loss"\ngpus = [0]\nreplicas = 2', ["score.s.gpus = [0] cannot be dealt equally"]),
    (
        "worker.a",
        'gpus = [0]\nenvironment = { CUDA_VISIBLE_DEVICES = "1" }',
        ["worker.a.environment: CUDA_VISIBLE_DEVICES says the same as worker.a.gpus: leave one out"],
    ),
    # addresses
    ("", 'redis_url = "redis://h/math"', ["redis://h/math ends with 'math', which is no number of a database."]),
    ("", 'redis_url = "redis://h:0"', ["redis://h:0 has port 0, which no server listens at."]),
    ("", 'redis_url = "redis://h:99999"', ["redis://h:99999 is not the address of a server."]),
    ("", 'redis_url = "unix://"', ["unix:// names no socket."]),
    ("", 'redis_url = "unix:///no/such.sock"', ["unix:///no/such.sock names a socket that is not there."]),
    ("", 'redis_url = "memory://"', ["redis_url = 'memory://' is a server inside of one process"]),
    ("", 'redis_url = "redis://h"\nredis_password_file = "blank"', ["redis_password_file = 'blank' is empty"]),
    (
        "weights",
        'listen = "h:0"',
        ["weights.listen = 'h:0': port 0 is another one at every start, and nobody knows it"],
    ),
    ("weights", 'url = "http://"', ["weights.url = 'http://' names no host"]),
    ("weights", 'url = "http://h:99999"', ["weights.url = 'http://h:99999' is no URL: Port out of range"]),
    (
        "weights",
        'url = "http://0.0.0.0:1"',
        ["weights.url = 'http://0.0.0.0:1' is no address that others can reach: write the host's name"],
    ),
    ("weights", 'cache = "own.py/x"', ["weights.cache = 'own.py/x': "]),
    # callables
    (
        "trainer.loss",
        'name = "own:one"',
        ["trainer.loss.name = 'own:one' does not fit ... it is called with (tokens, settings)"],
    ),
    ("trainer.loss", 'name = "own:waits"', ["trainer.loss.name = 'own:waits' is async"]),
    ("trainer.loss", 'name = "own.loss"', ["'own.loss' is not a loss ... Your own is named as package.module:name"]),
    ("batcher", 'order = "own:one"', ["batcher.order = 'own:one' does not fit ... it is called with (group, rng)"]),
    (
        "batcher",
        'advantage = "own:loss"',
        ["batcher.advantage = 'own:loss' does not fit ... (rewards, lengths, group)"],
    ),
    ("score.s", 'reward = "own:one"', ["score.s.reward = 'own:one' does not fit ... (rollout, group)"]),
    ("score.s", 'reward = "own:Judge"', ["score.s.reward = 'own:Judge' needs model to be made"]),
    ("worker.b", 'env = "own:one"', ["worker.b.env_options.first is required: env own:one has no default for it"]),
    ("worker.b", 'env = "own:waits"\nenv_options = { first = 1, second = 2 }', ["worker.b.env = 'own:waits' is async"]),
    ("worker.b", 'env = "own:Env"', ["worker.b.env = 'own:Env' is no env: it has no vocab_size, eos_token_ids"]),
    ("worker.b", 'env = "own.py:make"', ["there is no module own.py ... Write own:make"]),
    ("worker.b", 'env = "raising:make"', ["raising.py:2 raises RuntimeError('no key')"]),
    ("worker.b", 'env = "misspelt:make"', ["misspelt.py:1 imports Promptt ... Did you mean Prompt?"]),
    # data sets
    ("worker.b", 'env = "jsonl"\nenv_options = { path = "ids.jsonl" }', ["jsonl: without a tokenizer the env needs"]),
    (
        "worker.b",
        f'env = "jsonl"\nenv_options = {{ path = "text.jsonl", {IDS} }}',
        ["text.jsonl:1: a prompt of text needs a tokenizer"],
    ),
    (
        "worker.b",
        f'env = "jsonl"\nenv_options = {{ path = "ids.jsonl", {IDS} }}',
        ["ids.jsonl:2: token id 99 is not in 0-12"],
    ),
    ("worker.b", f'env = "jsonl"\nenv_options = {{ path = "torn.jsonl", {IDS} }}', ["torn.jsonl:2: not JSON: "]),
    ("worker.b", f'env = "jsonl"\nenv_options = {{ path = "blank", {IDS} }}', ["blank holds no prompt"]),
    (
        "worker.b",
        f'env = "jsonl"\nenv_options = {{ path = "named.jsonl", {IDS} }}',
        ["named.jsonl:1: there is no answer"],
    ),
    (
        "worker.b",
        f'env = "jsonl"\nenv_options = {{ path = "named.jsonl", fields = {{ reply = "solution" }}, {IDS} }}',
        ["fields: reply is not an option"],
    ),
    (
        "worker.b",
        'env = "jsonl"\nenv_options = { path = "text.jsonl", tokenizer = "kit", rewards = { exakt = 1.0 } }',
        ["reward exakt: kind 'exakt' is not one of", "tokenizer = 'kit' has no tokenizer in it"],
    ),
    ("worker.b", f'env = "jsonl"\nenv_options = {{ path = 3, {IDS} }}', ["worker.b.env_options.path = 3 is no path"]),
    (
        "worker.b",
        'env = "jsonl"\nenv_options = { path = "text.jsonl", tokenizer = "pointer", rewards = "exact" }',
        ["rewards = 'exact' is a table: name = weight", "tokenizer = 'pointer' has no tokenizer in it"],
    ),
    # more of samplers
    ("worker.a", 'sampler = "openai"\nsampler_options = { servers = 3 }', ["servers: name at least one server"]),
    (
        "worker.a",
        'sampler = "openai"\nsampler_options = { servers = ["http://h:99999"] }',
        ["sampler_options.servers: 'http://h:99999' is no URL: Port out of range"],
    ),
    (
        "worker.a",
        'sampler = "openai"\nsampler_options = { servers = "http://h", timeout_seconds = -1 }',
        ["sampler_options.timeout_seconds = -1 must be a positive number of seconds"],
    ),
    (
        "worker.a",
        'sampler = "openai"\nsampler_options = { servers = "http://h", updates_weights = "yes" }',
        ["sampler_options.updates_weights = 'yes' must be true or false"],
    ),
    ("worker.a", 'python = "/bin/true"', ["worker.a.python = '/bin/true' has rlbuffer , this is"]),
    # more of models
    ("model.config", 'vocab_size = "13"', ["model.config.vocab_size = '13' must be a whole number of at least 1"]),
    ("model.config", "hiden_size = 64", ["model.config.hiden_size is nothing that qwen3 knows. Did you mean hidden_"]),
    (
        "model.config",
        "num_attention_heads = 4\nnum_key_value_heads = 3",
        ["model.config.num_key_value_heads = 3 does not divide num_attention_heads = 4"],
    ),
    ("model.config", "eos_token_id = 13", ["model.config.eos_token_id = 13 is no token id: vocab_size is 13"]),
    ("-model.config", '[model]\npath = "torn"', ["torn/config.json cannot be read: "]),
    ("-model.config", '[model]\npath = "pointer"', ["pointer/model.safetensors is a pointer of Git LFS"]),
    ("-model.config", '[model]\npath = "cut"', ["cut/model.safetensors is cut short: it has"]),
    ("-model.config", '[model]\npath = "parts"', ["which is not there (1 of 1 file missing)"]),
    ("-model.config", '[model]\npath = "image"', ["'vit' is not a causal language model of transformers"]),
    ("-model.config", '[model]\npath = "Qwen/Qwen3-0.6B"', ["Nothing is downloaded: fetch the model first"]),
]
