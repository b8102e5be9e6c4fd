"""One tree of errors. Each says what is wrong and what to do next; the CLI prints both and exits 1."""

from __future__ import annotations


class HarnessError(Exception):
    """Base of every error a user may see.

    Args:
        message: what is wrong, with the value seen.
        hint: what to do next; empty only where the message already says it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.hint}" if self.hint else self.message


class UsageError(HarnessError):
    """The command line asks for something that contradicts itself or is not offered. Exit code 2."""


class SourceError(HarnessError):
    """The model source (folder, hub id, GGUF file) is missing, truncated, stale or contradicts itself."""


class UnsupportedModelError(HarnessError):
    """The source is readable but names an architecture or option this project does not lower."""


class RecipeError(HarnessError):
    """A quantization recipe cannot be read or does not fit the model."""


class TokenizerError(HarnessError):
    """A tokenizer or chat template is missing or fails its checks."""


class CalibrationError(HarnessError):
    """A calibration set, or a quantizer's result on it, is refused."""


class SuiteError(HarnessError):
    """A quality suite, or a file it names, is missing or not valid."""


class QualityError(HarnessError):
    """A quality measurement cannot be made: the two engines do not compare, or too little text is left."""


class BuildError(HarnessError):
    """Lowering or writing an engine failed; nothing half-made is left behind."""


class EngineError(HarnessError):
    """An engine folder is not usable: missing, corrupt, or built for something else."""


class DeviceError(HarnessError):
    """A GPU, or its driver, is not usable: it does not answer, or is of another arch than what is built or run."""


class NoDeviceError(DeviceError):
    """There is no GPU: no driver, no device, or none that is visible."""


class CapacityError(HarnessError):
    """The memory asked for does not fit, or a prompt can never fit."""


class RequestError(HarnessError):
    """One request is invalid. The server answers 400 and goes on.

    Args:
        param: the request field at fault, as in OpenAI's error object.
        code: a short machine-readable reason, as in OpenAI's error object.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OverloadedError(HarnessError):
    """The queue is full. The server answers 429 with Retry-After."""


class InvalidLogitsError(HarnessError):
    """The model computed something that is not a number, so one request has no answer. The engine goes on."""


class EngineDeadError(HarnessError):
    """The engine process died. Its requests are answered with this; a new process is being started."""
