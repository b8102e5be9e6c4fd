"""What clients may send: OpenAI's chat and text completions, and a few extensions, as pydantic models.

A field is honoured or answered with 400 that names it; nothing is accepted and ignored but `user`, which by definition
has no effect on the answer, and earlier `reasoning_content`, which DeepSeek's templates leave out of the next prompt.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from harness.errors import RequestError
from harness.runtime.request import DEFAULT_PRIORITY, SamplingParams

MAX_BODY_BYTES = 8 << 20
MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 128
MAX_REPORTED_LOGPROBS = 1 << 18  # of the prompts of one body, alternatives included: some 100 MB on their way
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

# OpenAI's fields that are not offered, with the values that ask for nothing.
_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class _Strict(BaseModel):
    # One body of 8 MiB can hold a million faults, and pydantic would describe each: unknown names end the check here at
    # the first, and every list below fails fast.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    not_offered: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_other_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        if not isinstance(data, dict):
            return handler(data)
        # clients send back whole message objects, with null for all that an answer did not have
        checked = handler({name: data[name] for name in cls.model_fields if data.get(name) is not None})
        for name, value in data.items():
            if value is None or name in cls.model_fields:
                continue
            if name not in cls.not_offered:
                raise PydanticCustomError("unknown_field", "unknown field '{param}'", {"param": name})
            # types are compared too: True is not 1
            if not any(type(value) is type(allowed) and value == allowed for allowed in cls.not_offered[name]):
                raise PydanticCustomError("not_offered", "{param} is not supported by this server", {"param": name})
        return checked


def _encodable(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("not_unicode", "half of a surrogate pair is not text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
# what any vocabulary may hold; whether this one does, the engine knows
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


# Branches of unions are chosen by what was sent, so that an error concerns the branch that was meant. pydantic puts
# their tags into an error's path, where no client looks for them.
_TEXT, _TEXTS, _PARTS, _IDS, _ID_LISTS = UNION_TAGS = ("[text]", "[texts]", "[parts]", "[ids]", "[lists of ids]")


class TextPart(_Strict):
    """A piece of a message's content. Images and sound are not understood."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Strict):
    """One turn. `developer` is OpenAI's newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag(_TEXT)] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag(_PARTS)],
        Discriminator(lambda content: _PARTS if isinstance(content, list) else _TEXT),
    ]
    reasoning_content: Text | None = None

    def as_template_input(self) -> dict[str, str]:
        """The message as chat templates know it; text parts are joined."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Strict):
    """`include_usage`: one more chunk at the end, with the usage and no choices."""

    include_usage: bool = False


StopStrings = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class _CompletionFields(_Strict):
    """What both endpoints share. Ranges are `SamplingParams`' own."""

    not_offered = _NOT_OFFERED

    model: Text
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: StopStrings = []
    user: str | None = None
    # extensions
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] = []
    cache_salt: Annotated[Text, Field(max_length=256)] = ""
    priority: Annotated[float, Field(ge=0, le=1)] = DEFAULT_PRIORITY

    @model_validator(mode="after")
    def _check_stream_options(self) -> _CompletionFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "stream_options is allowed only with stream true", {"param": "stream_options"}
            )
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def wanted_tokens(self) -> int | None:
        """Longest answer asked for, None for as long as fits."""
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """Number of alternatives reported beside each token of the answer, None for no report."""
        raise NotImplementedError

    def wanted_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return None

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """What the engine is told.

        Raises:
            RequestError: a value is out of range.
        """
        # Clients that ask for one token after an echo take the last entry for it and drop it, lm-evaluation-harness
        # among them. An answer of one token is over anyway, so it may be the model's end token as well.
        reports_every_token = max_tokens == 1 and self.wanted_prompt_logprobs() is not None
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                seed=self.seed,
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos or reports_every_token,
                logprobs=self.wanted_logprobs(),
                prompt_logprobs=self.wanted_prompt_logprobs(),
            )
        except ValueError as error:
            message = str(error)
            raise RequestError(message, param=message.split(" ", 1)[0], code="invalid_value") from None


class ChatCompletionRequest(_CompletionFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs", "top_logprobs is allowed only with logprobs true", {"param": "top_logprobs"}
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "max_tokens", "max_tokens and max_completion_tokens contradict each other", {"param": "max_tokens"}
            )
        return self

    def wanted_tokens(self) -> int | None:
        """See `_CompletionFields`; `max_completion_tokens` is the newer name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wanted_logprobs(self) -> int | None:
        """See `_CompletionFields`."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _kind_of_prompt(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return _TEXT
    if prompt and isinstance(prompt[0], list):
        return _ID_LISTS
    return _TEXTS if prompt and isinstance(prompt[0], str) else _IDS


class CompletionRequest(_CompletionFields):
    """Body of `POST /v1/completions`. A prompt is a text or token ids; each of a list gets a choice of its own."""

    prompt: Annotated[
        Annotated[Text, Tag(_TEXT)]
        | Annotated[TokenIds, Tag(_IDS)]
        | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag(_TEXTS)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag(_ID_LISTS)],
        Discriminator(_kind_of_prompt),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_stream(self) -> CompletionRequest:
        if self.stream and len(self.prompts()) > 1:
            raise PydanticCustomError("stream", "stream is allowed only with one prompt", {"param": "stream"})
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids; one for each choice of the answer."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [token for token in self.prompt if isinstance(token, int)]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)] or [ids]

    def wanted_tokens(self) -> int | None:
        """See `_CompletionFields`."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """See `_CompletionFields`."""
        return self.logprobs

    def wanted_prompt_logprobs(self) -> int | None:
        """See `_CompletionFields`; a prompt that is echoed is reported on like the answer."""
        return self.logprobs if self.echo else None
