"""Eight ranks train what one rank trains: the same recorded steps give the same parameters."""

from __future__ import annotations

from homes import Home

STEPS = 5


def test_eight_ranks_train_what_one_rank_trains(home: Home) -> None:
    """Takes a minute or two on two cores: eight ranks exchange gradients five times, then one trains alone."""
    import torch

    from rlbuffer.trainer.checkpoints.checkpoint import load_parameters

    config = home.config(steps=STEPS, world_size=8, dtype="float64", checkpoint_every=STEPS, keep_checkpoints=50)
    home.start_sources(config)
    eight = home.start("train", "--config", config, "--world-size", "8", log="train-8")
    assert home.ended(eight, 240) == 0, home.logs()
    records = home.metrics()
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    for record in records:
        assert len(record["parameters_sha256"]) == 8
        assert len(set(record["parameters_sha256"])) == 1

    alone = home.path / "alone"
    one = home.start("train", "--config", config, "--world-size", "1", "--output", alone, log="train-1")
    assert home.ended(one, 240) == 0, home.logs()
    assert [r["step"] for r in home.metrics(folder=alone)] == list(range(1, STEPS + 1))
    many = load_parameters(home.path / "runs" / "tiny", STEPS)
    single = load_parameters(alone, STEPS)
    assert many.keys() == single.keys()
    difference = torch.sqrt(sum(((many[k].double() - single[k].double()) ** 2).sum() for k in many))
    norm = torch.sqrt(sum((single[k].double() ** 2).sum() for k in many))
    assert float(difference / norm) <= 1e-9
    assert len(records[0]["batch_sha256"]) == 8
    assert home.call("verify", "--run", "tiny").returncode == 0
