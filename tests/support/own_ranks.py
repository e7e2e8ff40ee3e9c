"""The ranks of a trainer of one's own, as torchrun starts them."""

from __future__ import annotations

import socket
from typing import Any

from homes import Home


def started(home: Home, script: str, *arguments: object, ranks: int) -> list[Any]:
    """A process for each rank that runs `script` of the home's folder, with the environment of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone, processes = home.environment, []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch` says where there is no GPU
        home.environment = alone | {name: str(value) for name, value in place.items()}
        command = [str(home.path / f"{script}.py"), *map(str, arguments)]
        processes.append(home.start_python(*command, log=f"{script}-{rank}"))
    home.environment = alone
    return processes
