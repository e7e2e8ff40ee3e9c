"""Files that appear whole: beside what others have put into their folder, and with the modes that users have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbuffer.process.files import whole_file, write_whole


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("planted", [".x.part", ".x", "x.part", "x.tmp", ".x.tmp"])
def test_a_link_beside_the_file_is_not_followed(tmp_path: Path, planted: str) -> None:
    precious, shared = tmp_path / "precious", tmp_path / "shared"
    precious.write_text("precious")
    shared.mkdir()
    (shared / planted).symlink_to(precious)
    write_whole(shared / "x", "new")
    assert (precious.read_text(), (shared / "x").read_text(), (shared / "x").is_symlink()) == ("precious", "new", False)
    assert sorted(path.name for path in shared.iterdir()) == sorted([planted, "x"])


def test_no_name_is_taken_twice_and_none_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the name known, what stands there would be refused, a link as well as a file."""
    names = set()
    for _ in range(20):
        with whole_file(tmp_path / "x"):
            names |= {path.name for path in tmp_path.iterdir()} - {"x"}
    assert len(names) == 20
    monkeypatch.setattr("rlbuffer.process.files.secrets.token_hex", lambda size: "known")
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / ".x.known.part").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "x", "new")
    assert precious.read_text() == "precious"


@pytest.mark.parametrize(("is_private", "mode"), [(False, 0o640), (True, 0o600)])
@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.usefixtures("usual_umask")
def test_the_umask_decides_who_reads_it(tmp_path: Path, is_private: bool, is_flushed: bool, mode: int) -> None:
    with whole_file(tmp_path / "x", is_private=is_private, is_flushed=is_flushed) as file:
        file.write(b"new")
    assert (tmp_path / "x").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("is_there", [False, True])
def test_an_error_leaves_what_was_there(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "x"
    if is_there:
        path.write_text("old")

    def pieces() -> Iterator[str]:
        yield "half"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_whole(path, pieces())
    assert [path.name for path in tmp_path.iterdir()] == ["x"] * is_there
    assert not is_there or path.read_text() == "old"


def test_a_link_of_that_name_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "x").symlink_to(tmp_path / "old")
    write_whole(tmp_path / "x", "new")
    assert ((tmp_path / "old").read_text(), (tmp_path / "x").read_text()) == ("old", "new")


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "€" * 85])
def test_a_name_may_be_as_long_as_names_can_be(tmp_path: Path, name: str) -> None:
    write_whole(tmp_path / name, "new")
    assert (tmp_path / name).read_text() == "new"


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_pipe_is_refused_and_stays(tmp_path: Path, is_linked: bool) -> None:
    """Whoever reads from it would wait for ever once a file had its name."""
    path = tmp_path / "x"
    os.mkfifo(tmp_path / "pipe" if is_linked else path)
    if is_linked:
        path.symlink_to(tmp_path / "pipe")
    before = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(OSError, match="pipe or a device") as refused:
        write_whole(path, "new")
    assert refused.value.filename == str(path)
    assert path.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == before
