"""Names and shapes of what a model directory holds, read from the files' headers alone.

Imports safetensors, not torch.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlbuffer.errors import WeightsError


def names_and_shapes(directory: str | Path) -> dict[str, list[int]]:
    """Tensor name -> shape of every ``*.safetensors`` file.

    Raises:
        WeightsError: there is no such file, or one cannot be read.
    """
    shape_of: dict[str, list[int]] = {}
    try:
        for path in weight_files(directory):
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    shape_of[name] = list(file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"the weights at {directory} cannot be read: {error}") from error
    return shape_of


def differing(actual: dict[str, list[int]], expected: dict[str, list[int]]) -> str:
    """Up to three names that are missing, unknown or of another shape, for a message; "" when there are none.

    Example:
        >>> differing({"lm_head.weight": [13, 64]}, {"lm_head.weight": [32, 64]})
        'lm_head.weight'
    """
    wrong = sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"{', '.join(wrong[:3])}{more}" if wrong else ""


def weight_files(directory: str | Path) -> list[Path]:
    """The ``*.safetensors`` files of a model directory, in order.

    Raises:
        FileNotFoundError: there are none.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors file")
    return files
