"""`rlbuffer train` on a terminal: what it says of its ranks while the live view is drawn, and when it has ended."""

from __future__ import annotations

from homes import Home
from terminals import ANSI, typed

LOSS = """
def loss(tokens, options):
    raise ValueError("not a loss")
"""


def test_what_is_said_of_ranks_and_the_last_error_stay_when_the_screen_is_gone(home: Home) -> None:
    (home.path / "failing.py").write_text(LOSS)
    given = f"train --config {home.config(run='fake')} --fake-data --world-size 1 --steps 2 --max-restarts 1".split()
    variables = home.environment | {"RLBUFFER_TRAINER__LOSS__NAME": "failing:loss"}
    program = home.parent.stand_in
    drawn = typed(given, home.path, until=b"", keys=b"", columns=100, code=1, program=program, **variables)
    screen, _, kept = drawn.partition(b"\x1b[?1049l")
    assert b"starting the ranks; the steps are made up" in screen
    assert b"Starting the rank again" in screen, "it is said while the ranks are at work, too"
    rows = [row for row in ANSI.sub(b"", kept).decode().replace("\r", "\n").split("\n") if row]
    first, last = (i for i, row in enumerate(rows) if row.startswith("Rank 0 failed:"))
    again = rows.index("Starting the rank again from the newest checkpoint (restart 1 of 1).")
    assert first < again < last
    for end in (again, len(rows)):
        error = max(i for i in range(end) if rows[i] == "ValueError: not a loss")
        assert "`rlbuffer runs rewind 0 --keep-pending`" in " ".join(rows[error + 1 : end]), (
            "what is said of the error stands behind it"
        )
    assert rows[-1] == "Giving up after 1 restart."
