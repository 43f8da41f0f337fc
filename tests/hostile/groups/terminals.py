"""Escape sequences and markup in whatever is printed: rows, names, fields, tokens, templates, answers, errors."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from hostile import mutations
from hostile.case import Case
from hostile.stock import CHATML, Stock
from hostile.strings import MARKUP, TERMINAL


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """Something that is printed with a text in it that would command the terminal."""
    work = folder / "work"
    text = _text(chance)
    name = text.replace("/", "|").replace("\0", "")[:60] or "x"
    terminal = chance.randrange(4) > 0
    way = chance.randrange(9)
    rows: list[dict[str, Any]] = [
        {"instruction": f"i{text}", "input": text, "output": f"o{text}", f"f{text}": text} for _ in range(6)
    ]
    model, template, overrides = str(stock.model("llama")), "plain", []
    words = chance.choice(
        (
            ["inspect", "config.yaml"],
            ["inspect", "config.yaml", "--json"],
            ["plan", "config.yaml"],
            ["train", "config.yaml", "--dry-run"],
        )
    )
    data: dict[str, Any] = {}
    if way == 0:
        rows[0]["output"] = 3 if chance.randrange(2) else ""
    elif way == 1:
        model, template = _odd_tokens(chance, work, stock, text), "auto"
    elif way == 2:
        model = name
        shutil.copytree(stock.model("llama"), work / name)
    elif way == 3:
        model = str(stock.copy_model("chat", work / "model"))
        template = "auto"
        (work / "model" / "chat_template.jinja").write_text(
            chance.choice(
                (
                    CHATML.replace("<|im_end|>\\n", f"<|im_end|>{text}"),
                    f"{{{{ raise_exception({json.dumps(text)}) }}}}",
                    f"{{% {text} %}}",
                )
            ),
            errors="replace",
        )
    elif way == 4:
        overrides = [
            f"{chance.choice(('', 'data.', 'data.template=', 'model=', 'output=', 'seed='))}{text}".replace("\0", "")
        ]
    elif way == 5:
        data["columns"] = {"instruction": f"i{text}", text: "output"}
    elif way == 6:
        words = chance.choice(
            (
                [
                    "generate",
                    str(stock.model("llama")),
                    "--prompt",
                    text.replace("\0", ""),
                    "--template",
                    "plain",
                    "--max-new-tokens",
                    "5",
                    "--temperature",
                    "5",
                ],
                ["verify", name],
                ["import", name],
                ["chat", name],
                [name.lstrip("-")],
                ["export", name, "out"],
                ["generate", name, "--prompt", "x"],
                ["follow", name],
                ["launch", "kube", name],
                ["train", "--resume", name],
            )
        )
        return Case([words], terminal=terminal)
    elif way == 7:
        (work / "a.json").write_text(json.dumps({"optimizer": {"type": text, f"k{text}": text}, f"z{text}": 1}))
        return Case([["import", "a.json", *chance.choice(([], ["--json"]))]], terminal=terminal)
    rows_name = f"{name}.jsonl" if way == 8 else "rows.jsonl"
    (work / rows_name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = stock.config(
        model=model, data={"train": rows_name, "template": template, **data}, output=f"run{name}" if way == 8 else "run"
    )
    try:
        written = json.dumps(found)
    except ValueError:
        written = "{}"
    (work / "config.yaml").write_text(written)
    return Case([[*words[:2], *(one for one in overrides if one and one[0] != "-"), *words[2:]]], terminal=terminal)


def _text(chance: random.Random) -> str:
    if chance.randrange(3):
        found = chance.choice((*TERMINAL, *MARKUP))
    else:
        found = mutations.text(chance)[:100]
    return found.replace("\udc80", "\ufffd").encode("utf-8", "replace").decode()


def _odd_tokens(chance: random.Random, work: Path, stock: Stock, text: str) -> str:
    """A model whose end of a turn is a text that would command the terminal."""
    model = stock.copy_model("chat", work / "model")
    end = text or "[/INST]"
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = end if token["content"] == "<|im_end|>" else token["content"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    described = json.loads((model / "tokenizer_config.json").read_text())
    described["eos_token"] = end
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    (model / "chat_template.jinja").write_text(CHATML.replace("'<|im_end|>\\n'", "eos_token"))
    return str(model)
