"""From weights to the proof that this project's TensorRT-LLM engines work, on a machine with the GPU.

Calibration and TensorRT-LLM cannot be installed together: they want releases of transformers that exclude each other.
Either keep an environment that calibrates beside the one with TensorRT-LLM, as scripts/gpu-acceptance does; or make the
checkpoints on another machine, by a dry run with the same flags, and copy its report folder here: what lies in it is
found. The checkpoint of a model may also be given as --checkpoint: a quantized one (engines/MODEL/quantized-ID), or a
TensorRT-LLM one (trtllm-ID), for which there are no answers of a CPU engine to compare with.

Exit code 0: every step passed, or was skipped or tolerated with a reason. 1: a step failed.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from plan import Wishes, plan
from report import machine, mixed_verdict, write_report
from servers import Servers
from steps import Result, run_steps

_DRY_ARCH = "sm_90"


def main() -> int:
    """Run all steps and write the report."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    folder: Path = given.out.resolve()
    wishes = _wishes(given, folder / "work")
    wishes.work.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "flags": shlex.join(sys.argv[1:]), "dry_run": given.dry_run, "arch": wishes.arch}
    with Servers(folder, ready_s=given.load_timeout) as servers:
        steps = plan(wishes, servers)

        def keep(results: list[Result]) -> None:
            write_report(folder, results, about, is_whole=len(results) == len(steps))

        results = run_steps(steps, folder, has_gpu=not given.dry_run, on_result=keep)
    print(f"int4 and int8 in one engine: {mixed_verdict(results)}", file=sys.stderr)
    print(folder / "report.md")
    return int(any(result.fails_the_run for result in results))


def _wishes(given: argparse.Namespace, work: Path) -> Wishes:
    calib = ["--calib", str(given.calib.resolve())] if given.calib else []
    calib += [
        word
        for name in ("calib_samples", "calib_tokens")
        if (value := getattr(given, name)) is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    local = given.model is not None and Path(given.model).exists()
    return Wishes(
        arch=given.arch or (_DRY_ARCH if given.dry_run else "native"),
        work=work,
        dry_run=given.dry_run,
        model=str(Path(given.model).resolve()) if local else given.model,
        checkpoint=given.checkpoint.resolve() if given.checkpoint else None,
        recipe=given.recipe.resolve() if given.recipe else None,
        bits=given.bits,
        tp=given.tp,
        calib_flags=tuple(calib),
        calib_bin=given.calib_bin.resolve() if given.calib_bin else None,
        rounds=given.rounds,
        timeout_s=given.build_timeout,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="folder, GGUF file or hub id; default: the small model of the tests alone")
    model.add_argument("--checkpoint", type=Path, help="a checkpoint of the model made elsewhere, instead of --model")
    parser.add_argument("--calib", type=Path, help="traffic to calibrate on; default: a bundled set")
    parser.add_argument("--calib-samples", type=int, help="samples to calibrate on")
    parser.add_argument("--calib-tokens", type=int, help="tokens of each sample at most")
    parser.add_argument("--bits", default="4.5", help="bits per weight of --model, mixed of int4 and int8 (4.5)")
    parser.add_argument("--recipe", type=Path, help="precision per layer of --model, instead of --bits")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer of the model (1)")
    parser.add_argument("--arch", help="default: native, and sm_90 in a dry run")
    parser.add_argument("--out", type=Path, default=Path("gpu-acceptance"), help="report folder (./gpu-acceptance)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the comparison with trtllm-serve (5)")
    parser.add_argument("--calib-bin", type=Path, help="folder with the harness-build that can calibrate")
    parser.add_argument("--build-timeout", type=float, default=3 * 3600, help="seconds of one build at most (10800)")
    parser.add_argument("--load-timeout", type=float, default=900, help="seconds until a server is ready (900)")
    parser.add_argument("--dry-run", action="store_true", help="do what needs no GPU, list the rest with its commands")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
