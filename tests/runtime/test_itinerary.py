"""The order in which a backward goes back through a forward, for any forward."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from polyshard.runtime.order import BackwardAction, BackwardOrder, ForwardRecord, Point, backward_order

#: A forward as a tree of calls: which stage, and what it calls in turn.
Call = tuple[str, list["Call"]]

calls = st.recursive(
    st.tuples(st.sampled_from("abcd"), st.just([])),
    lambda inner: st.tuples(st.sampled_from("abcd"), st.lists(inner, max_size=4)),
    max_leaves=12,
)


def marks_of(call: Call, known: dict[tuple[str, BackwardAction], Point[str]]) -> list[Point[str]]:
    stage, inner = call
    entry = known.setdefault((stage, BackwardAction.POST_BACKWARD), Point(stage, BackwardAction.POST_BACKWARD))
    leave = known.setdefault((stage, BackwardAction.PRE_BACKWARD), Point(stage, BackwardAction.PRE_BACKWARD))
    return [entry, *(mark for each in inner for mark in marks_of(each, known)), leave]


@given(calls)
def test_a_stage_is_gathered_for_its_last_call_and_finished_after_its_first(call: Call) -> None:
    points = marks_of(call, {})
    order = backward_order(points)
    assert len(order) == len(set(order)) == 2 * len({mark.module_state for mark in points})
    # As autograd comes by: backwards in time, the last exit and the first entry of each.
    when = {}
    for time, mark in enumerate(points):
        if mark.action is BackwardAction.PRE_BACKWARD or mark not in when:
            when[mark] = time
    assert [when[mark] for mark in order] == sorted(when.values(), reverse=True)


@given(calls, st.lists(st.integers(0, 100), max_size=8))
def test_whichever_marks_a_backward_comes_to_all_are_done_once_and_in_order(call: Call, arrivals: list[int]) -> None:
    forward_record: ForwardRecord[str] = ForwardRecord(None)
    for mark in marks_of(call, {}):
        forward_record.points.append(mark)
    order = backward_order(forward_record.points)
    walk: BackwardOrder[str] = BackwardOrder()
    assert not walk.follows(forward_record)
    walk.begin(forward_record)
    done: list[Point[str]] = []
    for arrival in arrivals:
        mark = order[arrival % len(order)]
        before = walk.until(forward_record, mark)
        if mark in done:
            assert before is None
        else:
            assert before is not None
            done += [*before, mark]
    assert [*done, *walk.rest()] == order
    assert list(walk.rest()) == []
    walk.end()
    assert not walk.follows(forward_record)


def test_an_itinerary_that_was_left_behind_has_nothing_more_to_do() -> None:
    first, second = (ForwardRecord[str](None) for _ in range(2))
    mark = Point("a", BackwardAction.POST_BACKWARD)
    for forward_record in (first, second):
        forward_record.points.append(mark)
    walk: BackwardOrder[str] = BackwardOrder()
    walk.begin(second)
    assert list(walk.rest()) == [mark]
    walk.begin(first)
    assert walk.follows(second)
    assert walk.until(second, mark) is None
    assert list(walk.until(first, mark) or ()) == []
