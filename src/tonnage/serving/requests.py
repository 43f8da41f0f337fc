"""What may be asked, in OpenAI's words. A field that is not known here is refused, and so is a value that would be
ignored.

Fields that only have one meaning here (``n: 1``, ``presence_penalty: 0``, ``tools: null``) may say that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from tonnage.inference.generate import LEAST_TEMPERATURE

MOST_BYTES = 2 << 20
"""Of a request."""
MOST_BYTES_WITH_IMAGES = 20 << 20
"""Of a request to a model that takes images, which come inside of it."""
MOST_IMAGES = 50
"""Of a request."""
MOST_MESSAGES = 2000
MOST_STOPS = 4
MOST_LIKELIEST = 20


class Refused(Exception):
    """A request that is not answered, as OpenAI would say it."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        self.message, self.status, self.param, self.code = message, status, param, code
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(_Section):
    type: Literal["text"]
    text: str


class ImageAddress(_Section):
    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto"] | None = None


class ImagePart(_Section):
    type: Literal["image_url"]
    image_url: ImageAddress


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(_Section):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[Part], Field(min_length=1, max_length=1000)]
    name: None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def as_ours(self) -> dict[str, Any]:
        """The same as templates know it."""
        if self.images:
            return self.model_dump(include={"role", "content"})
        parts = [] if isinstance(self.content, str) else self.content
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        return {"role": self.role, "content": self.content if isinstance(self.content, str) else text}

    @property
    def images(self) -> int:
        return sum(isinstance(part, ImagePart) for part in self.content)


class StreamOptions(_Section):
    include_usage: bool | None = None


class PlainText(_Section):
    """The only form of an answer."""

    type: Literal["text"]


Length = Annotated[int, Field(ge=1, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class _Asked(_Section):
    """What both endpoints take."""

    model: Annotated[str, Field(max_length=1000)]
    max_tokens: Length | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: None = None

    @property
    def stops(self) -> list[str]:
        """Words before which the answer ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(_Asked):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    response_format: PlainText | None = None
    tools: None = None
    tool_choice: None = None

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens are told in each place; none tells no probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Asked):
    prompt: str | Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


_Form = TypeVar("_Form", ChatRequest, CompletionRequest)


def read_request(form: type[_Form], body: bytes) -> _Form:
    """A request from what was sent.

    Raises:
        Refused: it is no JSON, or not what is taken here; names the field.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the request is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise Refused("the request is not a JSON object")
    try:
        wish = form.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise _refused(form, value, error) from error
    if isinstance(wish, ChatRequest):
        if wish.messages[-1].role != "user":
            raise Refused("the last message is not the user's", param="messages")
        if (number := sum(message.images for message in wish.messages)) > MOST_IMAGES:
            raise Refused(f"{number:,} images; at most {MOST_IMAGES} are taken", param="messages")
        if wish.top_logprobs is not None and not wish.logprobs:
            raise Refused("top_logprobs without logprobs: true", param="top_logprobs")
        if wish.max_tokens is not None and wish.max_completion_tokens is not None:
            raise Refused("both max_tokens and max_completion_tokens", param="max_tokens")
    if wish.temperature and wish.temperature < LEAST_TEMPERATURE:
        reason = f"temperature: it is {wish.temperature}, and 0 or at least {LEAST_TEMPERATURE:f} is taken"
        raise Refused(reason, param="temperature")
    if wish.stream_options is not None and not wish.stream:
        raise Refused("stream_options without stream: true", param="stream_options")
    return wish


def _place(value: Any, steps: tuple[int | str, ...]) -> str:
    """Where a value stands in a request: pydantic names the types that it tried as well, and those of parts."""
    names: list[str] = []
    for before, step in zip((None, *steps), steps, strict=False):
        if isinstance(value, dict):
            if isinstance(before, int) and step == value.get("type"):
                continue
            names.append(str(step))
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            names.append(str(step))
            value = value[step] if step < len(value) else None
    return ".".join(names)


def _refused(form: type[BaseModel], value: Any, error: ValidationError | RecursionError) -> Refused:
    if isinstance(error, RecursionError):
        return Refused("the request is nested too deeply")
    errors = [(_place(value, one["loc"]), one) for one in error.errors(include_url=False)]
    # Of a value that may have several types, what is wrong with it as the one that fits it best.
    begun = errors[0][0]
    beside = [(place, one) for place, one in errors if place == begun or place.startswith(f"{begun}.")]
    place, first = max(beside, key=lambda pair: (not pair[1]["type"].endswith("_type"), len(pair[1]["loc"])))
    place = place[:200]
    if first["type"] == "extra_forbidden":
        taken = f" ({', '.join(form.model_fields)} are taken)" if len(first["loc"]) == 1 else ""
        return Refused(f"unknown field: {place}{taken}", param=place, code="unknown_parameter")
    if first["type"] == "missing":
        return Refused(f"{place} is missing", param=place, code="missing_required_parameter")
    return Refused(f"{place}: {first['msg']}, and it is {_shown(first['input'])}", param=place)


def _shown(value: object) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
