"""Writes what a vLLM's protocol models say of the pages that a gateway asks, as JSON schemas: ``python FILE SCHEMAS``.

It runs where that vLLM can be imported; its compiled parts are not needed. Texts that decide nothing are left out.
Every object with named fields is closed: a field that this vLLM does not know would be ignored in silence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SAID = ("title", "description", "default", "examples", "deprecated", "discriminator")


def bare(schema: Any) -> Any:
    """A schema without what is said of it, whose objects are closed."""
    if isinstance(schema, list):
        return [bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: bare(part) for name, part in schema.items() if name not in (*SAID, "properties", "$defs")}
    for names in ("properties", "$defs"):
        if names in schema:
            found[names] = {name: bare(part) for name, part in schema[names].items()}
    if "properties" in schema:
        found["additionalProperties"] = False
    return found


def main(file: Path) -> None:
    import vllm
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateDerenderResponse,
        GenerateRequest,
        GenerateTokensResponse,
    )

    models = {
        "conversation": ChatCompletionRequest,
        "generate": GenerateRequest,
        "derendered": GenerateDerenderResponse,
        "tokens": GenerateTokensResponse,
    }
    schemas = {name: bare(model.model_json_schema()) for name, model in models.items()}
    source = f"vLLM {vllm.__version__}, " + ", ".join(f"{m.__module__}.{m.__qualname__}" for m in models.values())
    file.write_text(json.dumps({"source": source, **schemas}, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
