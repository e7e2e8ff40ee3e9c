"""The style of exported pages: lenses by CSS alone, so that no script is needed, and the policy that forbids any."""

from __future__ import annotations

import base64
import hashlib

LENS_COLOURS = {
    "red": "214,64,69",
    "magenta": "190,75,170",
    "yellow": "222,170,30",
    "cyan": "40,160,190",
    "green": "60,160,80",
}
"""Names of :mod:`rlbuffer_cli.render.lenses` as red, green, blue."""
LENSES = {2: "p", 3: "a", 4: "m", 5: "e", 6: "x", 7: "v"}
"""Key of a lens -> letter of the classes that its levels have."""
UNDERLINES = {"red": "wavy", "magenta": "double", "yellow": "dashed", "cyan": "dotted", "green": "solid"}
"""A level is also a line below the token: colour is never the only sign."""

BASE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 1rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h4 { margin: .8rem 0 .2rem; font-size: .9rem; opacity: .75; }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0; overflow-wrap: anywhere; }
details details { margin-left: 1rem; border-left: 3px solid rgba(128,128,128,.3); padding-left: .8rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .1rem .7rem .1rem 0; text-align: right; } td:first-child, th:first-child { text-align: left; }
pre, .t, .g { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre, .t { margin: .2rem 0; padding: .3rem .6rem; background: rgba(128,128,128,.1); unicode-bidi: isolate; }
.t b { font-weight: inherit; unicode-bidi: isolate; } .t i { font-style: inherit; opacity: .65; }
.t b:hover { outline: 1px solid; }
.n { opacity: .75; } .g, .w { display: none; }
fieldset { position: sticky; top: 0; background: Canvas; border: 0; border-bottom: 1px solid; padding: .4rem 0; }
label { margin-right: 1rem; }
""".strip()


def style(colours: dict[int, list[str]]) -> str:
    """The whole style. `colours`: key of a lens -> colour of each of its levels, "" for none."""
    rules = [BASE]
    for key, names in colours.items():
        chosen = f"body:has(#l{key}:checked)"
        rules.append(f"{chosen} .g{key} {{ display: block; }}")
        for level, name in enumerate(names):
            if name:
                rules.append(
                    f"{chosen} .{LENSES[key]}{level} {{ background: rgba({LENS_COLOURS[name]},.35); "
                    f"text-decoration: underline {UNDERLINES[name]}; }}"
                )
    rules.append("body:has(#l1:checked) .g1, body:has(#l1:checked) .w { display: block; }")
    rules.append("body:has(#l1:checked) .w ~ * { display: none; }")
    return "\n".join(rules)


def policy(css: str, *, forms: str) -> str:
    """The Content-Security-Policy of a page with this style: nothing is fetched, run or framed. A form may be sent to
    `forms`: `none`, or `self`, the server that the page is from."""
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action '{forms}'"
