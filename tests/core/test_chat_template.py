"""Chat templates: Hugging Face's dialect, and what an untrusted template cannot do."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from harness.chat_template import ChatTemplate
from harness.errors import RequestError, TokenizerError


def render(source: str, content: Any = "hi", **extra: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<bos>"})
    return template.render([{"role": "user", "content": content}], **extra)


def test_blocks_leave_no_whitespace() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "hi\n"


def test_loop_controls_and_special_tokens() -> None:
    source = (
        "{{ bos_token }}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ eos_token }}"
    )
    assert render(source) == "<bos>01"


def test_tojson_is_plain_json() -> None:
    assert render("{{ messages[0].content | tojson }}", "<a> & '中'") == "\"<a> & '中'\""
    assert render("{{ tools | tojson(indent=2) }}", tools=[{"b": 1}]) == '[\n  {\n    "b": 1\n  }\n]'


def test_generation_prompt_and_generation_tag() -> None:
    source = "{% generation %}{{ messages[0].content }}{% endgeneration %}{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "hi>"
    assert render(source, add_generation_prompt=False) == "hi"


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    ("source", "content", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "hi", "roles must alternate"),
        ("{{ 'x' + messages[0].content }}", None, "NoneType"),
        ("{{ messages[0].missing.deeper }}", "hi", "missing"),
        ("{{ ''.__class__.__mro__ }}", "hi", "unsafe"),
        ("{{ messages.append(1) }}", "hi", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "hi", "[Rr]ange"),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", "x" * 1000, "longer than"),
    ],
)
def test_failures_belong_to_the_request(source: str, content: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        render(source, content)
    assert caught.value.param == "messages"


def test_an_invalid_template_is_refused_at_once() -> None:
    with pytest.raises(TokenizerError, match="not valid"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(TokenizerError, match="characters"):
        ChatTemplate("x" * (1 << 21), {})
