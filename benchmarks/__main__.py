"""``python -m benchmarks [--json FILE] [--beside VENV]... [PART OF A NAME ...]``

Runs the bench_*.py of this folder in the order of their names. ``--json`` writes what they print as data, too;
``--beside`` names an environment that holds Reverb or TransferQueue, for bench_beside.

Exit code 1 when a stated target is missed.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.report import Report


def main(chosen: list[str]) -> int:
    """`chosen`: parts of names (``planning``), after options; none runs all."""
    file, environments = None, list[Path]()
    while chosen[:1] in (["--json"], ["--beside"]) and len(chosen) > 1:
        option, value, *chosen = chosen
        if option == "--json":
            file = Path(value)
        else:
            environments.append(Path(value).absolute())
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    wanted = [name for name in names if not chosen or any(part in name for part in chosen)]
    if not wanted:
        print(f"no benchmark is called {' or '.join(chosen)}: there are {', '.join(names)}", file=sys.stderr)
        return 2
    report = Report(environments=environments)
    for name in wanted:
        importlib.import_module(f"benchmarks.{name}").run(report)
    if file is not None:
        file.write_text(json.dumps(report.record, indent=1) + "\n")
    return report.end()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
