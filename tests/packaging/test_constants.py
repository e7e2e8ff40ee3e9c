"""A constant's name has one value in the whole project: a reader may look for it anywhere."""

from __future__ import annotations

import ast
from collections import defaultdict

from test_layers import MODULES


def test_no_constant_name_has_two_values() -> None:
    values: dict[str, dict[str, str]] = defaultdict(dict)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith("_"):
                    values[target.id][module] = ast.unparse(node.value)
    assert {name: where for name, where in values.items() if len(set(where.values())) > 1} == {}
