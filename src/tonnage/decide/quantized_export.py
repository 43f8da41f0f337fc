"""An exported model with the weights that fake quantisation trained for, as transformers writes them by torchao."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.errors import user_error

if TYPE_CHECKING:
    from tonnage.kernels.fake_quantized import Scheme


def check_quantized(scheme: Scheme | None, run: Path, directory: Path, *, target: str, is_whole: bool) -> Scheme:
    """The scheme in which a run's export is quantised. ``is_whole``: whether it is a causal language model, all of it.

    Raises:
        UserError: the run rounded nothing, or what it trained is not written quantised.
    """
    plain = f"tonnage export {run} {directory}"
    if scheme is None:
        raise user_error(
            where="--quantized",
            found="a run whose weights were not rounded in training",
            needed="a run with quantize_aware",
            change=plain,
        )
    if scheme.name == "int4":
        raise user_error(
            where="--quantized",
            found="int4, whose weights torchao packs by a GPU's kernels (mslk), where the model is served",
            needed="int8, int8-int4 or mxfp4",
            change=f"{plain}, and load that with TorchAoConfig(Int4WeightOnlyConfig(group_size={scheme.group_size}))",
        )
    if scheme.name == "nvfp4":
        raise user_error(
            where="--quantized",
            found="nvfp4, whose weights torchao makes on a Blackwell card, where the model is served",
            needed="int8, int8-int4 or mxfp4",
            change=f"{plain}, and load that with TorchAoConfig(NVFP4DynamicActivationNVFP4WeightConfig())",
        )
    if not is_whole or target not in ("transformers", "vllm"):
        raise user_error(
            where="--quantized",
            found=f"an export for {target}" if is_whole else "an adapter, a merged one, a part of a model, or scores",
            needed="a whole language model whose own weights were trained, for transformers or vllm",
            change=plain,
        )
    return scheme


def quantize_export(directory: Path, scheme: Scheme) -> str:
    """Replace the weights in ``directory`` by quantised ones; returns a line for the user. The model is in memory
    once."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", quantization_config=TorchAoConfig(scheme.for_torchao())
    )
    for path in (*directory.glob("*.safetensors"), *directory.glob("*.safetensors.index.json")):
        path.unlink()
    model.save_pretrained(directory)
    return f"weights of the blocks are in {scheme.name}: to load them, pip install torchao"
