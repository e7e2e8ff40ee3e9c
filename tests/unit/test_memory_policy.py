"""A run's needs of the server's memory, and the rules for when it fills up. Shares are of a limit of 1000 bytes."""

from __future__ import annotations

from typing import Any

import pytest
from logged import Logged
from step_headers import header_of

from rlbuffer.config import memory_needs
from rlbuffer.config.batcher import BatcherConfig, EnvConfig
from rlbuffer.config.memory_needs import Forecast, forecast_of
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import memory_rules
from rlbuffer.daemon.archiving import Archiving
from rlbuffer.daemon.memory_rules import Pressure
from rlbuffer.daemon.memory_watch import MemoryWatch
from rlbuffer.records.waiting import Trouble
from rlbuffer.store.records import Attempt, Meta

LIMIT = 1000
SIZES = dict.fromkeys(range(1, 100), 50)


def seen(*used: int, limit: int = LIMIT, retired: int = 0, sizes: dict[int, int] = SIZES) -> Pressure:
    pressure = Pressure()
    pressure.sizes = sizes
    pressure.retire(retired)
    for bytes_used in used:
        pressure.observe(bytes_used, limit)
    return pressure


# -- forecast ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (BatcherConfig(64), 5),
        (BatcherConfig(64, lookahead=0, max_age=0), 3),
        (BatcherConfig(64, lookahead=2, max_age=1, envs={"a": EnvConfig(max_age=4), "b": EnvConfig()}), 9),
    ],
)
def test_steps_at_once_are_lookahead_and_the_largest_max_age_and_three(config: BatcherConfig, steps: int) -> None:
    assert memory_needs.steps_at_once(config) == steps


def test_a_full_step_takes_its_rows_at_nine_bytes_a_token_and_one_rollout_a_row() -> None:
    config = BatcherConfig(1000, micro_batches_per_rank=2, rows_per_micro_batch=3, step_groups=0)
    assert memory_needs.capacity_bytes(config, 4) == 4 * 2 * 3 * (9 * 1000 + memory_needs.ROLLOUT_BYTES)


@pytest.mark.parametrize("size", [{"step_groups": 4}, {"step_rollouts": 64}])
def test_steps_of_a_number_of_groups_or_rollouts_are_known_when_they_are_there(size: dict[str, int]) -> None:
    assert memory_needs.capacity_bytes(BatcherConfig(1000, **size), 4) is None  # type: ignore[arg-type]


def test_such_steps_take_no_more_than_full_rows_and_their_rollouts() -> None:
    rows, of_rollout = 4 * 9 * 1000, memory_needs.ROLLOUT_BYTES
    assert memory_needs.most_bytes(BatcherConfig(1000, step_groups=4), 4, 16) == rows + 64 * of_rollout
    assert memory_needs.most_bytes(BatcherConfig(1000, step_rollouts=70), 4, 16) == rows + 70 * of_rollout
    assert memory_needs.most_bytes(BatcherConfig(1000, step_groups=0), 4, 16) is None
    assert memory_needs.most_bytes(BatcherConfig(1000, feeds="stream"), 1, 16) is None


def test_the_experts_of_a_token_are_part_of_what_it_takes() -> None:
    experts = {"num_hidden_layers": 3, "num_experts": 300, "num_experts_per_tok": 4}
    given: dict[str, Any] = {"model": {"config": experts}, "batcher": {"row_tokens": 1000, "step_groups": 0}}
    plain, recorded = (
        forecast_of(RunSettings(**given, worker={"a": {"env": "vcopy", "record_experts": records}}), LIMIT)
        for records in (False, True)
    )
    assert plain is not None
    assert recorded is not None
    rows = RunSettings(**given).batcher.micro_batches_per_rank * RunSettings(**given).batcher.rows_per_micro_batch
    assert recorded.step_bytes - plain.step_bytes == rows * 1000 * 3 * 4 * 2


@pytest.mark.parametrize(("step_bytes", "fits"), [(119, True), (120, True), (121, False)])
def test_five_steps_must_fit_sixty_percent(step_bytes: int, fits: bool) -> None:
    assert Forecast(step_bytes=step_bytes, steps=5, limit=LIMIT).fits is fits


# -- 85 % --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("used", "last"),
    # 75 % of the missing 100, 110 and 250 bytes, in steps of 50.
    [(849, None), (850, 2), (860, 2), (1000, 4)],
)
def test_from_85_percent_the_oldest_trained_steps_go(used: int, last: int | None) -> None:
    assert seen(used, used).retires_up_to(90) == last


def test_one_high_look_is_a_client_s_buffer() -> None:
    pressure = seen(700, 990)
    assert pressure.retires_up_to(90) is None
    pressure.observe(900, LIMIT)
    assert pressure.retires_up_to(90) == 3
    assert seen(990).retires_up_to(90) is None


@pytest.mark.parametrize(
    ("looks", "may_be_short"),
    [((), True), ((100,), True), ((100, 299), False), ((100, 300), True), ((900, 100), False)],
)
def test_a_server_that_fills_is_looked_at_more_often_from_30_percent(
    looks: tuple[int, ...], may_be_short: bool
) -> None:
    assert seen(*looks).may_be_short is may_be_short
    assert not seen(10**9, 10**9, limit=0).may_be_short


def test_early_retirement_goes_on_down_to_75_percent_and_begins_again_at_85() -> None:
    pressure = seen(860, 860)
    for used, last in ((800, 1), (750, 1), (749, None), (849, None), (850, 2)):
        pressure.retires_up_to(90)
        pressure.retire(0)
        pressure.observe(used, LIMIT)
        pressure.observe(used, LIMIT)
        assert pressure.retires_up_to(90) == last, used


def test_what_is_not_trained_never_goes() -> None:
    assert seen(1000, 1000, retired=3).retires_up_to(5) == 5
    assert seen(1000, 1000, retired=5).retires_up_to(5) is None
    assert seen(1000, 1000, retired=5).retires_up_to(4) is None


def test_of_steps_whose_size_is_not_known_one_goes_at_a_time() -> None:
    assert seen(1000, 1000, retired=3, sizes={}).retires_up_to(90) == 4


def test_a_server_without_a_limit_is_never_short() -> None:
    pressure = seen(10**12, 10**12, limit=0)
    assert pressure.retires_up_to(90) is None
    assert not pressure.asks(done=90)
    assert pressure.share == 0.0


# -- 70 % --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("used", "asks"), [(699, False), (700, True)])
def test_from_70_percent_a_checkpoint_is_asked_for(used: int, asks: bool) -> None:
    assert seen(used, used).asks(done=9) is asks


@pytest.mark.parametrize(("done", "asks"), [(1, False), (2, True)])
def test_a_checkpoint_that_could_free_less_than_a_tenth_is_not_asked_for(done: int, asks: bool) -> None:
    assert seen(900, 900).asks(done=done) is asks


def test_it_is_not_asked_again_while_the_checkpoint_is_being_made() -> None:
    pressure = seen(800, 800)
    pressure.committed(11, 50, asks=True)
    assert [pressure.asks(done=done) for done in (9, 10, 11, 12)] == [False] * 3 + [True]
    assert not pressure.asks(done=10, checkpoint=10)
    assert pressure.asks(done=11, checkpoint=11)


def test_it_is_asked_again_after_each_checkpoint_while_memory_stays_short() -> None:
    pressure = seen(800, 800)
    asked = []
    for step in range(10, 20):
        if pressure.asks(done=step - 2):
            pressure.committed(step, 50, asks=True)
            asked.append(step)
    assert asked == [10, 13, 16, 19]


def test_after_an_early_retirement_a_checkpoint_is_asked_for_whatever_the_memory_is() -> None:
    pressure = seen(100, 100, retired=3)
    pressure.must_ask = True
    assert pressure.asks(done=3)
    pressure.committed(5, 50, asks=True)
    assert not pressure.asks(done=6)


# -- what is told ------------------------------------------------------------------------------------------------------
class Machine:
    """A server of 1000 bytes."""

    used, maxmemory = 0, LIMIT

    def losses(self) -> int:
        return 0

    def server(self) -> dict[str, Any]:
        return {"name": "valkey", "maxmemory": self.maxmemory, "used_memory": self.used}

    def retire(self, *args: object, **said: object) -> int:
        return 1


@pytest.mark.parametrize(
    ("maxmemory", "used", "is_told"), [(LIMIT, 969, False), (LIMIT, 970, True), (0, 10**12, False)]
)
def test_a_full_server_is_a_trouble_and_one_without_a_limit_is_none(
    maxmemory: int, used: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbuffer.daemon.memory_watch.HURRY_SECONDS", 0.0)
    monkeypatch.setattr("rlbuffer.daemon.memory_watch.TELEMETRY_SECONDS", 0.0)
    store: Any = Machine()
    store.maxmemory, store.used = maxmemory, used
    watch = MemoryWatch(store)
    told = [watch.problems() for _ in range(memory_rules.MEMORY_LOOKS)]
    assert [problem.kind for problem in told[-1]] == [Trouble.MEMORY] * is_told


def test_an_early_retirement_and_the_checkpoint_that_it_asks_for_name_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlbuffer.daemon.memory_watch.HURRY_SECONDS", 0.0)
    store: Any = Machine()
    store.used = LIMIT
    logged = Logged("rlbuffer.daemon")
    watch = MemoryWatch(store)
    trainer = Attempt(number=1, trained=7, at=7, seen_seconds_ago=0.0)
    meta = Meta(schema=1, epoch=1, step=7, digest="", retired=2, config={}, config_digest="", error="")
    archive = Archiving(pytest.fail, None)
    watch.retired(meta.retired)
    while not watch.is_short():
        assert not watch.relieve(trainer, meta.step, archive)
    assert watch.relieve(trainer, meta.step, archive)
    (early,) = logged.told("memory")
    assert (early.first, early.last) == (3, 3)
    assert watch.marked(meta, trainer).checkpoint_now
    watch.committed(header_of(step=8, checkpoint_now=True))
    logged.close()
    assert [(line.state, line.step) for line in logged.told("memory")[1:]] == [("checkpoint", 8)]
