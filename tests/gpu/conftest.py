"""What only a CUDA device shows; skipped without one. `python -m pytest tests/gpu`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cuda() -> None:
    """Skips where there is no device; else its memory is as if nothing had run before."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    torch.cuda.empty_cache()
