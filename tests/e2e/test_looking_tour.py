"""The tour of docs/guide/inspect.md in a real terminal, beside a live demo: every screen by the documented keys."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "inspect.md"
SCREENS = {
    "pool": ("share of tokens", "of pushed "),
    "group": ("16 of 16 rollouts", "prompt "),
    "compare": ("they part at token", "≠"),
    "rollout-logprob": ("2 logprob: ", "TOKEN ", "LIFE"),
    "rollout-advantage": ("3 advantage: ",),
    "steps": ("reward ", "entropy ", "closed by"),
    "step": ("rank 0: ", "rank 1: ", "empty", "worst rollout"),
    "workers": ("worker vcopy", "worker repeat", "rank 0", "batcher"),
}
"""Screen -> what it says."""


def load() -> ModuleType:
    """The script that makes the pictures."""
    spec = importlib.util.spec_from_file_location("pictures", PAGE.parent / "inspect" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = load()


def test_the_page_shows_the_pictures_that_the_scripts_make() -> None:
    shown = re.findall(r"\]\(inspect/([\w-]+)\.png\)", PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(pictures.KEPT)
    files = list((PAGE.parent / "inspect").glob("*.png"))
    assert sorted(file.stem for file in files) == sorted(shown)
    assert max(file.stat().st_size for file in files) < 100_000


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_tour_passes_every_screen(tmp_path: Path) -> None:
    seen: dict[str, str] = {}
    rlbuffer = str(Path(sys.executable).with_name("rlbuffer"))

    def keep(name: str, window: object) -> None:
        seen[name] = window.text()  # type: ignore[attr-defined]

    home = str(tmp_path / "home")
    with pictures.demo(home), pictures.terminal("looker", rlbuffer, "inspect", "--home", home) as window:
        pictures.tour(window, keep)
    for name, text in seen.items():
        flowing = " ".join(text.split())
        assert [word for word in SCREENS[name] if word.strip() not in flowing] == [], f"{name}:\n{text}"
        assert max(map(len, text.splitlines())) <= pictures.SIZE[0]
    assert seen.keys() == SCREENS.keys()
