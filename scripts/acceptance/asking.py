"""Steps that ask an engine which a server has loaded. What is asked and must come back is `checks` and `load`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import checks
import load
import numpy as np
from servers import Server, ServerCommand, Servers
from steps import FOUND, Findings, Step, StepFailed
from tools import Variant, serve, trtllm_serve, trtllm_serve_folder, write_tokenizer

from harness.manifest import read_manifest

CONCURRENCIES = (1, 8, 32)
TRTLLM_READY = "/health"  # trtllm-serve listens once its engine is loaded
_SHARED = "0.4"  # of the free GPU memory for KV, where two servers share a GPU
_SERVING = (checks.in_flight_batching, checks.prefix_reuse, checks.streaming, checks.cancellation)


class Asking:
    """Makes such steps. The servers stay up from one to the next, as long as the engine is the same.

    Args:
        rounds: of the comparison with `trtllm-serve`.
    """

    def __init__(self, servers: Servers, *, rounds: int) -> None:
        self._servers = servers
        self._rounds = rounds

    def cpu_answers(self, variant: Variant) -> Step:
        """What the CPU engine says, kept for `answers`."""

        def made() -> bool:
            return variant.cpu_answers.is_file()

        def ask(server: Server) -> Findings:
            found = checks.answers(server, checks.texts())
            variant.cpu_answers.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            return {"prompts": len(found), "an_answer": found[0][1]}

        what = "the CPU engine answers"
        name, needs = f"{variant.name}-cpu-answers", (f"{variant.name}-cpu-engine",)
        return self._asked(name, what, variant.cpu_engine, ask, needs=needs, gpu=False, made=made)

    def rehearsal(self, variant: Variant) -> Step:
        """The checks of serving where there is no GPU."""

        def ask(server: Server) -> Findings:
            speed = load.measure(server, np.random.default_rng(0), concurrency=4, num_tokens=32)
            # a CPU computes for this client too, so that its times say nothing
            found = {"in_flight_batching": checks.in_flight_batching(server, most_time=math.inf)}
            found |= {check.__name__: check(server) for check in _SERVING if check is not checks.in_flight_batching}
            return {**found, "speed": asdict(speed)}

        what = "the checks themselves, tried out on the CPU engine"
        needs = (f"{variant.name}-cpu-engine",)
        return self._asked("rehearsal", what, variant.cpu_engine, ask, needs=needs, gpu=False)

    def answers(self, variant: Variant, of: Variant | None = None) -> Step:
        """Greedy answers beside the CPU engine of the same integers. `of`: whose that is; the variant's own if None."""
        same = of or variant

        def ask(server: Server) -> Findings:
            seen = checks.answers(server, checks.texts())
            if same.given:
                return checks.compare_answers(seen, seen)
            return checks.compare_answers(seen, json.loads(same.cpu_answers.read_text("utf-8")))

        needs = (f"{variant.name}-engine", *(() if same.given else (f"{same.name}-cpu-answers",)))
        what = "the engine loads and answers like the CPU engine" if not same.given else "the engine loads and answers"
        return self._asked(f"{variant.name}-answers", what, variant.engine, ask, needs=needs)

    def no_reuse(self, variant: Variant) -> Step:
        """That an engine without reuse reuses nothing."""

        def ask(server: Server) -> Findings:
            if read_manifest(variant.engine).gpu.prefix_reuse:  # type: ignore[union-attr]
                raise StepFailed("its manifest says that it reuses prefixes")
            return checks.prefix_reuse(server, expected=False)

        what = "an int8 KV cache has no reuse of prefixes, and says so"
        return self._asked(f"{variant.name}-no-reuse", what, variant.engine, ask, needs=(f"{variant.name}-engine",))

    def lookahead_is_greedy(self, variant: Variant, plain: Variant) -> Step:
        """That drafting changes no answer."""

        def run(log: TextIO) -> Findings:
            prompts = checks.texts()
            expected = checks.answers(self._servers.only(f"{plain.name}-engine", serve(plain.engine)), prompts, 32)
            seen = checks.answers(self._servers.only(f"{variant.name}-engine", serve(variant.engine)), prompts, 32)
            return checks.compare_answers(seen, expected)

        return Step(
            name="lookahead-is-greedy",
            what="lookahead decoding gives the plain engine's greedy answers",
            command=lambda: shlex.join(serve(variant.engine)(8000)),
            run=run,
            needs=(f"{variant.name}-engine", f"{plain.name}-engine"),
            gpu=True,
        )

    def pytorch_answers(self, variant: Variant) -> Step:
        """The folder for the PyTorch backend, served by TensorRT-LLM itself."""
        folder = variant.folder / "pytorch"

        def ask(server: Server) -> Findings:
            return checks.compare_answers(
                checks.answers(server, checks.texts()), json.loads(variant.cpu_answers.read_text("utf-8"))
            )

        what = "TensorRT-LLM's PyTorch backend loads its folder and answers like the CPU engine"
        needs = ("pytorch-folder", f"{variant.name}-cpu-answers")
        command = trtllm_serve_folder(folder)
        return self._asked("pytorch-answers", what, folder, ask, needs=needs, command=command, ready_path=TRTLLM_READY)

    def serving(self, variant: Variant) -> list[Step]:
        """All that a client can see of how requests are run."""
        needs = (f"{variant.name}-engine",)
        return [
            self._asked(check.__name__.replace("_", "-"), _first_line(check), variant.engine, check, needs=needs)
            for check in (*_SERVING, checks.gpu_memory)
        ]

    def speed(self, variant: Variant) -> Step:
        """Beside `trtllm-serve`, both at once on the same GPUs."""
        ours = serve(variant.engine, "--gpu-memory-fraction", _SHARED)

        def run(log: TextIO) -> Findings:
            tokenizer = write_tokenizer(variant.engine, variant.folder / "tokenizer")
            first = self._servers.only("harness-run", ours)
            command = trtllm_serve(variant.engine, tokenizer, memory_fraction=float(_SHARED))
            second = self._servers.beside("trtllm-serve", command, TRTLLM_READY)
            return load.compare(first, second, concurrencies=CONCURRENCIES, rounds=self._rounds)

        return Step(
            name="speed",
            what="tokens a second, time to the first token and of later ones, beside trtllm-serve on the same engine",
            command=lambda: shlex.join(ours(8000)),
            run=run,
            needs=(f"{variant.name}-engine",),
            gpu=True,
        )

    def _asked(
        self,
        name: str,
        what: str,
        engine: Path,
        ask: Callable[[Server], Findings],
        *,
        needs: tuple[str, ...],
        gpu: bool = True,
        command: ServerCommand | None = None,
        ready_path: str = "/ready",
        made: Callable[[], bool] = lambda: False,
    ) -> Step:
        served = command or serve(engine)

        def run(log: TextIO) -> Findings:
            if made():
                return FOUND
            server = self._servers.only(f"{engine.parent.name}-{engine.name}", served, ready_path)
            log.write(f"asked {server.url}, whose log is {server.log}\n")
            return ask(server)

        shown = lambda: shlex.join(served(8000))  # noqa: E731
        return Step(name=name, what=what, command=shown, run=run, needs=needs, gpu=gpu)


def _first_line(check: Callable[..., Findings]) -> str:
    return (check.__doc__ or "").partition("\n")[0].rstrip(".")
