"""Answers against a greedy loop written out, limits, stops, and which directory a name means."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

import tiny
from stripped import stripping_tokenizer, write_stripping_model
from tonnage.data import encode_prompt
from tonnage.errors import UserError
from tonnage.inference.generate import Decoding, Loaded, generate, is_match, load, resolve_model, stream, write

ASKED = ["Say a", "A much longer question about nothing at all, to be padded against", "b", "Say abc, please", "c d e"]
CHATS = [[{"role": "user", "content": text}] for text in ASKED]
SHAPES = {"llama": tiny.llama_config, "neox": tiny.neox_config}


def small(name: str) -> Any:
    return SHAPES[name](num_hidden_layers=2, initializer_range=0.2)


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("models") / request.param, small(request.param))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Loaded:
    return load(directory, template="alpaca")


def greedy(loaded: Loaded, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest next token, again and again: whole forward passes, no cache, no padding."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in loaded.stop_tokens:
                break
    return ids[len(prompt) :]


def test_batched_answers_equal_a_greedy_loop(loaded: Loaded) -> None:
    tokens = [greedy(loaded, encode_prompt(chat, loaded.tokenizer), 12) for chat in CHATS]
    assert len({tuple(answer) for answer in tokens}) > 1  # a model that always says the same would prove little
    expected = [loaded.tokenizer.decode(answer, skip_special_tokens=True) for answer in tokens]
    for batch_size in (1, 2, 5):
        assert generate(loaded, CHATS, Decoding(12), batch_size=batch_size) == expected
    seen: list[tuple[int, int]] = []
    generate(loaded, CHATS, Decoding(2), batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_an_answer_ends_before_its_stop_token(loaded: Loaded) -> None:
    tokens = greedy(loaded, encode_prompt(CHATS[0], loaded.tokenizer), 12)
    stop = tokens[5]
    stopped = replace(loaded, stop_tokens=(stop,))
    expected = loaded.tokenizer.decode(tokens[: tokens.index(stop)])
    assert generate(stopped, CHATS, Decoding(12))[0] == expected
    assert "".join(stream(stopped, CHATS[0], Decoding(12))) == expected


def test_a_stream_is_the_answer_in_pieces(loaded: Loaded) -> None:
    pieces = list(stream(loaded, CHATS[3], Decoding(30)))
    assert "".join(pieces) == generate(loaded, [CHATS[3]], Decoding(30))[0]
    assert all(pieces)


def test_a_closed_stream_stops_the_model(loaded: Loaded) -> None:
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    hook = loaded.model.register_forward_hook(count)
    endless = replace(loaded, stop_tokens=())
    written = stream(endless, CHATS[0], Decoding(400))
    next(written)
    written.close()
    hook.remove()
    assert num_forwards < 400
    assert not [thread for thread in threading.enumerate() if "write" in thread.name]


def test_an_error_while_streaming_is_raised_where_it_is_read(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(loaded.model, "generate", fail)
    with pytest.raises(RuntimeError, match="no more memory"):
        list(stream(loaded, CHATS[0]))


def test_drawn_answers_vary_with_the_seed_and_repeat_with_it(loaded: Loaded) -> None:
    def drawn(seed: int) -> list[str]:
        torch.manual_seed(seed)
        return generate(loaded, CHATS, Decoding(12, temperature=1.0, top_p=0.9))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_no_room_for_an_answer_is_refused_with_numbers(loaded: Loaded) -> None:
    long = [{"role": "user", "content": "x" * 600}]
    with pytest.raises(UserError, match=r"conversation 2 has 7\d\d tokens\n  needed: fewer than 512"):
        generate(loaded, [CHATS[0], long])
    with pytest.raises(UserError, match="fewer than 512"):
        list(stream(loaded, long))


def test_an_answer_never_goes_beyond_the_positions(loaded: Loaded) -> None:
    endless = replace(loaded, stop_tokens=())
    prompt = [{"role": "user", "content": "x" * 300}]
    room = 512 - len(encode_prompt(prompt, loaded.tokenizer))
    written = generate(endless, [prompt], Decoding(10_000))[0]
    assert 0 < len(loaded.tokenizer(written)["input_ids"]) <= room * 3  # bytes that are no text take three


@pytest.mark.parametrize("batch_size", [2, 5])
def test_a_long_prompt_leaves_the_answers_beside_it_their_room(loaded: Loaded, batch_size: int) -> None:
    endless = replace(loaded, stop_tokens=())
    texts = ("x" * 350, "x" * 5, "x" * 340, "x" * 20, "y" * 350)
    chats = [[{"role": "user", "content": text}] for text in texts]
    alone = [generate(endless, [chat], Decoding(40))[0] for chat in chats]
    assert generate(endless, chats, Decoding(40), batch_size=batch_size) == alone
    written = write(endless, chats, Decoding(40), seed=0, attention="sdpa", batch_size=batch_size)
    lengths = [len(encode_prompt(chat, loaded.tokenizer)) for chat in chats]
    assert [len(answer.tokens) for answer in written] == [min(40, 512 - length) for length in lengths]
    assert 40 > 512 - lengths[2] > 512 - lengths[0]


def test_a_prompt_without_tokens_is_refused(directory: Path) -> None:
    plain = load(directory, template="plain")
    chats = [[{"role": "user", "content": text}] for text in ("hello", "")]
    with pytest.raises(UserError, match=r"conversation 2 has no tokens\n  needed: one at least.*\n  change: write"):
        generate(plain, chats)
    with pytest.raises(UserError, match="no tokens"):
        list(stream(plain, chats[1]))


def test_a_stream_keeps_the_spaces_at_the_beginning_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_stripping_model(tmp_path / "model"), template="plain")
    names = ["▁is", "<0x0A>", "▁", "▁", "x", "<0x0A>", "▁world", "</s>"]
    written = torch.tensor([stripping_tokenizer().convert_tokens_to_ids(names)])

    def says(*, input_ids: torch.Tensor, streamer: Any = None, **_: Any) -> torch.Tensor:
        for tokens in () if streamer is None else (input_ids, *written[0]):
            streamer.put(tokens)
        return torch.cat([input_ids, written], 1)

    monkeypatch.setattr(model.model, "generate", says)
    assert generate(model, [CHATS[0]]) == ["is\n  x\n world"]
    assert list(stream(model, CHATS[0])) == ["is", "\n ", " ", "x", "\n world"]


@pytest.mark.parametrize("temperature", [1e-40, -1.0, 1e4, float("nan"), float("inf")])
def test_a_temperature_that_nothing_can_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(UserError, match=r"temperature: .*\n  needed: 0, or a number from 0.000001 to 1,000"):
        Decoding(temperature=temperature)


def test_draws_at_the_least_temperature_are_the_likeliest(loaded: Loaded) -> None:
    assert generate(loaded, CHATS, Decoding(12, temperature=1e-6)) == generate(loaded, CHATS, Decoding(12))


def test_a_seed_of_too_many_digits_is_refused(loaded: Loaded) -> None:
    for seed in (99_999_999_999_999_999_999, -(2**63)):
        with pytest.raises(UserError, match=rf"seed: a seed of {seed}\n  needed: a whole number from -9"):
            generate(loaded, CHATS, seed=seed)
    assert generate(loaded, CHATS[:1], Decoding(2), seed=-1)


def test_white_space_around_an_answer_does_not_count() -> None:
    assert is_match(" 42\n", "42")
    assert not is_match("4 2", "42")
    assert not is_match("", None)


def test_a_template_with_tokens_that_the_model_lacks_is_refused(directory: Path) -> None:
    with pytest.raises(UserError, match=r"chatml.*<\|im_start\|>"):
        load(directory, template="chatml")


def test_a_model_that_is_not_loaded_leaves_the_bars_of_transformers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        assert not logging.is_progress_bar_enabled()
        raise ValueError("no such kernel")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fails)
    assert logging.is_progress_bar_enabled()
    with pytest.raises(UserError, match="no such kernel"):
        load(directory)
    assert logging.is_progress_bar_enabled()


def test_weights_keep_their_type(tmp_path: Path) -> None:
    saved = tiny.write_model(tmp_path / "model", small("llama"), dtype=torch.bfloat16)
    assert load(saved, template="plain").model.dtype == torch.bfloat16


def test_a_run_means_its_export(directory: Path, tmp_path: Path) -> None:
    assert resolve_model(directory) == directory
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model: x\n")
    with pytest.raises(UserError, match="until it has saved a checkpoint"):
        resolve_model(run)
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    with pytest.raises(UserError, match=f"tonnage export {run} {run}/export"):
        resolve_model(run)
    (run / "export").symlink_to(directory)
    assert resolve_model(run) == run / "export"


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing/here"):
        resolve_model(f"{tmp_path}/nothing/here")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match=r"(?s)no tokenizer.*no weights"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("tokens", ["NaN", "1.5", str(2**63), "[256, -1]", '"<|end|>"', "[]", "258"])
def test_special_tokens_that_are_none_are_refused(directory: Path, tmp_path: Path, tokens: str) -> None:
    shutil.copytree(directory, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(f'{{"eos_token_id": {tokens}}}')
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load(tmp_path / "model")
