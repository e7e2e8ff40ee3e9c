"""Deltas between files of weights: whatever is drawn is rebuilt bit for bit, or refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlbuffer.errors import WeightsError
from rlbuffer.weights import delta
from rlbuffer.weights.delta import apply_delta, write_delta

here = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def files_of(folder: Path, words: int, seed: int, share: float, largest: int) -> tuple[Path, Path]:
    """A file of words, and the same with a share of them changed by up to `largest`."""
    dice = np.random.default_rng(seed)
    old = dice.integers(0, 1 << 16, words, dtype=np.uint16)
    steps = dice.integers(-largest, largest + 1, words).astype(np.int64)
    new = np.where(dice.random(words) < share, old + steps, old).astype(np.uint16)
    for name, data in (("old", old), ("new", new)):
        (folder / name).write_bytes(data.tobytes())
    return folder / "old", folder / "new"


@here
@given(
    words=st.integers(1, 2000),
    seed=st.integers(0, 1 << 30),
    share=st.sampled_from([0.0, 0.003, 0.02, 0.1]),
    largest=st.sampled_from([1, 3, 200, 32767]),
    chunk=st.sampled_from([7, 256, 1 << 23]),
)
def test_a_file_is_rebuilt_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int, seed: int, share: float, largest: int, chunk: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(delta, "CHUNK_WORDS", chunk)
        patch.setattr(delta, "MOST_SHARE", 1e9)
        old, new = files_of(tmp_path, words, seed, share, largest)
        assert write_delta(old, new, tmp_path / "delta")
        checksum = apply_delta(old, tmp_path / "delta", tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == new.read_bytes()
    assert checksum == hashlib.sha256(new.read_bytes()).hexdigest()


@here
@given(words=st.integers(100, 40_000), share=st.sampled_from([0.0, 0.01, 0.4, 1.0]))
def test_a_delta_that_is_kept_is_at_most_half_of_the_file(tmp_path: Path, words: int, share: float) -> None:
    old, new = files_of(tmp_path, words, words, share, 32767)
    out = tmp_path / "delta"
    out.unlink(missing_ok=True)
    is_kept = write_delta(old, new, out)
    assert is_kept == out.exists()
    assert not is_kept or out.stat().st_size <= words
    assert is_kept or share >= 0.4 or words < 200


@pytest.mark.parametrize(("old", "new"), [(b"ab", b"abcd"), (b"abc", b"abd")])
def test_files_of_other_or_odd_sizes_have_no_delta(tmp_path: Path, old: bytes, new: bytes) -> None:
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    assert not write_delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


@here
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_a_damaged_delta_is_refused_or_makes_a_file_of_another_checksum(
    tmp_path: Path, data: st.DataObject, seed: int
) -> None:
    old, new = files_of(tmp_path, 2000, seed, 0.05, 300)
    assert write_delta(old, new, tmp_path / "delta")
    whole = bytearray((tmp_path / "delta").read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "other", "of another size"]))
    if kind == "flip":
        place = data.draw(st.integers(0, 8 * len(whole) - 1))
        whole[place // 8] ^= 1 << place % 8
    elif kind == "cut":
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    elif kind == "longer":
        whole += data.draw(st.binary(min_size=1, max_size=40))
    elif kind == "other":
        whole[8:] = data.draw(st.binary(max_size=200))
    else:
        old.write_bytes(old.read_bytes() + bytes(2 * data.draw(st.integers(1, 50))))
    (tmp_path / "delta").write_bytes(whole)
    try:
        checksum = apply_delta(old, tmp_path / "delta", tmp_path / "made")
    except WeightsError:
        return
    made = (tmp_path / "made").read_bytes()
    assert checksum == hashlib.sha256(made).hexdigest()
    # What a flipped bit leaves as it was is a field that nothing depends on.
    assert made != new.read_bytes() or kind == "flip"
