"""``python tests/faults``: runs of real processes on a real server, under faults. ``make faults`` calls it.

    python tests/faults                       everything, with a seed of the day
    python tests/faults kills --seed 7        one of the runs again

Exit code 0 when there was no finding, else 1.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Runs with the homes and servers of tests/support. Returns the exit code."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from fault_command import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
