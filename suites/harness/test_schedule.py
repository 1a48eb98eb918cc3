"""Schedules: the text form parses back, and token streams are a pure function of text and seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.replay import Plan
from harness.schedule import (
    MAX_COUNT,
    Close,
    Feed,
    Greedy,
    Open,
    Refuse,
    Restore,
    Rewind,
    Save,
    Schedule,
    ScheduleError,
    Step,
)
from harness.tokens import TokenStream, special_ids

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in {"open", "feed", "step", "greedy", "rewind", "save", "restore", "close", "refuse", "all"}
)
counts = st.integers(1, MAX_COUNT)
accepted = st.one_of(
    st.builds(Open, names),
    st.builds(Close, names),
    st.builds(Feed, counts, names, st.booleans(), st.none() | counts, st.none() | counts),
    st.builds(Save, names, names),
    st.builds(Restore, names, names),
    st.builds(Step, counts, st.lists(names, min_size=1, max_size=4, unique=True).map(tuple)),
    st.builds(Greedy, counts, names),
    st.builds(Rewind, counts, names),
)
operations = accepted | st.builds(Refuse, accepted)
schedules = st.lists(operations, min_size=1, max_size=8).map(lambda found: Schedule(tuple(found)))


@given(schedules)
def test_text_form_parses_back(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


@given(st.text(max_size=60))
def test_any_text_is_a_schedule_or_a_schedule_error(text: str) -> None:
    try:
        schedule = Schedule.parse(text)
    except ScheduleError:
        return
    assert Schedule.parse(str(schedule)) == schedule


def test_the_sequence_may_be_left_out() -> None:
    assert Schedule.parse("feed 5 all; step 2; rewind 1") == Schedule((Feed(5, "a", True), Step(2), Rewind(1)))
    assert Schedule.parse("save x; restore x; refuse feed 3 pad=8") == Schedule(
        (Save("x"), Restore("x"), Refuse(Feed(3, pad=8)))
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("feed", "needs a count"),
        ("feed 0", "1 to"),
        ("feed a -3", "got '-3'"),
        ("feed a 99999999999", "got '99999999999'"),
        ("feed 5 sideways", "sideways"),
        ("feed a+b 5", "only step"),
        ("step a+a 5", "distinct"),
        ("dance 5", "unknown operation"),
        ("rewind a 2 3", "unexpected"),
        ("feed 5 pad=0", "pad must be 1 to"),
        ("feed 5 pad=x", "pad=x"),
        ("feed 5 pad=2 pad=2", "once each"),
        ("feed 5 all all", "once each"),
        ("feed 5 all=2", "all=2"),
        ("save", "a sequence and a snapshot"),
        ("save a b c", "a sequence and a snapshot"),
        ("save a Big", "'Big' is not a name"),
        ("restore a feed", "'feed' is not a name"),
        ("refuse", "refuse needs the operation"),
        ("refuse refuse feed 1", "refuse needs the operation"),
        ("refuse dance 5", "unknown operation"),
    ],
)
def test_what_does_not_parse_is_named(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Schedule.parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("feed 5; rewind 6", "holds 5 tokens"),
        ("feed 5; rewind 2; greedy 3", "no row to choose from"),
        ("open a; greedy 3", "no row to choose from"),
        ("rewind 1", "never fed"),
        ("close a", "never fed"),
        ("feed 5; open a", "open already"),
        ("feed 5; close a; feed 5", "closed"),
        ("save a x", "never fed"),
        ("feed 5; restore b x", "no snapshot x"),
        ("feed 5; save a x; close a; save a y", "closed"),
        ("feed 5; save a x; restore b x; greedy b 2", "no row to choose from"),
        ("feed 5; save a x; feed 3; restore a x; rewind a 6", "holds 5 tokens"),
        ("refuse feed 5", "must be open before"),
        ("feed 5; refuse rewind 6", "holds 5 tokens"),
    ],
)
def test_a_schedule_that_no_target_can_run_is_refused_before_it_runs(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Plan(Schedule.parse(text), 0, 128)


def test_a_plan_knows_every_row_it_expects() -> None:
    plan = Plan(Schedule.parse("feed a 3; feed a 2 all; rewind a 4; step a+b 2; greedy b 2; close b; open b; feed b 2"), 0, 128)
    steps = [(3, 1), (3, 0), (3, 2), (3, 1)]  # a stands at 1 after the rewind, b at 0
    assert plan.expected() == [(0, 2), (1, 3), (1, 4), *steps, (4, 2), (4, 3), (7, 1)]


def test_a_restored_sequence_stands_where_the_snapshot_was_taken() -> None:
    text = "feed a 5; save a x; step a 2; close a; restore b x; step b 1; restore a x; refuse rewind a 2; feed a 2 all"
    assert Plan(Schedule.parse(text), 0, 128).expected() == [(0, 4), (2, 5), (2, 6), (5, 5), (8, 5), (8, 6)]


@given(st.integers(0, 2**63), names, st.integers(0, 5), st.lists(st.integers(0, 10_000), max_size=20))
def test_tokens_depend_on_nothing_but_their_place(seed: int, name: str, branch: int, positions: list[int]) -> None:
    stream = TokenStream(seed, 128, frozenset({1, 2}))
    together = stream.tokens(name, branch, positions)
    assert together == [stream.tokens(name, branch, [position])[0] for position in positions]
    assert all(0 <= token < 128 and token not in (1, 2) for token in together)


def test_sequences_branches_and_seeds_have_tokens_of_their_own() -> None:
    streams = [(0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0)]
    texts = {tuple(TokenStream(seed, 128).tokens(name, branch, range(16))) for seed, name, branch in streams}
    assert len(texts) == len(streams)


def test_all_allowed_tokens_occur() -> None:
    assert set(TokenStream(0, 16, frozenset({1})).tokens("a", 0, range(400))) == set(range(16)) - {1}


def test_special_ids_come_as_number_list_or_null() -> None:
    assert special_ids({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}) == {1, 2, 3}


def test_a_vocabulary_without_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="no choice"):
        TokenStream(0, 3, frozenset({0, 1}))


def test_ids_that_are_no_ids_are_left_out() -> None:
    assert special_ids({"bos_token_id": {"a": 1}, "eos_token_id": [2, "3", True, [4]], "pad_token_id": 1.5}) == {2}


@pytest.mark.parametrize("avoid", [frozenset(), frozenset({0, 1, 5}), frozenset({15, 7, 99, -3})])
def test_every_id_but_those_to_avoid_is_drawn(avoid: frozenset[int]) -> None:
    assert set(TokenStream(0, 16, avoid).tokens("a", 0, range(600))) == set(range(16)) - avoid


def test_a_stream_of_any_vocabulary_takes_no_memory_for_it() -> None:
    assert max(TokenStream(0, 1 << 60, frozenset({2})).tokens("a", 0, range(8))) > 1 << 40
