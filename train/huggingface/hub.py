"""Finds models on the Hugging Face Hub: `org/name` becomes a folder in the Hub's local cache.

The variables HF_HOME, HF_TOKEN and HF_HUB_OFFLINE tell `huggingface_hub` where the cache is, which
token to send, and whether to download.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from train.huggingface.config import ModelError

# All files that a model needs, without pickles or a second copy of the weights.
FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
NO_FILES = ("*/*", "consolidated*")


def model_folder(model: str | Path, files: Sequence[str] = FILES) -> Path:
    """Returns the local folder with this name, or the `files` of `org/name` from the Hub."""
    folder, name = Path(model), str(model)
    # A misspelled name of a local folder is not looked up on the Hub.
    if folder.exists() or folder.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return folder
    from huggingface_hub import snapshot_download  # local folders do not need it

    try:
        options = {"allow_patterns": list(files), "ignore_patterns": list(NO_FILES)}
        return Path(snapshot_download(name, **options))
    except (OSError, ValueError) as error:  # the Hub's errors and network errors
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"`model`: {name} is neither a folder nor available from the Hub: {reason} "
            f"({type(error).__name__}). Check the name and the network, log in with `hf auth "
            "login`, or copy a folder from elsewhere (`hf download NAME --local-dir DIR`)."
        ) from error
