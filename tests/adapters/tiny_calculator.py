"""A tool server for verifiers, started by it as a process of its own."""

from __future__ import annotations

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two integers."""
        return str(a + b)


if __name__ == "__main__":
    Calculator.run()
