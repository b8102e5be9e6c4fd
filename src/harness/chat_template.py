"""Chat templates: messages to prompt text, with the Jinja dialect that Hugging Face templates are written in.

Templates come with weights, so they are untrusted: they run in Jinja's sandbox, see only what is passed to them, and
their output is bounded. Reference: transformers' documentation, "Chat templates".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from harness.errors import RequestError, TokenizerError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_PROMPT_CHARS = 64 << 20

# what a template can raise on messages it was not written for: `None + "text"`, a missing key, a bad index
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled chat template. `special_tokens` are visible to it as variables, such as `bos_token`.

    Raises:
        TokenizerError: the template is not valid Jinja, or longer than 1 MiB.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TokenizerError(
                f"the chat template has {len(source)} characters, allowed: {MAX_TEMPLATE_CHARS}",
                "take the template from the model's own release",
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(
                f"the chat template is not valid: {error}", "take the template from the model's own release"
            ) from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """Prompt text for a conversation. `extra` are further variables, such as `tools`.

        Raises:
            RequestError: the template refuses the messages or fails on them, or the prompt has no bound.
        """
        variables = {"tools": None, "documents": None, **self._special_tokens, **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                num_chars += len(part)
                if num_chars > MAX_PROMPT_CHARS:
                    raise jinja2.TemplateRuntimeError(f"the prompt is longer than {MAX_PROMPT_CHARS} characters")
        except _TEMPLATE_FAILURES as error:
            raise RequestError(
                f"the model's chat template does not accept these messages: {error}",
                param="messages",
                code="chat_template_error",
            ) from None
        return "".join(parts)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; models are trained on plain JSON
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
