"""Benchmarks: what a run costs. They share servers and stores with the tests (tests/support)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
