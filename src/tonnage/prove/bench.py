"""What ``tonnage bench`` measures: a known shape with weights and documents that are drawn, trained in a known way.

The steps are those of ``tonnage profile``, so tokens/s, peak, floor and causes are counted as it counts them.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from tonnage import __version__
from tonnage.doctor.hardware import Hardware
from tonnage.errors import user_error
from tonnage.files.writing import write_json
from tonnage.planning.plan import Plan
from tonnage.prove.material import MOST_DRAWN, model_sizes, shape_of, tokenizer


def _shape(family: str, *numbers: int, **more: Any) -> Mapping[str, Any]:
    words = {"family": family, "vocab_size": 50_304, "bos_token_id": 0, "eos_token_id": 0}
    return {**words, **model_sizes(*numbers), **more}


def _neox(hidden: int, blocks: int, heads: int) -> Mapping[str, Any]:
    return _shape("gpt_neox", hidden, 4 * hidden, blocks, heads, max_position_embeddings=2048)


def _groups(number: int, **more: Any) -> Mapping[str, Any]:
    return {"num_key_value_heads": number, "max_position_embeddings": 4096, "tie_word_embeddings": True, **more}


_EXPERTS = {"moe_intermediate_size": 1024, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LINEAR_HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 8}
_HEAD_SIZES = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-4m": _shape("llama", 256, 768, 4, 4, **_groups(2, vocab_size=4096)),
    "pythia-70m": _neox(512, 6, 8),
    "pythia-160m": _neox(768, 12, 12),
    "pythia-1b": _neox(2048, 16, 8),
    "llama-135m": _shape("llama", 576, 1536, 30, 9, **_groups(3)),
    "mixture-190m": _shape("qwen3_moe", 512, 1024, 12, 8, **_groups(4, **_EXPERTS)),
    "hybrid-150m": _shape("qwen3_5_text", 576, 2048, 24, 9, **_groups(3, **_LINEAR_HEADS, **_HEAD_SIZES)),
}
"""Family and sizes of each; the first is for tests. A token of the mixture is computed by two of eight experts. Of four
blocks of the hybrid three have a gated delta rule, the last has attention."""


@dataclass(frozen=True)
class Method:
    title: str
    """In the table."""
    config: Mapping[str, Any]
    step_tokens: int = 4096
    max_length: int = 1024
    document_tokens: tuple[int, int] = (64, 448)
    """The shortest and the longest that is drawn."""

    @property
    def documents(self) -> str:
        """What is trained on, in the table."""
        least, most = self.document_tokens
        lengths = f"{least:,}" if least == most else f"{least} to {most}"
        return f"drawn, of {lengths}; {self.step_tokens:,} a step"


_LORA = {"rank": 32, "alpha": 64}
LONG = 8192
METHODS: Mapping[str, Method] = {
    "bf16": Method("full, bf16", {}),
    "fp32": Method("full, fp32", {"precision": "fp32"}),
    "lora": Method("LoRA", {"adapter": _LORA}),
    "nf4": Method("LoRA over nf4", {"adapter": {**_LORA, "quantize": "nf4"}}),
    "long": Method("full, bf16, long documents", {}, LONG, LONG, (LONG, LONG)),
}


def shape_named(name: str, **changes: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = shape_of(**{**SHAPES[name], **changes})
    return config


def write_run_of(folder: Path, shape: str, method: str, steps: int) -> Path:
    """Write a run of one worker that is long enough for a profile of so many steps: its model (without weights, they
    are drawn by the worker), its rows and its config, which is returned.

    Raises:
        UserError: there is no such shape or method.
    """
    for option, name, names in (("--shape", shape, SHAPES), ("--method", method, METHODS)):
        if name not in names:
            raise user_error(f"none is called {name}", f"one of {', '.join(names)}", where=option)
    way, total = METHODS[method], 2 * steps + 1
    positions = max(way.max_length, SHAPES[shape]["max_position_embeddings"])
    shape_named(shape, max_position_embeddings=positions).save_pretrained(folder / "model")
    drawable = min(SHAPES[shape]["vocab_size"], MOST_DRAWN)
    tokenizer(drawable).save_pretrained(folder / "model")
    _write_rows(folder / "rows.jsonl", way, (total + 1) * way.step_tokens, drawable)
    config = {
        "model": str(folder / "model"),
        "init": "random",
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": way.max_length,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"tokens": way.step_tokens},
        "steps": total,
        "launch": {"workers": 1},
        "track": [],
        "output": str(folder / "run"),
    }
    write_json(folder / "config.yaml", {**config, **way.config})
    return folder / "config.yaml"


def _write_rows(path: Path, way: Method, num_tokens: int, vocabulary: int) -> None:
    """Documents of drawn lengths and tokens, of which the second half of each is supervised."""
    drawn = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        while num_tokens > 0:
            length = drawn.randint(*way.document_tokens)
            mask = [0] * (length // 2) + [1] * (length - length // 2)
            row = {"input_ids": [drawn.randrange(vocabulary) for _ in range(length)], "loss_mask": mask}
            file.write(json.dumps(row) + "\n")
            num_tokens -= length


def result_of(
    shape: str, method: str, plan: Plan, figures: Mapping[str, Any], hardware: Hardware, others: float
) -> dict[str, Any]:
    """What the steps showed, for a file. ``figures`` are those of a profile, ``others`` is the share of the
    processors that others had meanwhile."""
    layout = plan.layout
    place = "device" if layout.device == "cuda" else "host"
    return {
        "benchmark": "bench",
        "date": time.strftime("%Y-%m-%d"),
        "tonnage": __version__,
        "machine": asdict(hardware),
        "shape": shape,
        "method": method,
        "device": layout.device,
        "threads": plan.threads_per_worker,
        "micro_batch": layout.micro_batch,
        "recompute": layout.recompute,
        "tokens_per_second": figures["tokens"] / figures["step_seconds"],
        "peak_bytes": figures["peak_bytes"][place],
        "share_of_floor": figures["floor_seconds"] / figures["step_seconds"],
        "share_of_cpu_that_others_had": others,
        **{key: value for key, value in figures.items() if key not in ("operations", "by_worker", "peak_bytes")},
    }


COLUMNS = (
    *("processor", "threads", "shape", "method", "documents", "tokens/s", "peak memory", "share of floor"),
    *("over TRL", "over Trainer", "measured"),
)
"""Of the table."""


def row_of(result: Mapping[str, Any]) -> dict[str, str]:
    """What stands in the columns for a result; those that it lacks stay empty."""
    machine, method = result["machine"], METHODS[result["method"]]
    on_device = result["device"] == "cuda"
    return {
        "processor": machine["devices"][0] if on_device else processor_named(machine["processor"], machine["features"]),
        "threads": str(result["threads"]),
        "shape": result["shape"],
        "method": method.title,
        "documents": method.documents,
        "tokens/s": f"{result['tokens_per_second']:,.0f}",
        "peak memory": f"{result['peak_bytes'] / 1e9:.2f} GB",
        "share of floor": f"{result['share_of_floor']:.0%}",
        "measured": result["date"],
    }


def markdown(rows: Iterable[Mapping[str, str]]) -> str:
    """The table of some rows."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *([row.get(column, "") for column in COLUMNS] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_WIDEST = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bf16", "avx512f": "AVX-512", "avx2": "AVX2", "bf16": "bf16"}


def processor_named(name: str, features: Sequence[str]) -> str:
    """A processor by its name and the instructions that decide how fast its products are."""
    for word in ("(R)", "(TM)", " Processor", " CPU"):
        name = name.replace(word, "")
    widest = next((short for feature, short in _WIDEST.items() if feature in features), "")
    return f"{name}, {widest}" if widest else name
