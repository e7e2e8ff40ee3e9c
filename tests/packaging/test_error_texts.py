"""Every text that an exception of the source can carry stands in a test, word for word.

A text without a test is listed with its place. Add a row with the exact text to a table of `tests/**/test_*_errors.py`,
or, where no test can make it happen, an entry with the reason to EXCEPTIONS.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
from error_texts import HOLE, ErrorText, error_names, is_covered, named_in, texts_of

ROOT = Path(__file__).parents[2]
SOURCES = ("rlbuffer", "cli/rlbuffer_cli")
_WIRE = "tests/unit/test_wire.py puts a common beginning before the texts of its table"
_GUARD = "a guard for what the types allow and the lines before it rule out"
_ENGINE = "vLLM's engine must die for it; tests/real_vllm runs the engine where vLLM is installed"
_ABORTED = "never shown: a group that is aborted goes back without a word"
_ONE_STORE = "a guard for another kind of Store: rlbuffer.connect() makes none, memory:// is a RedisStore, too"
EXCEPTIONS = MappingProxyType(
    {
        "invalid rollout payload: version_spans": _WIRE,
        "invalid rollout payload: turns": _WIRE,
        "invalid rollout payload: table of {}": _WIRE,
        "invalid rollout payload: {} has the unknown dtype {}": _WIRE,
        "invalid rollout payload: {} has the size {}": _WIRE,
        "rollout {}: {} loss tokens after {} prompt tokens do not fit {} tokens": _WIRE,
        "rollout {}: policy versions {}..{}": _WIRE,
        "rollout {}: {} turns, {} bytes, checksum {}": _WIRE,
        "agree() was called with neither a step nor a reason for having none": _GUARD,
        "the process of {} was started without pipes": _GUARD,
        "torch's variable-length attention returned more than its output": _GUARD,
        "this process is ending: it does not start the embedded server again": "only while the interpreter ends",
        "only a run on a server can be backed up": _ONE_STORE,
        "a run can only be restored onto a server": _ONE_STORE,
        "step {}: the ranks' parameters differ: {}": "only a defect of torch or of the hardware makes them differ",
        "the vLLM engine has died ({}); it is started again": _ENGINE,
        "the vLLM engine ended a request without an answer": _ENGINE,
        "the vLLM engine is not there": _ENGINE,
        "vLLM failed while it loaded version {} ({}: {}); it is started again with it": _ENGINE,
        "the worker ends": _ABORTED,
        "sampling was stopped": _ABORTED,
        "the episode has {} traces to train, a rollout is one": "needs verifiers: tests/adapters",
    }
)
"""Text, with {} for a value -> why no test has it."""


def all_texts() -> list[ErrorText]:
    """Every error text of the source that has words of its own; others only put two texts together."""
    errors = error_names(ROOT / "rlbuffer" / "errors.py")
    found: list[ErrorText] = []
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            found += texts_of(path, str(path.relative_to(ROOT)), errors)
    return [text for text in found if text.parts]


def shown(text: ErrorText) -> str:
    return text.text.replace(HOLE, "{}")


def test_every_error_text_stands_in_a_test() -> None:
    texts = all_texts()
    assert len(texts) > 350, "the reader of the source has lost its way"
    strings = named_in(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    missing = [text for text in texts if shown(text) not in EXCEPTIONS and not is_covered(text, strings)]
    assert not missing, "no test has these texts:\n" + "\n".join(map(str, missing))


def test_every_exception_is_still_a_text_of_the_source() -> None:
    assert set(EXCEPTIONS) <= {shown(text) for text in all_texts()}


MODULE = """
from rlbuffer.errors import ConfigError
CLOSED = "the reader was closed"

def _refuse(setting, why):
    raise ConfigError(f"batcher.{setting} {why}", setting=setting)

def check(value, other):
    if value < 0:
        _refuse("max_age", f"= {value} must not be negative")
    if other:
        raise ConfigError(_differs(value, other))
    message = f"cannot read {other}"
    raise ConfigError(message) if value else ConfigError(f"{CLOSED} at step {value}")

def _differs(old, new):
    return f"started with {old}, " f"asked for {new}"
"""


def texts_in(source: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "module.py"
    path.write_text(source)
    return [shown(text) for text in texts_of(path, "module.py", ["ConfigError"]) if text.parts]


def test_texts_are_found_wherever_they_are_written(tmp_path: Path) -> None:
    assert texts_in(MODULE, tmp_path) == [
        "batcher.{} {}",
        "= {} must not be negative",
        "cannot read {}",
        "the reader was closed at step {}",
        "started with {}, asked for {}",
    ]


@pytest.mark.parametrize(
    ("test", "is_named"),
    [
        ('text = "max_age = 3 must not be negative"', True),
        ('text = f"= {value} must not be negative"', True),
        ('match = r"^= \\d must not be negative$"', True),
        ('text = "= 3 must not be positive"', False),
        ('text = "= 3 must not", "be negative"', False),
    ],
)
def test_a_text_is_named_only_with_all_its_words_in_one_string(tmp_path: Path, test: str, is_named: bool) -> None:
    (tmp_path / "test_it.py").write_text(test)
    text = ErrorText(file="module.py", line=1, text=f"= {HOLE} must not be negative")
    assert is_covered(text, named_in([tmp_path / "test_it.py"])) is is_named
