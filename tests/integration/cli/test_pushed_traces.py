"""`rlbuffer push` of what other frameworks recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from store_runs import Run

import rlbuffer
from rlbuffer.traces import read

TRACES = Path(__file__).parents[2] / "unit" / "fixtures" / "traces"
Call = Callable[..., tuple[int, str, str]]


def test_traces_are_recognised_and_their_rollouts_are_the_runs(run: Run, typed: Call) -> None:
    file = TRACES / "verifiers.jsonl"
    groups = read(file, policy_version=0).groups
    assert max(len(r.sequences) for group in groups for r in group.rollouts) > 1
    code, _, said = typed("push", str(file), "--redis", run.url, "--run", run.store.run, "--version", "0")
    assert code == 0, said
    assert "verifiers" in said
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        stored = {group.group_id: buffer.group(group.group_id).members for group in groups}
    for group in groups:
        lengths = [(len(r.sequences), r.length, r.loss_tokens, r.reward) for r in group.rollouts]
        assert [
            (len(m.rollout.sequences), m.length, m.loss_tokens, m.reward) for m in stored[group.group_id]
        ] == lengths
    _, again, _ = typed("push", str(file), "--redis", run.url, "--run", run.store.run, "--version", "0", "--json")
    assert '"stored": 0' in again


def test_a_file_of_no_known_format_is_refused_with_its_line(run: Run, typed: Call, tmp_path: Path) -> None:
    file = tmp_path / "12.jsonl"
    file.write_text('{"input": "2+2?", "output": "4", "gts": "4", "score": 1.0, "step": 12}\n')
    code, _, said = typed("push", str(file), "--redis", run.url, "--run", run.store.run)
    assert code != 0
    assert f"{file}:1  input: unknown field" in said
    assert run.pool() == []
