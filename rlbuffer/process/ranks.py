"""This process among its ranks: small exchanges of numbers and texts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlbuffer.errors import RankFailed, RlbufferError
from rlbuffer.records.micro_batch import Step
from rlbuffer.trainer.ranks.agreement import (
    _ENDED,
    _FAILED,
    _LOSS_TOKENS,
    _OUTCOMES,
    _STOPPING,
    Agreement,
    Verdict,
    _digest_text,
    _encode,
)


class Ranks:
    """This process among its ranks. With a world size of 1 nothing is exchanged."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device

    def gather(self, values: Tensor) -> Tensor:
        """[k] -> [world size, k]: everybody's values, to everybody. On the CPU."""
        if self.world_size == 1:
            return values[None].cpu()
        local = values.to(self.device)
        received = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(received, local)
        return torch.stack(received).cpu()

    def gather_digests(self, hex_digest: str) -> list[str]:
        """Everybody's SHA-256."""
        rows = self.gather(torch.tensor(list(bytes.fromhex(hex_digest)), dtype=torch.uint8))
        return [bytes(row.tolist()).hex() for row in rows]

    def gather_text(self, text: str) -> list[str]:
        """Everybody's text."""
        data = text.encode()
        sizes = self.gather(torch.tensor([len(data)], dtype=torch.int64))[:, 0].tolist()
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

    def agree(
        self,
        step: Step | None,
        *,
        failure: RlbufferError | None = None,
        is_stopping: bool = False,
        has_ended: bool = False,
    ) -> Agreement:
        """Compares what each rank holds: digest, outcome, readable tokens.

        Args:
            step: what this rank would train; None when it failed or stops, or the run has ended.

        Raises:
            RlbufferError: `failure`, if this rank has one.
            RankFailed: another rank has one; with that rank's exit code.
        """
        rows = self.gather(_encode(step, failure, is_stopping, has_ended))
        if failure is not None:
            raise failure
        failed = [r for r in range(len(rows)) if rows[r, 0] == _FAILED]
        if failed:
            error = RankFailed(f"rank {failed[0]} could not go on; its own message says why")
            error.exit_code = int(rows[failed[0], 1])
            raise error
        if (rows[:, 0] == _STOPPING).any():
            return Agreement(verdict=Verdict.STOP)
        if (rows[:, 0] == _ENDED).all():
            return Agreement(verdict=Verdict.END)
        if (rows[:, 0] == _ENDED).any():  # it goes on: more was pushed at this very moment
            return Agreement(verdict=Verdict.PULL_AGAIN, held=tuple(_OUTCOMES[int(row[0])] for row in rows))
        if step is None:
            raise RlbufferError("agree() was called with neither a step nor a reason for having none")
        if not (rows[:, 2:_LOSS_TOKENS] == rows[0, 2:_LOSS_TOKENS]).all():
            held = tuple(
                f"rank {r}: step {int(row[2])} of epoch {int(row[3])}, digest {_digest_text(row)}"
                for r, row in enumerate(rows)
            )
            return Agreement(verdict=Verdict.PULL_AGAIN, held=held)
        damaged = max(0, step.normalizers.loss_tokens - int(rows[:, _LOSS_TOKENS].sum()))
        return Agreement(verdict=Verdict.TRAIN, damaged_tokens=damaged)
