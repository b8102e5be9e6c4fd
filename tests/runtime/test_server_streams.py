"""Streams of the HTTP face, over a scripted backend: form, stops, whole characters, reasoning, disconnects, drain."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from harness.errors import OverloadedError
from harness.runtime.request import FinishReason, Request, TokenChunk


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def chat_text(events: list[dict[str, Any]], key: str = "content") -> str:
    return "".join(event["choices"][0]["delta"].get(key, "") for event in events if event["choices"])


def test_chat_stream_begins_with_the_role_and_ends_with_a_reason(
    scripted_server: Any, answer: Any, read_events: Any
) -> None:
    events = read_events(scripted_server(answer("Hello.")).chat(stream=True))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat_text(events) == "Hello."
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all("usage" not in event for event in events)


def test_completion_stream_sends_deltas_only(scripted_server: Any, answer: Any, read_events: Any) -> None:
    server = scripted_server(answer("one two three four"))
    events = read_events(server.complete(stream=True))
    assert len(events) > 2
    assert "".join(event["choices"][0]["text"] for event in events) == "one two three four"
    echoed = read_events(server.complete(stream=True, echo=True))
    assert "".join(event["choices"][0]["text"] for event in echoed) == "Hione two three four"


def test_a_streamed_report_on_the_prompt_comes_with_the_first_text(
    scripted_server: Any, answer: Any, read_events: Any
) -> None:
    server = scripted_server(answer("one two", logprobs=True, pause=0.01))
    fields: dict[str, Any] = {"prompt": "prompt", "echo": True, "logprobs": 1, "max_tokens": 20}
    whole = server.complete(**fields).json()["choices"][0]
    choices = [event["choices"][0] for event in read_events(server.complete(**fields, stream=True))]
    assert choices[0]["text"].startswith("prompto")
    assert len(choices) > 2
    assert "".join(choice["text"] for choice in choices) == whole["text"] == "promptone two"
    for name, column in whole["logprobs"].items():
        parts = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
        assert [entry for part in parts for entry in part] == column


def test_a_report_comes_with_an_answer_that_shows_nothing(scripted_server: Any, answer: Any, read_events: Any) -> None:
    server = scripted_server(answer("STOP", logprobs=True))
    fields: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 9, "stop": "STOP"}
    events = read_events(server.complete(**fields, stream=True))
    for choices in ([event["choices"][0] for event in events], server.complete(**fields).json()["choices"]):
        assert "".join(choice["text"] for choice in choices) == "ab"
        assert choices[0]["logprobs"]["token_logprobs"] == [None, -1, -2]
        assert choices[-1]["finish_reason"] == "stop"


def test_several_prompts_are_not_streamed(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("Hello."))
    response = server.complete(prompt=["a", "b"], stream=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")
    assert server.complete(prompt=["a"], stream=True).status_code == 200


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_usage_comes_in_a_last_chunk_without_choices(
    scripted_server: Any, answer: Any, read_events: Any, endpoint: str
) -> None:
    server = scripted_server(answer("Hello.", num_cached=2))
    send = getattr(server, endpoint)
    events = read_events(send(stream=True, stream_options={"include_usage": True}))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == send().json()["usage"]
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert all(event["usage"] is None for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "shown", "num_tokens", "reason"),
    [
        ("alphabet: ABCDEFGHIJKL", "DEFGHIJ", "alphabet: ABC", 20, "stop"),
        ("alphabet: ABCDEFG", "DEFGHIJ", "alphabet: ABCDEFG", 17, "length"),
        ("one\n\ntwo", ["three", "\n\n"], "one", 5, "stop"),
        ("aab", "ab", "a", 3, "stop"),
        ("你好,世界", "世", "你好,", 10, "stop"),
        ("STOP", "STOP", "", 4, "stop"),
    ],
)
def test_stop_strings_are_cut_off_and_end_the_request(
    scripted_server: Any, answer: Any, read_events: Any, *, text: str, stop: Any, shown: str, num_tokens: int,
    reason: str, stream: bool,
) -> None:  # fmt: skip
    server = scripted_server(answer(text, finish=FinishReason.LENGTH))
    # token ids as the prompt, too: stop strings belong to the answer, however the prompt came
    response = server.complete(prompt=[40, 41], stop=stop, max_tokens=50, stream=stream,
                               **({"stream_options": {"include_usage": True}} if stream else {}))  # fmt: skip
    if stream:
        events = read_events(response)
        pieces = [event["choices"][0] for event in events if event["choices"]]
        seen, last, usage = "".join(p["text"] for p in pieces), pieces[-1]["finish_reason"], events[-1]["usage"]
    else:
        choice = response.json()["choices"][0]
        seen, last, usage = choice["text"], choice["finish_reason"], response.json()["usage"]
    assert (seen, last, usage["completion_tokens"]) == (shown, reason, num_tokens)
    assert len(server.backend.closed_early) == (reason == "stop")


def test_logprobs_of_cut_off_tokens_are_not_reported(scripted_server: Any, answer: Any, read_events: Any) -> None:
    server = scripted_server(answer("abcSTOP", logprobs=True))
    whole = server.complete(stop="STOP", logprobs=0).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["a", "b", "c"]
    events = read_events(server.complete(stop="STOP", logprobs=0, stream=True))
    streamed = [t for e in events if e["choices"][0]["logprobs"] for t in e["choices"][0]["logprobs"]["tokens"]]
    assert streamed == ["a", "b", "c"]


@pytest.mark.parametrize("text", ["中文字符和表情 😀🎉 完", "é", "👩‍👩‍👧", "tail 😀"])
def test_characters_of_many_tokens_are_never_split(
    scripted_server: Any, answer: Any, read_events: Any, text: str
) -> None:
    server = scripted_server(answer(text, pause=0.002))
    events = read_events(server.chat(stream=True))
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == text == server.chat().json()["choices"][0]["message"]["content"]
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_tail_of_a_character_cut_by_the_limit_is_flushed(
    scripted_server: Any, answer: Any, read_events: Any
) -> None:
    server = scripted_server(answer("ok 😀".encode()[:-1], finish=FinishReason.LENGTH))
    assert chat_text(read_events(server.chat(stream=True))) == "ok \ufffd"
    assert server.chat().json()["choices"][0]["message"]["content"] == "ok \ufffd"


R1_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (R1_TEMPLATE, "Let me see.\n</think>\n\nIt is 4.", "Let me see.\n", "It is 4."),
        (R1_TEMPLATE, "never done", "never done", ""),
        (None, "<think>\nHm.</think>\nYes.", "Hm.", "Yes."),
        (None, "No tags <think> here.", "", "No tags <think> here."),
        (None, "<thin ice", "", "<thin ice"),
    ],
)
def test_reasoning_is_parted_from_content(
    scripted_server: Any, answer: Any, read_events: Any, tokenizer_with_template: Any, *, template: str | None,
    text: str, reasoning: str, content: str,
) -> None:  # fmt: skip
    tokenizer = tokenizer_with_template(template) if template else tokenizer_with_template("{{ messages[0].content }}")
    server = scripted_server(answer(text), tokenizer=tokenizer)
    message = server.chat().json()["choices"][0]["message"]
    assert message["content"] == content
    assert message.get("reasoning_content", "") == reasoning
    events = read_events(server.chat(stream=True))
    assert (chat_text(events, "reasoning_content"), chat_text(events)) == (reasoning, content)


def test_no_proxy_is_invited_to_buffer_a_stream(scripted_server: Any, answer: Any) -> None:
    headers = scripted_server(answer("abc")).chat(stream=True).headers
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


def test_the_first_token_is_sent_at_once(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("abc", pause=1.0))
    body = {"model": "scripted", "prompt": "Hi", "stream": True}
    started = time.monotonic()
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        first = next(response.iter_text())
        assert '"a"' in first
        assert time.monotonic() - started < 0.8


def test_an_error_in_mid_stream_is_an_event(scripted_server: Any, answer: Any, read_events: Any) -> None:
    server = scripted_server(answer("part", pause=0.01, finish=FinishReason.ERROR, error="the logits are not finite"))
    response = server.chat(stream=True)
    assert response.status_code == 200
    events = read_events(response)
    assert chat_text(events[:-1]).startswith("p")
    assert events[-1]["error"]["code"] == "invalid_logits"
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["", "abc"])
def test_a_closed_connection_ends_the_request_within_a_second(
    scripted_server: Any, answer: Any, stream: bool, text: str
) -> None:
    # after its text, if any, the script is silent for a minute
    script = answer(text, before=0 if text else 60, pause=60)
    server = scripted_server(script)
    body = {"model": "scripted", "prompt": "Hi", "stream": stream}
    request = httpx.Request("POST", f"{server.url}/v1/completions", json=body)
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request.content)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + request.content)
        assert wait_until(lambda: server.backend.num_running == 1, 5)
        if stream and text:
            assert connection.recv(1)  # the stream has begun
    assert wait_until(lambda: server.backend.num_running == 0, 1)
    assert len(server.backend.closed_early) == 1
    assert 'finish_reason="cancelled"' in server.client.get("/metrics").text


def test_a_burst_beyond_the_queue_is_429_and_accepted_requests_finish(scripted_server: Any, answer: Any) -> None:
    accepted: list[str] = []

    async def script(request: Request) -> AsyncIterator[TokenChunk]:
        if len(accepted) >= 3:
            raise OverloadedError("the queue is full")
        accepted.append(request.request_id)
        async for chunk in answer("Hello.", pause=0.05)(request):
            yield chunk

    server = scripted_server(script)
    responses: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: responses.append(server.chat())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_status = sorted(response.status_code for response in responses)
    assert by_status == [200] * 3 + [429] * 5
    assert all(r.headers["retry-after"] for r in responses if r.status_code == 429)
    assert all(r.json()["choices"][0]["message"]["content"] == "Hello." for r in responses if r.status_code == 200)


def test_draining_lets_streams_finish_and_refuses_new_requests(
    scripted_server: Any, answer: Any, read_events: Any
) -> None:
    server = scripted_server(answer("Hello.", pause=0.2))
    streams: list[httpx.Response] = []
    streaming = threading.Thread(target=lambda: streams.append(server.chat(stream=True)))
    streaming.start()
    assert wait_until(lambda: server.backend.num_running == 1, 5)
    server.uvicorn_server.handle_exit(signal.SIGTERM, None)
    with httpx.Client(base_url=server.url) as other:
        ready = other.get("/ready")
        refused = other.post("/v1/completions", json={"model": "scripted", "prompt": "Hi"})
    assert (ready.status_code, refused.status_code) == (503, 503)
    assert refused.json()["error"]["code"] == "shutting_down"
    assert "retry-after" in refused.headers
    streaming.join()
    assert chat_text(read_events(streams[0])) == "Hello."
    assert wait_until(lambda: server.uvicorn_server.should_exit, 2)


class SlowTokenizer:
    """Encodes when it is told to."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.may_encode = threading.Event()
        self.num_encoding = 0

    def encode(self, text: str) -> Any:
        self.num_encoding += 1
        assert self.may_encode.wait(20)
        return self._tokenizer.encode(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_waits_for_a_request_that_is_being_tokenized(
    scripted_server: Any, answer: Any, byte_tokenizer: Any, stream: bool
) -> None:
    tokenizer = SlowTokenizer(byte_tokenizer)
    server = scripted_server(answer("Hello."), tokenizer=tokenizer, drain=20)
    with ThreadPoolExecutor() as pool:
        response = pool.submit(server.complete, stream=stream)
        assert wait_until(lambda: tokenizer.num_encoding == 1, 5)
        server.uvicorn_server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.5)
        assert not server.uvicorn_server.should_exit
        tokenizer.may_encode.set()
        assert response.result().status_code == 200
    assert wait_until(lambda: server.uvicorn_server.should_exit, 2)


def test_requests_being_tokenized_are_limited(scripted_server: Any, answer: Any, byte_tokenizer: Any) -> None:
    tokenizer = SlowTokenizer(byte_tokenizer)
    server = scripted_server(answer("Hello."), tokenizer=tokenizer, max_active=2)
    with ThreadPoolExecutor() as pool:
        responses = [pool.submit(server.complete) for _ in range(2)]
        assert wait_until(lambda: tokenizer.num_encoding == 2, 5)
        refused = server.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert tokenizer.num_encoding == 2
        tokenizer.may_encode.set()
        assert [response.result().status_code for response in responses] == [200, 200]
    assert server.complete().status_code == 200
    assert server.service.num_active == 0


def test_each_prompt_of_a_list_counts_in_the_limit(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("Hello.", before=0.5), max_active=4)
    with ThreadPoolExecutor() as pool:
        response = pool.submit(server.complete, prompt=["a", "b", "c"])
        assert wait_until(lambda: server.backend.num_running == 3, 5)
        assert server.service.num_active == 3
        assert server.complete(prompt=["a", "b"]).status_code == 429
        assert server.complete(prompt="a").status_code == 200
        assert len(response.result().json()["choices"]) == 3
    assert server.service.num_active == 0


def test_a_client_that_goes_takes_all_its_prompts_with_it(scripted_server: Any, answer: Any) -> None:
    server = scripted_server(answer("", before=60))
    body = {"model": "scripted", "prompt": ["a", "b", "c"]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
    assert wait_until(lambda: server.backend.num_running == 0, 1)
    assert len(server.backend.closed_early) == 3


def test_a_client_that_goes_while_its_prompt_is_tokenized_is_counted(
    scripted_server: Any, answer: Any, byte_tokenizer: Any
) -> None:
    tokenizer = SlowTokenizer(byte_tokenizer)
    server = scripted_server(answer("Hello."), tokenizer=tokenizer)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"model": "scripted", "prompt": "Hi"}, timeout=0.5)
    assert wait_until(lambda: server.service.num_active == 0, 1)
    tokenizer.may_encode.set()
    assert 'finish_reason="cancelled"' in server.client.get("/metrics").text
    assert server.backend.requests == []


def test_a_second_signal_stops_at_once(scripted_server: Any, read_events: Any) -> None:
    stopped = asyncio.Event()

    async def script(request: Request) -> AsyncIterator[TokenChunk]:
        yield TokenChunk(request_id=request.request_id, token_ids=[40])
        await stopped.wait()
        yield TokenChunk(request_id=request.request_id, finish_reason=FinishReason.CANCELLED)

    server = scripted_server(script, drain=60)

    async def stop() -> None:
        stopped.set()

    server.backend.stop = stop
    streams: list[httpx.Response] = []
    streaming = threading.Thread(target=lambda: streams.append(server.chat(stream=True)))
    streaming.start()
    assert wait_until(lambda: server.backend.num_running == 1, 5)
    server.uvicorn_server.handle_exit(signal.SIGINT, None)
    time.sleep(0.3)
    assert not server.uvicorn_server.should_exit
    server.uvicorn_server.handle_exit(signal.SIGINT, None)
    streaming.join(5)
    assert read_events(streams[0])[-1]["error"]["code"] == "shutting_down"
    assert wait_until(lambda: server.uvicorn_server.should_exit, 2)
