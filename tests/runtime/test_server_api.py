"""Requests and answers of the HTTP face, over a scripted backend: shapes, usage, errors, limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from harness.errors import EngineDeadError, OverloadedError, RequestError
from harness.runtime.request import FinishReason, Request, TokenChunk
from harness.runtime.server.serve import uvicorn_config
from harness.runtime.server.service import cache_salt


def test_chat_answer_has_openais_shape_and_exact_usage(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("Hello.", num_cached=3))
    response = server.chat()
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "scripted"
    message = {"role": "assistant", "content": "Hello."}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    # <bos> + "user:Hi\n" + "assistant:"
    prompt = 1 + 8 + 10
    assert len(server.backend.requests[0].prompt_token_ids) == prompt
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 3},
        "prompt_cache_hit_tokens": 3,
        "prompt_cache_miss_tokens": prompt - 3,
    }


def test_prompt_begins_with_exactly_one_bos(plain_server: Any, byte_tokenizer: Any) -> None:
    server = plain_server
    server.chat()
    server.complete()
    for request in server.backend.requests:
        assert request.prompt_token_ids.count(byte_tokenizer.bos_token_id) == 1


def test_completion_takes_text_ids_and_lists_of_one(plain_server: Any, byte_tokenizer: Any) -> None:
    server = plain_server
    ids = byte_tokenizer.encode("Hi")
    for prompt in ("Hi", ids, ["Hi"], [ids]):
        response = server.complete(prompt=prompt)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == "Hello."
        assert response.json()["object"] == "text_completion"
    assert [request.prompt_token_ids for request in server.backend.requests] == [ids] * 4


def test_echo_puts_the_prompt_before_the_answer(plain_server: Any, byte_tokenizer: Any) -> None:
    server = plain_server
    assert server.complete(echo=True).json()["choices"][0]["text"] == "HiHello."
    ids = byte_tokenizer.encode("Hi")
    assert server.complete(prompt=ids, echo=True).json()["choices"][0]["text"] == "HiHello."


def test_each_prompt_of_a_list_gets_a_choice(scripted_server: Any, answer: Any, byte_tokenizer: Any) -> None:
    """Answers come in another order than the prompts, and with different lengths."""
    texts = {"a": "first", "bc": "2nd", "": "third one"}

    async def script(request: Request) -> AsyncIterator[TokenChunk]:
        text = texts[byte_tokenizer.decode(request.prompt_token_ids)]
        async for chunk in answer(text, num_cached=1, before=0.05 * (text == "first"))(request):
            yield chunk

    server = scripted_server(script)
    ids = [byte_tokenizer.encode(text) for text in texts]
    for prompt in (["a", "bc", "a"], ids[:2] + ids[:1]):
        body = server.complete(prompt=prompt).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [choice["text"] for choice in body["choices"]] == ["first", "2nd", "first"]
        assert body["usage"]["prompt_tokens"] == 2 + 3 + 2
        assert body["usage"]["completion_tokens"] == 5 + 3 + 5
        assert body["usage"]["prompt_cache_hit_tokens"] == 3
    # <bos> alone is a prompt, too
    assert server.complete(prompt=ids[2:]).json()["choices"][0]["text"] == "third one"
    assert len({request.request_id for request in server.backend.requests}) == 7


def test_echo_and_logprobs_report_on_every_token(scripted_server: Any, answer: Any, byte_tokenizer: Any) -> None:
    server = scripted_server(answer("é!", logprobs=True))
    choice = server.complete(prompt="aé", echo=True, logprobs=1, max_tokens=3).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "aéé!"
    assert logprobs["tokens"] == ["<bos>", "a", *["bytes:\\xc3", "bytes:\\xa9"] * 2, "!"]
    assert logprobs["token_logprobs"] == [None, -1, -2, -3, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][:3] == [None, {"a": -1}, {"bytes:\\xc3": -2}]
    # the BOS put before a text has no part of it; a character's later bytes begin where it does
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 2, 3]
    assert [len(column) for column in logprobs.values()] == [7] * 5
    (request,) = server.backend.requests
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (1, 1)


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [
        ("a<eos>b", "a<eos>b", [0, 0, 1, 6]),  # a special token written as text is text
        ("<bos>a", "<bos>a", [0, 5]),
        ([257, 64, 256, 65], "ab", [0, 0, 1, 1]),
        ([64, 127], "a\ufffd", [0, 1]),
    ],
)
def test_an_echo_shows_what_was_sent(
    scripted_server: Any, answer: Any, byte_tokenizer: Any, prompt: Any, text: str, offsets: list[int]
) -> None:
    server = scripted_server(answer("!", logprobs=True))
    choice = server.complete(prompt=prompt, echo=True, logprobs=0).json()["choices"][0]
    assert choice["text"] == text + "!"
    assert choice["logprobs"]["text_offset"] == [*offsets, len(text)]
    assert server.complete(prompt=prompt, echo=True).json()["choices"][0]["text"] == text + "!"
    assert server.backend.requests[1].sampling.prompt_logprobs is None


def test_a_prompt_is_scored_without_an_answer(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("never", finish=FinishReason.LENGTH, logprobs=True))
    response = server.complete(prompt=["ab", "c"], echo=True, logprobs=2, max_tokens=0)
    choices = response.json()["choices"]
    assert [choice["text"] for choice in choices] == ["ab", "c"]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[None, -1, -2], [None, -1]]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
    assert response.json()["usage"]["completion_tokens"] == 0
    refused = server.complete(echo=True, max_tokens=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_one_token_after_a_report_may_be_the_models_end(plain_server: Any) -> None:
    """lm-evaluation-harness asks for one token and drops the last entry: there must be one."""
    for fields in ({"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 1, "logprobs": None}):
        plain_server.complete(**{"echo": True, "logprobs": 1} | fields)
    assert [r.sampling.ignore_eos for r in plain_server.backend.requests] == [True, False, False]


def test_reports_of_one_body_are_limited(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("."), max_model_len=5000, max_active=100)
    wanted = {"prompt": [[1] * 4000] * 64, "echo": True, "max_tokens": 0}
    refused = server.complete(**wanted, logprobs=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert "512000 log-probabilities" in refused.json()["error"]["message"]
    assert server.backend.requests == []
    assert server.complete(**wanted, logprobs=0).status_code == 200


def test_a_body_may_not_hold_more_prompts_than_the_queue(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("."), max_prompts=2)
    assert server.complete(prompt=["a"] * 2).status_code == 200
    refused = server.complete(prompt=["a"] * 3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert "prompt has 3 entries; allowed: 2" in refused.json()["error"]["message"]


def test_all_prompts_fail_with_the_first_that_does(scripted_server: Any, answer: Any) -> None:
    async def script(request: Request) -> AsyncIterator[TokenChunk]:
        if len(request.prompt_token_ids) == 2:
            await asyncio.sleep(0.05)
            raise OverloadedError("the queue is full")
        async for chunk in answer("slow", before=60)(request):
            yield chunk

    server = scripted_server(script)
    response = server.complete(prompt=["long", "a", "long"])
    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    assert (server.backend.num_running, len(server.backend.closed_early)) == (0, 2)
    assert server.service.num_active == 0


def test_all_sampling_fields_reach_the_engine(plain_server: Any) -> None:
    server = plain_server
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "seed": 42, "ignore_eos": True,
    }  # fmt: skip
    body = {**fields, "max_tokens": 5, "stop_token_ids": [3, 4], "logprobs": True, "top_logprobs": 2, "user": "u"}
    assert server.chat(**body).status_code == 200
    sampling = server.backend.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.logprobs) == (5, (3, 4), 2)


def test_max_tokens_defaults_and_is_cut_to_the_context(plain_server: Any) -> None:
    server = plain_server
    server.chat()
    server.chat(max_tokens=10_000)
    server.chat(max_completion_tokens=4)
    server.complete()
    chat_room = 128 - 19
    assert [r.sampling.max_tokens for r in server.backend.requests] == [chat_room, chat_room, 4, 16]


def test_values_that_ask_for_nothing_are_accepted(plain_server: Any) -> None:
    server = plain_server
    neutral = {
        "n": 1, "logit_bias": {}, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none",
        "store": False, "service_tier": "auto", "stop": None, "seed": None, "functions": None,
    }  # fmt: skip
    assert server.chat(**neutral).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"n": 2}, "n", "unsupported_field"),
        ({"n": True}, "n", "unsupported_field"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_field"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_field"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_field"),
        ({"no_such_field": 1}, "no_such_field", "unknown_field"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stop": ""}, "stop.0", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "no_such": 1}]}, "messages.0.no_such", "unknown_field"),
        ({"stream": True, "stream_options": {"no_such": 1}}, "stream_options.no_such", "unknown_field"),
        ({"echo": True}, "echo", "unknown_field"),
        ({"stop_token_ids": [-5]}, "stop_token_ids.0", "invalid_value"),
        ({"stop_token_ids": [1, 10**12]}, "stop_token_ids.1", "invalid_value"),
        ({"seed": 2**80}, "seed", None),
    ],
)
def test_bad_fields_are_answered_with_400_that_names_them(
    plain_server: Any, body: dict[str, Any], param: str | None, code: str | None
) -> None:
    server = plain_server
    response = server.chat(**body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
        assert param.split(".")[0] in error["message"]
    if code is not None:
        assert error["code"] == code
    assert server.backend.requests == []
    assert server.chat().status_code == 200


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[1], []], None, 5, ["a", 1], [[]], ["a"] * 129])
def test_what_is_no_prompt_is_refused(plain_server: Any, prompt: Any) -> None:
    response = plain_server.complete(prompt=prompt)
    assert response.status_code == 400, response.text
    assert "prompt" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (["a"] * 129, "prompt"),
        ([[1], [2, "a"]], "prompt.1.1"),
        ([1, "a"], "prompt.1"),
        (5, "prompt"),
        ([[1, None]], "prompt.0.1"),
        ([-1], "prompt.0"),
        ([1, 2**70], "prompt.1"),
        ([[2**31]], "prompt.0.0"),
    ],
)
def test_an_error_names_the_field_as_the_client_wrote_it(plain_server: Any, prompt: Any, param: str) -> None:
    response = plain_server.complete(prompt=prompt, echo=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


_MANY = 100_000
_MANY_FIELDS = {f"field{n}": 1 for n in range(_MANY)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] + ["a"] * _MANY}),
        ("/v1/completions", {"prompt": [[1] + ["a"] * _MANY]}),
        ("/v1/completions", {"prompt": "x", "stop": [1] * _MANY}),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": ["a"] * _MANY}),
        ("/v1/completions", {"prompt": "x", **_MANY_FIELDS}),
        ("/v1/chat/completions", {"messages": [1] * _MANY}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * _MANY}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", **_MANY_FIELDS}]}),
    ],
)
def test_of_many_faults_one_is_described(
    plain_server: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    counts = []
    created = RequestValidationError.__init__

    def counting(self: RequestValidationError, errors: Any, **rest: Any) -> None:
        counts.append(len(errors))
        created(self, errors, **rest)

    monkeypatch.setattr(RequestValidationError, "__init__", counting)
    response = plain_server.client.post(path, json={"model": "scripted", **body})
    assert response.status_code == 400
    assert counts == [1]


def test_content_parts_of_text_are_joined_and_others_refused(plain_server: Any, byte_tokenizer: Any) -> None:
    server = plain_server
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    server.chat(messages=[{"role": "user", "content": parts}])
    assert "user:ab\n" in byte_tokenizer.decode(server.backend.requests[0].prompt_token_ids)
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    refused = server.chat(messages=[{"role": "user", "content": image}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.content.0.type")


def test_an_answer_can_be_sent_back_as_it_came(plain_server: Any, byte_tokenizer: Any) -> None:
    server = plain_server
    earlier = {
        "role": "assistant", "content": "A", "reasoning_content": "because", "refusal": None, "tool_calls": None,
    }  # fmt: skip
    messages = [{"role": "developer", "content": "D"}, earlier, {"role": "user", "content": "U"}]
    assert server.chat(messages=messages).status_code == 200
    prompt = byte_tokenizer.decode(server.backend.requests[0].prompt_token_ids)
    assert prompt == "system:D\nassistant:A\nuser:U\nassistant:"


def test_prompt_over_the_context_is_refused_and_the_next_request_works(plain_server: Any) -> None:
    server = plain_server
    response = server.complete(prompt="x" * 500)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "501" in response.json()["error"]["message"]
    assert server.complete().status_code == 200


def test_idle_connections_outlive_those_of_clients_and_proxies(plain_server: Any) -> None:
    assert uvicorn_config(plain_server.service).timeout_keep_alive > 60


@pytest.mark.parametrize("chat", [False, True])
def test_text_that_cannot_fit_is_refused_without_being_encoded(
    plain_server: Any, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    longest = byte_tokenizer.max_token_chars
    text = "x" * (longest * 4_000 + 1)

    def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(type(byte_tokenizer), "encode", never)
    server = plain_server
    response = server.chat(messages=[{"role": "user", "content": text}]) if chat else server.complete(prompt=text)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if chat else "prompt")
    assert "at least 4000 tokens" in error["message"] or chat
    monkeypatch.undo()
    assert server.complete().status_code == 200


def test_no_chat_template_is_the_clients_error(scripted_server: Any, answer: Any, tokenizer_with_template: Any) -> None:
    response = scripted_server(answer(""), tokenizer=tokenizer_with_template(None)).chat()
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/nowhere", b"", 404),
        ("GET", "/v1/chat/completions", b"", 405),
        ("POST", "/v1/chat/completions", b"{not json", 400),
        ("POST", "/v1/chat/completions", b"[1]", 400),
        ("POST", "/v1/chat/completions", b'{"user": "\xff"}', 400),
        ("POST", "/v1/completions", b'{"model": "scripted", "prompt": "\\ud800"}', 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b'{"messages": "' + b"x" * (9 << 20) + b'"}', 413),
    ],
)
def test_every_error_has_openais_shape(plain_server: Any, method: str, path: str, content: bytes, status: int) -> None:
    server = plain_server
    response = server.client.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert server.chat().status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"é" * (1 << 20): 1},
        {"messages": [{"role": "user", "content": "x", "z" * (1 << 20): 1}]},
        {"model": "m" * (1 << 20)},
        {"seed": 10**4000},
    ],
)
def test_what_an_error_quotes_is_cut(plain_server: Any, body: dict[str, Any]) -> None:
    response = plain_server.chat(**body)
    assert response.status_code in (400, 404)
    assert len(response.content) < 4000
    if "model" in body:
        assert "served: 'scripted'" in response.json()["error"]["message"]


def test_json_that_is_not_labelled_as_json_is_told_so(plain_server: Any) -> None:
    content = b'{"model": "scripted", "prompt": "x"}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends by itself
    response = plain_server.client.post("/v1/completions", content=content, headers=form)
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_unknown_model_is_404(plain_server: Any) -> None:
    response = plain_server.chat(model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retries"),
    [
        (RequestError("token 9 is unknown", param="prompt"), 400, False),
        (OverloadedError("the queue is full"), 429, True),
        (EngineDeadError("the engine died"), 503, True),
        (RuntimeError("secret detail"), 500, False),
    ],
)
def test_errors_of_the_backend_become_statuses_streamed_or_not(
    scripted_server: Any, error: Exception, status: int, retries: bool, stream: bool
) -> None:
    async def script(request: Request) -> AsyncIterator[TokenChunk]:
        await asyncio.sleep(0)
        raise error
        yield

    response = scripted_server(script).chat(stream=stream)
    assert response.status_code == status
    assert ("retry-after" in response.headers) == retries
    assert "secret" not in response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_no_numbers_are_500_and_no_refusal(scripted_server: Any, answer: Any, stream: bool) -> None:
    server = scripted_server(answer("", finish=FinishReason.ERROR, error="the logits of token 5 are not finite"))
    response = server.chat(stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "invalid_logits")
    assert "token 5" in response.json()["error"]["message"]
    assert "retry-after" not in response.headers
    metrics = server.client.get("/metrics").text
    assert 'harness_errors_total{code="invalid_logits",model="scripted"} 1.0' in metrics
    assert "harness_rejected_requests_total{" not in metrics


def test_chat_logprobs_have_bytes_for_tokens_that_are_no_text(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("é", logprobs=True))
    content = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"][0]["bytes"] == [0xC3]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0


def test_completion_logprobs_count_characters(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("éa", logprobs=True))
    logprobs = server.complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a"]
    assert logprobs["bytes"] == [[0xC3], [0xA9], [0x61]]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert set(logprobs["top_logprobs"][2]) >= {"a"}


def test_salt_is_derived_from_credential_and_wish() -> None:
    assert cache_salt("", "") == ""
    salts = [cache_salt("a", ""), cache_salt("", "a"), cache_salt("a", "b"), cache_salt("ab", ""), cache_salt("b", "a")]
    assert len(set(salts)) == len(salts)
    assert cache_salt("a", "b") == cache_salt("a", "b")


def test_tenants_get_different_salts(plain_server: Any) -> None:
    server = plain_server
    for key, salt in (("A", ""), ("A", ""), ("B", ""), ("A", "x")):
        body = {"model": "scripted", "prompt": "Hi", "cache_salt": salt}
        server.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    first, second, third, fourth = (request.cache_salt for request in server.backend.requests)
    assert first == second
    assert len({first, third, fourth}) == 3
    assert "A" not in first


def test_a_priority_reaches_the_engine(plain_server: Any) -> None:
    server = plain_server
    for priority in (None, 0.9):
        body = {"model": "scripted", "prompt": "Hi"} | ({} if priority is None else {"priority": priority})
        assert server.client.post("/v1/completions", json=body).status_code == 200
    assert [request.priority for request in server.backend.requests] == [0.5, 0.9]
    refused = server.client.post("/v1/completions", json={"model": "scripted", "prompt": "Hi", "priority": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


def test_models_health_ready_cache_stats(plain_server: Any) -> None:
    server = plain_server
    model = server.client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["object"], model["max_model_len"]) == ("scripted", "model", 128)
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 200
    stats = server.client.get("/cache/stats").json()
    assert (stats["prefix_hit_tokens"], stats["prefix_query_tokens"], stats["prefix_hit_rate"]) == (4, 10, 0.4)
    server.backend.is_ready = False
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 503


def test_metrics_count_requests_tokens_and_errors(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("Hello.", num_cached=3))
    server.backend.num_restarts = 2
    server.chat()
    server.chat(stream=True)
    server.chat(temperature=-1)
    lines = dict(
        line.rsplit(" ", 1) for line in server.client.get("/metrics").text.splitlines() if not line.startswith("#")
    )
    assert all(name.startswith("harness_") for name in lines)
    chat = 'endpoint="/v1/chat/completions"'
    finished = f'harness_requests_total{{{chat},finish_reason="stop",model="scripted",status="200"}}'
    assert lines[finished] == "2.0"
    assert lines['harness_errors_total{code="invalid_value",model="scripted"}'] == "1.0"
    for name, value in {"prompt_tokens": 38, "cached_prompt_tokens": 6, "generated_tokens": 12}.items():
        assert float(lines[f'harness_{name}_total{{{chat},model="scripted"}}']) == value
    for name in ("ttft", "tpot", "e2e"):
        assert lines[f'harness_{name}_seconds_count{{{chat},model="scripted"}}'] == "2.0"
    assert lines['harness_kv_blocks{model="scripted"}'] == "8.0"
    assert lines['harness_engine_up{model="scripted"}'] == "1.0"
    assert lines['harness_engine_restarts_total{model="scripted"}'] == "2.0"
    assert lines['harness_active_requests{model="scripted"}'] == "0.0"
    assert lines['harness_prefix_hit_tokens_total{model="scripted"}'] == "4.0"


def test_unknown_paths_do_not_become_labels(plain_server: Any) -> None:
    server = plain_server
    server.client.get("/some/secret")
    assert "secret" not in server.client.get("/metrics").text


def test_openapi_describes_the_bodies(plain_server: Any) -> None:
    described: Callable[..., Any] = plain_server.client.get("/openapi.json").json
    assert "ChatCompletionRequest" in described()["components"]["schemas"]
