"""Runtime faults of what only some families keep between forwards: windows of keys and values, and recurrent states.

They stand at the states' own seams (append, get, put), as those of harness.faults do, so that every family that keeps such a
state is covered by the same ones.
"""

from __future__ import annotations

from typing import Any

from harness.cases.case import RECURRENT, RING
from harness.fault import Fault, Patch, Planted

__all__ = ["STATES"]


def _window_one_too_short(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine.state.ring import RingKVState

    append = RingKVState.append

    def short(self: RingKVState, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        seen = append(self, keys, values, padding)
        if seen[0].shape[2] - keys.shape[2] < self.window - 1:
            return seen
        planted.mark()
        return seen[0][:, :, 1:], seen[1][:, :, 1:]

    return [(RingKVState, "append", short)]


def _window_out_of_order(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine.state.ring import RingKVState

    append = RingKVState.append

    def rolled(self: RingKVState, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        seen = append(self, keys, values, padding)
        old, new = seen[0].shape[2] - keys.shape[2], keys.shape[2]
        if old < 2 or new == 1:  # to a query alone the order is the same, whatever it is
            return seen
        planted.mark()
        first, second = (
            mx.concatenate([whole[:, :, old // 2 : old], whole[:, :, : old // 2], whole[:, :, old:]], axis=2) for whole in seen
        )
        return first, second

    return [(RingKVState, "append", rolled)]


def _padding_enters_the_window(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine.state.ring import RingKVState

    append = RingKVState.append

    def whole(self: RingKVState, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        if padding:
            planted.mark()
        return append(self, keys, values)

    return [(RingKVState, "append", whole)]


def _forgotten(planted: Planted, which: int) -> list[Patch]:
    """`which` of (convolution tail, recurrent state) is read as zeros."""
    import mlx.core as mx

    from engine.state.recurrent import RecurrentState

    get = RecurrentState.get

    def zeroed(self: RecurrentState) -> tuple[mx.array, mx.array]:
        parts = list(get(self))
        if self.length:
            planted.mark()
            parts[which] = mx.zeros_like(parts[which])
        return parts[0], parts[1]

    return [(RecurrentState, "get", zeroed)]


def _recurrent_state_stays(planted: Planted) -> list[Patch]:
    from engine.state.recurrent import RecurrentState

    put = RecurrentState.put

    def kept(self: RecurrentState, n: int, conv_states: Any, ssm_states: Any) -> None:
        conv, ssm = self.get()
        if not self.length:
            put(self, n, conv_states, ssm_states)
            return
        planted.mark()
        put(self, n, [*conv_states[:-1], conv], [*ssm_states[:-1], ssm])

    return [(RecurrentState, "put", kept)]


def _padding_enters_the_recurrence(planted: Planted) -> list[Patch]:
    import mlx.core as mx

    from engine import engine
    from engine.state import KVState, Span
    from engine.state.recurrent import RecurrentState

    append, put = KVState.append, RecurrentState.put
    hidden = 0  # padding of the forward that runs, of which the mixers are not told

    def span(start: int, length: int, offset: int, slots: Any, padding: int) -> Span:
        nonlocal hidden
        hidden = padding
        if padding:
            planted.mark()
        return Span(start, length, offset, slots, 0)

    def told(self: KVState, keys: mx.array, values: mx.array, padding: int = 0) -> tuple[mx.array, mx.array]:
        return append(self, keys, values, padding or hidden)

    def counted(self: RecurrentState, n: int, conv_states: Any, ssm_states: Any) -> None:
        put(self, n - hidden, conv_states, ssm_states)

    return [(engine, "Span", span), (KVState, "append", told), (RecurrentState, "put", counted)]


_RING, _RECURRENT = frozenset({RING}), frozenset({RECURRENT})
STATES = (
    Fault("window_one_too_short", "a query does not see the oldest key of its window", _window_one_too_short, _RING),
    Fault("window_out_of_order", "kept keys come back in another order than they went in", _window_out_of_order, _RING),
    Fault("padding_enters_the_window", "rows of padding push keys out of the window", _padding_enters_the_window, _RING),
    Fault(
        "conv_tail_forgotten",
        "a convolution starts on zeros at the edge of a piece",
        lambda planted: _forgotten(planted, 0),
        _RECURRENT,
    ),
    Fault(
        "recurrent_state_forgotten",
        "a recurrence starts on zeros at the edge of a piece",
        lambda planted: _forgotten(planted, 1),
        _RECURRENT,
    ),
    Fault("recurrent_state_stays", "a recurrent state is written by the first piece only", _recurrent_state_stays, _RECURRENT),
    Fault(
        "padding_enters_the_recurrence",
        "rows of padding go through the recurrence as tokens do",
        _padding_enters_the_recurrence,
        _RECURRENT,
    ),
)
