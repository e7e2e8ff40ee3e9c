"""This process among its ranks: small exchanges of numbers and texts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

MOST_SLEEP_SECONDS = 0.005


class Ranks:
    """This process among its ranks. With a world size of 1 nothing is exchanged.

    Example:
        >>> ranks = Ranks(0, 1, torch.device("cpu"))
        >>> ranks.gather(torch.tensor([0.5, 2.0])).tolist()
        [[0.5, 2.0]]
        >>> ranks.gather_text("ready")
        ['ready']
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device

    def gather(self, values: Tensor, *, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """[k] -> [world size, k]: everybody's values, to everybody. On the CPU.

        `meanwhile` is called again and again while others are waited for; what it raises ends the wait.
        """
        if self.world_size == 1:
            return values[None].cpu()
        local = values.to(self.device)
        received = [torch.empty_like(local) for _ in range(self.world_size)]
        exchange = dist.all_gather(received, local, async_op=True)
        sleep = 1e-4
        while meanwhile is not None and not exchange.is_completed():
            time.sleep(sleep)
            sleep = min(2 * sleep, MOST_SLEEP_SECONDS)
            meanwhile()
        exchange.wait()
        return torch.stack(received).cpu()

    def gather_digests(self, hex_digest: str) -> list[str]:
        """Everybody's SHA-256."""
        rows = self.gather(torch.tensor(list(bytes.fromhex(hex_digest)), dtype=torch.uint8))
        return [bytes(row.tolist()).hex() for row in rows]

    def gather_text(self, text: str, *, meanwhile: Callable[[], None] | None = None) -> list[str]:
        """Everybody's text; `meanwhile` as in :meth:`gather`."""
        data = text.encode()
        sizes = self.gather(torch.tensor([len(data)], dtype=torch.int64), meanwhile=meanwhile)[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.gather(padded)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def sum(self, values: Tensor) -> Tensor:
        """[k] float64 -> [k]: the sum over ranks, added up in the order of ranks: the same bits everywhere."""
        return self.gather(values).sum(0)

    def first(self, value: int) -> int:
        """Rank 0's value."""
        return int(self.gather(torch.tensor([value], dtype=torch.int64))[0, 0])

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.first(0)
