"""A worker and a trainer in threads, which go on through whatever befalls their server."""

from __future__ import annotations

import threading
from collections import Counter

from store_runs import Run

import rlbuffer
from rlbuffer.errors import ServerRefused, ServerUnreachable
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group


class Looping:
    """A worker that pushes and a trainer that pulls, in threads, as their own processes would."""

    def __init__(self, run: Run, step_seconds: float) -> None:
        """`step_seconds`: between two pushes."""
        self._step_seconds = step_seconds
        self._stop, self._trains = threading.Event(), threading.Event()
        self._trains.set()
        self.trained: list[int] = []
        self.uses: Counter[str] = Counter()
        """Rollout -> trained steps that it was in."""
        self.damaged: list[str] = []
        """Rollouts that trained as padding."""
        self.errors: list[BaseException] = []
        self._run = run
        reader = run.closes(rlbuffer.Reader(run.again(), rank=0, world_size=1, timeout_seconds=60))
        reader.start(0)
        reader.announce(PolicyVersion(version=0))
        self._threads = [threading.Thread(target=self._push), threading.Thread(target=self._train, args=(reader,))]
        for thread in self._threads:
            thread.start()

    def _push(self) -> None:
        with rlbuffer.connect(self._run.url, run=self._run.store.run) as buffer:
            writer = buffer.writer("w")
            number = 0
            while not self._stop.wait(self._step_seconds):
                try:
                    writer.push(make_group(env="a", size=2, version=0, group_id=f"a.{number}", seed=number))
                except (ServerUnreachable, ServerRefused):
                    continue  # once more, as a worker does
                except BaseException as error:
                    self.errors.append(error)
                    return
                number += 1

    def _train(self, reader: rlbuffer.Reader) -> None:
        try:
            for step in reader.steps():
                self.uses.update({sample.rollout_id for batch in step for sample in batch.samples})
                reader.announce(PolicyVersion(version=step.number))
                reader.trained(step)
                self.damaged += step.damaged
                self.trained.append(step.number)
                if not self._trains.is_set():
                    return
        except BaseException as error:
            self.errors.append(error)

    def close(self) -> None:
        """Ends with the next step that is trained."""
        self._trains.clear()
        self._threads[1].join(60)
        self._stop.set()
        self._threads[0].join(60)
        assert not any(thread.is_alive() for thread in self._threads)
