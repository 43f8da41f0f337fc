"""Chat templates of other programs that no built-in of ours has the text of, as data, and as Jinja.

A conversation is what stands around the words of each role. Texts are those of Axolotl 0.19 and LLaMA-Factory 0.9.5.
Calls of tools are not written: rows that have some are refused by name when they are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

CONTENT = "{content}"
_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Turns:
    """What stands around the words of each role: formats with ``{content}``, ``{bos}`` and ``{eos}``."""

    user: str
    opener: str
    """What opens the assistant's turn, behind the user's."""
    assistant: str = "{content}{eos}"
    system: str = CONTENT
    usual: str = ""
    """The system message of conversations that have none."""
    begins: str = ""
    """``bos_token`` or ``eos_token``, if a conversation begins with it."""
    within: bool = False
    """Whether the system message stands inside of the first user's."""
    trims: bool = False
    """Whether words lose white space around them."""
    thinks: bool = False
    """Whether an answer without a thought gets an empty one: part of the answer, or of what opens it if the template is
    told ``enable_thinking: false``."""
    tokens: tuple[str, ...] = ()
    """Special tokens that the tokenizer must have."""

    @property
    def joins(self) -> bool:
        """Whether an answer begins right behind other words, and not after a line break or a token in brackets."""
        return (self.opener or self.user)[-1] not in "\n>"


def jinja(turns: Turns) -> str:
    """The template of a conversation."""
    lines = [f"{{{{- {turns.begins} -}}}}"] if turns.begins else []
    words = "message['content']" + (" | trim" if turns.trims else "")
    if turns.within:
        lines += ["{%- set state = namespace(system='') -%}"]
        if turns.usual:
            lines += [f"{{%- set state.system = {_written(turns.system, _text(turns.usual))} -%}}"]
    elif turns.usual:
        lines += [
            "{%- if messages[0]['role'] != 'system' -%}",
            f"{{{{- {_written(turns.system, _text(turns.usual))} -}}}}",
            "{%- endif -%}",
        ]
    system = _written(turns.system, "message['content']")
    user = _written(turns.user, f"(state.system + {words})" if turns.within else f"({words})")
    lines += [
        "{%- for message in messages -%}",
        "{%- if message['role'] == 'system' and loop.first -%}",
        f"{{%- set state.system = {system} -%}}" if turns.within else f"{{{{- {system} -}}}}",
        "{%- elif message['role'] == 'user' -%}",
        f"{{{{- {user} -}}}}",
        *(["{%- set state.system = '' -%}"] if turns.within else []),
        "{%- elif message['role'] == 'assistant' -%}",
        f"{{{{- {_text(turns.opener)} -}}}}",
        *(_thought() if turns.thinks else []),
        f"{{{{- {_written(turns.assistant, f'({words})')} -}}}}",
        "{%- else -%}",
        "{{- raise_exception('this template has no place for role ' + message['role'] + ' here') -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
        "{%- if add_generation_prompt -%}",
        f"{{{{- {_text(turns.opener)} -}}}}",
        *(
            [
                "{%- if enable_thinking is defined and not enable_thinking -%}",
                f"{{{{- {_text(_THOUGHT)} -}}}}",
                "{%- endif -%}",
            ]
            if turns.thinks
            else []
        ),
        "{%- endif -%}",
    ]
    return "\n".join(lines)


def _thought() -> list[str]:
    return [
        "{%- if '<think>' not in message['content'] and '</think>' not in message['content'] -%}",
        f"{{{{- {_text(_THOUGHT)} -}}}}",
        "{%- elif enable_thinking is defined and not enable_thinking -%}",
        "{{- raise_exception('a thought, and enable_thinking is false') -}}",
        "{%- endif -%}",
    ]


def _written(format: str, words: str) -> str:
    """A format as an expression of Jinja."""
    before, _, behind = format.partition(CONTENT)
    found = [_with_tokens(before), words, _with_tokens(behind)]
    return " + ".join(part for part in found if part)


def _with_tokens(text: str) -> str:
    parts = re.split(r"\{(bos|eos)\}", text)  # texts and names in turn
    found = [f"{part}_token" if at % 2 else _text(part) for at, part in enumerate(parts) if part]
    return " + ".join(found)


def _text(text: str) -> str:
    """A text as Jinja writes one."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


_CHATML: dict[str, Any] = {
    "user": "<|im_start|>user\n{content}<|im_end|>\n",
    "opener": "<|im_start|>assistant\n",
    "assistant": "{content}<|im_end|>\n",
    "system": "<|im_start|>system\n{content}<|im_end|>\n",
}
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_OF_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
COHERE = Turns(
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{content}<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "{content}<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{content}<|END_OF_TURN_TOKEN|>",
    begins="bos_token",
    trims=True,
)
QWEN_25 = Turns(**_CHATML, usual=_OF_QWEN)

QWEN_3 = """\
{%- set state = namespace(asked=-1) -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{%- set state.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' or message['role'] == 'system' -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- elif message['role'] == 'assistant' and not message['tool_calls'] -%}
{%- set said = message['content'] -%}
{%- set thought = message['reasoning_content'] or '' -%}
{%- if not thought and '</think>' in said -%}
{%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > state.asked and (loop.last or thought) -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') -}}
{%- else -%}
{{- said -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- raise_exception('this template has no place for tools') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"""
"""Axolotl's ``qwen3``: the last answer has a thought, which is context where it is empty; earlier answers have none."""

LLAMA_FACTORY: dict[str, Turns] = {
    "alpaca": Turns(
        "### Instruction:\n{content}\n\n",
        "### Response:\n",
        "{content}{eos}\n\n",
        usual="Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n",
    ),
    "cohere": Turns(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{content}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        system=COHERE.system,
        begins="bos_token",
    ),
    "deepseek": Turns("User: {content}\n\n", "Assistant:", system="{content}\n\n", begins="bos_token"),
    "deepseek3": Turns("<｜User｜>{content}", "<｜Assistant｜>", begins="bos_token"),
    "deepseekr1": Turns("<｜User｜>{content}", "<｜Assistant｜>", begins="bos_token", thinks=True),
    "default": Turns("Human: {content}{eos}\n", "Assistant:", "{content}{eos}\n", "System: {content}{eos}\n"),
    "exaone": Turns("[|user|]{content}\n", "[|assistant|]", "{content}{eos}\n", "[|system|]{content}[|endofturn|]\n"),
    "llama2": Turns(
        "{bos}[INST] {content} [/INST]",
        "",
        system="<<SYS>>\n{content}\n<</SYS>>\n\n",
        within=True,
    ),
    "mistral": Turns(
        "[INST] {content}[/INST]", "", " {content}{eos}", "{content}\n\n", begins="bos_token", within=True
    ),
    "olmo": Turns("<|user|>\n{content}", "<|assistant|>\n", begins="eos_token"),
    "openchat": Turns("GPT4 Correct User: {content}{eos}", "GPT4 Correct Assistant:", begins="bos_token"),
    "qwen": Turns(**_CHATML, usual=_OF_QWEN, tokens=_CHATML_TOKENS),
    "qwen3": Turns(**_CHATML, thinks=True, tokens=_CHATML_TOKENS),
    "smollm2": Turns(
        **_CHATML,
        usual="You are a helpful AI assistant named SmolLM, trained by Hugging Face.",
        tokens=_CHATML_TOKENS,
    ),
    "vicuna": Turns(
        "USER: {content} ",
        "ASSISTANT:",
        usual="A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions.",
    ),
    "zephyr": Turns(
        "<|user|>\n{content}{eos}",
        "<|assistant|>\n",
        system="<|system|>\n{content}{eos}",
        usual="You are Zephyr, a helpful assistant.",
    ),
}
"""LLaMA-Factory's ``template``, for models whose own is another text."""
