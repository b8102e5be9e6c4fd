"""The console script `harness-run`: an engine in, answers out, over HTTP or in the terminal."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from harness.console import VersionOption, run_cli
from harness.errors import EngineError, UsageError

if TYPE_CHECKING:  # the real imports wait until a command runs, so that --help is quick
    from harness.manifest import EngineManifest
    from harness.runtime.config import EngineConfig, ResolvedConfig, SchedulingPolicy

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback()
def run(version: VersionOption = False) -> None:
    """Run an engine that `harness-build` made: serve it over HTTP, or talk to it here."""


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_LOG_LEVELS = ("debug", "info", "warning", "error")


def parse_size(text: str) -> int:
    """Bytes of a size such as `2GiB`, `512MB`, `1.5G` or `1048576`.

    Raises:
        UsageError: it is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if match is None:
        raise UsageError(f"{text!r} is not a size", "write it as 2GiB, 512MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def find_engine(engine: Path | None, engines_dir: Path) -> Path:
    """The engine given, or the only one under `engines_dir`.

    Raises:
        UsageError: there is none, or more than one; lists them.
    """
    if engine is not None:
        return engine
    found = sorted(path.parent for path in engines_dir.glob("*/*/manifest.json"))
    if not found:
        raise UsageError(
            f"no engine under ./{engines_dir}", "build one with: harness-build --model MODEL, or give --engine DIR"
        )
    if len(found) > 1:
        listed = "".join(f"\n       --engine {path}" for path in found)
        raise UsageError(f"{len(found)} engines under ./{engines_dir}", f"choose one:{listed}")
    return found[0]


EngineOption = Annotated[
    Path | None, typer.Option("--engine", help="Folder of an engine. Default: the only one under ./engines.")
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and answer together, in tokens. Less needs less KV memory for each sequence. Default: "
        "what the engine was built for."
    ),
]
KvCacheOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-memory",
        help="Memory for the KV cache, such as 2GiB (2^30 bytes) or 512MB (10^6). More means more sequences at once "
        "and longer reuse of prefixes; it is taken as it is used. Default: what the sequences that may run together "
        "need at full length, at most half of the memory left beside the weights and a reserve of 12 %. On GPUs it is "
        "memory of each, taken at once; default: what --gpu-memory-fraction allows.",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads", help="Threads of an engine on the CPU. Default: one for each physical core that it may use."
    ),
]
DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Compute in f32 with an f32 KV cache: the same prompt gives the same tokens whatever else is running. "
        "Slower, and about 3.5 times the KV memory. On the CPU only.",
    ),
]


@app.command()
def server(
    engine: EngineOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    max_model_len: MaxModelLenOption = None,
    kv_cache_memory: KvCacheOption = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Most sequences computed together; others wait. Default: 32, on a GPU what the engine was built for."
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens in one step; longer prompts are computed in chunks of it. Less keeps running streams "
            "smoother while a long prompt comes in, more finishes the prompt sooner. At least --max-num-seqs + 32. "
            "Default: 512, on a GPU what the engine was built for."
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Most requests in the queue; further ones are answered with 429.")
    ] = 256,
    threads: ThreadsOption = None,
    deterministic: DeterministicOption = False,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt in full, even what was computed before.")
    ] = False,
    gpu_memory_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share of the GPU memory that the loaded engine leaves free, for its KV cache. Default: 0.9."
        ),
    ] = None,
    host_cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the host, such as 32GiB, where KV blocks of earlier prompts are kept when the GPUs have no "
            "room for them. Default: none."
        ),
    ] = None,
    scheduling_policy: Annotated[
        str | None,
        typer.Option(
            help="On a GPU: guaranteed-no-evict starts a request when there is room to complete it, max-utilization as "
            "soon as it fits, and may have to pause it and compute it again. Default: guaranteed-no-evict."
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs",
            help="On a GPU: record steps that only decode, and replay them. Takes some memory. Default: recorded.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that requests must give as model. Default: the name in the engine.")
    ] = None,
    allow_failed_quality: Annotated[
        bool,
        typer.Option(
            "--allow-failed-quality", help="Serve an engine whose quality report failed a gate, all the same."
        ),
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug (a line for each decision), info, warning or error.")] = "info",
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get to finish after Ctrl-C or SIGTERM.")
    ] = 30.0,
) -> None:
    """Serve an engine over HTTP, in the form of OpenAI's API.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models; /health (alive), /ready (503 until the engine is
    loaded), /metrics (Prometheus), /cache/stats.

    Ctrl-C drains: new requests are refused, running ones finish. Ctrl-C again stops at once.
    """
    import asyncio

    from harness.runtime.config import EngineConfig
    from harness.runtime.process_backend import ProcessBackend
    from harness.runtime.server.serve import listen, serve
    from harness.runtime.server.service import CompletionService
    from harness.tokenizer import Tokenizer

    _set_up_logging(log_level)
    if math.isnan(drain_timeout):
        raise UsageError("--drain-timeout is nan", "allowed: 0 or more seconds")
    config = EngineConfig(
        engine_dir=find_engine(engine, Path("engines")),
        deterministic=deterministic,
        kv_cache_bytes=None if kv_cache_memory is None else parse_size(kv_cache_memory),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=threads,
        max_waiting=max_waiting,
        prefix_cache=not no_prefix_cache,
        gpu_memory_fraction=gpu_memory_fraction,
        host_cache_bytes=None if host_cache_memory is None else parse_size(host_cache_memory),
        scheduling_policy=cast("SchedulingPolicy | None", scheduling_policy),  # checked there
        cuda_graphs=cuda_graphs,
    )
    manifest, resolved = _resolve(config)
    check_quality(config.engine_dir, manifest, allow_failed=allow_failed_quality)
    model = served_model_name or manifest.model.name
    tokenizer = Tokenizer.from_dir(config.engine_dir)
    with listen(host, port) as sock:
        backend = ProcessBackend(resolved, log_level=log_level.upper())
        limits = resolved.scheduler
        service = CompletionService(
            backend,
            tokenizer,
            model=model,
            max_model_len=limits.max_model_len,
            max_active=limits.max_num_seqs + limits.max_waiting,
            max_prompts=limits.max_waiting,
        )
        bound_port = sock.getsockname()[1]
        typer.echo(
            f"http://{host}:{bound_port} serves {model!r}: context {resolved.max_model_len} tokens, "
            f"{resolved.describe()}; loading the engine ...",
            err=True,
        )
        asyncio.run(serve(sock, backend, service, drain_timeout_s=drain_timeout))


@app.command()
def chat(
    engine: EngineOption = None,
    prompt: Annotated[
        str | None, typer.Option(help="Ask this one question, print the answer and leave.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of the conversation.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 1024,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="0 always takes the likeliest token; more is more varied.")
    ] = 0.6,
    max_model_len: MaxModelLenOption = None,
    kv_cache_memory: KvCacheOption = None,
    threads: ThreadsOption = None,
    deterministic: DeterministicOption = False,
) -> None:
    """Talk to an engine in the terminal.

    The answer streams as it is made; after it come the time to the first token, the speed, and how much of the prompt
    was found in the prefix cache. `/reset` forgets the conversation, `/exit` leaves, Ctrl-C stops an answer.
    """
    import asyncio

    from harness.runtime.chat import Chat, converse, run_interruptible
    from harness.runtime.config import EngineConfig
    from harness.runtime.process_backend import ProcessBackend
    from harness.runtime.request import SamplingParams
    from harness.tokenizer import Tokenizer

    _set_up_logging("warning")
    try:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    except ValueError as error:
        raise UsageError(str(error)) from None
    config = EngineConfig(
        engine_dir=find_engine(engine, Path("engines")),
        deterministic=deterministic,
        kv_cache_bytes=None if kv_cache_memory is None else parse_size(kv_cache_memory),
        max_model_len=max_model_len,
        max_num_seqs=1,
        num_threads=threads,
    )
    manifest, resolved = _resolve(config)
    check_quality(config.engine_dir, manifest, allow_failed=True)
    backend = ProcessBackend(resolved)
    conversation = Chat(
        backend,
        Tokenizer.from_dir(config.engine_dir),
        max_model_len=resolved.max_model_len,
        system=system,
        sampling=sampling,
    )
    typer.echo("loading the engine ...", err=True)
    loop = asyncio.new_event_loop()
    try:
        run_interruptible(backend.start(), loop)
        if prompt is None:
            converse(conversation, loop)
        else:
            run_interruptible(conversation.ask(prompt), loop)
    finally:
        loop.run_until_complete(backend.stop())
        loop.close()


def _resolve(config: EngineConfig) -> tuple[EngineManifest, ResolvedConfig]:
    from harness.machine import available_memory_bytes, num_usable_cores
    from harness.manifest import read_manifest
    from harness.nvml import devices

    manifest = read_manifest(config.engine_dir)
    if manifest.gpu is None:
        available = available_memory_bytes()
    else:
        available = min(device.free_bytes for device in devices()[: manifest.gpu.num_ranks])
    return manifest, config.resolve(manifest, available_bytes=available, num_cores=num_usable_cores())


def check_quality(engine_dir: Path, manifest: EngineManifest, *, allow_failed: bool) -> None:
    """Warn of an engine that was not measured, and refuse one that failed.

    Raises:
        EngineError: it failed a gate, and that is not allowed.
    """
    verdict = manifest.quality.verdict
    if verdict == "not_run":
        again = f"harness-build quality --engine {engine_dir} --baseline MODEL"
        typer.echo(f"warning: no quality report says whether this engine may ship; make one with: {again}", err=True)
    elif verdict == "fail" and not allow_failed:
        report = engine_dir / (manifest.quality.report or "")
        raise EngineError(
            f"engine {manifest.engine_id} failed its quality report: see {report}",
            "build it with a higher precision, or serve it all the same with --allow-failed-quality",
        )
    elif verdict == "fail":
        typer.echo("warning: the quality report of this engine failed a gate", err=True)


def _set_up_logging(level: str) -> None:
    import logging

    if level not in _LOG_LEVELS:
        raise UsageError(f"--log-level is {level!r}", f"allowed: {', '.join(_LOG_LEVELS)}")
    # libraries speak from warnings on, whatever the level
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("harness").setLevel(level.upper())


def main() -> None:
    """Entry point of the console script."""
    run_cli(app)
