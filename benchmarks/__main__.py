"""``python -m benchmarks [PART OF A NAME ...]``: runs the bench_*.py of this folder in the order of their names.

Exit code 1 when a stated target is missed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.report import Report


def main(chosen: list[str]) -> int:
    """`chosen`: parts of names (``planning``); none runs all."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    wanted = [name for name in names if not chosen or any(part in name for part in chosen)]
    if not wanted:
        print(f"no benchmark is called {' or '.join(chosen)}: there are {', '.join(names)}", file=sys.stderr)
        return 2
    report = Report()
    for name in wanted:
        importlib.import_module(f"benchmarks.{name}").run(report)
    return report.end()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
