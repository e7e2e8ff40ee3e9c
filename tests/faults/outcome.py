"""The outcome of one run under faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Findings and figures of one run; no finding: everything held."""

    name: str
    findings: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    """Faults that struck it, by kind."""
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        done = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.faults.items()))
        lines = [f"{self.name}: {done or 'no fault'}; {self.seconds:.0f} s"]
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        lines += [f"  FINDING: {finding}" for finding in self.findings] or ["  no finding"]
        return lines
