"""What a sequence keeps between forwards: states (one per slot), spans of a forward, layouts."""

from engine.state.kv import KVSnapshot, KVState
from engine.state.layout import SequenceStateLayout
from engine.state.span import Span
from engine.state.state import State

__all__ = ["KVSnapshot", "KVState", "SequenceStateLayout", "Span", "State"]
