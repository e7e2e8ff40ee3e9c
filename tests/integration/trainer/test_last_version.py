"""The policy versions that a trainer announces, up to the one of its last step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from test_several_updates import settings

from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train


@pytest.mark.parametrize(("steps", "versions"), [(3, [0, 2, 3]), (4, [0, 2, 4])])
def test_the_last_step_of_data_that_ends_is_published_whatever_number_it_has(
    tmp_path: Path, steps: int, versions: list[int]
) -> None:
    announced: list[int] = []

    class Ending(FakeRun):
        def steps(self, start: int | None = None, *, until: Callable[[], bool] | None = None) -> Iterator[Step]:
            yield from islice(super().steps(start), steps)
            self.has_ended = True

        def current(self) -> PolicyVersion:
            return PolicyVersion(version=announced[-1] if announced else -1, location="there")

        def announce(self, version: int, **_: Any) -> bool:
            announced.append(version)
            return True

    assert train(settings(tmp_path, steps=9, publish={"every": 2}), rank=0, world_size=1, source=Ending)
    assert announced == versions
