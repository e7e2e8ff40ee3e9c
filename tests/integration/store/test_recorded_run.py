"""A run as an older version left it, byte for byte: pushes and steps without lengths, headers with fewer fields.

``fixtures/run_of_2026-11-20.rlb`` is a backup that c2b59f3 wrote of a run of its own: steps 1 and 2 trained, 3 and 4
packed, groups pending. The worker and the rank were tests/support/one_role.py.
"""

from __future__ import annotations

from pathlib import Path

from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.backup.restore import restore_backup
from rlbuffer.store.redis_store import open_store

FILE = Path(__file__).parent / "fixtures" / "run_of_2026-11-20.rlb"
CONFIG = rlbuffer.BatcherConfig(row_tokens=64, step_groups=2, max_age=4)


def test_a_run_of_an_older_version_is_read_and_trained_on(redis_url: str, tmp_path: Path) -> None:
    run = Run(redis_url, tmp_path)
    store = run.closes(open_store(redis_url, run=f"{run.store.run}-old", home=tmp_path, server=ServerSettings()))
    restore_backup(store, FILE)
    run.store, run.meta = store, store.meta()
    try:
        assert store.verify().findings == ()
        before = store.ledger().total()
        assert {longest for parts in before.lengths.values() for longest in parts} == {0}
        # The settings of that day are fewer: `serve --replace-config`.
        Served(run).serve(CONFIG, replace_config=True)
        reader = run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=60))
        for step in reader.steps(start=3):
            assert (step.damaged, step.header.masks_truncated) == ((), False)
            reader.trained(step)
            if step.number == 5:
                break
        assert store.verify().findings == ()
        after = store.ledger().total()
        assert after.trained[0] == before.trained[0] + 3 * 4
        # Its own steps have no lengths, those of the batcher and trainer of this version have.
        assert after.lengths["trained"][0][0] == before.trained[0] + 2 * 4
    finally:
        run.close()
