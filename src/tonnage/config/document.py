"""The schema as documentation: ``python -m tonnage.config.document`` prints ``docs/config.md``.

A test compares the file with what this prints, so the page, the error messages and the help are one text.
"""

from __future__ import annotations

import textwrap

from tonnage.config import keys

OPENING = """\
# The config

A config is a YAML file. `model` and `data.train` are required; everything else has a default.

```yaml
model: EleutherAI/pythia-160m
data: {train: rows.json, validation: 0.02, max_length: 1024}
batch: {tokens: 32768}
epochs: 1
optimizer: {lr: 1e-4}
```

Any value can be set on the command line as well, written as YAML. Items of a list are named by their number
(`data.train.1.format`), which may be left out where there is only one. A source that is written as a bare path takes
further keys too (`data.train.format=alpaca`):

    tonnage train config.yaml optimizer.lr=1e-5 data.train.format=alpaca batch='{sequences: 64}'

`'KEY: VALUE'` in one word does the same, and a file takes dotted keys too (`optimizer.lr: 1e-5`), each key once in
either way. An override of `steps` takes the place of `epochs` in the file, and the other way round; so do
`batch.tokens` and `batch.sequences`. Relative paths start from the working directory; `~` and `~user` are home
directories in every path, `$VARIABLE` is left to shells. Unknown keys and values of a wrong type are errors, and so
are anchors, aliases and
tags; a config has at most 256 KB and 20,000 keys and items. The config of a run, with every default written out and
what was `auto` in `batch` and `checkpoint.every` as it was decided, is `config.yaml` in its directory.

<!-- Written by `python -m tonnage.config.document > docs/config.md`; change src/tonnage/config/schema.py. -->
"""


def render() -> str:
    """The page, as Markdown: a table for the top level and one for each section."""
    described = keys.all_keys()
    sections: dict[str, list[keys.Key]] = {"": []}
    sentences = {key.name: key.sentence for key in described}
    for key in described:
        sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    parts = [OPENING]
    for parent, members in sections.items():
        title = "A source" if parent == "data.train" else f"`{parent}`"
        parts.append(f"## {title if parent else 'Top level'}\n")
        if parent == "data.train":
            parts.append("One item of `data.train` or `data.validation`; only `path` is required.\n")
        elif parent:
            parts.append(f"{sentences[parent]}\n")
        parts.append("| key | takes | default | |\n|---|---|---|---|")
        parts += [_row(key) for key in members]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def render_help(width: int) -> str:
    """The keys as plain text for a terminal: a line or more for each."""
    described = [key for key in keys.all_keys() if not key.is_section or key.default not in ("", "required")]
    indent = max(len(key.name) for key in described) + 2
    lines = []
    for key in described:
        default = {"": "", "required": ", required"}.get(key.default, f", default {key.default}")
        text = textwrap.wrap(f"{key.sentence} ({key.takes}{default})", max(20, width - indent - 2))
        names = [f"  {key.name}", *[""] * (len(text) - 1)]
        lines += [f"{name:<{indent + 2}}{line}" for name, line in zip(names, text, strict=True)]
    return "\n".join(lines)


def _row(key: keys.Key) -> str:
    name = key.name.rpartition(".")[2]
    shown_default = key.default if key.default in ("", "required") else f"`{key.default}`"
    if key.is_section and key.name.count(".") == 0:
        shown_name, takes = f"[`{name}`](#{name})", "section"
        if key.default in ("", "required"):
            shown_default = ""
        else:
            words = key.takes.removeprefix("a section of keys or ")
            takes = f"{words} or section"
    else:
        shown_name, takes = f"`{name}`", key.takes
    return f"| {shown_name} | {takes} | {shown_default} | {' '.join(key.sentence.split())} |"


if __name__ == "__main__":
    print(render(), end="")
