"""``python -m rlbuffer_cli`` is ``rlbuffer``."""

from __future__ import annotations

import sys

from rlbuffer_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
