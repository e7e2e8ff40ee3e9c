"""`rlbuffer run` that trains a LoRA adapter: workers sample with each of its versions."""

from __future__ import annotations

import re

from homes import Home


def test_a_run_that_trains_an_adapter_samples_with_its_versions(home: Home) -> None:
    config = home.config(world_size=1, steps=6)
    text = config.read_text().replace('env = "vcopy"', 'env = "vcopy"\nself_check = "always"')
    config.write_text(f"{text}\n[trainer.lora]\nrank = 4\nalpha = 8.0\n")

    run = home.start("run", config, "--display", "plain", log="run")
    assert home.ended(run, 240) == 0, home.logs()
    log = (home.path / "run.log").read_text()
    differences = re.findall(r"worker vcopy .*logprobs are those of the published weights \(to (\S+)\)", log)
    assert len(differences) == 2, "the base that the engine starts with, and the first version that takes its place"
    assert max(map(float, differences)) < 1e-4
    assert not re.search("Traceback|weights do not fit|goes on sampling", log), home.logs()

    records = home.metrics()
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["age"] < 5, "the last step has rollouts of the adapter's versions, not of the first alone"
    names = sorted(path.name.partition("-")[0] for path in (home.path / "runs/tiny/weights").iterdir())
    assert names[0] == "base"
    assert names[-1] == "v00000006"
    assert home.call("verify", "--run", "tiny").returncode == 0
