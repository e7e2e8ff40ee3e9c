"""The application: which screen comes next. Reads by :class:`rlbuffer.client.buffer.Buffer` alone."""

from __future__ import annotations

import os
from typing import ClassVar

from textual.app import App
from textual.screen import Screen

from rlbuffer.client.trainer_values import KeptValues
from rlbuffer_cli.browse.group import Group
from rlbuffer_cli.browse.pages import Help, Pair, Raw
from rlbuffer_cli.browse.pool import Pool
from rlbuffer_cli.browse.rollout import OneRollout
from rlbuffer_cli.browse.screen import Looking, Open
from rlbuffer_cli.browse.steps import OneStep, Steps
from rlbuffer_cli.browse.workers import Workers
from rlbuffer_cli.whole_run import WholeRun

PATIENCE_SECONDS_OF_A_SCREEN = 1.0
"""A server that is away is said to be so after this time, and asked again."""


class Browser(App[None]):
    """`rlbuffer inspect` on a terminal."""

    ENABLE_COMMAND_PALETTE = False
    CSS: ClassVar[str] = """
    Look { layout: vertical; background: $background; }
    #title { height: 1; background: $panel; }
    #notice { height: auto; max-height: 5; text-style: bold; }
    #keys { background: $panel; }
    #legend { height: auto; max-height: 3; background: $panel; }
    #header, #step, #facts, #curves { height: 3; }
    #groups, #members, #steps, #worst, #beats, #page, #pairs { height: 1fr; }
    #failure { height: 40%; }
    EntryLine { height: 3; }
    #halves { height: 1fr; }
    #tokens, #text { width: 1fr; height: 1fr; }
    #halves #facts { width: 32; height: 1fr; margin-left: 1; }
    """

    def __init__(self, run: WholeRun, *, identifier: str | None = None, where: str = "") -> None:
        if not (without_colours := bool(os.environ.get("NO_COLOR"))):
            os.environ.pop("NO_COLOR", None)  # an empty one says nothing, and Textual would draw in greys
        super().__init__(ansi_color=True if without_colours else None)
        buffer = run.buffer
        buffer.store.patience_seconds = PATIENCE_SECONDS_OF_A_SCREEN
        self.looking = Looking(run=run, kept=KeptValues(buffer.settings.output_dir), where=where)
        self.identifier = identifier

    def get_default_screen(self) -> Screen[None]:
        """Begins at the pool."""
        return Pool(self.looking)

    def on_mount(self) -> None:
        """Opens what was asked for."""
        if self.identifier is not None:
            group, slash, _ = self.identifier.rpartition("/")
            kind = "rollout" if slash else "group"
            self.on_open(Open(kind, self.identifier, {"group": group or self.identifier}))

    def on_open(self, message: Open) -> None:
        """Shows another screen."""
        what, record, looking = message.what, message.record or {}, self.looking
        if message.kind == "group":
            self.push_screen(Group(looking, what))
        elif message.kind == "rollout":
            self.push_screen(OneRollout(looking, what, str(record["group"])))
        elif message.kind == "pair":
            self.push_screen(Pair(looking, str(record["group"]), (what, str(record["other"]))))
        elif message.kind == "step":
            self.push_screen(OneStep(looking, int(what)))
        elif message.kind == "raw":
            self.push_screen(Raw(looking, what, record))
        else:
            while not isinstance(self.screen, Pool):
                self.pop_screen()
            self.screen.choose(what, is_of_worker=True)

    def action_workers(self) -> None:
        """Shows who works."""
        if not isinstance(self.screen, Workers):
            self.push_screen(Workers(self.looking))

    def action_steps(self) -> None:
        """Shows the committed steps."""
        if not isinstance(self.screen, Steps):
            self.push_screen(Steps(self.looking))

    def action_help(self) -> None:
        """Shows the keys."""
        if not isinstance(self.screen, Help):
            self.push_screen(Help(self.looking))


def browse(run: WholeRun, *, identifier: str | None, where: str) -> int:
    """Runs the browser until `q`. -> exit code."""
    Browser(run, identifier=identifier, where=where).run()
    return 0
