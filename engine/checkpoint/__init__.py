"""Checkpoints: config.json, safetensors, GGUF, hub ids -> a loaded checkpoint. All of it is untrusted input."""

from engine.checkpoint.hub import HubUnavailable
from engine.checkpoint.loading import Checkpoint, load

__all__ = ["Checkpoint", "HubUnavailable", "load"]
