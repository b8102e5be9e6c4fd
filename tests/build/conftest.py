"""Fixtures that build small models and run them in deterministic mode, and one that runs `harness-build`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from cli_process import Done, without_report

from harness.build.cli import main
from harness.build.cpu_engine import build_cpu_engine
from harness.build.hf_source import HfFolderSource
from harness.manifest import read_manifest
from harness.recipe import preset
from harness.runtime.executor import TOKENS_PER_BLOCK, ScheduledSequence, SchedulerOutput
from harness.runtime.openvino_executor import OpenVinoExecutor

Logits = npt.NDArray[np.float32]


@pytest.fixture
def engine_logits(tmp_path: Path) -> Callable[..., Logits]:
    """Builds a folder for `cpu` and returns its logits of all positions, deterministic mode, computed in chunks."""

    def run(
        folder: Path, token_ids: list[int], *, precision: str = "f16", chunk: int = 128, name: str = "engine"
    ) -> Logits:
        source = HfFolderSource(folder)
        out = tmp_path / name
        build_cpu_engine(source, preset(precision, source.spec), engines_dir=tmp_path, out=out)
        executor = OpenVinoExecutor(out, read_manifest(out), deterministic=True, kv_cache_bytes=16 << 20, num_threads=2)
        num_blocks = -(-len(token_ids) // TOKENS_PER_BLOCK)
        table = list(np.random.default_rng(1).permutation(num_blocks + 2)[:num_blocks])
        rows = []
        for start in range(0, len(token_ids), chunk):
            tokens = token_ids[start : start + chunk]
            sequence = ScheduledSequence(
                request_id="r",
                token_ids=tokens,
                num_computed_tokens=start,
                block_table=[int(b) for b in table[: -(-(start + len(tokens)) // TOKENS_PER_BLOCK)]],
                logit_positions=list(range(len(tokens))),
            )
            rows.append(executor.execute(SchedulerOutput(sequences=[sequence])).logits.copy())
        return np.concatenate(rows)

    return run


@pytest.fixture
def build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Done]]:
    """Runs `harness-build` with arguments, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    on_term = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["harness-build", *without_report(arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        seen = capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(code=code or 0, out=seen.out, err=seen.err)

    yield run
    signal.signal(signal.SIGTERM, on_term)
