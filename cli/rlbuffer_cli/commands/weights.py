"""``rlbuffer weights``."""

from __future__ import annotations

import threading

from rlbuffer.errors import ConfigError
from rlbuffer_cli import options
from rlbuffer_cli.options import echo


@options.group("weights")
def command() -> None:
    """Serve policy versions to other hosts.

    \b
    Example:
      rlbuffer weights serve --listen 0.0.0.0:9465
    """


@command.command("serve")
@options.common
@options.setting("weights.listen", "Where to serve. [default: weights.listen]", metavar="HOST:PORT")
def serve(given: options.RunFlags) -> int:
    """Serve policy versions over HTTP until ctrl-C.

    It serves what the trainer publishes on this host: for trainers started by torchrun, and hosts where that should be
    a process of its own (`rlbuffer train` and `rlbuffer run` serve by themselves when weights.listen is set).
    RLBUFFER_WEIGHTS_TOKEN, when set, is asked for as bearer token.

    \b
    Example:
      rlbuffer weights serve --listen 0.0.0.0:9465
    """
    from rlbuffer.process.environment import name_process
    from rlbuffer.process.signals import stop_on_signals
    from rlbuffer.weights.cache import weights_token
    from rlbuffer.weights.places import load_serving

    settings = given.load().settings
    address = settings.weights.listen
    if not address:
        raise ConfigError(
            "where should it listen? Give --listen HOST:PORT, or set weights.listen", setting="weights.listen"
        )
    serving = load_serving()
    name_process("weights")
    stop = threading.Event()
    folder = settings.output_dir / "weights"
    app = serving.make_app(folder, token=weights_token())
    with stop_on_signals(stop), serving.FileServer(app, address) as server:
        echo(f"serving {folder} at {address} ({server.url} from here)")
        stop.wait()
    return 0
