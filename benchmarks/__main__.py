"""``python -m benchmarks [--json FILE] [PART OF A NAME ...]``: runs the bench_*.py of this folder in the order of their
names. ``--json`` writes what they print as data, too.

Exit code 1 when a stated target is missed.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.report import Report


def main(chosen: list[str]) -> int:
    """`chosen`: parts of names (``planning``), after an optional ``--json FILE``; none runs all."""
    file = Path(chosen[1]) if chosen[:1] == ["--json"] and len(chosen) > 1 else None
    chosen = chosen if file is None else chosen[2:]
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    wanted = [name for name in names if not chosen or any(part in name for part in chosen)]
    if not wanted:
        print(f"no benchmark is called {' or '.join(chosen)}: there are {', '.join(names)}", file=sys.stderr)
        return 2
    report = Report()
    for name in wanted:
        importlib.import_module(f"benchmarks.{name}").run(report)
    if file is not None:
        file.write_text(json.dumps(report.record, indent=1) + "\n")
    return report.end()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
