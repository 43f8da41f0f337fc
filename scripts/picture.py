"""The picture of a plan in README: ``python scripts/picture.py docs/plan.svg``.

A model of the shape of Qwen 2.5 1.5B, which lies nowhere, on one GPU of 24 GB: nothing of it depends on this machine.
The picture asks nobody for anything, fonts included.
"""

from __future__ import annotations

import argparse
import io
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from transformers import Qwen2Config

from tonnage.cli.plan import show_plan
from tonnage.decide.plans import suppose
from tonnage.planning.machine import parse_hardware

HARDWARE = "RTX4090:64GB"


def main(path: Path) -> None:
    """Draw the plan."""
    shape = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        plan = suppose(folder, ["data.max_length=2048", "batch.tokens=32768"], parse_hardware(HARDWARE))
    console = Console(file=io.StringIO(), record=True, width=112, force_terminal=True, color_system="truecolor")
    console.print(f"$ tonnage plan Qwen/Qwen2.5-1.5B --hardware {HARDWARE}", style="bold", highlight=False)
    show_plan(plan, console)
    drawn = console.export_svg(title="tonnage", theme=MONOKAI, unique_id="plan")
    drawn = re.sub(r"<!-- Generated with Rich.*?-->\s*", "", drawn)
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # which would be fetched
    path.write_text(drawn.replace("Fira Code, monospace", "monospace"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    main(parser.parse_args().path)
