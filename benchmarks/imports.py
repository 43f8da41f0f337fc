"""How many example configurations of other programs come over whole, and what keeps the others back.

    python -m benchmarks.imports DIRECTORY... [--output benchmarks/results/imports.json] [--list]

A directory is a checkout of Axolotl, LLaMA-Factory, TRL, ms-swift or torchtune; every YAML and shell script in its
``examples`` (torchtune: ``recipes/configs``) is imported as it lies there. How many workers there are, torchtune's
files leave to the command: one is said. Outcomes: ``whole`` (a config that ``tonnage train`` takes as it is, every key
carried over or needless), ``asks`` (something must still be said), ``refused`` (a key that decides what is computed is
not carried over), ``beside`` (only keys that say where bytes rest or what is shown are not), ``not read`` (nobody's
configuration).
Of files that train on text and are not whole, ``needed`` counts the method that each would need: a file once, under the
first of ``METHODS`` that one of its keys asks for. Nothing of the examples is kept, and no name of a file is written;
``--list`` prints them to the terminal. A checkout without its ``.git`` is given its commit with ``--commit``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tonnage.errors import UserError
from tonnage.migration import Import, import_files

METHODS = {
    "quantisation-aware training": r"qat\.",
    "a base in NVFP4": r"nvfp4|dsv4_fp4",
    "a base in GPTQ": r"gptq ",
    "a base of 1.58 bits": r"use_onebitllms",
    "arithmetic in FP8": r"fp8 ",
    "sequences divided among workers": r"context_parallel_size|cp_size",
    "diffusion in the place of next tokens": r"diffusion|plugins .*Diffusion",
    "pruned weights": r"llmcompressor",
    "another optimizer than AdamW": r"use_(galore|apollo|badam|adam_mini|muon)|optimizer muon|optim_config\.name",
    "a stream of rows that is never whole": r"pretraining_dataset",
    "a loss that weighs tokens by itself": r"use_(dft|asft|eaft)",
    "layers that take turns (LISA, ReLoRA)": r"lisa_n_layers|relora",
    "another adapter than LoRA, or another start (OFT, PiSSA, LoftQ)": r"finetuning_type oft|pissa_init|peft\.loftq",
    "rates of its own for a part of the adapter (LoRA+)": r"loraplus",
    "other blocks than the model's (LLaMA Pro, mixture of depths)": r"use_llama_pro|mixture_of_depths",
    "experts converted for another engine": r"kt_weight_path",
    "another engine": r"dist_config\.name",
    "batches filled up to a number of padded tokens": r"batching_strategy dynamic_batching",
    "another tracker, or an evaluation with other measures": r"use_otel|use_swanlab|do_causal_lm_eval",
}
"""What keys ask for: patterns of a key and its value."""
OPEN, OTHER = "something that the file leaves open", "something else"
ENDINGS = (".yaml", ".yml", ".sh")
MOST_REASONS = 5


def main() -> None:
    """Import every example and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIRECTORY")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--commit", action="append", default=[], metavar="NAME=COMMIT")
    given = parser.parse_args()
    commits = dict(one.split("=", 1) for one in given.commit)
    found = {directory.name: counted(directory, commits, given.list) for directory in given.directories}
    if given.output and given.output.exists():  # checkouts that are not looked at again stay as they were
        found = json.loads(given.output.read_text()) | found
    text = json.dumps(found, indent=1) + "\n"
    if given.output:
        given.output.write_text(text)
    print(text, end="")


def counted(directory: Path, commits: dict[str, str], is_listed: bool) -> dict[str, Any]:
    """Counts of one checkout, by what its files train."""
    outcomes: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    needed: Counter[str] = Counter()
    unknown = 0
    of_recipes = directory / "recipes" / "configs"
    folder, workers = (of_recipes, 1) if of_recipes.is_dir() else (directory / "examples", None)
    for path in sorted(path for path in folder.rglob("*") if path.suffix in ENDINGS and path.is_file()):
        kind = kind_of(path)
        try:
            found = import_files([path], workers=workers)
        except UserError as error:
            outcome, why = "not read", error.problems[0].found
        else:
            outcome, why = outcome_of(found)
            unknown += len(found.of("unknown"))
            if outcome == "refused":
                reasons.update(sorted({reason_of(entry.setting.name, entry.note) for entry in found.lost}))
            if outcome != "whole" and kind.startswith("text"):
                needed[method_of(found)] += 1
        outcomes.setdefault(kind, Counter())[outcome] += 1
        if is_listed and outcome != "whole":
            print(f"{path.relative_to(folder)}: {kind}: {outcome}: {why}")
    return {
        "commit": commits.get(directory.name) or commit_of(directory),
        "files": sum(sum(one.values()) for one in outcomes.values()),
        "unknown_keys": unknown,
        "outcomes": {kind: dict(one.most_common()) for kind, one in sorted(outcomes.items())},
        "text": {
            "files": sum(sum(one.values()) for kind, one in outcomes.items() if kind.startswith("text")),
            "whole": sum(one["whole"] for kind, one in outcomes.items() if kind.startswith("text")),
            "needed": dict(needed.most_common()),
        },
        "commonest_reasons": [
            {"reason": reason, "files": number} for reason, number in reasons.most_common(MOST_REASONS)
        ],
    }


def method_of(found: Import) -> str:
    """What a file that is not whole needs, by the keys that were not carried over."""
    entries = [*found.lost, *found.of("not supported")]
    said = [f"{entry.setting.name} {entry.setting.shown_value}" for entry in entries]
    if not said:
        return OPEN
    return next((name for name, keys in METHODS.items() if any(re.match(keys, one) for one in said)), OTHER)


def outcome_of(found: Import) -> tuple[str, str]:
    """What became of a file, and why it is not whole."""
    if found.lost:
        return "refused", "; ".join(
            f"{entry.setting.shown} {entry.setting.shown_value}: {entry.note}" for entry in found.lost
        )
    if found.needs:
        return "asks", "; ".join(f"{need.key}: {need.sentence}" for need in found.needs)
    if not found.is_whole:
        return "beside", "; ".join(entry.setting.shown for entry in found.of("not supported"))
    return "whole", ""


def reason_of(name: str, note: str) -> str:
    """A key and what was said of it, without numbers of list items and names of models."""
    plain = ".".join(part for part in name.split(".") if not part.isdecimal())
    return f"{plain}: {re.sub(r'^[^ ]+/[^ ]+ ', 'the model ', note)}"


def kind_of(path: Path) -> str:
    """What a file trains, as its own keys say."""
    if path.suffix == ".sh":
        return of_command(path.read_text())
    try:
        said = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        return "no YAML"
    if not isinstance(said, dict):
        return "no keys"
    if "checkpointer" in said or "tokenizer" in said:
        return of_components(said)
    sets = said.get("datasets") or []
    has_media = said.get("processor_type") or any(
        "llava" in str(one.get("path")) for one in sets if isinstance(one, dict)
    )
    has_media = has_media or re.search(r"_vl|vl_|mllm|llava", str([said.get("template"), said.get("dataset")]))
    if said.get("rl") or said.get("reward_model") or said.get("process_reward_model"):
        return "preferences and rewards"
    if said.get("stage") in ("dpo", "kto", "rm", "ppo") or "dpo" in str(said.get("train_dataset")):
        return "preferences and rewards"
    if has_media or "multimodal" in str(said.get("train_dataset")):
        return "images and sounds"
    if "base_model" in said:
        return f"text, {said.get('adapter') or 'all weights'}"
    if "train_dataset" in said:
        name = (said.get("peft_config") or {}).get("name")
        return f"text, {name or 'all weights'}"
    if "dataset" in said and "do_train" in said:
        name = said.get("finetuning_type", "lora")
        return f"text, {'all weights' if name == 'full' else name}"
    return "no training"


def of_command(script: str) -> str:
    """What a shell script trains: ms-swift's commands say it."""
    words = re.findall(r"^[^#\n]*\bswift (sft|pt|rlhf)\b", script, re.MULTILINE)
    if not words:
        return "commands"
    method = re.search(r"--rlhf_type\s+(\w+)", script)
    return f"swift {words[0]}" + (f" {method[1]}" if words[0] == "rlhf" and method else "")


def of_components(said: dict[str, Any]) -> str:
    """What torchtune's components train."""
    named = json.dumps(said)
    if "optimizer" not in said and not re.search(r"ppo_|grpo|reward_", named):
        return "no training"
    if re.search(r"rlhf|grpo|ppo_|reward_", named):
        return "preferences and rewards"
    if re.search(r"vision|multimodal|_transform|image_size", named):
        return "images and sounds"
    return f"text, {'lora' if 'lora_attn_modules' in named else 'all weights'}"


def commit_of(directory: Path) -> str:
    """The commit of a checkout; empty if it is none."""
    command = ["git", "-C", str(directory), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


if __name__ == "__main__":
    main()
