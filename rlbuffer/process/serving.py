"""The loop of a process that serves a run until it is stopped: one for workers and scorers. Who leads a run is stopped
by other errors (:meth:`rlbuffer.daemon.loop.Daemon.run`), and who reads it hears them.

::

    serve --it is over--------------> end
       |---Stopped------------------> end
       |---RunGone------------------> forget, and serve what is there by then; of a damaged run after a pause
       +---ServerRefused------------> say it, pause, serve again
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from rlbuffer.errors import RunDamaged, RunGone, ServerRefused
from rlbuffer.process.signals import Stopped

PAUSE_SECONDS = 1.0
"""Before a damaged run, or a server that takes nothing, is tried again."""


async def serve_until_stopped(
    serve: Callable[[], Awaitable[bool]],
    *,
    stop: threading.Event,
    forget: Callable[[RunGone], None],
    refused: Callable[[ServerRefused], None],
) -> bool:
    """Serves one run after the other that is there under a name, until `stop` is set or one has ended (-> True).

    Args:
        serve: serves the run that is there; True when it has ended.
        stop: ends the loop before the next run.
        forget: it is another run, or another epoch: numbers that are remembered mean something else.
        refused: the server takes no writes for now.
    """
    has_ended = False
    while not (stop.is_set() or has_ended):
        try:
            has_ended = await serve()
        except Stopped:
            break
        except RunGone as error:
            forget(error)
            if isinstance(error, RunDamaged):  # until a person has mended it
                await asyncio.sleep(PAUSE_SECONDS)
        except ServerRefused as error:
            refused(error)
            await asyncio.sleep(PAUSE_SECONDS)
    return has_ended
