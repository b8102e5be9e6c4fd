"""The Hugging Face hub: fetching a model's folder by its id, into the hub's own cache.

Only safetensors, JSON and templates are fetched: no pickles, no code. Downloads resume, and HF_ENDPOINT (a mirror),
HF_HUB_OFFLINE, HF_TOKEN and HF_HOME mean what they mean to the `huggingface_hub` library.
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import SourceError

_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights


def fetch_from_hub(model_id: str) -> Path:
    """The folder of a model's newest revision, downloaded where it is not in the cache yet.

    Raises:
        SourceError: no such model, no access to it, no network, or no room; says which and what to do.
    """
    # half a second of imports that folders and GGUF files do not need
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError:
        raise SourceError(
            f"{model_id} on {constants.ENDPOINT} is gated", "accept its licence there, then set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise SourceError(
            f"no folder {model_id} here, and no model of that id on {constants.ENDPOINT}",
            "check the spelling; a private model needs HF_TOKEN",
        ) from None
    except HFValidationError as error:
        raise SourceError(f"{model_id!r} is not a hub id: {error}", "a hub id reads org/name") from None
    except LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise SourceError(
            f"no folder {model_id} here, and it cannot be fetched from the hub: {reason}",
            "check the network, set HF_ENDPOINT to a mirror, or give --model a local folder or GGUF file",
        ) from None
    except Exception as error:  # which errors a broken transfer raises depends on the library's release
        raise SourceError(
            f"fetching {model_id} from {constants.ENDPOINT} failed: {error or type(error).__name__}",
            "check network and disk space, then run the command again: it resumes",
        ) from None
