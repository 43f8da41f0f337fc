"""What sources of other programs have in common: names of roles that we know, and what rows want to be shown by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tonnage.migration.draft import Pick
from tonnage.migration.prompts import PromptFormat
from tonnage.migration.turns import TurnFormats

USUAL_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai", "function_call"),
    "tool": ("tool", "observation", "ipython", "function", "tool_response"),
}
"""Names of roles that our reader knows."""


@dataclass
class ImportedSources:
    """Sources, and what they want to be shown by."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    picks: list[Pick[Any]] = field(default_factory=list)
    shown: set[str] = field(default_factory=set)
    prompt: PromptFormat | TurnFormats | None = None
    """A text around the columns of the rows, which no built-in template has."""
    hold_images: bool = False
    """Whether a program says that rows of theirs have images."""
    templates: list[Pick[str]] = field(default_factory=list)
    """Names of chat templates that sources ask for."""
