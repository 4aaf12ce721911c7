"""The store of responses: who sees what, and the bounds."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxllm.server.responses.store import MAX_AGE, ResponseStore, Stored, Turn

ANN, BOB = b"ann", b"bob"


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(id: str, before: Turn | None = None) -> Stored:
    """A response with one item of input and one of output."""
    turn = Turn(before, [(f"in_{id}", b"{}"), (f"out_{id}", b"{}")])
    return Stored(id, ANN, turn, 1, b"body of " + id.encode())


class Told(Stored):
    """A response that notes when it is forgotten."""

    gone = False

    def forgotten(self) -> None:
        self.gone = True


def test_a_response_is_visible_only_to_its_owner():
    store = ResponseStore()
    store.keep(stored("a"))
    assert store.find("a", ANN) is not None
    assert store.find("a", BOB) is None
    assert store.find_item("in_a", ANN) == b"{}"
    assert store.find_item("in_a", BOB) is None


def test_the_oldest_leaves_when_there_are_too_many():
    store = ResponseStore(max_responses=2)
    for id in "abc":
        store.keep(stored(id))
    assert [store.find(id, ANN) is not None for id in "abc"] == [False, True, True]


def test_responses_leave_when_they_take_too_many_bytes():
    one = ResponseStore()
    one.keep(stored("a"))
    store = ResponseStore(max_bytes=2 * one.bytes)
    for id in "abc":
        store.keep(stored(id))
    assert [store.find(id, ANN) is not None for id in "abc"] == [False, True, True]
    assert store.bytes == 2 * one.bytes


def test_old_responses_leave():
    clock = Clock()
    store = ResponseStore(clock=clock)
    store.keep(stored("a"))
    clock.now += MAX_AGE / 2
    store.keep(stored("b"))
    clock.now += MAX_AGE / 2
    assert store.find("a", ANN) is None
    assert store.find_item("in_a", ANN) is None
    assert store.find("b", ANN) is not None


def test_a_response_larger_than_the_store_is_forgotten_at_once_and_told_so():
    store = ResponseStore(max_bytes=100)
    one = Told("a", ANN, Turn(None), 0, b"")
    store.keep(one)
    assert store.find("a", ANN) is None
    assert one.gone
    assert store.bytes == 0


def test_a_continued_response_outlives_the_one_before():
    store = ResponseStore()
    first = stored("a")
    store.keep(first)
    second = stored("b", before=first.turn)
    store.keep(second)
    store.drop(first)
    assert store.find("a", ANN) is None
    assert [id for id, _ in second.input_items()] == ["in_a", "out_a", "in_b"]
    assert store.find_item("out_a", ANN) == b"{}"
    store.drop(second)
    assert store.bytes == 0
    assert store.find_item("out_a", ANN) is None


def test_a_turn_may_continue_one_that_was_forgotten_meanwhile():
    store = ResponseStore()
    first = stored("a")
    store.keep(first)
    store.drop(first)
    second = stored("b", before=first.turn)
    store.keep(second)
    assert store.bytes == second.size + second.turn.size + first.turn.size
    store.drop(second)
    assert store.bytes == 0


def item(store: ResponseStore, id: str, text: bytes, before: Turn | None = None) -> Stored:
    """A stored response whose only item is a copy of `item`."""
    one = Stored(id, ANN, Turn(before, [("item", text)]), 1, b"")
    store.keep(one)
    return one


def test_an_item_is_its_latest_copy_whatever_was_deleted_meanwhile():
    store = ResponseStore()
    first = item(store, "a", b"old")
    continued = Turn(first.turn, [("item", b"new")])
    store.drop(first)
    store.keep(second := Stored("b", ANN, continued, 1, b""))
    assert store.find_item("item", ANN) == b"new"
    third = item(store, "c", b"newest", continued)
    assert store.find_item("item", ANN) == b"newest"
    store.drop(third)
    assert store.find_item("item", ANN) == b"new"
    store.drop(second)
    assert store.find_item("item", ANN) is None
    assert not store._items


def test_what_a_response_gains_while_it_is_made_counts():
    store = ResponseStore()
    one = stored("a")
    store.keep(one)
    before = store.bytes
    store.grow(one, 100)
    with store.changing(one):
        one.body += b"12345"
        one.turn.items.append(("late", b"[]"))
    assert store.bytes == one.size + one.turn.size
    assert store.bytes > before + 105
    assert store.find_item("late", ANN) == b"[]"
    store.drop(one)
    store.grow(one, 100)
    assert store.bytes == 0


class Bounds(RuleBasedStateMachine):
    """Whatever is kept, continued and dropped: the count of bytes is exact and bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = ResponseStore(max_responses=6, max_bytes=20_000, clock=self.clock)
        self.made: list[Stored] = []

    @rule(size=st.integers(0, 4000), owner=st.sampled_from([ANN, BOB]), data=st.data())
    def keep(self, size: int, owner: bytes, data: st.DataObject) -> None:
        same = [None, *(one.turn for one in self.made if one.owner == owner)]
        id = str(len(self.made))
        one = Stored(id, owner, Turn(data.draw(st.sampled_from(same)), [(id, b"x" * size)]), 1, b"")
        self.made.append(one)
        self.store.keep(one)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.made))
        if self.store.find(one.id, one.owner) is not None:
            self.store.drop(one)

    @rule(seconds=st.floats(0, MAX_AGE))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.store.find("none", ANN)

    @invariant()
    def bytes_are_those_of_what_can_be_reached(self) -> None:
        kept = [one for one in self.made if self.store.find(one.id, one.owner)]
        turns = set()
        for one in kept:
            turn: Turn | None = one.turn
            while turn is not None:
                turns.add(turn)
                turn = turn.before
        expected = sum(one.size for one in kept) + sum(turn.size for turn in turns)
        assert self.store.bytes == expected <= 20_000
        assert len(self.store) == len(kept) <= 6
        reached = {id for turn in turns for id, _ in turn.items}
        for one in self.made:
            assert (self.store.find_item(one.id, one.owner) is not None) == (one.id in reached)


Bounds.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
test_bytes_are_counted_exactly = Bounds.TestCase
