"""What every engine refuses of a request before it is queued."""

from __future__ import annotations

from harness.errors import RequestError
from harness.runtime.request import DEFAULT_PRIORITY, Request


def check_request(request: Request, *, max_model_len: int, vocab_size: int, has_priorities: bool) -> None:
    """Refuse a prompt that leaves no room for an answer, and tokens that the model does not have.

    Args:
        max_model_len: longest prompt and answer together, in tokens.
        vocab_size: token ids are below it.
        has_priorities: whether the engine's queue heeds them.

    Raises:
        RequestError: names the field.
    """
    if request.priority != DEFAULT_PRIORITY and not has_priorities:
        raise RequestError(
            "this engine takes requests in turn, whatever their priority", param="priority", code="unsupported_value"
        )
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt", code="empty_prompt")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; prompt and answer together may have {max_model_len}",
            param="prompt",
            code="context_length_exceeded",
        )
    for param, token_ids in (("prompt", prompt), ("stop_token_ids", request.sampling.stop_token_ids)):
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if unknown is not None:
            raise RequestError(
                f"token id {unknown} is not in the vocabulary; allowed: 0 to {vocab_size - 1}",
                param=param,
                code="invalid_token_id",
            )
