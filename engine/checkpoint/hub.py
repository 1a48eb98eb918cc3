"""Hub ids: a snapshot of the files that the engine reads, through huggingface_hub and its cache."""

from __future__ import annotations

import re
from pathlib import Path

from engine.checkpoint.bounded import one_line
from engine.errors import EngineError

__all__ = ["HubUnavailable", "is_hub_id", "snapshot"]

# No pickles, no code: the engine reads these and nothing else.
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "*.safetensors.index.json",
]
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}\Z")


class HubUnavailable(EngineError):
    """The hub, or this id on it, cannot be had from here: no network, unknown id, no access. Says what to do."""


def is_hub_id(source: str) -> bool:
    return bool(_HUB_ID.match(source)) and ".." not in source and "--" not in source


def snapshot(hub_id: str) -> Path:
    """The local directory of a hub id's newest snapshot, downloaded where the cache lacks it. Raises HubUnavailable."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=FILES))
    except (errors.GatedRepoError, errors.RepositoryNotFoundError):
        cause = "the hub does not know this id, or it needs access (`hf auth login`)"
    except errors.LocalEntryNotFoundError:
        cause = "the hub cannot be reached and the local cache does not have it"
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        cause = one_line(error, 160)
    raise HubUnavailable(
        f"cannot get {hub_id!r} from the hub: {cause}. Download it where there is network (`hf download {hub_id}`) and pass "
        "its directory, or put it into the cache and set HF_HUB_OFFLINE=1"
    ) from None
