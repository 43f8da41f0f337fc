"""What tries begin with: tiny models, rows, a config, a cache that knows them, and a run that has ended. Made once."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hostile.forking import forked
from tiny import alpaca_rows, llama_config, neox_config, write_model, write_rows
from visions import draw_image, write_vision

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ROWS = 24


class Stock:
    """A directory of things that nobody changes: tries copy what they need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.run = folder / "run"

    def model(self, kind: str) -> Path:
        """A model directory: ``llama`` (tied, no template), ``neox``, ``chat`` (untied, with a chat template),
        ``vision`` (text and images)."""
        return self.folder / "models" / kind

    def copy_model(self, kind: str, to: Path) -> Path:
        """A copy of one that may be changed."""
        return Path(shutil.copytree(self.model(kind), to))

    @property
    def rows(self) -> Path:
        """Rows that are right."""
        return self.folder / "rows.jsonl"

    def config(self, **keys: Any) -> dict[str, Any]:
        """A config as values, right unless ``keys`` say otherwise; a section among them is merged."""
        found: dict[str, Any] = {
            "model": str(self.model("llama")),
            "data": {"train": str(self.rows), "max_length": 256, "template": "plain"},
            "batch": {"sequences": 2},
            "steps": 2,
            "launch": {"threads": 1},
            "track": [],
        }
        for key, value in keys.items():
            is_section = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = found[key] | value if is_section else value
        return found


def make(folder: Path) -> Stock:
    """Make everything. Call this where everything is imported: what takes long is done in children."""
    stock = Stock(folder)
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    write_model(stock.model("llama"), llama_config(**small, **heads))
    write_model(stock.model("neox"), neox_config(**small))
    chat = write_model(stock.model("chat"), llama_config(**small, **heads, tie_word_embeddings=False))
    _give_template(chat)
    write_vision(stock.model("vision"), "llava")
    write_rows(stock.rows, [dict(row) for row in alpaca_rows(ROWS)])
    (folder / "said").mkdir()
    for number, words in enumerate(_warming(stock)):
        _carried_out(stock, words, number)
    return stock


def _give_template(model: Path) -> None:
    described = json.loads((model / "tokenizer_config.json").read_text())
    described["eos_token"] = "<|im_end|>"
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = {"<|end|>": "<|im_end|>", "<|pad|>": "<|im_start|>"}[token["content"]]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    described["pad_token"] = "<|im_start|>"
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    (model / "chat_template.jinja").write_text(CHATML)


def _warming(stock: Stock) -> list[list[str]]:
    configs = {}
    for kind in ("neox", "chat", "llama"):
        keys: dict[str, Any] = {"model": str(stock.model(kind)), "checkpoint": {"every": 1}}
        keys["data"] = {"template": "auto" if kind == "chat" else "plain"}
        path = stock.folder / f"{kind}.yaml"
        path.write_text(json.dumps(stock.config(**keys, output=str(stock.run))))
        configs[kind] = str(path)
    content = [{"type": "image", "path": "cat.png"}, {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "a cat"}]
    (stock.folder / "cat.png").write_bytes(draw_image(1))
    write_rows(stock.folder / "images.jsonl", [{"messages": turns}] * 4)
    data = {"train": str(stock.folder / "images.jsonl"), "template": "auto"}
    path = stock.folder / "vision.yaml"
    path.write_text(json.dumps(stock.config(model=str(stock.model("vision")), data=data, output=str(stock.run))))
    configs["vision"] = str(path)
    run, export = str(stock.run), str(stock.run / "export")
    return [
        *(["plan", config] for config in configs.values()),
        ["train", configs["llama"], "--prepare"],
        ["work", run],
        ["export", run, export],
    ]


def _carried_out(stock: Stock, words: list[str], number: int) -> None:
    said = stock.folder / "said" / str(number)
    said.mkdir()

    def work() -> int:
        os.environ["TONNAGE_CACHE"] = str(stock.cache)
        return carry_out(words)

    ended = forked(work, said, says_yes=False, terminal=False, seconds=90)
    if ended.status or ended.wrong:
        raise AssertionError(f"{' '.join(words)}: {ended.status} {ended.wrong}\n{ended.out}\n{ended.err}")


def carry_out(words: list[str]) -> int:
    """A command line in this process; returns its exit status. ``work RUN`` is what a worker of a written run does."""
    if words[0] == "work":
        return _work(words[1])
    from entry import main

    sys.argv = ["tonnage", *words]
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    return 0


def _work(run: str) -> int:
    from tonnage.launch.local import reserved_port
    from tonnage.rundir.directory import RunDirectory
    from tonnage.training.worker import main

    with reserved_port() as port:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        status = main(run)
    for account in RunDirectory(run).read_errors():
        whole = "" if account.exit_status == 2 else account.trace
        print(f"{account.kind}: {account.message}\n{whole}", file=sys.stderr)
    return status
