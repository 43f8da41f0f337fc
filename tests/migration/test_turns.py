"""Templates that are written out, against texts that are written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.data.text.rendering import ChatTemplate
from tonnage.migration.templates import AXOLOTL_TEMPLATES, LLAMA_FACTORY_TEMPLATES

SYSTEM = {"role": "system", "content": "Be 'brief'."}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]
THOUGHT = "<think>\n\n</think>\n\n"


def of_cohere(end: str) -> str:
    """Cohere's text, with what ends an answer."""
    said = (("SYSTEM", "Be 'brief'."), ("USER", "One?"), ("CHATBOT", "1"), ("USER", "Two?"), ("CHATBOT", "2"))
    return "<s>" + "".join(
        f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{words}{end if role == 'CHATBOT' else '<|END_OF_TURN_TOKEN|>'}"
        for role, words in said
    )


CHATML = (
    "<|im_start|>system\nBe 'brief'.<|im_end|>\n"
    "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n{0}1<|im_end|>\n"
    "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n{0}2<|im_end|>\n"
)

EXPECTED = {
    "alpaca": "Be 'brief'.### Instruction:\nOne?\n\n### Response:\n1</s>\n\n"
    "### Instruction:\nTwo?\n\n### Response:\n2</s>\n\n",
    "cohere": of_cohere("</s>"),
    "deepseek": "<s>Be 'brief'.\n\nUser: One?\n\nAssistant:1</s>User: Two?\n\nAssistant:2</s>",
    "deepseek3": "<s>Be 'brief'.<｜User｜>One?<｜Assistant｜>1</s><｜User｜>Two?<｜Assistant｜>2</s>",
    "deepseekr1": f"<s>Be 'brief'.<｜User｜>One?<｜Assistant｜>{THOUGHT}1</s>"
    f"<｜User｜>Two?<｜Assistant｜>{THOUGHT}2</s>",
    "default": "System: Be 'brief'.</s>\nHuman: One?</s>\nAssistant:1</s>\nHuman: Two?</s>\nAssistant:2</s>\n",
    "exaone": "[|system|]Be 'brief'.[|endofturn|]\n"
    "[|user|]One?\n[|assistant|]1</s>\n[|user|]Two?\n[|assistant|]2</s>\n",
    "llama2": "<s>[INST] <<SYS>>\nBe 'brief'.\n<</SYS>>\n\nOne? [/INST]1</s><s>[INST] Two? [/INST]2</s>",
    "mistral": "<s>[INST] Be 'brief'.\n\nOne?[/INST] 1</s>[INST] Two?[/INST] 2</s>",
    "olmo": "</s>Be 'brief'.<|user|>\nOne?<|assistant|>\n1</s><|user|>\nTwo?<|assistant|>\n2</s>",
    "openchat": "<s>Be 'brief'.GPT4 Correct User: One?</s>GPT4 Correct Assistant:1</s>"
    "GPT4 Correct User: Two?</s>GPT4 Correct Assistant:2</s>",
    "qwen": CHATML.format(""),
    "qwen3": CHATML.format(THOUGHT),
    "smollm2": CHATML.format(""),
    "vicuna": "Be 'brief'.USER: One? ASSISTANT:1</s>USER: Two? ASSISTANT:2</s>",
    "zephyr": "<|system|>\nBe 'brief'.</s><|user|>\nOne?</s><|assistant|>\n1</s><|user|>\nTwo?</s><|assistant|>\n2</s>",
}
USUAL = {
    "alpaca": "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n",
    "qwen": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face.",
    "vicuna": "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions.",
    "zephyr": "You are Zephyr, a helpful assistant.",
}


def rendered(text: str, messages: list[dict[str, Any]], *, opened: bool = False, **arguments: Any) -> str:
    return ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}, arguments).render(messages, opened=opened)


@pytest.mark.parametrize("name", [name for name, named in LLAMA_FACTORY_TEMPLATES.items() if named.text])
def test_a_template_of_llama_factory(name: str) -> None:
    text, expected = LLAMA_FACTORY_TEMPLATES[name].text, EXPECTED[name]
    assert rendered(text, [SYSTEM, *CHAT]) == expected
    opening = rendered(text, [SYSTEM, *CHAT[:3]], opened=True)
    assert expected.startswith(opening)
    assert expected.removeprefix(opening).removeprefix(THOUGHT).lstrip(" ").startswith("2"), (
        "it ends where an answer begins"
    )
    if name in USUAL:
        assert rendered(text, CHAT) == expected.replace("Be 'brief'.", USUAL[name])


def test_thoughts_that_are_off_are_no_part_of_an_answer() -> None:
    text = LLAMA_FACTORY_TEMPLATES["qwen3"].text
    assert rendered(text, CHAT[:1], opened=True, enable_thinking=False).endswith(THOUGHT)
    assert rendered(text, CHAT[:1], opened=True).endswith("<|im_start|>assistant\n")
    thinking = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n2"}
    assert rendered(text, [*CHAT[:3], thinking]).endswith("assistant\n<think>\nHm.\n</think>\n\n2<|im_end|>\n")


def test_templates_of_axolotl() -> None:
    assert rendered(AXOLOTL_TEMPLATES["cohere"].text, [SYSTEM, *CHAT]) == of_cohere("<|END_OF_TURN_TOKEN|>")
    assert rendered(AXOLOTL_TEMPLATES["qwen_25"].text, [SYSTEM, *CHAT]) == CHATML.format("")
    last = CHATML.format("").replace("2<|im_end|>", f"{THOUGHT}2<|im_end|>")
    qwen_3 = AXOLOTL_TEMPLATES["qwen3"].text
    assert rendered(qwen_3, [SYSTEM, *CHAT]) == last
    thinking = {"role": "assistant", "content": "2", "reasoning_content": "Hm."}
    assert rendered(qwen_3, [SYSTEM, *CHAT[:3], thinking]) == last.replace("\n\n</think>", "\nHm.\n</think>")
