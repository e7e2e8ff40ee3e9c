"""``python tests/rights.py [PROGRAM ...]``: what each user of deploy/users.acl uses of a server, as a table.

Every role does its work on a server of its own with the shipped users (the bundled one, and those that are named). The
table is from the server's own MONITOR. Exit code 1 when the server refused something, or a right is needless.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

from role_rights import record, shown, table


def main() -> int:
    """See the module's docstring. Returns the exit code."""
    good = True
    for program in sys.argv[1:] or [None]:
        with tempfile.TemporaryDirectory() as folder:
            used, refused, findings = record(Path(folder), program)
        print(program or "the bundled server")
        print("\n".join(table(used)))
        said = {"refused": refused, "needless rights": findings.needless, "allowed and not used": findings.unused}
        print("\n".join(shown(said)))
        good &= not any(said.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
