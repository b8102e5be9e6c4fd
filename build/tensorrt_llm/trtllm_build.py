"""Runs `trtllm-build`: the command line with every limit explicit, its log, and what the log says was given up.

The builder goes on without a kernel or a feature that it cannot have, with a warning in its log: here such lines are
found and reported. Flags and messages are those of TensorRT-LLM 1.2.1 (`tensorrt_llm/commands/build.py`, `builder.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.build.tensorrt_llm.limits import EngineLimits
from harness.errors import BuildError, UsageError
from harness.ledger import TOKENS_PER_BLOCK

COMMAND = "trtllm-build"
LOG_NAME = "build.log"
_FALLBACK = re.compile(r"fall(?:ing|s)? ?back|is disabled because|are disabled|Overriding \w+ to|not supported", re.I)
_HARMLESS = re.compile(r"Overriding paged_state to|Overriding reduce_fusion|Overriding user_buffer", re.I)
_LAST_LINES = 12
_PATIENCE_S = 10
_MOST_FALLBACKS = 40


@dataclass(frozen=True, kw_only=True)
class Lookahead:
    """Lookahead decoding (arXiv 2402.02057): sizes of window, n-gram and verification set."""

    window: int
    ngram: int
    verification: int

    @classmethod
    def parse(cls, text: str) -> Lookahead:
        """Read `W,N,G`, such as `7,7,7`.

        Raises:
            UsageError: not three numbers that TensorRT-LLM can run: W from 1, N from 2, G from 0, each up to 64.
        """
        found = re.fullmatch(r"(\d{1,2}),(\d{1,2}),(\d{1,2})", text)
        sizes = [int(size) for size in found.groups()] if found else []
        if not sizes or not all(least <= size <= 64 for least, size in zip((1, 2, 0), sizes, strict=True)):
            raise UsageError(
                f"--lookahead {text!r} is not W,N,G", "W from 1, N from 2, G from 0, up to 64; 7,7,7 is a good start"
            )
        return cls(window=sizes[0], ngram=sizes[1], verification=sizes[2])

    @property
    def num_draft_tokens(self) -> int:
        """Most tokens drafted in a step, as TensorRT-LLM counts them for `--max_draft_len`."""
        guesses = (self.window - 1 + self.verification) * (self.ngram - 1)
        return guesses + self.ngram - 2

    def __str__(self) -> str:
        return f"{self.window},{self.ngram},{self.verification}"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine can do besides; each costs something.

    Args:
        paged_context: attention over paged KV in prefill, which block reuse and chunked context need.
        context_logits: logits of prompts, which a quality report needs and serving does not.
    """

    paged_context: bool = True
    lookahead: Lookahead | None = None
    context_logits: bool = False

    def __post_init__(self) -> None:
        if self.lookahead and self.context_logits:
            raise UsageError(
                "--lookahead and --context-logits exclude each other",
                "TensorRT-LLM gathers no logits of prompts while it drafts; build one engine to measure, one to serve",
            )


def build_flags(limits: EngineLimits, options: EngineOptions) -> list[str]:
    """Arguments of `trtllm-build` that decide what is built; all but the folders."""
    flags = {
        "max_batch_size": limits.max_batch_size,
        "max_num_tokens": limits.max_num_tokens,
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "max_beam_width": 1,
        "kv_cache_type": "paged",
        "tokens_per_block": TOKENS_PER_BLOCK,
        "remove_input_padding": "enable",
        "context_fmha": "enable",
        "use_paged_context_fmha": "enable" if options.paged_context else "disable",
        "gpt_attention_plugin": "auto",
        "gemm_plugin": "auto",
        "multiple_profiles": "enable",  # more kernels to choose from, for a longer build
    }
    if options.lookahead:
        flags |= {
            "speculative_decoding_mode": "lookahead_decoding",
            "max_draft_len": options.lookahead.num_draft_tokens,
        }
    written = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return [*written, *(["--gather_context_logits"] if options.context_logits else [])]


def build_command(checkpoint: Path, output: Path, flags: Sequence[str], *, num_workers: int) -> list[str]:
    """The whole command line."""
    folders = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(output), "--workers", str(num_workers)]
    return [COMMAND, *folders, "--log_level", "info", *flags]


def run_trtllm_build(command: Sequence[str], log: Path, on_line: Callable[[str], None]) -> list[str]:
    """Run the builder, keep its log, and return the lines that tell of something given up.

    Raises:
        BuildError: it is not installed, or it failed; the message has its last lines.
    """
    program = shutil.which(command[0])
    if program is None:
        raise BuildError(f"{command[0]} is not on PATH", "install TensorRT-LLM, see harness-build doctor --arch native")
    last: deque[str] = deque(maxlen=_LAST_LINES)
    given_up: dict[str, None] = {}
    with (
        log.open("w", encoding="utf-8", errors="replace") as file,
        subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                last.append(line.rstrip())
                on_line(line.rstrip())
                if is_fallback(line) and len(given_up) < _MOST_FALLBACKS:
                    given_up[line.strip()] = None
        except BaseException:  # interrupted: the builder and its workers must not go on alone
            _end(process)
            raise
    if process.returncode:
        raise _failure(command[0], process.returncode, last)
    return list(given_up)


def is_fallback(line: str) -> bool:
    """Whether a line of the log says that the engine lacks a kernel or a feature."""
    return _FALLBACK.search(line) is not None and _HARMLESS.search(line) is None


def _end(process: subprocess.Popen[str]) -> None:
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
    finally:  # workers may outlive it, and would keep the GPU's memory
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(program: str, code: int, last: Sequence[str]) -> BuildError:
    if code in (-9, 137):
        why = f"{program} was killed, most likely for want of host memory"
        return BuildError(why, "close other programs, or build on a machine with more memory")
    said = "\n       ".join(last)
    return BuildError(
        f"{program} ended with exit code {code}:\n       {said}", "see harness-build doctor, and the lines above"
    )
