"""The recorded table of TensorRT-LLM's signatures: that the stand-in holds to it, and that the library does."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import fake_trtllm
import pytest
from fake_trtllm import TABLE, Unevaluated, parse_signature


@pytest.mark.parametrize(
    "wrong",
    [
        lambda api: api.SamplingConfig(topk=1),  # no such argument
        lambda api: api.SamplingConfig(1, 2),  # keyword-only
        lambda api: api.SamplingConfig(top_k=1.5),
        lambda api: api.SamplingConfig(seed=-1),
        lambda api: api.Request([1]),  # max_tokens is missing
        lambda api: api.Request([1], 2**31),
        lambda api: api.Request([1], 1, stop_words=[3]),
        lambda api: api.Request([1], 1, sampling_config=api.OutputConfig()),
        lambda api: api.ExtendedRuntimePerfKnobConfig(cuda_graph_mode=True),  # an attribute alone
        lambda api: setattr(api.ExtendedRuntimePerfKnobConfig(), "cuda_graphs", True),
        lambda api: setattr(api.Request([1], 1), "max_tokens", 2),  # read-only
        lambda api: api.Result().cached_tokens,
        lambda api: api.FinishReason.STOP,
        lambda api: api.Executor("engine", api.ModelType.DECODER_ONLY),
        lambda api: api.KVCacheManager,
    ],
)
def test_what_the_table_does_not_list_is_an_error(wrong: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        wrong(fake_trtllm.make_module())


def test_calls_of_the_executor_are_bound_too() -> None:
    api = fake_trtllm.make_module()
    executor = api.Executor("engine", api.ModelType.DECODER_ONLY, api.ExecutorConfig())
    for wrong in (
        lambda: executor.await_responses(timeout=5),  # milliseconds as a number are not taken
        lambda: executor.enqueue_request(object()),
        lambda: executor.cancel_request(id="1"),
        lambda: executor.get_stats(),
    ):
        with pytest.raises((TypeError, AttributeError)):
            wrong()


def test_iterations_are_json_of_the_fields_of_the_table() -> None:
    api = fake_trtllm.make_module()
    executor = api.Executor(
        "engine", api.ModelType.DECODER_ONLY, api.ExecutorConfig(max_batch_size=1, max_num_tokens=8)
    )
    executor.enqueue_request(api.Request([1], 1))
    executor.await_responses()
    for iteration in executor.get_latest_iteration_stats():
        assert list(json.loads(iteration.to_json_str())) == TABLE["json"]["IterationStats"]


def split_arguments(text: str) -> list[str]:
    """Arguments of a signature as nanobind writes it: commas within brackets part nothing."""
    depth, part, parts = 0, "", []
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()] if part.strip() else parts


def written_signatures(function: Any) -> Iterator[list[str]]:
    """Arguments, without self, of each overload that a nanobind function describes in its docstring."""
    for line in (function.__doc__ or "").splitlines():
        found = re.search(r"\w+\((self(?:: [^,)]*)?)(?:, )?(.*)\)(?: -> .*)?$", line.strip())
        if found:
            yield [argument for argument in split_arguments(found[2]) if argument != "/"]


def differences(signature: inspect.Signature, written: list[str]) -> list[str]:
    """Where an overload is another than the table says: names, order, what is keyword-only, plain defaults."""
    expected: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in expected:
            expected.append("*")
        expected.append(parameter.name)
    names = [re.split(r"[:=\s]", argument)[0] for argument in written]
    if names != expected:
        return [f"arguments {names}, in the table {expected}"]
    wrong = []
    for argument in written:
        name, _, default = argument.partition(" = ")
        parameter = signature.parameters.get(re.split(r"[:\s]", name)[0])
        if parameter is None or isinstance(parameter.default, Unevaluated):
            continue
        is_required = parameter.default is inspect.Parameter.empty
        plain = default if not is_required and isinstance(parameter.default, float) else None
        same = (
            float(plain) == parameter.default if plain else default == ("" if is_required else repr(parameter.default))
        )
        if not same:
            wrong.append(f"{argument}, in the table {parameter}")
    return wrong


@pytest.mark.gpu
def test_the_installed_library_is_as_recorded() -> None:
    assert version("tensorrt_llm") == TABLE["version"]
    api = import_module(TABLE["module"])
    wrong: list[str] = []

    def hold(where: str, text: str, function: Any) -> None:
        found = [differences(parse_signature(text), written) for written in written_signatures(function)]
        if not found:
            wrong.append(f"{where} describes no signature: {function.__doc__!r}")
        elif [] not in found:
            wrong.append(f"{where}: {found}")

    for name, members in TABLE["enums"].items():
        wrong += [f"{name}.{member}" for member in members if not hasattr(getattr(api, name), member)]
    for name, entry in TABLE["classes"].items():
        kind = getattr(api, name)
        if entry["init"] is not None:
            hold(name, entry["init"], kind.__init__)
        wrong += [f"{name}.{a}" for a in (*entry["writable"], *entry["readable"]) if not hasattr(kind, a)]
        for method, text in entry["methods"].items():
            hold(f"{name}.{method}", text, getattr(kind, method))
    iteration = json.loads(api.IterationStats().to_json_str())
    wrong += [f"IterationStats[{field!r}]" for field in set(TABLE["json"]["IterationStats"]) ^ set(iteration)]
    for name, owner in (("kv_cache_stats", "KvCacheStats"), ("inflight_batching_stats", "InflightBatchingStats")):
        stats = api.IterationStats()
        setattr(stats, name, getattr(api, owner)())
        part = json.loads(stats.to_json_str())[re.sub(r"_(\w)", lambda m: m[1].upper(), name)]
        wrong += [f"{owner}[{field!r}]" for field in set(TABLE["json"][owner]) ^ set(part)]
    assert not wrong, "\n".join(wrong)


def test_docstrings_of_nanobind_are_read_right() -> None:
    """The comparison itself, on docstrings of functions that nanobind 2 has bound."""

    def function() -> None:
        """
        __init__(self, ids: collections.abc.Sequence[int], *, config: probe.C = <probe.C object at 0x7f0>, kind: probe.Kind = Kind.A, words: collections.abc.Sequence[collections.abc.Sequence[int]] | None = None, priority: float = 0.5) -> None
        __init__(self, other: probe.C) -> None
        """  # noqa: E501

    first, second = written_signatures(function)
    kinds = "config: object = C(), kind: Kind = Kind.A, words: list | None = None"
    good = parse_signature(f"(ids: list[i32], *, {kinds}, priority: f32 = 0.5)")
    assert differences(good, first) == []
    assert differences(good, second)
    assert differences(parse_signature(f"(ids: list[i32], *, {kinds}, priority: f32 = 1.0)"), first)
    assert differences(parse_signature(f"(ids: list[i32], {kinds}, priority: f32 = 0.5)"), first)
    assert differences(parse_signature(f"(ids: list[i32] | None = None, *, {kinds}, priority: f32 = 0.5)"), first)
