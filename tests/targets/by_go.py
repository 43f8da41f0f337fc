"""Have Go render our Go templates, and keep what it writes: ``python -m tests.targets.by_go`` (Go 1.18 or newer)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tonnage.forms.conversation import Message

PROGRAM = """package main

import (
	"bytes"
	"encoding/json"
	"os"
	"text/template"
)

type message struct{ Role, Content string }
type data struct {
	System   string
	Messages []*message
}
type job struct {
	Template string
	Data     data
}

// Reads a list of templates with their data, and writes what text/template makes of them, as Ollama calls it.
func main() {
	var jobs []job
	if err := json.NewDecoder(os.Stdin).Decode(&jobs); err != nil {
		panic(err)
	}
	texts := []string{}
	for _, one := range jobs {
		var text bytes.Buffer
		parsed := template.Must(template.New("").Option("missingkey=zero").Parse(one.Template))
		given := map[string]any{"System": one.Data.System, "Messages": one.Data.Messages, "Response": ""}
		if err := parsed.Execute(&text, given); err != nil {
			panic(err)
		}
		texts = append(texts, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""


def collated(messages: Iterable[Message]) -> dict[str, Any]:
    """What Ollama gives to a template for a conversation: messages of one role that follow each other are joined, the
    words of all system messages are there as well."""
    joined = list[dict[str, str]]()
    for message in messages:
        if joined and joined[-1]["Role"] == message["role"]:
            joined[-1]["Content"] += "\n\n" + message["content"]
        else:
            joined.append({"Role": message["role"], "Content": message["content"]})
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    return {"Messages": joined, "System": system, "Tools": [], "Response": ""}


def by_go(jobs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """What Go's text/template makes of templates with their data."""
    given = [{"Template": template, "Data": {**data, "Tools": None}} for template, data in jobs]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "main.go"
        program.write_text(PROGRAM)
        done = subprocess.run(
            ["go", "run", str(program)], input=json.dumps(given), capture_output=True, text=True, check=True
        )
    texts: list[str] = json.loads(done.stdout)
    return texts


def main() -> None:
    """Write ``rendered.json``."""
    from targets.test_turns import RENDERED, SPECIAL, templates
    from tonnage.data.text.rendering import ChatTemplate
    from tonnage.targets.ollama import go_template_of
    from tonnage.targets.turns import cases

    kept = {}
    for name, jinja in templates().items():
        template = ChatTemplate(jinja, SPECIAL)
        text, _ = go_template_of(template, name)
        kept[name] = {"template": text, "texts": by_go([(text, collated(said)) for said, _ in cases(template)])}
    RENDERED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
