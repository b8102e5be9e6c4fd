"""From a parsed body to token ids: chat template, tokenizer, echo, and the limit on a prompt's length.

Takes as long as a prompt is long, so it is called on a thread of its own. Knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import RequestError
from harness.runtime.reasoning import ReasoningSplitter
from harness.runtime.server.protocol import MAX_REPORTED_LOGPROBS, ChatCompletionRequest, CompletionRequest
from harness.runtime.text_stream import Echo
from harness.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as the engine takes it, and what its answer's text is made with."""

    token_ids: list[int]
    splitter: ReasoningSplitter | None = None
    echo: Echo | None = None


class PromptEncoder:
    """Encodes the prompts of a body.

    Args:
        max_model_len: longest prompt and answer together, in tokens.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def encode(self, body: ChatCompletionRequest | CompletionRequest) -> list[Prompt]:
        """The prompts, one for each choice of the answer.

        Raises:
            RequestError: one is empty, leaves no room for an answer, or does not fit the chat template.
        """
        if isinstance(body, ChatCompletionRequest):
            text = self._tokenizer.render_chat([message.as_template_input() for message in body.messages])
            token_ids = self._encode_text(text, "messages")
            return [Prompt(token_ids=token_ids, splitter=ReasoningSplitter.for_prompt(text))]
        prompts = [self._encode_given(given, echo=body.echo) for given in body.prompts()]
        wanted = body.wanted_prompt_logprobs()
        num_reported = 0 if wanted is None else (1 + wanted) * sum(len(prompt.token_ids) for prompt in prompts)
        if num_reported > MAX_REPORTED_LOGPROBS:
            raise RequestError(
                f"{num_reported} log-probabilities of prompt tokens are asked for; one request may ask for "
                f"{MAX_REPORTED_LOGPROBS}: give fewer prompts, or lower logprobs",
                param="logprobs",
                code="invalid_value",
            )
        return prompts

    def _encode_given(self, given: str | list[int], *, echo: bool) -> Prompt:
        if not given:
            raise RequestError(
                "prompt is empty; allowed: a text or a list of token ids", param="prompt", code="empty_prompt"
            )
        text: str | None = None
        if isinstance(given, str):
            token_ids, text = self._encode_text(given, "prompt"), given
        else:
            token_ids = given
            self._check_room(len(given), "prompt")
        return Prompt(token_ids=token_ids, echo=Echo.of(self._tokenizer, token_ids, text) if echo else None)

    def _encode_text(self, text: str, param: str) -> list[int]:
        # seconds and gigabytes go into encoding what a body may hold, so text that cannot fit is not encoded
        least = len(text) // self._tokenizer.max_token_chars
        if least > self._max_model_len:
            raise self._too_long(f"{len(text)} characters, at least {least} tokens", param)
        token_ids = self._tokenizer.encode(text)
        self._check_room(len(token_ids), param)
        return token_ids

    def _check_room(self, num_tokens: int, param: str) -> None:
        if num_tokens >= self._max_model_len:
            raise self._too_long(f"{num_tokens} tokens", param)

    def _too_long(self, size: str, param: str) -> RequestError:
        return RequestError(
            f"the prompt has {size}; this server's context is {self._max_model_len} tokens, prompt and answer together",
            param=param,
            code="context_length_exceeded",
        )
