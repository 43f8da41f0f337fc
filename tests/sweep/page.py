"""The page of the documentation that says what becomes of every family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sweep.trial import Outcome

HEAD = """# Model families

Every name in the causal language model mapping of transformers, tried as a tiny model of its default configuration:
two steps in fp32, at least five documents a pack. A family is in the table as trained only if losses are equal to those
of plain transformers on one document at a time to 1e-5, and gradient norms to 1e-4 (relative), with weights so large
that documents which saw each other would change the loss by ten times that bound at least (in most families by a
hundred times).

- *packed*: documents lie in one row, one after another, and keep to themselves there.
- *padded*: each document has a row of its own, padded at the right; documents of a step are sorted by length, so that
  little is padding, and a plan says how much. What a step is made of is the same as in packed rows.
- *refused*: in one sentence, before any weight is read.
- *too slow*: nothing was found out in minutes.
- *not tried*: transformers makes no tiny model of the family's default configuration.
- *no text model*: the family has none of its own.

What was found: of padded families, why their documents do not lie in one row. Figures there are of packed rows, which
are not used then.

A run asks the same of its own model before it starts ([how](planning.md#packed-or-padded)), on the kind of device that
it runs on. No family is known by its name: what counts is what a tiny model of the very configuration computes.

Gradients are judged more sharply: of the families that were reached, with no recompute, selective and full, of all
weights and of an adapter, with weights and documents of two seeds, against plain transformers in fp64. Losses, norms
and gradients are off by no more than 8 times what plain transformers in fp32 is off, or 2e-6 where that is off by less
([results](../benchmarks/results/models_exact.json), which say what was not reached; `python -m tests.sweep --exact`).

**What transformers changes as it loads**: of these families, Youtu's padding token gets a row of zeros whatever its
file has there, so it has one here too.

Each family that trains was also trained by two workers with ZeRO 3, with full recompute (gradient checkpointing), with
its optimizer on disk, and with everything on disk, each time stopped after a step, resumed and exported
([2026-11-27](../benchmarks/results/models_layouts.json), `python -m tests.sweep --layouts NAME ...`): losses and norms
are equal to plain transformers' as above, and the export has every tensor of the original, by name and shape.

**Your own model**: `tonnage plan MODEL` reads its `config.json` alone, asks the same questions, and refuses what
would be refused. What is not in this table is asked as well.

**Whose code**: transformers' classes compute, ours replace single operations in them ([kernels](kernels.md)). Python
files that come with a model run only with `trust_remote_code: true`; a model whose class is in transformers does not
need it.

**Mixtures of experts** are, among others, mixtral, olmoe, phimoe, qwen2_moe, qwen3_moe, qwen3_5_moe, qwen3_next,
deepseek_v2 and v3, glm4_moe, ernie4_5_moe, gpt_oss, granitemoe, minimax, jamba, lfm2_moe and llama4. The loss that
balances the router is added where the model's own config asks for it, which few do; `router_loss` sets its weight
([parallelism](parallelism.md#mixtures-of-experts)).

**Weight files**: parameters that they lack, or tensors too many, are refused unless `allow_missing` or
`allow_unexpected` name them. Of a model of text and images the text model is trained, and `visual.*` goes into the
export as it was: nothing to set. Quantised weights (fp8, mxfp4, nvfp4, GPTQ, AWQ, compressed-tensors) are
read, and [stay as they are under an adapter](adapters.md#a-base-that-is-quantised-already); bitsandbytes, HQQ, AQLM and
others are refused by name, so take the model in bf16. All of it: [what a run starts
from](checkpoints.md#what-a-run-starts-from).

**What works for which family**:

- ZeRO, replicate, recompute, offload, checkpoints and export: every family that trains.
- LoRA, and a base in 4 or 8 bits: linear layers and experts, whatever the family; tested on Llama, GPT-NeoX, Qwen 3
  and a mixture of Qwen 3 ([adapters](adapters.md)).
- Packing: *packed* families. Windows, sinks and caps of scores are computed within each document; recurrences and
  convolutions that would run across documents make a family *padded*, with the same losses.
- `parallel.tensor`: dense families with a plan of transformers by layers (so not GPT-2 or Phi-3), no mixtures ([tested
  ones](parallelism.md#tensor)). `parallel.pipeline`: sixteen shapes are tested ([which are
  refused](parallelism.md#pipeline)).
- Rows with images: families whose language model does with an image what training can do; a tiny model of it is asked
  ([which are tested, and which are refused](data.md#images)).
- Shared prefixes: on CPUs, where no window is shorter than a document and scores have no cap
  ([data](data.md#prefixes)).
- Fast kernels: whatever a family's operations take; the others are computed by torch.
"""


def page(outcomes: Sequence[Outcome], date: str, torch: str, transformers: str) -> str:
    """Markdown."""
    counts = Counter(outcome.kind for outcome in outcomes)
    told = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    rows = [f"| {one.name} | {one.kind} | {_cell(one)} |" for one in outcomes]
    made = f"On {date}, with torch {torch.split('+')[0]} and transformers {transformers}, on a CPU: {told}."
    command = "`python -m tests.sweep --output benchmarks/results/models.json --page docs/models.md` makes this page."
    return "\n".join([HEAD, made, command, "", "| family | rows | what was found |", "|---|---|---|", *rows, ""])


def _cell(outcome: Outcome) -> str:
    if outcome.kind == "packed":
        return ""
    note = outcome.note.removeprefix(f"model type {outcome.name}: ")
    note = note.removeprefix("padded: documents would not keep to themselves in one row (").partition("), so each")[0]
    return note.replace("|", "/").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
