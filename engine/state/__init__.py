"""What a sequence keeps between forwards: states (one per slot), spans of a forward, layouts."""

from engine.state.kv import KVState
from engine.state.layout import SequenceStateLayout
from engine.state.recurrent import RecurrentState
from engine.state.ring import RingKVState
from engine.state.snapshot import StateSnapshot
from engine.state.span import Span
from engine.state.state import State
from engine.state.token_tail import TokenTail

__all__ = ["KVState", "RecurrentState", "RingKVState", "SequenceStateLayout", "Span", "State", "StateSnapshot", "TokenTail"]
