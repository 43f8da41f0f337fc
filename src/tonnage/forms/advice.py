"""What to write in a config for rows that fit no form: worked out from the rows themselves, and tried on them."""

from __future__ import annotations

from tonnage.forms.conversation import RowError
from tonnage.forms.formats import FORMATS, PRESETS, Form, RowPurpose, form_of
from tonnage.forms.reader import Reader
from tonnage.forms.values import Row, written

ALIASES = {
    "instruction": ("question", "query", "problem", "prompt", "input", "human", "user", "task", "q"),
    "output": ("response", "answer", "solution", "completion", "target", "assistant", "reply", "generation", "a"),
    "input": ("context", "passage"),
    "system": ("system_prompt", "system_message"),
}
"""Field of the Alpaca form -> names that people give to it, the likeliest first."""


def advice(source: str, path: str, row: Row, purpose: RowPurpose = "supervised") -> str:
    """What to write for a source whose rows fit no form: a preset or columns with which this row can be read.

    ``source`` is the source's key and ``path`` its path, as the config has them. Empty where nothing is found.
    ``purpose`` is what rows are to be for.
    """
    for name, (format, columns) in PRESETS.items():
        suits = bool(columns) and FORMATS[format].purpose == purpose
        if suits and all(theirs in row for theirs in columns.values()) and _reads(form_of(name, {}, {}), row):
            return f"{source}: {written({'path': path, 'format': name})}"
    if purpose != "supervised":
        return ""
    columns = {}
    for ours, names in ALIASES.items():
        free = [name for name in (ours, *names) if name in row and name not in columns.values()]
        if free and free[0] != ours:
            columns[ours] = free[0]
    if columns and _reads(Form("alpaca", columns), row):
        return f"{source}: {written({'path': path, 'columns': columns})}"
    if "message_id" in row and "parent_id" in row:
        return "take the file of the data set that holds whole trees (a prompt with its replies), or join the messages"
    return ""


def _reads(form: Form, row: Row) -> bool:
    try:
        return bool(Reader(form).read(row))
    except (RowError, RecursionError):
        return False
