"""``python tests/faults``: runs of real processes on a real server, under faults. ``make faults`` calls it.

    python tests/faults                       everything, with a seed of the day
    python tests/faults kills --seed 7        one of the runs again

Exit code 0 when there was no finding, else 1.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Runs with the homes of the end-to-end tests and the servers of the integration tests. -> exit code"""
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests / "e2e"), str(tests / "integration")]
    from fault_command import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
