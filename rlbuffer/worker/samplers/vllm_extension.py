"""The extension of every vLLM worker process: weights and adapters that are checked before the model is touched.

For a server of your own: ``--worker-extension-cls rlbuffer.worker.samplers.vllm_extension.WeightsExtension``. A load
that fails half-way leaves an engine that dies at its next step while it still says that it is healthy, so everything
that can be wrong with a file is found first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlbuffer.weights.fit import is_finite
from rlbuffer.weights.shapes import differing, weight_files
from rlbuffer.worker.samplers.base import ADAPTER_NAME


class WeightsExtension:
    """Mixed into vLLM's worker class; its methods are called by ``collective_rpc``."""

    def rlbuffer_load(self, directory: str, shapes: Mapping[str, Sequence[int]], seed: int | None = None) -> str:
        """Loads the weights of a model directory into the running model.

        Args:
            directory: in Hugging Face layout.
            shapes: name -> shape of what the model was started with.
            seed: of what is sampled from now on; None: random numbers go on.

        Returns:
            "" when they are loaded; else why the model was not touched.
        """
        tensors, refusal = _checked(directory, shapes)
        if refusal:
            return refusal
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(tensors))
        _process_again(worker.model_runner.get_model())
        _draw_from(worker, seed)
        return ""

    def rlbuffer_load_adapter(
        self, directory: str, shapes: Mapping[str, Sequence[int]], seed: int | None = None
    ) -> str:
        """Puts another LoRA adapter in the place of the one that the engine has: requests in flight go on with it.

        Not by vLLM's own loading over HTTP: that leaves "load in place" in every later request, and each step of the
        engine then loads the adapter of one of its requests again, whichever comes last (read in vLLM 0.32).

        Args:
            directory: in PEFT's layout.
            shapes: name -> shape of the adapter that the engine has.
            seed: as :meth:`rlbuffer_load`.

        Returns:
            "" when it is loaded; else why the adapter was not touched.
        """
        _, refusal = _checked(directory, shapes)
        if refusal:
            return refusal
        worker: Any = self
        adapter_ids = sorted(worker.list_loras())
        if len(adapter_ids) != 1:
            return f"the engine has {len(adapter_ids)} LoRA adapters; one is what rlbuffer loads in place of another"
        from vllm.lora.request import LoRARequest

        worker.add_lora(
            LoRARequest(lora_name=ADAPTER_NAME, lora_int_id=adapter_ids[0], lora_path=directory, load_inplace=True)
        )
        _draw_from(worker, seed)
        return ""


def _draw_from(worker: Any, seed: int | None) -> None:
    """Starts the engine's random numbers again from a seed: without its own every server begins with the same ones, at
    every start. All processes of an engine must have the same."""
    if seed is not None:
        from vllm.utils.torch_utils import set_random_seed

        set_random_seed(seed, worker.parallel_config.data_parallel_index)


def _checked(directory: str, shapes: Mapping[str, Sequence[int]]) -> tuple[list[tuple[str, torch.Tensor]], str]:
    """Tensors of a directory, and why they cannot be used ("" when they can)."""
    try:
        tensors = _read(directory)  # whole: an iterator that fails half-way would leave half a model
    except (OSError, SafetensorError, RuntimeError) as error:
        return [], str(error)
    found = {name: list(tensor.shape) for name, tensor in tensors}
    if wrong := differing(found, {name: list(shape) for name, shape in shapes.items()}):
        return [], f"the weights do not fit the model: {wrong} differ"
    for name, tensor in tensors:
        if not is_finite(tensor):
            return [], f"the weights are not finite: {name}"
    return tensors, ""


def _process_again(model: torch.nn.Module) -> None:
    """Processes layers again that the reload leaves with a packed copy of the old values, on the CPU (vLLM 0.32).

    Those that share another layer's weight: the file holds a tied weight once, so the reload skips the layer that
    borrows it, such as an output layer tied to the embedding. And experts, which are packed only when they are made.
    """
    owners: set[int] = set()
    for layer in model.modules():
        weight = layer.__dict__.get("_parameters", {}).get("weight")
        method: Any = getattr(layer, "quant_method", None)
        experts: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None:
            experts.process_weights_after_loading(layer)
        if weight is None or method is None:
            continue
        if id(weight) in owners:
            method.process_weights_after_loading(layer)
        owners.add(id(weight))


def _read(directory: str | Path) -> list[tuple[str, torch.Tensor]]:
    tensors = []
    for path in weight_files(directory):
        with safe_open(path, "pt") as file:
            tensors += [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 - not a mapping
    return tensors
