"""Logits of text from an engine for a GPU: the inner seam over TensorRT-LLM's executor, for a quality report.

The executor keeps its KV cache to itself and gives logits of whole prompts alone (`return_context_logits`, of engines
built with them). So each step hands it every sequence from its first token on, and keeps the rows that were wanted:
slower than serving, and the same kernels that serve prompts. The blocks that a step names are not looked at.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np

from harness.errors import EngineError
from harness.manifest import EngineManifest
from harness.runtime.config import ResolvedConfig
from harness.runtime.executor import TOKENS_PER_BLOCK, ScheduledSequence, SchedulerOutput, StepOutput
from harness.runtime.tensorrt_llm.load import make_executor

_NO_END_ID = -1
_PATIENCE = timedelta(minutes=5)


def load_context_logits(config: ResolvedConfig, manifest: EngineManifest) -> ContextLogits:
    """Load a checked engine for its logits.

    Raises:
        EngineError: TensorRT-LLM cannot load it.
    """
    from tensorrt_llm.bindings import executor as api

    assert config.gpu is not None
    assert manifest.gpu is not None
    return ContextLogits(
        api,
        make_executor(api, config, manifest.gpu, config.gpu),
        vocab_size=manifest.model.vocab_size,
        num_blocks=config.kv_cache_bytes // (manifest.kv.bytes_per_token["fast"] * TOKENS_PER_BLOCK),
    )


class ContextLogits:
    """An `Executor` of an engine that was built with the logits of prompts.

    Args:
        api: the module `tensorrt_llm.bindings.executor`.
        executor: loaded, with block reuse off: reused tokens have no logits.
        vocab_size: of the model; the engine may have padded it.
        num_blocks: what it was given memory for; nothing here counts blocks.
    """

    def __init__(self, api: Any, executor: Any, *, vocab_size: int, num_blocks: int) -> None:
        self._api = api
        self._executor = executor
        self._vocab_size = vocab_size
        self._num_blocks = num_blocks
        self._tokens: dict[str, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """See `Executor`."""
        return self._num_blocks

    @property
    def vocab_size(self) -> int:
        """See `Executor`."""
        return self._vocab_size

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        """See `Executor`; all sequences of a step are in flight together.

        Raises:
            EngineError: a sequence goes on from tokens that were never computed, or the executor failed.
        """
        asked = {self._executor.enqueue_request(self._request(each)): each for each in scheduled.sequences}
        rows: dict[int, Any] = {}
        while len(rows) < len(asked):
            responses = self._executor.await_responses(timeout=_PATIENCE)
            if not responses:
                raise EngineError(f"the engine gave no logits in {_PATIENCE}", "its log may say why")
            for response in responses:
                if response.has_error():
                    raise EngineError(f"TensorRT-LLM's executor failed: {response.error_msg}", "its log says more")
                if response.result.is_final:
                    rows[response.request_id] = self._rows(response.result, asked[response.request_id])
        return StepOutput(logits=np.concatenate([rows[request_id] for request_id in asked]))

    def close(self) -> None:
        """Free the GPU's memory."""
        self._executor.shutdown()

    def _request(self, sequence: ScheduledSequence) -> Any:
        known = self._tokens.get(sequence.request_id, [])[: sequence.num_computed_tokens]
        if len(known) != sequence.num_computed_tokens:
            raise EngineError(f"{sequence.request_id} goes on from {sequence.num_computed_tokens} tokens, not computed")
        self._tokens[sequence.request_id] = tokens = [*known, *sequence.token_ids]
        output = self._api.OutputConfig(return_context_logits=True, exclude_input_from_output=True)
        greedy = self._api.SamplingConfig(top_k=1)
        return self._api.Request(tokens, 1, sampling_config=greedy, output_config=output, end_id=_NO_END_ID)

    def _rows(self, result: Any, sequence: ScheduledSequence) -> Any:
        if result.context_logits is None:
            raise EngineError("the engine gives no logits of prompts", "build it with --context-logits")
        wanted = [sequence.num_computed_tokens + position for position in sequence.logit_positions]
        # a torch tensor, (prompt, padded vocabulary)
        return result.context_logits[wanted, : self._vocab_size].float().cpu().numpy()
