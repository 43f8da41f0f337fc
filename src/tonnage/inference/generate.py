"""Answers of a model: in batches over many conversations, or one at a time as it is written.

    resolve_model   RUN | MODEL | hub id -> a model directory
    load            the directory -> model, tokenizer with its template, stop tokens
    generate        conversations -> answers, in batches of similar length, padded on the left
    stream          one conversation -> pieces of the answer

Prompts come from ``tonnage.data.encode_prompt``, so they are the tokens that stood before the answer in training.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from tonnage.data import encode_prompt, stop_tokens
from tonnage.data.text.choice import choose
from tonnage.errors import Problem, UserError, user_error
from tonnage.forms.conversation import Conversation, Image
from tonnage.host.spinning import sleep_soon_beside_others
from tonnage.inference.pieces import Token, pieces_of
from tonnage.inference.questions import Question
from tonnage.inference.sight import Sight, sight_of, with_images
from tonnage.model import adapter_files
from tonnage.model.files import CONFIG, ModelFiles, find_model, positions_of, read_model_config, read_tokenizer
from tonnage.rundir.directory import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

BATCH_SIZE = 32
BLOCK_BY_BLOCK = (
    "The model has no room on this GPU: its blocks come from the host's memory, one after another, "
    "so that answers take long."
)
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e3
"""Of draws: numbers that are divided by less are soon none in fp32."""
MOST_SEED = 2**63 - 1
TALK: Mapping[str, Any] = {"formats": ("messages",), "single_turn": False}
"""What ``load`` is told for conversations of several turns."""


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen, and when to stop."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 always takes the likeliest token; otherwise tokens are drawn at this temperature."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens that together have this probability."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE:
            raise user_error(
                found=f"a temperature of {self.temperature}",
                needed=f"0, or a number from {LEAST_TEMPERATURE:f} to {MOST_TEMPERATURE:,.0f}",
                change="0 takes the likeliest token every time, 1 draws from the model's own distribution",
                where="temperature",
            )


@dataclass(frozen=True)
class Loaded:
    """A model ready to answer."""

    model: Any
    """A causal LM of transformers, whose ``generate`` is untyped."""
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]
    sight: Sight | None = None
    """How it looks at images, if it takes any."""

    @property
    def positions(self) -> int | None:
        """Tokens that the model has positions for; None where it does not say."""
        return positions_of(self.model.config)


@dataclass(frozen=True)
class EncodedPrompt:
    """A conversation as tokens, up to the opening of the assistant's turn."""

    ids: list[int]
    images: list[Image]
    """Whose tokens are among them."""


def resolve_model(model: str | Path, *, trust_remote_code: bool = False) -> Path:
    """The model directory meant by a run directory (its export), a model directory or a hub id.

    Raises:
        UserError: no such model, files are missing, or the run has no export yet.
    """
    run = RunDirectory(model)
    if not run.is_run():
        return place_of(find_model(str(model), code=trust_remote_code))
    if not any((run.export / name).is_file() for name in (CONFIG, adapter_files.CONFIG)):
        saved = run.checkpoints.is_dir() and any(run.checkpoints.glob("*/COMPLETE"))
        raise user_error(
            found=f"a run without a model in {run.export}",
            needed="an exported model",
            change=f"tonnage export {run.path} {run.export}"
            if saved
            else "let the run go on until it has saved a checkpoint; a run that ends or is stopped exports itself",
            where=str(model),
        )
    return place_of(find_model(str(run.export)))


def place_of(files: ModelFiles) -> Path:
    """The directory that was given, or fetched: that of an adapter, not of the model it belongs to."""
    return files.directory if files.adapter is None else files.adapter.directory


def load(
    directory: str | Path,
    *,
    template: str = "auto",
    formats: Sequence[str] = (),
    single_turn: bool = True,
    trust_remote_code: bool = False,
    allow_unexpected: Sequence[str] = (),
    max_new_tokens: int | None = None,
    tell: Callable[[str], None] = lambda message: None,
) -> Loaded:
    """Load a model directory in the type of its weights, on the accelerator if there is one. Of a model that has no
    room there blocks rest in the host's memory, and come for as long as they run; ``tell`` hears of that.
    ``allow_unexpected`` are patterns of tensors that may be left out.

    ``template``, ``formats`` and ``single_turn`` matter where the tokenizer has no chat template of its own: one is
    chosen as for training on such rows. With no formats a base model simply goes on from the text it is given.

    Raises:
        UserError: files or weights are missing, weights are not finite, the template adds tokens that the model does
            not have, or it has no positions for answers of ``max_new_tokens``, if that is how long they are to be.
    """
    sleep_soon_beside_others()

    import torch

    from tonnage.kernels.products import use_fast_products
    from tonnage.model.pretrained import load_pretrained
    from tonnage.parallel.host_blocks import come_and_go, has_no_room

    files = find_model(str(directory))
    if max_new_tokens is not None:
        _check_longest(read_model_config(files, trust_remote_code=trust_remote_code), max_new_tokens)
    whole = read_tokenizer(files, trust_remote_code=trust_remote_code)
    tokenizer, chosen = choose(template, whole, formats, single_turn)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = load_pretrained(files, trust_remote_code=trust_remote_code, allow_unexpected=allow_unexpected)
    if files.adapter is not None:
        if files.adapter.vocabulary > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(files.adapter.vocabulary, mean_resizing=False)  # merging fills all rows
        from tonnage.model.peft import merge

        merge(model, files.adapter)
    use_fast_products(model)
    num_embeddings = _num_embeddings(model)
    if chosen.added_tokens and max(tokenizer.get_vocab().values()) >= num_embeddings:
        raise user_error(
            found=f"template {chosen.name!r} adds {', '.join(chosen.added_tokens)}, and the model has no "
            f"embeddings beyond {num_embeddings:,} tokens",
            needed="a template that the model was trained with",
            change="give another template, plain for instance",
            where=str(directory),
        )
    _check_special_tokens(model.generation_config, num_embeddings, str(Path(directory) / "generation_config.json"))
    if has_no_room(model, device):
        tell(BLOCK_BY_BLOCK)
        come_and_go(model, _blocks(model, device), device)
    else:
        model.to(device)
    sight = sight_of(files, model, tokenizer, device, trusts=trust_remote_code)
    return Loaded(model.eval(), tokenizer, stop_tokens(tokenizer), sight)


def encode(loaded: Loaded, conversation: Conversation | Sequence[Mapping[str, Any]]) -> EncodedPrompt:
    """The tokens and images of a conversation. Raises ``UserError`` where the template refuses it, an image cannot be
    used, or a token has no embedding: some tokenizers have more than their model."""
    conversation = with_images(conversation)
    recipe = None if loaded.sight is None else loaded.sight.recipe
    ids = encode_prompt(conversation, loaded.tokenizer, recipe)
    num_embeddings = _num_embeddings(loaded.model)
    if beyond := [token for token in dict.fromkeys(ids) if token >= num_embeddings]:
        raise user_error(
            found=f"{', '.join(map(str, loaded.tokenizer.convert_ids_to_tokens(beyond)))} in a conversation, and the "
            f"model has no embeddings beyond {num_embeddings:,} tokens",
            needed="tokens that the model knows",
            change="take them out of the conversation, or give another template if they are not in it",
        )
    return EncodedPrompt(ids, conversation.images if isinstance(conversation, Conversation) else [])


def _num_embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _check_longest(config: PreTrainedConfig, max_new_tokens: int) -> None:
    """Refuse answers that are longer than a model can write. Raises ``UserError``."""
    positions = positions_of(config)
    if positions is not None and max_new_tokens >= positions:
        observed = f"{max_new_tokens:,} tokens for an answer"
        needed = f"fewer than {positions:,}, the model's positions, where the prompt is as well"
        raise user_error(observed, needed, f"--max-new-tokens {max(1, positions // 2)}", "--max-new-tokens")


def _blocks(model: Any, device: Any) -> Sequence[Any]:
    """The blocks of a model that has no room on a GPU. Raises ``UserError`` where they cannot be found."""
    from tonnage.model.anatomy import dissect

    try:
        return dissect(model).blocks
    except UserError as error:
        num_bytes = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        raise user_error(
            where=f"model type {model.config.model_type}",
            found=f"weights of {num_bytes / 1e9:.1f} GB, for which {device} has no room",
            needed="room for them, or blocks that tonnage finds, to bring them one by one",
            change="a larger GPU, or the CPU: CUDA_VISIBLE_DEVICES= in front of the command",
        ) from error


def _check_special_tokens(settings: Any, num_embeddings: int, where: str) -> None:
    """Refuse ids of tokens that transformers would take for some and that are none: a fraction, a text, 2 to the 64;
    and an end of text that no answer can reach."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = getattr(settings, name, None)
        most = num_embeddings if name == "eos_token_id" else 2**31  # some models pad with an id beyond their rows
        tokens = value if isinstance(value, list) else [value]
        for token in tokens or [""]:
            if token is not None and not (type(token) is int and 0 <= token < most):
                raise user_error(
                    where=where,
                    found=f"{name} is {str(value)[:100]}",
                    needed=f"the id of a token, or a list of such, below {most:,}",
                    change="mend that file, or remove it",
                )


def generate(
    loaded: Loaded,
    conversations: Sequence[Conversation | Sequence[Mapping[str, Any]]],
    decoding: Decoding = Decoding(),
    *,
    batch_size: int = BATCH_SIZE,
    seed: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """The assistant's next turn in every conversation, in order.

    Contents may be lists of parts, images among them, where the model takes these.

    Draws depend on ``seed`` and on all conversations, and the program's own random numbers are left as they are;
    without a seed these are drawn from. ``progress`` is told how many are answered and how many there are.

    Raises:
        UserError: a conversation has no tokens or leaves no room for an answer, or the template refuses one.
    """
    import torch

    prompts = [encode(loaded, conversation) for conversation in conversations]
    answers, num_answered = [""] * len(prompts), 0
    with drawn_from(seed, loaded), torch.inference_mode():
        for batch in _in_batches(loaded, prompts, decoding, batch_size):
            for index, tokens in batch.items():
                answers[index] = _decode(loaded, tokens)
            num_answered += len(batch)
            progress(num_answered, len(prompts))
    return answers


def _in_batches(
    loaded: Loaded, prompts: Sequence[EncodedPrompt], decoding: Decoding, batch_size: int
) -> Iterator[dict[int, list[int]]]:
    """Prompts of similar length, answered side by side: for each batch the written tokens, by the index of the prompt.
    Those with room for less than a whole answer are only beside others of their length. Raises ``UserError`` where a
    prompt leaves no room for an answer."""
    check_room([prompt.ids for prompt in prompts], loaded.positions)

    def kind(index: int) -> tuple[bool, int]:
        return bool(prompts[index].images), _room(loaded, len(prompts[index].ids), decoding)

    order = sorted(range(len(prompts)), key=lambda index: (bool(prompts[index].images), len(prompts[index].ids)))
    for (looks, _), group in groupby(order, kind):
        those = list(group)
        size = 1 if looks and not (loaded.sight and loaded.sight.pads) else batch_size
        for start in range(0, len(those), size):
            batch = those[start : start + size]
            ids, mask = _pad_left(loaded, [prompts[index].ids for index in batch])
            images = [prompts[index].images for index in batch]
            whole = call_generate(loaded, ids, mask, decoding, images=images)
            yield dict(zip(batch, whole[:, ids.shape[1] :].tolist(), strict=True))


def _room(loaded: Loaded, prompt_tokens: int, decoding: Decoding) -> int:
    """The most tokens of an answer after a prompt of so many."""
    positions = loaded.positions
    return decoding.max_new_tokens if positions is None else min(decoding.max_new_tokens, positions - prompt_tokens)


@dataclass(frozen=True)
class Written:
    """What a model wrote, and after what."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    """With the one at which it stopped, if it did."""
    text: str
    """Without what ends it."""
    stopped: bool
    """Whether it came to an end, and was not cut off."""


@contextmanager
def drawn_from(seed: int | None, loaded: Loaded) -> Iterator[None]:
    """Draw from ``seed`` within it, and leave the program's own random numbers as they are; None draws from these.
    Raises ``UserError``."""
    import torch

    if seed is None:
        yield
        return
    if abs(seed) > MOST_SEED:
        raise user_error(f"a seed of {seed}", f"a whole number from {-MOST_SEED} to {MOST_SEED}", "seed 0", "seed")
    device = loaded.model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def write(
    loaded: Loaded,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    decoding: Decoding,
    *,
    seed: int,
    attention: str,
    batch_size: int = BATCH_SIZE,
) -> list[Written]:
    """The assistant's next turn in every conversation, in order, token by token as it was drawn.

    The model is one that is being trained, built with ``attention``. Draws depend on ``seed`` and on all conversations;
    the random numbers of the program's own are left as they are.

    Raises:
        UserError: as of ``generate``.
    """
    import torch

    from tonnage.model.attention import as_in_transformers

    places_of: dict[str, EncodedPrompt] = {}  # prompts are repeated, for several answers to each
    for conversation in conversations:
        if (key := repr(conversation)) not in places_of:
            places_of[key] = EncodedPrompt(encode_prompt(conversation, loaded.tokenizer), [])
    prompts = [places_of[repr(conversation)] for conversation in conversations]
    answers: dict[int, Written] = {}
    with (
        drawn_from(seed, loaded),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),  # for rows of one token, nothing is compiled
        as_in_transformers(loaded.model, attention),
    ):
        for batch in _in_batches(loaded, prompts, decoding, batch_size):
            for index, tokens in batch.items():
                end = next((at for at, token in enumerate(tokens) if token in loaded.stop_tokens), None)
                answer_tokens = tokens if end is None else tokens[: end + 1]
                text = _decode(loaded, tokens)
                answers[index] = Written(tuple(prompts[index].ids), tuple(answer_tokens), text, end is not None)
    return [answers[index] for index in range(len(prompts))]


def stream(
    loaded: Loaded,
    conversation: Conversation | Sequence[Mapping[str, Any]],
    decoding: Decoding = Decoding(),
) -> Generator[str, None, None]:
    """The assistant's next turn, piece by piece as it is written.

    Closing the iterator, or an interrupt while waiting for a piece, stops the model at its next token.

    Raises:
        UserError: the conversation has no tokens or leaves no room for an answer, or the template refuses it.
    """
    prompt = encode(loaded, conversation)
    check_room([prompt.ids], loaded.positions)
    ids, mask = _pad_left(loaded, [prompt.ids])
    pieces, texts = pieces_of(loaded.tokenizer), Queue[str | None]()
    enough = Event()
    errors: list[BaseException] = []

    def take(token: int) -> None:
        if token not in loaded.stop_tokens:
            texts.put(pieces.add(Token(token))[0])

    def write() -> None:
        import torch

        try:
            with torch.inference_mode():
                more = {"streamer": streamer_to(take), "stopping_criteria": stop_when(enough.is_set)}
                call_generate(loaded, ids, mask, decoding, images=[prompt.images], **more)
            texts.put(pieces.end()[0])
        except BaseException as error:
            errors.append(error)
        finally:
            texts.put(None)

    writer = Thread(target=write, daemon=True)
    writer.start()
    try:
        yield from (text for text in iter(texts.get, None) if text)
    finally:
        enough.set()
        writer.join()
    if errors:
        raise errors[0]


def streamer_to(take: Callable[[int], None]) -> BaseStreamer:
    """Has transformers tell ``take`` of every token of an answer as it is drawn."""
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        is_prompt = True

        def put(self, value: Tensor) -> None:
            if self.is_prompt:  # which comes first, at once
                self.is_prompt = False
                return
            for token in value.flatten().tolist():
                take(token)

        def end(self) -> None:
            pass

    return Streamer()


def stop_when(is_enough: Callable[[], bool]) -> StoppingCriteriaList:
    """Has transformers stop at the next token once ``is_enough`` says so."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class StopWhen(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Any:
            return torch.full((input_ids.shape[0],), is_enough(), device=input_ids.device)

    return StoppingCriteriaList([StopWhen()])


def is_match(answer: str, expected: str | None) -> bool:
    """Whether an answer is the expected one, white space at both ends aside."""
    return expected is not None and answer.strip() == expected.strip()


def form_of(questions: Sequence[Question]) -> dict[str, Any]:
    """What ``load`` needs to know of the questions to choose a template."""
    single = all(
        [message["role"] for message in question.conversation.messages] in (["user"], ["system", "user"])
        for question in questions
    )
    return {"formats": sorted({question.format for question in questions}), "single_turn": single}


def call_generate(
    loaded: Loaded,
    ids: Tensor,
    mask: Tensor,
    decoding: Decoding,
    *,
    images: Sequence[Sequence[Image]] = (),
    **more: Any,
) -> Tensor:
    """Transformers' ``generate``: (batch, prompt) token ids and mask in, (batch, prompt + answer) token ids out; with
    ``images``, those of each prompt, the whole model's. Raises ``UserError``."""
    model = loaded.model
    if any(images):
        assert loaded.sight is not None, "who takes no images has encoded none"
        more |= loaded.sight.inputs(ids, images)
        model = loaded.sight.tower.model
    device = loaded.model.device
    drawn = decoding.temperature > 0
    try:
        written: Tensor = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=_room(loaded, ids.shape[1], decoding),
            do_sample=drawn,
            temperature=decoding.temperature if drawn else None,
            top_p=decoding.top_p if drawn else None,
            top_k=0 if drawn else None,
            eos_token_id=list(loaded.stop_tokens) or None,
            pad_token_id=_pad_token(loaded),
            **more,
        )
    except (TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise user_error(
            where=str(getattr(loaded.model, "name_or_path", "")),
            found=f"transformers cannot write an answer ({type(error).__name__}: {reason})",
            needed="a generation_config.json that it can use",
            change="mend that file of the model, or remove it",
        ) from error
    return written


def _pad_left(loaded: Loaded, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both int64 (batch, longest prompt)."""
    import torch

    longest, pad = max(map(len, prompts)), _pad_token(loaded)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _pad_token(loaded: Loaded) -> int:
    """The token of padding; the mask hides it, so any will do that the model has an embedding of."""
    tokens, num_embeddings = (loaded.tokenizer.pad_token_id, *loaded.stop_tokens), _num_embeddings(loaded.model)
    return next((token for token in tokens if isinstance(token, int) and token < num_embeddings), 0)


def _decode(loaded: Loaded, tokens: Sequence[int]) -> str:
    end = next((at for at, token in enumerate(tokens) if token in loaded.stop_tokens), len(tokens))
    text = loaded.tokenizer.decode(list(tokens[:end]), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def check_room(prompts: Sequence[Sequence[int]], positions: int | None) -> None:
    """Refuse prompts of no tokens, and those after which a model of so many positions, if it says, can write nothing.
    Raises ``UserError``."""
    problems = []
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            change = "write a prompt, or choose a template with words of its own around it"
            problems.append(Problem(f"conversation {number} has no tokens", "one at least, to go on from", change))
        elif positions is not None and len(prompt) >= positions:
            observed = f"conversation {number} has {len(prompt):,} tokens"
            problems.append(Problem(observed, f"fewer than {positions:,}, the model's positions"))
    if problems:
        raise UserError(*problems[:10])
