"""A Modelfile for Ollama: where the weights are, the chat template in Go's words, what ends an answer, how it is drawn.

The template is written from the table of ours (``turns``), which writes the same bytes as ours on a dozen conversations
or is refused; that Go's text/template writes what the table says is held by tests, with what Go made of the templates
of many families. Ollama joins messages of the same role that follow each other
before it renders them, takes a beginning-of-text token off that its tokenizer adds itself, and has no place for tools
in a template that does not name them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tonnage.data.text.rendering import ChatTemplate
from tonnage.targets.turns import BESIDES, END, ROLES, START, TurnTable, cases

MODELFILE = "Modelfile"
READS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
)
"""Architectures whose safetensors Ollama converts itself (its convert/convert.go, August 2026) and that are plain text
models; of others it takes a GGUF file."""
PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
"""Of a generation configuration, what Ollama has by the same name; it has defaults of its own for what is not said."""

_BLANKS = [chr(code) for code in range(0x3001) if chr(code).isspace()]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _trim(name: str, *, left: bool, then: str) -> str:
    """A template that takes white space off one end of a string, by calling itself, as Go knows no trim."""
    branches = []
    for size in (1, 2, 3):
        blanks = " ".join(_quoted(one) for one in _BLANKS if len(one.encode()) == size)
        end, rest = f"slice . 0 {size}", f"slice . {size}"
        if not left:
            end, rest = f"slice . (len (slice . {size}))", f"slice . 0 (len (slice . {size}))"
        condition = f"and (ge (len .) {size}) (eq ({end}) {blanks})"
        branches.append(f'if {condition} }}}}{{{{ template "{name}" ({rest}) }}}}')
    return (
        f'{{{{- define "{name}" }}}}\n{{{{- '
        + "\n{{- else ".join(branches)
        + f"\n{{{{- else }}}}{then}\n{{{{- end }}}}"
        "\n{{- end }}\n"
    )


_DEFINED = {
    "left": _trim("left", left=True, then="{{ . }}"),
    "right": _trim("right", left=False, then="{{ . }}"),
    "both": _trim("both", left=True, then='{{ template "right" . }}'),
}


def go_text(turns: TurnTable) -> str:
    """A table as a template of Go's."""
    used = set(turns.trims.values())
    needed = [name for name in ("left", "right", "both") if name in used or (name == "right" and "both" in used)]
    lines = [_DEFINED[name] for name in needed]
    lines.append('{{- $before := "" }}')
    lines.append("{{- range $i, $m := .Messages }}" if turns.folded else "{{- range .Messages }}")
    roles = [role for role in ROLES if not (turns.folded and role == "system")]
    for number, role in enumerate(roles):
        gaps = {before: gap for (before, now), gap in turns.gaps.items() if now == role}
        lines.append(f"{{{{- {'else if' if number else 'if'} eq .Role {_quoted(role)} }}}}")
        silent = [before for before, now in turns.silent if now == role]
        if silent:
            lines.append(f"{{{{- if eq $before {' '.join(map(_quoted, sorted(silent)))} }}}}{{{{ else }}}}")
        if turns.folded and role == "user":
            lines.append("{{- if and $.System (eq (len (slice $.Messages $i)) 1) }}")
            lines += _chosen(turns.folded)
            lines.append("{{- " + _shown("$.System", turns.trims.get((START, "system"), "none")) + " }}")
            lines.append("{{- " + _quoted(gaps.pop("system", "")) + " }}")
            lines.append("{{- " + _shown(".Content", turns.trims.get(("system", "user"), "none")) + " }}")
            lines += ["{{- else }}", *_chosen(gaps), *_contents(turns, role, gaps), "{{- end }}"]
        else:
            lines += [*_chosen(gaps), *_contents(turns, role, gaps)]
        lines.append("{{- $before = .Role }}")
        lines += ["{{- end }}"] if silent else []
    lines += ["{{- end }}", "{{- end }}"]
    lines += _chosen({before: gap for (before, now), gap in turns.gaps.items() if now == END})
    return "\n".join(lines)


def _contents(turns: TurnTable, role: str, gaps: Iterable[str]) -> list[str]:
    """A message of a role, without the white space that it loses behind each role before."""
    contents = {before: _shown(".Content", turns.trims.get((before, role), "none")) for before in gaps}
    if len(set(contents.values())) < 2:
        return ["{{- " + next(iter(contents.values()), ".Content") + " }}"]
    return _branches(contents)


def _shown(value: str, trim: str) -> str:
    return value if trim == "none" else f'template "{trim}" {value}'


def _chosen(gaps: Mapping[str, str]) -> list[str]:
    """What stands behind each role, as actions."""
    return _branches({before: _quoted(gap) for before, gap in gaps.items() if gap})


def _branches(actions: Mapping[str, str]) -> list[str]:
    """Actions by the role that they stand behind."""
    alike: dict[str, list[str]] = {}
    for before, action in actions.items():
        alike.setdefault(action, []).append(before)
    lines = list[str]()
    for action, befores in alike.items():
        condition = f"eq $before {' '.join(map(_quoted, befores))}"
        lines.append(f"{{{{- {'else if' if lines else 'if'} {condition} }}}}{{{{ {action} }}}}")
    return [*lines, "{{- end }}"] if lines else []


def go_template_of(template: ChatTemplate, where: str) -> tuple[str, list[str]]:
    """A chat template for Ollama, and what there is to say of it.

    Raises:
        UserError: no template of Go's writes the same bytes; says what of ours is in the way.
    """
    turns = TurnTable.of(template, where)
    compared = sum(1 for _ in cases(template))
    notes = [f"chat template: the same bytes in Go's form as in ours, on {compared} conversations"]
    if (START, "system") not in turns.gaps:
        notes.append("system messages: the chat template has no place for them, and Ollama says nothing of that")
    for what, messages in BESIDES.items():
        if template.attempt(messages, opened=True) not in (None, turns.render(messages)):
            notes.append(f"{what}: Ollama writes it otherwise than the chat template does")
    return go_text(turns), notes


def modelfile(
    source: str,
    template: str,
    *,
    stops: Sequence[str],
    generation: Mapping[str, Any],
    context: int | None,
    title: str,
) -> str:
    """The text of a Modelfile.

    Args:
        source: the weights, a directory or a file beside it.
        template: in Go's form.
        stops: texts of the tokens that end a turn.
        generation: as in ``generation_config.json``.
        context: tokens that the model was trained on at once; ``None`` leaves it to Ollama.
        title: what the model is called in the comment.
    """
    assert '"""' not in template
    lines = [f"# {title}: ollama create NAME -f {MODELFILE}, in this directory", f"FROM {source}"]
    lines.append(f'TEMPLATE """{template}"""')
    lines += [f"PARAMETER stop {_stop(stop)}" for stop in stops]
    drawn = generation.get("do_sample") is True
    if not drawn:
        lines.append("PARAMETER temperature 0")
    else:
        lines += [f"PARAMETER {name} {generation[name]}" for name in PARAMETERS if name in generation]
    if context is not None:
        lines.append(f"PARAMETER num_ctx {context}")
    return "\n".join(lines) + "\n"


def _stop(text: str) -> str:
    if '"' in text or "\n" in text:
        return f'"""{text}"""'
    return f'"{text}"'
