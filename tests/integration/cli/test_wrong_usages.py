"""Commands that were typed wrongly, and files that are wrong: one error each, in our words, with the value, its place
and what to do; nothing on stdout, and no traceback."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
GOOD = '[model.config]\nmodel_type = "qwen3"\nvocab_size = 13\n[worker.a]\nenv = "vcopy"\n'
FILES: dict[str, str | bytes] = {
    "good.toml": GOOD,
    "empty.toml": "",
    "binary.toml": b"\xff\xfe\x00",
    "twice.toml": 'run = "a"\nrun = "b"\n',
    "tables.toml": "[batcher]\n[trainer]\n[batcher]\n",
    "unquoted.toml": "run = math\n",
    "open_list.toml": "gpus = [1,\n",
    "open_text.toml": 'run = "math\n',
    "no_value.toml": "run\n",
    "list.toml": f"run = [1]\n{GOOD}",
    "table.toml": f"batcher = 3\n{GOOD}",
    "section.toml": f"[bacher]\nmax_age = 1\n{GOOD}",
    "setting.toml": f"[batcher]\nmax_agee = 1\n{GOOD}",
    "elsewhere.toml": f"[trainer]\nmax_age = 1\n{GOOD}",
    "old_name.toml": f"{GOOD}groups_per_batch = 3\n",
    "no_env.toml": GOOD.replace('env = "vcopy"', "group_size = 2"),
    "no_worker.toml": GOOD.partition("[worker")[0],
    "no_model.toml": GOOD.partition("[worker")[1] + GOOD.partition("[worker")[2],
    "two_ends.toml": f"[batcher]\nstep_groups = 3\nstep_rollouts = 4\n{GOOD}",
    "too_small.toml": f"{GOOD}group_size = 2\n[batcher]\nmin_group_size = 3\n",
    "number.toml": f'[trainer]\nsteps = "ten"\n{GOOD}',
    "truth.toml": f"[trainer]\nsteps = true\n{GOOD}",
    "choice.toml": f'[trainer]\nparallel = "tp"\n{GOOD}',
    "range.toml": f"[batcher]\nclose_fill = 1.5\n{GOOD}",
    "below.toml": f"[batcher]\nmax_age = -1\n{GOOD}",
    "path.toml": f"[trainer]\noutput = 3\n{GOOD}",
    "gpus.toml": f'[trainer]\ngpus = ["a b"]\n{GOOD}',
    "budget.toml": f"[batcher]\nbudgets = {{ vcopy = 1.5 }}\n{GOOD}",
    "loss.toml": f'[trainer.loss]\nname = "gspoo"\n{GOOD}',
    "order.toml": f'[batcher]\norder = "random"\n{GOOD}',
    "name.toml": f'[worker."a b"]\nenv = "vcopy"\n{GOOD}',
    "listen.toml": f"[metrics]\nlisten = 9464\n{GOOD}",
    "memory.toml": f'[server]\nmaxmemory = "lots"\n{GOOD}',
    "address.toml": f'redis_url = "localhost:6379"\n{GOOD}',
    "password.toml": f'redis_url = "redis://h:1/0"\nredis_password_file = "none"\n{GOOD}',
    "no_such_env.toml": GOOD.replace("vcopy", "vcoppy"),
    "no_module.toml": GOOD.replace("vcopy", "no_such_module:Env"),
    "no_name.toml": GOOD.replace("vcopy", "own:Nothing"),
    "no_path.toml": GOOD.replace("vcopy", "jsonl"),
    "no_folder.toml": '[model]\npath = "nowhere"\n[worker.a]\nenv = "vcopy"\n',
    "scorer.toml": f"{GOOD}[score.s]\nreplicas = 2\n",
    "own.py": "def make(): ...\n",
    "empty.jsonl": "",
    "text.jsonl": "hello\n",
    "number.jsonl": "3\n",
    "utf16.jsonl": b"\xff\xfe{\x00",
    "folder/x": "",
}

TYPED = [
    ("serv", 2, "'serv' serve?"),
    ("--run x serve", 2, "--run behind"),
    ("serve extra", 2, "'extra' `rlbuffer serve [OPTIONS]`"),
    ("serve --resume --fresh", 2, "--resume --fresh"),
    ("serve --confg x.toml", 2, "--confg --config?"),
    ("serve --config none.toml", 3, "none.toml `rlbuffer config init`"),
    ("serve --config folder", 3, "folder directory file"),
    ("serve --run UPPER", 3, "--run 'UPPER' a-z"),
    ("serve --redis localhost:6379", 3, "--redis localhost:6379 redis://HOST:PORT"),
    ("serve --redis redis://:pw@h:1/0", 3, "--redis RLBUFFER_REDIS_PASSWORD"),
    ("serve --archive good.toml", 3, "--archive 'good.toml' directory another"),
    ("run none.toml", 3, "none.toml `rlbuffer config init`"),
    ("run folder", 3, "folder directory file"),
    ("run --config good.toml", 2, "--config `rlbuffer run FILE`"),
    ("run good.toml extra", 2, "'extra' `rlbuffer run [OPTIONS] [FILE]`"),
    ("run good.toml --steps many", 2, "--steps 'many' integer"),
    ("run good.toml --steps 0", 3, "--steps trainer.steps 0 1 or more"),
    ("run good.toml --display loud", 2, "--display 'loud' rich, plain"),
    ("run good.toml --display", 2, "--display value"),
    ("demo --steps 0", 2, "--steps 0 1 or more"),
    ("demo --seconds soon", 2, "--seconds 'soon' number"),
    ("demo --seed -1", 2, "--seed -1 0 or more"),
    ("worker b --config good.toml", 3, "[worker.b] good.toml --env"),
    ("worker a b --config good.toml", 2, "'b' `rlbuffer worker"),
    ("worker a --config good.toml --group-size 0", 3, "--group-size worker.a.group_size 0 1 or more"),
    ("worker a --config good.toml --temperature hot", 2, "--temperature 'hot' number"),
    ("worker --env own:", 3, "--env own: package.module:name own:NAME"),
    ("score --model nowhere", 3, "--model nowhere directory"),
    ("score --reward own", 3, "--reward 'own' own:NAME"),
    ("train --config good.toml --debug-samples -1", 2, "--debug-samples -1 0 or more"),
    ("train --config good.toml --world-size two", 2, "--world-size 'two' integer"),
    ("push", 2, "FILE `rlbuffer push [OPTIONS] FILE"),
    ("push folder", 2, "FILE 'folder' directory file"),
    ("push none.jsonl", 2, "FILE 'none.jsonl' no such file"),
    ("push empty.jsonl", 1, "empty.jsonl no group"),
    ("push text.jsonl", 1, "text.jsonl:1 JSON"),
    ("push number.jsonl", 1, "number.jsonl:1 3 object"),
    ("push utf16.jsonl", 1, "utf16.jsonl UTF-16 iconv"),
    ("push text.jsonl --version new", 2, "--version new current"),
    ("export", 2, "--output missing"),
    ("export -o groups.csv", 2, "'groups.csv' FILE.jsonl"),
    ("export -o x.jsonl --where evn:a", 2, "'evn' env?"),
    ("inspect --where 'age>=old'", 2, "age 'old'"),
    ("inspect --where age", 2, "'age' env:math"),
    ("inspect --limit none", 2, "--limit 'none' integer"),
    ("inspect --plian", 2, "--plian --plain?"),
    ("inspect a b c", 2, "'c' `rlbuffer inspect"),
    ("top --every 0", 2, "--every 0.1 or more"),
    ("plot", 2, "WHAT `rlbuffer plot"),
    ("plot reward -o x.gif", 2, "x.gif .png .svg"),
    ("alive", 2, "WHO `rlbuffer alive"),
    ("alive batcher --within x", 2, "--within 'x' number"),
    ("env stop math", 2, "`rlbuffer env stop` pause"),
    ("env pause", 2, "ENV `rlbuffer env pause"),
    ("env done a/b", 2, "'a/b'"),
    ("drop", 2, "--where env:math"),
    ("drop --where ''", 2, "state:forming,ready"),
    ("drain --timeout 9", 2, "'drain' `rlbuffer env pause --all`"),
    ("env resume a --all", 2, "--all"),
    ("doctor --for nothing", 2, "--for 'nothing' run, serve"),
    ("runs lst", 2, "`rlbuffer runs lst` list?"),
    ("runs void 3", 2, "`rlbuffer runs void` `rlbuffer runs rewind N --keep-pending`"),
    ("runs rewind", 2, "N `rlbuffer runs rewind [OPTIONS] N`"),
    ("runs rewind x", 2, "N 'x' integer"),
    ("runs rewind 3 --keep", 2, "--keep --keep-pending?"),
    ("runs reset a --run b", 2, "'a' 'b'"),
    ("config chek", 2, "`rlbuffer config chek` check?"),
    ("config example", 2, "`rlbuffer config example` `rlbuffer config init`"),
    ("config check --config good.toml", 2, "--config `rlbuffer config check FILE`"),
    ("config check none.toml", 3, "none.toml `rlbuffer config init`"),
    ("config check good.toml --for all", 2, "--for 'all' run, serve"),
    ("config explain", 2, "SETTING `rlbuffer config explain"),
    ("config explain batcher.nothing", 3, "batcher.nothing `rlbuffer config show`"),
    ("config explain gpus", 3, "'gpus' trainer.gpus, worker.NAME.gpus"),
    ("config apply", 2, "`rlbuffer config apply FILE` rlbuffer.toml"),
    ("config apply table.toml", 3, "table.toml:1 batcher 3 table"),
    ("config init good.toml", 3, "good.toml another file"),
    ("config init none/x.toml", 3, "none/x.toml No such file"),
    ("config init - --all --model m", 2, "--all --env --model"),
    ("weights serve", 3, "--listen HOST:PORT weights.listen"),
    ("completion tcsh", 2, "'tcsh' bash, zsh, fish"),
    ("completion", 2, "bash, zsh, fish"),
]
"""Words of a command, its exit code, and what its error has."""

CHECKED = {
    "empty.toml": "[model] [worker.NAME] `rlbuffer config init`",
    "binary.toml": "UTF-8",
    "twice.toml": ":2 has a value already",
    "tables.toml": ":3 is there already",
    "unquoted.toml": ":1 quotes",
    "open_list.toml": "TOML",
    "open_text.toml": ":1 TOML",
    "no_value.toml": ":1 NAME = VALUE",
    "list.toml": ":1 run [1] text",
    "table.toml": ":1 batcher 3 table",
    "section.toml": ":2 bacher batcher?",
    "setting.toml": ":2 batcher.max_agee batcher.max_age?",
    "elsewhere.toml": ":2 trainer.max_age batcher.max_age?",
    "old_name.toml": ":6 worker.a.groups_per_batch worker.a.groups_in_flight",
    "no_env.toml": ":5 worker.a.env required",
    "no_worker.toml": "[worker.NAME] `rlbuffer config init`",
    "no_model.toml": "[model] [model.config] `rlbuffer config init`",
    "two_ends.toml": ":2 batcher.step_groups 3 batcher.step_rollouts one of the two",
    "too_small.toml": "batcher.min_group_size 3 worker.a.group_size 2",
    "number.toml": ":2 trainer.steps 'ten' integer",
    "truth.toml": ":2 trainer.steps true must not",
    "choice.toml": ":2 trainer.parallel 'tp' 'ddp' 'fsdp'",
    "range.toml": ":2 batcher.close_fill 1.5 1 or less",
    "below.toml": ":2 batcher.max_age -1 0 or more",
    "path.toml": ":2 trainer.output 3 path",
    "gpus.toml": ":2 trainer.gpus 'a b' UUID",
    "budget.toml": ":2 batcher.budgets.vcopy 1.5 at most 1",
    "loss.toml": ":2 trainer.loss.name 'gspoo' gspo?",
    "order.toml": ":2 batcher.order 'random' newest_first",
    "name.toml": ":2 'a b' A-Z",
    "listen.toml": ":2 metrics.listen 9464 text",
    "memory.toml": ":2 server.maxmemory 'lots' 2gb",
    "address.toml": ":1 localhost:6379 redis://HOST:PORT",
    "password.toml": ":2 redis_password_file none",
    "no_such_env.toml": ":5 worker.a.env vcoppy vcopy?",
    "no_module.toml": ":5 worker.a.env no_such_module PYTHONPATH",
    "no_name.toml": ":5 worker.a.env own:Nothing",
    "no_path.toml": ":5 worker.a.env_options 'path'",
    "no_folder.toml": ":2 model.path nowhere directory",
    "scorer.toml": ":7 score.s model reward",
}
"""A file of FILES -> what the error of `config check` has."""

THEIRS = ("Invalid value", "Got unexpected", "No such option", "No such command", "Missing ", "Input should", "parse")
"""Words of the libraries that find mistakes."""


@pytest.fixture
def run(typed: Run) -> Run:
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return typed


@pytest.mark.parametrize(("words", "code", "told"), [*TYPED, *((f"config check {f}", 3, CHECKED[f]) for f in CHECKED)])
def test_what_is_typed_or_written_wrongly_gets_one_error_with_value_place_and_remedy(
    run: Run, words: str, code: int, told: str
) -> None:
    actual, out, err = run(*shlex.split(words))
    assert (actual, out) == (code, ""), err
    assert (f"\n{err}".count("\nError: "), "Traceback" in err) == (1, False), err
    error = err[err.index("Error: ") :]
    assert [word for word in told.split() if word not in error] == [], error
    assert [word for word in THEIRS if word in error] == [], error
    if words.startswith("config check") and code == 3 and words != "config check empty.toml":
        assert "mistakes" not in error, "one mistake, and nothing that follows from it"
