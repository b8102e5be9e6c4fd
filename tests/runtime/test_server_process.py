"""`harness-run server` as users run it: a real process, a real small model, real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from engine_oracle import deterministic_logits

from harness.calib.measure import negative_log_likelihood
from harness.tokenizer import Tokenizer

COMMAND = [sys.executable, "-c", "from harness.runtime.cli import main; main()"]
SMALL = ["--kv-cache-memory", "512MiB", "--max-model-len", "1024", "--deterministic", "--served-model-name", "smol"]
SYSTEM = "You are a patient teacher. " + "You answer in one short and friendly sentence, and never guess. " * 6


@dataclass
class Server:
    """A running `harness-run server`."""

    process: subprocess.Popen[str]
    client: httpx.Client
    log: list[str]

    def body(self, question: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 24, **fields}

    def ask(self, question: str, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=self.body(question, **fields))

    def stream(self, question: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Objects of a streamed answer as they come."""
        body = self.body(question, stream=True, **fields)
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def metric(self, name: str) -> float:
        found = re.search(rf"^harness_{name}{{.*}} (.*)$", self.client.get("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def is_ready(self) -> bool:
        return self.client.get("/ready").status_code == 200


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def running(engine: Path, *arguments: str) -> Iterator[Server]:
    command = [*COMMAND, "server", "--engine", str(engine), "--port", "0", *SMALL, *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log: list[str] = []
    try:
        reader = threading.Thread(target=log.extend, args=(process.stderr,))
        reader.start()
        wait_until(lambda: " serves " in "".join(log) or process.poll() is not None, 30)
        address = re.search(r"^http://\S+", "".join(log), re.MULTILINE)
        assert address, log
        with httpx.Client(base_url=address[0], timeout=60) as client:
            wait_until(lambda: client.get("/health").status_code == 200, 10)
            server = Server(process, client, log)
            wait_until(server.is_ready, 60)
            yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(20)
        reader.join()
        process.stderr.close()


@pytest.fixture(scope="module")
def server(smollm2_engine: Path) -> Iterator[Server]:
    with running(smollm2_engine) as started:
        yield started


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])


@pytest.mark.parametrize(
    "question", ["What is the capital of France?", "用中文说你好,再加一个表情 😀", "def add(a, b):"]
)
def test_a_stream_is_the_whole_answer_in_pieces(server: Server, question: str) -> None:
    whole = server.ask(question).json()
    events = list(server.stream(question, stream_options={"include_usage": True}))
    assert text_of(events) == whole["choices"][0]["message"]["content"] != ""
    assert len(events) > 3
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_the_second_question_finds_the_shared_prefix(server: Server) -> None:
    salt = {"cache_salt": "prefix"}
    first = server.ask("What is a noun?", **salt).json()["usage"]
    second = server.ask("What is a verb?", **salt).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 64
    assert cached % 32 == 0
    assert second["prompt_cache_hit_tokens"] == cached
    assert second["prompt_cache_hit_tokens"] + second["prompt_cache_miss_tokens"] == second["prompt_tokens"]


def test_tenants_do_not_share_a_prefix(server: Server) -> None:
    def cached(tenant: str) -> int:
        usage = server.ask("Who are you?", max_tokens=1, cache_salt=tenant).json()["usage"]
        return int(usage["prompt_cache_hit_tokens"])

    assert cached("A") == 0
    assert cached("A") > 0
    assert cached("B") == 0


def test_the_same_question_gives_the_same_answer_alone_or_together(server: Server) -> None:
    alone = server.ask("Name a color.", cache_salt="cold").json()["choices"]
    with ThreadPoolExecutor(6) as pool:
        together = pool.map(
            lambda n: server.ask("Name a color.", cache_salt=f"cold{n % 3}").json()["choices"], range(6)
        )
    assert all(choices == alone for choices in together)


def test_a_seed_holds_beside_other_requests(server: Server) -> None:
    def seeded() -> Any:
        return server.ask("Tell me a story.", temperature=1.0, seed=7).json()["choices"]

    alone = seeded()
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(server.ask, "Tell me a story.", temperature=1.0) for _ in range(3)]
        assert pool.submit(seeded).result() == alone
    assert all(other.result().status_code == 200 for other in others)


def test_a_stop_string_is_cut_off_a_real_answer(server: Server) -> None:
    whole = server.ask("What is the capital of France?").json()["choices"][0]["message"]["content"]
    stop = whole.split()[2]
    expected = whole.split(stop)[0]
    cut = server.ask("What is the capital of France?", stop=stop).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (expected, "stop")
    assert text_of(list(server.stream("What is the capital of France?", stop=stop))) == expected


def test_a_prompt_over_the_context_or_of_unknown_tokens_is_400_and_the_server_lives(server: Server) -> None:
    long = server.ask("word " * 2000)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    unknown = server.client.post("/v1/completions", json={"model": "smol", "prompt": [10**6]})
    assert unknown.status_code == 400
    assert "1000000" in unknown.json()["error"]["message"]
    assert server.ask("Hello?").status_code == 200


def test_logprobs_are_of_the_answer_alone(server: Server) -> None:
    body = {"model": "smol", "prompt": "The capital of France is", "top_k": 1, "logprobs": 2, "max_tokens": 3}
    logprobs = server.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 3
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_likelihoods_of_prompts_are_those_of_the_logits(server: Server, smollm2_engine: Path) -> None:
    """What lm-evaluation-harness sends, and what it makes of the answer: lists of token ids, one token after each."""
    tokenizer = Tokenizer.from_dir(smollm2_engine)
    prompts = [tokenizer.encode(text) for text in (SYSTEM, "The capital of France is Paris.", "为什么天空是蓝色的？")]
    body = {"model": "smol", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    for prompt, choice in zip(prompts, response.json()["choices"], strict=True):
        logits = deterministic_logits(smollm2_engine, prompt)
        told = choice["logprobs"]["token_logprobs"]
        assert (len(told), told[0]) == (len(prompt) + 1, None)
        losses = negative_log_likelihood(logits[:-1], np.array(prompt[1:]))
        np.testing.assert_allclose(told[1:-1], -losses, atol=1e-5)
        tops = choice["logprobs"]["top_logprobs"][1:-1]
        is_greedy = [value == max(top.values()) for value, top in zip(told[1:-1], tops, strict=True)]
        assert is_greedy == (logits[:-1].argmax(axis=1) == prompt[1:]).tolist()


def test_the_end_token_is_reported_where_one_token_is_asked_for(server: Server) -> None:
    prompt = "<|im_start|>user\nSay nothing.<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris."
    body = {"model": "smol", "prompt": prompt, "temperature": 0, "logprobs": 1, "echo": True, "max_tokens": 1}
    choice = server.client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"]["tokens"][-1] == "<|im_end|>"
    assert choice["text"] == prompt


def test_a_closed_connection_frees_its_blocks_within_a_second(server: Server) -> None:
    for event in server.stream("Write a very long story.", max_tokens=700, ignore_eos=True):
        if event["choices"][0]["delta"].get("content"):
            break
    wait_until(lambda: server.metric("requests_running") == 0, 1)
    assert server.metric("kv_blocks_free") == server.metric("kv_blocks")


def test_a_port_in_use_is_refused_before_the_engine_is_loaded(server: Server, smollm2_engine: Path) -> None:
    port = str(server.client.base_url.port)
    command = [*COMMAND, "server", "--engine", str(smollm2_engine), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert "loading" not in done.stderr


def test_a_killed_engine_is_told_to_its_clients_and_replaced(server: Server) -> None:
    events = server.stream("Write a very long story.", max_tokens=700, ignore_eos=True)
    for event in events:
        if event["choices"][0]["delta"].get("content"):
            break
    killed = server.engine()
    killed.kill()
    assert "killed by signal 9" in list(events)[-1]["error"]["message"]
    wait_until(lambda: server.client.get("/health").status_code == 200, 1)
    refused = server.ask("Hello?")
    if refused.status_code != 200:  # else the new engine was quicker
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    wait_until(server.is_ready, 60)
    assert server.engine().pid != killed.pid
    assert server.ask("Hello?").status_code == 200


def test_sigterm_in_mid_stream_drains(smollm2_engine: Path) -> None:
    with running(smollm2_engine, "--max-num-seqs", "1", "--max-waiting", "1") as server:
        engine = server.engine()
        first = server.stream("Write a story.", max_tokens=100, ignore_eos=True)
        events = [next(first), next(first)]
        with ThreadPoolExecutor(6) as pool:
            # one runs; of the burst one waits, the others are too many
            burst = list(pool.map(lambda n: (time.sleep(n / 50), server.ask("Hi", max_tokens=1))[1], range(5)))
            assert sorted(r.status_code for r in burst) in ([200, 429, 429, 429, 429], [200, 200, 429, 429, 429])
            assert all(r.headers["retry-after"] for r in burst if r.status_code == 429)
        second = server.stream("Write a story.", max_tokens=100, ignore_eos=True)
        events = [next(second), next(second)]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/ready").status_code == 503, 2)
        assert server.ask("Hello?").json()["error"]["code"] == "shutting_down"
        events += second
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0
        assert not engine.is_running()
        list(first)


def test_the_engine_ends_with_a_killed_server(smollm2_engine: Path) -> None:
    with running(smollm2_engine) as server:
        engine = server.engine()
        folder = Path(engine.cmdline()[-2].removeprefix("ipc://")).parent
        assert folder.is_dir()
        os.kill(server.process.pid, signal.SIGKILL)
        engine.wait(5)
        assert not folder.exists()


def test_a_changed_file_is_refused_by_name(smollm2_engine: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(smollm2_engine, broken, copy_function=os.link)
    graph = broken / "model.xml"
    data = bytearray(graph.read_bytes())
    data[len(data) // 2] ^= 1
    graph.unlink()  # the link, not the engine's own file
    graph.write_bytes(data)
    command = [*COMMAND, "chat", "--engine", str(broken), "--prompt", "Hi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "model.xml is corrupt" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_answers_one_question_and_says_its_figures(smollm2_engine: Path) -> None:
    command = [*COMMAND, "chat", "--engine", str(smollm2_engine), "--temperature", "0", "--max-tokens", "20"]
    question = "What is the capital of France?"
    done = subprocess.run([*command, "--prompt", question], capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in done.stdout
    assert re.search(r"TTFT \d.* tokens/s.* 0 cached", done.stderr)


def test_chat_keeps_its_history_in_the_prefix_cache(smollm2_engine: Path) -> None:
    command = [*COMMAND, "chat", "--engine", str(smollm2_engine), "--temperature", "0", "--max-tokens", "20"]
    lines = "What is the capital of France?\n/help\nAnd of Italy?\n/reset\nHi\n/exit\n"
    done = subprocess.run(
        [*command, "--system", SYSTEM], input=lines, capture_output=True, text=True, timeout=60, check=True
    )
    cached = [int(n) for n in re.findall(r"(\d+) cached", done.stderr)]
    assert cached[0] == 0
    assert cached[1] > cached[2] > 0
    assert "/reset forgets" in done.stderr
