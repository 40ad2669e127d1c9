"""Shape policies: the lengths they give and refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_sweep.schema.shapes import (
    PadToBuckets,
    PadToLongest,
    PadToMax,
    ShapePolicy,
    group_by_length,
    optimal_buckets,
    uniform_buckets,
)

SIZES = st.integers(1, 600)


@st.composite
def policies(draw: st.DrawFn) -> tuple[ShapePolicy, int]:
    """A policy and its maximum length."""
    max_length, size = draw(SIZES), draw(SIZES)
    policy: ShapePolicy = draw(
        st.sampled_from(
            [
                PadToMax(max_length=max_length),
                PadToLongest(max_length=max_length, multiple=size),
                PadToBuckets(buckets=uniform_buckets(max_length, size)),
            ]
        )
    )
    return policy, max_length


@given(policies())
@settings(deadline=None)
def test_a_padded_length_holds_the_longest_row_and_is_one_the_policy_announced(given_policy: tuple[ShapePolicy, int]) -> None:
    policy, max_length = given_policy
    announced = policy.lengths()
    assert list(announced) == sorted(set(announced))
    assert announced[-1] == max_length
    padded = [policy.padded(longest) for longest in range(1, max_length + 1)]
    assert all(length >= longest for longest, length in enumerate(padded, start=1))
    assert padded == sorted(padded)
    assert set(padded) == set(announced)


@given(policies(), st.integers(1, 100))
@settings(deadline=None)
def test_a_row_above_the_maximum_is_an_error_not_a_cut(given_policy: tuple[ShapePolicy, int], excess: int) -> None:
    policy, max_length = given_policy
    with pytest.raises(ValueError, match=f"{max_length + excess} tokens does not fit the maximum of {max_length}"):
        policy.padded(max_length + excess)


@pytest.mark.parametrize(
    ("policy", "longest", "padded"),
    [
        (PadToMax(max_length=256), 1, 256),
        (PadToLongest(max_length=256), 31, 31),
        (PadToLongest(max_length=256, multiple=8), 32, 32),
        (PadToLongest(max_length=256, multiple=8), 33, 40),
        (PadToLongest(max_length=250, multiple=8), 249, 250),
        (PadToBuckets(buckets=(32, 64, 100)), 32, 32),
        (PadToBuckets(buckets=(32, 64, 100)), 65, 100),
    ],
)
def test_padding_goes_to_the_next_length(policy: ShapePolicy, longest: int, padded: int) -> None:
    assert policy.padded(longest) == padded


@pytest.mark.parametrize(
    ("max_length", "bucket_size", "buckets"),
    [(256, 64, (64, 128, 192, 256)), (100, 32, (32, 64, 96, 100)), (64, 64, (64,)), (64, 100, (64,))],
)
def test_buckets_are_multiples_and_the_longest_sequence(max_length: int, bucket_size: int, buckets: tuple[int, ...]) -> None:
    assert uniform_buckets(max_length, bucket_size) == buckets


def test_policies_of_equal_lengths_are_equal() -> None:
    assert PadToLongest(max_length=256, multiple=8) == PadToLongest(multiple=8, max_length=256)
    assert PadToMax(max_length=256) != PadToMax(max_length=255)


@given(
    row_lengths=st.lists(st.integers(1, 64), max_size=200),
    batch_size=st.integers(1, 9),
    window=st.integers(1, 12),
)
@settings(deadline=None)
def test_grouping_uses_each_row_at_most_once_and_never_pads_more(row_lengths: list[int], batch_size: int, window: int) -> None:
    plain, grouped = (PadToLongest(max_length=64, window=w).batches(row_lengths, batch_size) for w in (1, window))
    rows = [row for batch in grouped for row in batch]
    assert len(rows) == len(set(rows)) == len(row_lengths) // batch_size * batch_size == sum(map(len, plain))
    assert all(len(batch) == batch_size for batch in grouped)
    if window == 1:
        assert rows == sorted(rows)

    def whole_windows(batches: list[list[int]]) -> int:
        whole = len(row_lengths) // (batch_size * window) * window
        return sum(max(row_lengths[row] for row in batch) for batch in batches[:whole])

    assert whole_windows(grouped) <= whole_windows(plain)
    assert group_by_length(row_lengths, batch_size, window) == grouped


@given(
    batches=st.dictionaries(st.integers(1, 24), st.integers(1, 20), max_size=7),
    count=st.integers(1, 5),
    multiple=st.sampled_from([1, 2, 4]),
)
@settings(deadline=None)
def test_the_best_buckets_are_those_that_trying_all_finds(batches: dict[int, int], count: int, multiple: int) -> None:
    def padded_tokens(buckets: tuple[int, ...]) -> int:
        policy = PadToBuckets(buckets=buckets)
        return sum(number * policy.padded(longest) for longest, number in batches.items())

    candidates = range(multiple, 24, multiple)
    everything = [(*chosen, 24) for size in range(count) for chosen in combinations(candidates, size)]
    found = optimal_buckets(batches, count, max_length=24, multiple=multiple)
    assert found[-1] == 24
    assert len(found) <= count
    assert all(bucket % multiple == 0 for bucket in found)
    assert padded_tokens(found) == min(map(padded_tokens, everything))


def test_a_lower_bound_lengthens_short_batches() -> None:
    policy = PadToLongest(max_length=64, multiple=8, shortest=20)
    assert (policy.padded(3), policy.padded(25), policy.padded(64)) == (24, 32, 64)
    assert policy.lengths() == (24, 32, 40, 48, 56, 64)


@given(policies(), st.integers(1, 200))
@settings(deadline=None)
def test_of_batches_with_a_shortest_length_exactly_the_lengths_they_are_padded_to_are_announced(
    given_policy: tuple[ShapePolicy, int], least: int
) -> None:
    policy, max_length = given_policy
    least = min(least, max_length)
    told = policy if isinstance(policy, PadToMax) else replace(policy, min_length=least)  # type: ignore[type-var]
    assert set(told.lengths()) == {told.padded(longest) for longest in range(least, max_length + 1)}
