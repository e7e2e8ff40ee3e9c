"""``torchrun ... -m rlbuffer.trainer [rlbuffer.toml]``: joins as torchrun says; without torchrun, starts the ranks."""

from __future__ import annotations

import os
import sys

from rlbuffer.checks.loading import load
from rlbuffer.config.imports import make_importable
from rlbuffer.config.loading import folders_of
from rlbuffer.errors import RlbufferError, text_of
from rlbuffer.process import logs
from rlbuffer.process.environment import yield_cores
from rlbuffer.state.text import printable


def main(arguments: list[str]) -> int:
    """Returns the exit code. `arguments` may name the settings' file; else they are found as every command finds
    them."""
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print("usage: [torchrun ...] -m rlbuffer.trainer [rlbuffer.toml]", file=sys.stderr)
        return 2
    logs.outlive_readers()
    try:
        loaded = load(arguments[0] if arguments else None, parts=("train",))
        make_importable(folders_of(loaded.file))
        settings = loaded.settings
        if "RANK" not in os.environ:
            from rlbuffer.trainer.launch.launcher import launch

            return launch(settings, world_size=settings.trainer.world_size)
        yield_cores()
        from rlbuffer.trainer.launch.processes import INTERRUPTED
        from rlbuffer.trainer.launch.rank import run_rank

        code = 0 if run_rank(settings) else INTERRUPTED
        logs.stop()
        # As every forked rank ends: without destructors, which may hang (see `rlbuffer.trainer.loop`).
        os._exit(code)
    except RlbufferError as error:
        print(printable(f"Error: {text_of(error)}", lines=True), file=sys.stderr)
        logs.stop()
        if "RANK" in os.environ:
            os._exit(error.exit_code)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
