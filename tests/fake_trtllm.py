"""A stand-in for `tensorrt_llm.bindings.executor` 1.2.1, made from the recorded table of its signatures.

Every constructor, call and attribute is bound against the table: what it does not list is an error here, as are values
of another type. Behind it stands an executor without a model: every token is followed by the next number. It batches in
flight, streams, ends requests as the real one does (without the end id, with other stop tokens), cancels, reuses blocks
within a salt, keeps a queue, and reports its iterations.
"""

from __future__ import annotations

import ast
import enum
import inspect
import json
import sys
import time
import types
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

TABLE_PATH = Path(__file__).parent / "runtime" / "tensorrt_llm" / "api-1.2.1.json"
TABLE: dict[str, Any] = json.loads(TABLE_PATH.read_text(encoding="utf-8"))

VOCAB_SIZE = 260
TOKENS_PER_BLOCK = 32
NUM_BLOCKS = 64
REFUSED, POISON = 258, 259
"""A prompt that ends with one of these is refused when it is fetched, or breaks the executor."""


class Unevaluated(str):
    """A default that is no literal, `SamplingConfig()`, as text."""


def parse_signature(text: str) -> inspect.Signature:
    """A signature of the table; annotations stay text."""
    function = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    num_required = len(arguments.args) - len(arguments.defaults)
    positional = zip(arguments.args, [None] * num_required + arguments.defaults, strict=True)
    parameters = [_parameter(a, default, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a, default in positional]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters += [_parameter(a, default, inspect.Parameter.KEYWORD_ONLY) for a, default in keywords]
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, default: ast.expr | None, kind: Any) -> inspect.Parameter:
    assert argument.annotation is not None
    value: Any = inspect.Parameter.empty
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = Unevaluated(ast.unparse(default))
    return inspect.Parameter(argument.arg, kind, default=value, annotation=ast.unparse(argument.annotation))


_INTEGERS = {"i32": (-(2**31), 2**31 - 1), "u64": (0, 2**64 - 1)}
_KINDS: dict[str, tuple[type, ...]] = {"bool": (bool,), "str": (str,), "path": (str, Path), "ms": (timedelta, float)}


def _fits(value: Any, kind: str, module: types.ModuleType) -> bool:
    if " | " in kind:
        return any(_fits(value, one, module) for one in kind.split(" | "))
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        return type(value) is int and low <= value <= high
    if kind == "f32":
        return type(value) in (int, float)
    if kind.startswith("list"):
        return isinstance(value, list) and all(_fits(item, kind[5:-1] or "object", module) for item in value)
    if kind in ("object", "None"):
        return kind == "object" or value is None
    return isinstance(value, _KINDS[kind] if kind in _KINDS else getattr(module, kind))


def bind(signature: inspect.Signature, where: str, module: types.ModuleType, *args: Any, **kwargs: Any) -> Any:
    """Arguments by name, with defaults.

    Raises:
        TypeError: unknown, missing, or of another type than the table says.
    """
    bound = signature.bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].annotation
        if not _fits(value, kind, module):
            raise TypeError(f"{where}: {name} is {value!r}, not {kind}")
    bound.apply_defaults()
    return bound.arguments


class Bound:
    """Base of the classes made from the table: values by name, none but those listed."""

    _module: types.ModuleType
    _init: inspect.Signature | None
    _writable: frozenset[str]
    _listed: frozenset[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        assert self._init is not None, f"{type(self).__name__} is made by the executor alone"
        values = bind(self._init, type(self).__name__, self._module, *args, **kwargs)
        object.__setattr__(self, "arguments", values)
        object.__setattr__(self, "_values", dict.fromkeys(self._listed) | values)

    @classmethod
    def made(cls, **values: Any) -> Any:
        """As the executor makes one."""
        self = object.__new__(cls)
        object.__setattr__(self, "_values", {})
        for name, value in values.items():
            assert name in self._listed, f"{cls.__name__} has no {name} in the table"
            self._values[name] = value
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in self._listed:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} in the table")
        value = object.__getattribute__(self, "_values")[name]
        if isinstance(value, Unevaluated):  # a default that is an object
            owner, _, rest = value.partition(".")
            value = getattr(getattr(self._module, owner), rest) if rest else getattr(self._module, owner[:-2])()
            self._values[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._writable:
            raise AttributeError(f"{type(self).__name__}.{name} cannot be set, by the table")
        self._values[name] = value


def make_module(*, num_blocks: int = NUM_BLOCKS, step_seconds: float = 0.0) -> types.ModuleType:
    """The module, with an executor of so many blocks whose iterations take so long."""
    module = types.ModuleType(TABLE["module"])
    for name, members in TABLE["enums"].items():
        setattr(module, name, enum.Enum(name, members))
    for name, entry in TABLE["classes"].items():
        made = {
            "_module": module,
            "_init": None if entry["init"] is None else parse_signature(entry["init"]),
            "_writable": frozenset(entry["writable"]),
            "_listed": frozenset((*entry["writable"], *entry["readable"])),
        }
        behaviour = _BEHAVIOURS.get(name, {})
        assert set(behaviour) <= set(entry["methods"]), f"{name} behaves beyond the table"
        methods = {method: _bound_method(name, method, function, module) for method, function in behaviour.items()}
        setattr(module, name, type(name, (Bound,), made | methods))
    module.Executor.__init__ = _start_of(module, num_blocks, step_seconds)
    return module


def install(module: types.ModuleType) -> None:
    """Have `from tensorrt_llm.bindings import executor` find it."""
    package, bindings = types.ModuleType("tensorrt_llm"), types.ModuleType("tensorrt_llm.bindings")
    package.bindings, bindings.executor = bindings, module
    sys.modules |= {"tensorrt_llm": package, "tensorrt_llm.bindings": bindings, TABLE["module"]: module}


def _bound_method(name: str, method: str, function: Callable[..., Any], module: types.ModuleType) -> Callable[..., Any]:
    signature = parse_signature(TABLE["classes"][name]["methods"][method])

    @wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, **bind(signature, f"{name}.{method}", module, *args, **kwargs))

    return call


def _start_of(module: types.ModuleType, num_blocks: int, step_seconds: float) -> Callable[..., None]:
    signature = parse_signature(TABLE["classes"]["Executor"]["init"])

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        values = bind(signature, "Executor", module, *args, **kwargs)
        engine = ToyEngine(module, values["executor_config"], num_blocks, step_seconds)
        object.__setattr__(self, "engine", engine)

    return start


class Sequence:
    """One request in the toy."""

    def __init__(self, request_id: int, request: Any) -> None:
        self.request_id = request_id
        self.request = request
        self.prompt: list[int] = list(request.input_token_ids)
        self.tokens = list(self.prompt)
        self.num_computed = 0
        self.num_reused_blocks = 0
        self.log_probs: list[float] = []

    @property
    def num_blocks(self) -> int:
        return -(-len(self.tokens) // TOKENS_PER_BLOCK)


class ToyEngine:
    """What the executor's thread does, an iteration at a time."""

    def __init__(self, api: types.ModuleType, config: Any, num_blocks: int, step_seconds: float) -> None:
        self.api = api
        self.config = config
        self.num_blocks = num_blocks
        self.step_seconds = step_seconds
        self.queue: list[Sequence] = []
        self.active: list[Sequence] = []
        self.cancelled: set[int] = set()
        self.cache: set[tuple[int | None, tuple[int, ...]]] = set()
        self.iterations: list[Any] = []
        self.ids = count(1)
        self.num_iterations = 0
        self.requests: list[Any] = []

    def enqueue(self, request: Any) -> int:
        if self.config.max_queue_size and len(self.queue) >= self.config.max_queue_size:
            size = self.config.max_queue_size
            raise RuntimeError(f"Maximum queue size of {size} has been reached, please try again later")
        self.requests.append(request)
        self.queue.append(Sequence(next(self.ids), request))
        return self.queue[-1].request_id

    def iterate(self) -> list[Any]:
        responses = self._fetch()
        responses += [self._cancel(sequence) for sequence in list(self.active) if sequence.request_id in self.cancelled]
        time.sleep(self.step_seconds)
        self._report()
        if any(sequence.prompt[-1] == POISON for sequence in self.active):
            message = "Encountered an error in forwardAsync function: CUDA error"
            broken, self.active = self.active, []
            return [self.api.Response.made(request_id=s.request_id, error_msg=message) for s in broken]
        budget = self.config.max_num_tokens
        for sequence in list(self.active):
            num_tokens = min(budget, len(sequence.tokens) - sequence.num_computed)
            budget -= num_tokens
            sequence.num_computed += num_tokens
            if num_tokens and sequence.num_computed == len(sequence.tokens):
                responses.append(self._generate(sequence))
        if not self.active:
            self._report()
        return responses

    def _fetch(self) -> list[Any]:
        refusals = []
        while self.queue and len(self.active) < self.config.max_batch_size:
            sequence = self.queue.pop(0)
            if sequence.prompt[-1] == REFUSED:
                message = "Encountered an error when fetching new request: no"
                refusals.append(self.api.Response.made(request_id=sequence.request_id, error_msg=message))
                continue
            if self.config.kv_cache_config.enable_block_reuse:
                sequence.num_reused_blocks = self._find(sequence)
                reused = sequence.num_reused_blocks * TOKENS_PER_BLOCK
                sequence.num_computed = min(reused, len(sequence.prompt) - 1)
            self.active.append(sequence)
        return refusals

    def _find(self, sequence: Sequence) -> int:
        """Blocks of the prompt, all but its last token, that are in the tree: whole ones, and a last one if equal."""
        salt, usable, num_found = sequence.request.cache_salt_id, sequence.prompt[:-1], 0
        for end in _block_ends(len(usable)):
            if (salt, tuple(usable[:end])) in self.cache:
                num_found += 1
            elif self.config.kv_cache_config.enable_partial_reuse:
                begin = tuple(usable[: num_found * TOKENS_PER_BLOCK + 1])
                return num_found + any(s == salt and tokens[: len(begin)] == begin for s, tokens in self.cache)
            else:
                break
        return num_found

    def _generate(self, sequence: Sequence) -> Any:
        request, reasons = sequence.request, self.api.FinishReason
        token_id = (sequence.tokens[-1] + 1) % VOCAB_SIZE
        reason = reasons.NOT_FINISHED
        new_tokens = [token_id]
        if token_id == request.end_id:
            reason, new_tokens = reasons.END_ID, []
        elif [token_id] in (request.stop_words or []):
            reason = reasons.STOP_WORDS
        elif len(sequence.tokens) + 1 == len(sequence.prompt) + request.max_tokens:
            reason = reasons.LENGTH
        sequence.tokens += new_tokens
        sequence.log_probs += [log_prob(token) for token in new_tokens]
        if reason is not reasons.NOT_FINISHED:
            self.active.remove(sequence)
            self._store(sequence)
        return self._response(sequence, new_tokens, reason)

    def _store(self, sequence: Sequence) -> None:
        stored = sequence.tokens[:-1]
        salt = sequence.request.cache_salt_id
        self.cache |= {(salt, tuple(stored[:end])) for end in _block_ends(len(stored))}

    def _cancel(self, sequence: Sequence) -> Any:
        self.cancelled.discard(sequence.request_id)
        self.active.remove(sequence)
        return self._response(sequence, [], self.api.FinishReason.CANCELLED)

    def _response(self, sequence: Sequence, token_ids: list[int], reason: Any) -> Any:
        output = sequence.request.output_config
        result = self.api.Result()
        result.is_final = result.is_sequence_final = reason is not self.api.FinishReason.NOT_FINISHED
        result.output_token_ids = [token_ids]
        result.finish_reasons = [reason]
        if output.return_log_probs:
            result.log_probs = [list(sequence.log_probs)]
        if output.return_context_logits:
            result.context_logits = context_logits(sequence.prompt)
        if output.return_perf_metrics:
            metrics, figures = self.api.RequestPerfMetrics(), self.api.KvCacheMetrics()
            figures.num_reused_blocks = sequence.num_reused_blocks
            metrics.kv_cache_metrics = figures
            result.request_perf_metrics = metrics
        return self.api.Response.made(request_id=sequence.request_id, error_msg=None, result=result)

    def _report(self) -> None:
        used = sum(sequence.num_blocks for sequence in self.active)
        kv = {"maxNumBlocks": self.num_blocks, "freeNumBlocks": self.num_blocks - used, "tokensPerBlock": 32}
        batch = {"numScheduledRequests": len(self.active), "numPausedRequests": 0}
        figures = {
            "iter": self.num_iterations,
            "numActiveRequests": len(self.active),
            "numQueuedRequests": len(self.queue),
            "kvCacheStats": filled("KvCacheStats", kv),
            "inflightBatchingStats": filled("InflightBatchingStats", batch),
            "staticBatchingStats": None,
            "specDecodingStats": None,
            "timestamp": "11-30-2026 00:00:00.000000",
        }
        self.num_iterations += 1
        report = self.api.IterationStats()
        object.__setattr__(report, "figures", filled("IterationStats", figures))
        self.iterations.append(report)


def context_logits(token_ids: list[int]) -> Any:
    """Logits `(tokens, padded vocabulary)` of a prompt: the next number is likely, padding likelier."""
    import torch  # the engine process of most tests needs none

    logits = torch.zeros(len(token_ids), VOCAB_SIZE + 4, dtype=torch.bfloat16)
    logits[:, VOCAB_SIZE:] = 100
    for row, token_id in enumerate(token_ids):
        logits[row, (token_id + 1) % VOCAB_SIZE] = 5
    return logits


def log_prob(token_id: int) -> float:
    """What the toy reports of a token."""
    return -(token_id % 8) / 8


def filled(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """JSON of the table's fields, 0 where nothing is known."""
    fields = TABLE["json"][name]
    assert set(figures) <= set(fields)
    return dict.fromkeys(fields, 0) | figures


def _block_ends(length: int) -> list[int]:
    return [*range(TOKENS_PER_BLOCK, length, TOKENS_PER_BLOCK), *([length] if length else [])]


def _await(self: Any, timeout: timedelta | None) -> list[Any]:
    engine = self.engine
    if not engine.active and not engine.queue:
        time.sleep(0 if timeout is None else timeout.total_seconds())
        return []
    return engine.iterate()


def _take_iterations(self: Any) -> list[Any]:
    taken, self.engine.iterations = self.engine.iterations, []
    return taken


_BEHAVIOURS: dict[str, dict[str, Callable[..., Any]]] = {
    "Executor": {
        "enqueue_request": lambda self, request: self.engine.enqueue(request),
        "cancel_request": lambda self, id: self.engine.cancelled.add(id),
        "await_responses": _await,
        "get_latest_iteration_stats": _take_iterations,
        "can_enqueue_requests": lambda self: True,
        "shutdown": lambda self: None,
    },
    "Response": {"has_error": lambda self: self._values.get("error_msg") is not None},
    "IterationStats": {"to_json_str": lambda self: json.dumps(self.figures)},
}
