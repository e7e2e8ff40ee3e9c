"""The application: which screen comes next. Reads by :class:`rlbuffer_cli.shown_run.ShownRun` alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.theme import Theme

from rlbuffer_cli import look
from rlbuffer_cli.browse.listing import Listing, OneGroup, OneStep
from rlbuffer_cli.browse.pages import Help, Raw
from rlbuffer_cli.browse.rollout import OneRollout
from rlbuffer_cli.browse.screen import BrowsedRun, BrowserScreen, Open
from rlbuffer_cli.shown_run import ShownRun
from rlbuffer_cli.table import Target
from rlbuffer_cli.tables import GROUPS, VIEWS

PATIENCE_SECONDS_OF_A_SCREEN = 1.0
"""A server that is away is said to be so after this time, and asked again."""


class Browser(App[None]):
    """`rlbuffer inspect` on a terminal."""

    ENABLE_COMMAND_PALETTE = False
    VERTICAL_BREAKPOINTS = [(0, "-low"), (30, "-tall")]  # noqa: RUF012 (textual declares it for instances)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help"),
        Binding("q", "quit", "quit"),
        *(Binding(view.press, f"show('{view.name}')", view.name) for view in VIEWS.values() if view.press),
        Binding("T", "theme", show=False),
    ]
    CSS: ClassVar[str] = """
    BrowserScreen { layout: vertical; background: $background; }
    #title { height: 1; background: $panel; }
    #standing { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #notice { height: auto; max-height: 5; text-style: bold; }
    #legend { height: auto; max-height: 3; }
    #top { height: auto; max-height: 60%; }
    .-low.-pool #top { max-height: 8; }
    OneStep #top { max-height: 66%; }
    .-tall #standing, .-tall.-pool #title, .-tall #head { margin-bottom: 1; }
    #head { height: auto; }
    #more { height: auto; max-height: 40%; border-top: solid $scrollbar; }
    #rows { height: 1fr; background: $background; background-tint: $background 0%; }
    #rows > .datatable--header { background: $background; text-style: none; }
    #rows > .datatable--cursor { text-style: bold; }
    EntryLine { height: 3; }
    #rows:ansi > .datatable--cursor { text-style: bold reverse; }
    #page { height: 1fr; }
    #halves { height: 1fr; }
    #tokens, #text { width: 1fr; height: 1fr; }
    #halves #facts { width: 36; height: 1fr; padding-left: 2; border-left: solid $scrollbar; scrollbar-gutter: stable; }
    Prose { scrollbar-size-vertical: 1; }
    Prose > Static { width: 100%; }
    """

    def __init__(self, run: ShownRun, *, opens: Target | None = None, where: str = "") -> None:
        if not (without_colours := bool(os.environ.get("NO_COLOR"))):
            os.environ.pop("NO_COLOR", None)  # an empty one says nothing, and Textual would draw in greys
        super().__init__(ansi_color=True if without_colours else None)
        run.wait_at_most(PATIENCE_SECONDS_OF_A_SCREEN)
        self.browsed = BrowsedRun(run=run, where=where)
        self.opens = opens
        self.has_colours = not without_colours
        for kind in ("dark", "light"):
            self.register_theme(_theme(kind))
        self.dress("dark")

    def dress(self, kind: str) -> None:
        """Takes the colours: `dark` or `light`; without colours those of the terminal."""
        self.browsed.colours = kind if self.has_colours else ""
        if self.has_colours:
            self.theme = f"rlbuffer-{kind}"
        self.console.push_theme(look.themed(kind if self.has_colours else "printed"))

    def action_theme(self) -> None:
        self.dress("light" if self.browsed.colours == "dark" else "dark")
        for screen in self.screen_stack:
            if isinstance(screen, BrowserScreen):
                screen.reload()

    def get_default_screen(self) -> Screen[None]:
        """Begins at the groups."""
        return Listing(self.browsed, Target("table", GROUPS.name, where=self.browsed.where))

    def on_mount(self) -> None:
        """Opens what was asked for; the groups are behind every other screen."""
        if self.opens is not None and self.opens[:2] != ("table", GROUPS.name):
            self.on_open(Open(self.opens))

    def on_open(self, message: Open) -> None:
        target, browsed = message.target, self.browsed
        if target.kind == "raw":
            self.push_screen(Raw(browsed, target.name, message.record or {}))
        else:
            screens: dict[str, Callable[[BrowsedRun, Target], Screen[None]]] = {
                "group": OneGroup,
                "rollout": OneRollout,
                "step": OneStep,
            }
            self.push_screen(screens.get(target.kind, Listing)(browsed, target))

    def action_show(self, name: str) -> None:
        if not (isinstance(self.screen, Listing) and self.screen.target[:2] == ("table", name)):
            self.push_screen(Listing(self.browsed, Target("table", name)))

    def action_help(self) -> None:
        if not isinstance(self.screen, Help):
            self.push_screen(Help(self.browsed))


def _theme(kind: str) -> Theme:
    """The palette as Textual's colours."""
    p = {name: colours[kind == "dark"] for name, colours in look.PALETTE.items()}
    return Theme(
        f"rlbuffer-{kind}",
        dark=kind == "dark",
        primary=p["accent"],
        secondary=p["e2"],
        accent=p["accent"],
        foreground=p["ink"],
        background=p["bg"],
        surface=p["bg"],
        panel=p["panel"],
        success=p["trained"],
        warning=p["packed"],
        error=p["dropped"],
        variables={
            "footer-background": p["panel"],
            "footer-key-foreground": p["accent"],
            "footer-description-foreground": p["label"],
            "block-cursor-background": p["accent-soft"],
            "block-cursor-foreground": p["ink"],
            "scrollbar": p["line"],
            "scrollbar-background": p["bg"],
        },
    )


def browse(run: ShownRun, *, opens: Target, where: str) -> int:
    """Runs the browser until `q`. -> exit code."""
    for name in ("COLUMNS", "LINES"):  # they may be those of another terminal, and Textual would believe them
        os.environ.pop(name, None)
    Browser(run, opens=opens, where=where).run()
    return 0
