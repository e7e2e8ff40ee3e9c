"""Two gloo ranks that replay experts have the gradient of one process, under DDP and under FSDP2."""

from __future__ import annotations

from pathlib import Path

import expert_ranks
from forked import Parent


def test_ranks_that_replay_experts_have_the_gradient_of_one_process(parent: Parent, tmp_path: Path) -> None:
    ranks = [
        parent.start([expert_ranks.__file__, str(rank), str(tmp_path)], environment=parent.environment, folder=tmp_path)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=150)
            assert rank.returncode == 0, out + errors
    finally:
        for rank in ranks:
            rank.kill()
    import torch
    from expert_families import config_of, made

    from rlbuffer.trainer.model.packed_policy import prepare

    policy = prepare(made(config_of(expert_ranks.FAMILY)))
    for rank in range(2):
        ids, positions, cu_seqlens, chosen, routed, weights = expert_ranks.row_of(policy, rank)
        logprobs, _ = policy(ids, positions, cu_seqlens, chosen, 1.0, routed)
        (logprobs * weights).sum().backward()
    expected = {name: p.grad / 2 for name, p in policy.named_parameters() if p.grad is not None}
    told = torch.load(tmp_path / "gradients.pt")
    for way, gradients in told.items():
        assert gradients.keys() == expected.keys()
        apart = max(float((gradients[name] - its).abs().max()) for name, its in expected.items())
        assert (apart > 1e-3) if way == "own choice" else (apart < 1e-9), way
