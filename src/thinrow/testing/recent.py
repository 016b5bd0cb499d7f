"""Contract suite of the recent tier: subclass it for a tier of yours, and pytest holds it to what thinrow relies on.

::

    class TestMyTier(RecentTierContract):
        def open_tier(self, path, schema):
            return MyTier(path, schema)

Random operations must agree with ``ModelTier``, the contract as plain Python. Needs pytest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import (
    DuplicateEventError,
    InputError,
    SchemaError,
    StoreError,
    UnknownEventError,
    UserKindError,
)
from thinrow.core.units import NEVER
from thinrow.core.users import UserKind
from thinrow.history.recent.tier import RecentRead, RecentTier
from thinrow.jagged import Column
from thinrow.jagged.column import ARROW_TYPES
from thinrow.schema import EventSchema
from thinrow.testing.recent_model import (
    INT_USERS,
    LONGEST,
    TEXT_USERS,
    ModelTier,
    append_rows,
    column_of,
    contract_schema,
    fields_of,
    hides_of,
    listed,
    random_rows,
    read,
    repeated,
    state_of,
    users_of,
    values_of,
)
from thinrow.testing.recent_positions import PositionsContract


class RecentTierContract(PositionsContract):
    """Subclass and implement ``open_tier``; set ``durable = False`` where nothing outlives ``close``."""

    durable: ClassVar[bool] = True

    def open_tier(self, path: Path, schema: EventSchema) -> RecentTier:
        """The tier at ``path`` (a directory that may not be there yet), new or as it was left."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[RecentTier]:
        """An empty tier with int64 users and int64 event ids."""
        opened = self.open_tier(tmp_path / "tier", contract_schema())
        yield opened
        opened.close()

    # --- erasure -----------------------------------------------------------------------------------------------

    @staticmethod
    def _erase(tier: RecentTier, user: int, first: Sequence[int], last: Sequence[int], whole: bool) -> None:
        bounds = np.array([0, len(first)]), np.array(first, np.int64), np.array(last, np.int64)
        tier.erase(np.array([user]), *bounds, np.array([whole]))

    def test_an_erased_user_is_forgotten_and_no_number_is_given_twice(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, i, i, None, values_of(i)) for i in range(9)])
        append_rows(tier, [(2, i, i, None, values_of(i)) for i in range(3)])
        (first,) = tier.reserve(np.array([1]), np.array([0]), np.array([1])).tolist()
        for _ in range(2):
            self._erase(tier, 1, [1], [first + 1], True)
            assert tier.known_users().tolist() == [2]
            assert read(tier, [1, 2]).events.lengths.tolist() == [0, 3]
        again = append_rows(tier, [(1, 5, 0, None, values_of(0)), (2, 1, 0, None, values_of(0))])
        assert again.arrivals.tolist() == [first + 2, 1]
        assert again.duplicate.tolist() == [False, True]
        assert append_rows(tier, [(3, 0, None, None, values_of(0))]).arrivals[0] > first + 1

    def test_numbers_of_others_go_on_from_their_own_after_an_erasure(self, tier: RecentTier) -> None:
        append_rows(tier, [(u, i, i, None, values_of(i)) for u, n in ((1, 9), (2, 3)) for i in range(n)])
        self._erase(tier, 1, [1], [9], True)
        tier.trim(np.array([2]), np.array([3]))
        assert append_rows(tier, [(2, 7, 7, None, values_of(7))]).arrivals.tolist() == [4]
        assert tier.reserve(np.array([2]), np.array([0]), np.array([2])).tolist() == [4]

    def test_ids_of_erased_events_are_new_again(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, i, i, None, values_of(i)) for i in range(9)])
        tier.trim(np.array([1]), np.array([7]))
        self._erase(tier, 1, [2, 5], [3, 5], False)
        assert [e[0] for e in listed(read(tier, [1]))[1]] == [8, 9]
        rows = [(1, i, i, None, values_of(i)) for i in range(9)]
        result = append_rows(tier, rows)
        assert np.flatnonzero(~result.duplicate).tolist() == [1, 2, 4]
        assert result.arrivals.tolist() == [1, 10, 11, 4, 12, 6, 7, 8, 9]
        tier.check_ids()

    def test_a_user_who_came_back_keeps_what_came_after(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, i, i, None, values_of(i)) for i in range(4)])
        (first,) = tier.reserve(np.array([1]), np.array([0]), np.array([1])).tolist()
        append_rows(tier, [(1, 7, 7, None, values_of(7))])
        self._erase(tier, 1, [1], [first + 1], True)
        assert [e[0] for e in listed(read(tier, [1]))[1]] == [first + 2]
        assert tier.known_users().tolist() == [1]
        assert read(tier, [1]).top.tolist() == [first + 2]

    # --- append and read ---------------------------------------------------------------------------------------

    def test_arrivals_count_each_user_in_row_order(self, tier: RecentTier) -> None:
        rows = [(u, 100 - i, None, None, values_of(i)) for i, u in enumerate([7, 3, 7, -2, 3, 7])]
        result = append_rows(tier, rows)
        assert result.arrivals.tolist() == [1, 1, 2, 1, 2, 3]
        assert not result.duplicate.any()
        assert append_rows(tier, rows[:2]).arrivals.tolist() == [4, 3]
        assert [e[:2] for e in listed(read(tier, [7]))[7]] == [(1, 100), (2, 98), (3, 95), (4, 100)]

    @pytest.mark.parametrize(("kind", "ids"), [("int64", "int64"), ("string", "string"), ("int64", None)])
    def test_every_value_comes_back(self, tmp_path: Path, kind: UserKind, ids: Any) -> None:
        tier = self.open_tier(tmp_path / "tier", contract_schema(kind, ids))
        users: Sequence[Any] = INT_USERS if kind == "int64" else TEXT_USERS
        names: Any = {"int64": [*INT_USERS, None], "string": [*TEXT_USERS, "", None], None: [None]}[ids]
        rows = [
            (
                users[i % len(users)],
                i,
                names[i // len(users)] if i // len(users) < len(names) else None,
                None,
                values_of(i),
            )
            for i in range(150)
        ]
        model = ModelTier()
        assert list(zip(*(a.tolist() for a in fields_of(append_rows(tier, rows))), strict=True)) == model.append(rows)
        model.check(tier, users, [0] * len(users))
        model.check(tier, users[::-1], range(len(users)))
        tier.close()

    def test_columns_of_a_read_have_the_types_of_the_schema(self, tier: RecentTier) -> None:
        for found in (read(tier, [1]), read(tier, []), self._one(tier)):
            assert list(found.events.columns) == [c.name for c in tier.schema.columns]
            for spec in tier.schema.columns:
                column = found.events.columns[spec.name]
                assert column.values.dtype == spec.numpy_dtype
                assert (column.dictionary is not None) == spec.is_bytes
                assert column.dictionary is None or column.dictionary.type == ARROW_TYPES[spec.dtype]
            assert found.event_ids is not None
            assert found.event_ids.values.dtype == np.int64

    def _one(self, tier: RecentTier) -> RecentRead:
        append_rows(tier, [(1, 5, 1, None, values_of(1))])
        return read(tier, [1])

    def test_nan_and_negative_zero_keep_their_bits(self, tier: RecentTier) -> None:
        bits = np.array([0x7FF8000000000001, 0xFFF8000000000000, 0x8000000000000000], np.uint64)
        columns = repeated(tier.schema, 2, 3)
        columns["price"] = Column(bits.view(np.float64))
        tier.append(np.array([1, 1, 1]), np.arange(3), columns)
        assert read(tier, [1]).events.columns["price"].values.view(np.uint64).tolist() == bits.tolist()

    def test_many_events_of_one_call_are_read_from_any_arrival(self, tier: RecentTier) -> None:
        rows = [(1 + i % 2, i, i, None, values_of(i)) for i in range(1400)]
        append_rows(tier, rows)
        model = ModelTier()
        model.append(rows)
        for after in (0, 1, 255, 256, 257, 511, 512, 699, 700, 900):
            model.check(tier, [2, 1], [after, after // 2])

    def test_unknown_users_have_nothing(self, tier: RecentTier) -> None:
        append_rows(tier, [(5, 1, None, None, values_of(1))])
        found = read(tier, [4, 6, 5], [0, 9, 0])
        assert found.events.lengths.tolist() == [0, 0, 1]
        assert found.top.tolist() == [0, 0, 1]
        assert found.trimmed_through.tolist() == [0, 0, 0]
        assert len(read(tier, []).events) == 0

    def test_empty_append_changes_nothing(self, tier: RecentTier) -> None:
        result = append_rows(tier, [])
        assert len(result.arrivals) == len(result.duplicate) == 0
        assert len(tier.users()) == 0

    def test_users_ascend_as_ids_do(self, tmp_path: Path) -> None:
        for kind, users in (("int64", INT_USERS), ("string", TEXT_USERS)):
            tier = self.open_tier(tmp_path / kind, contract_schema(kind))  # type: ignore[arg-type]
            append_rows(tier, [(u, 1, None, None, values_of(1)) for u in users])
            assert tier.users().tolist() == sorted(users)
            tier.close()

    # --- ids ---------------------------------------------------------------------------------------------------

    def test_an_id_is_appended_once_for_each_user(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 10, 7, None, values_of(1)), (1, 11, 8, None, values_of(2))])
        rows = [(1, 99, 8, None, values_of(3)), (1, 12, 9, None, values_of(4)), (2, 13, 8, None, values_of(5))]
        result = append_rows(tier, rows)
        assert result.arrivals.tolist() == [2, 3, 1]
        assert result.duplicate.tolist() == [True, False, False]
        assert [e[:3] for e in listed(read(tier, [1]))[1]] == [(1, 10, 7), (2, 11, 8), (3, 12, 9)]
        again = append_rows(tier, rows)
        assert again.arrivals.tolist() == [2, 3, 1]
        assert again.duplicate.all()

    def test_ids_outlive_their_events(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 10, 7, None, values_of(1))])
        tier.trim(np.array([1]), np.array([1]))
        result = append_rows(tier, [(1, 10, 7, None, values_of(1))])
        assert (result.arrivals.tolist(), result.duplicate.tolist()) == ([1], [True])
        assert len(read(tier, [1]).events) == 0

    def test_null_ids_are_no_ids(self, tier: RecentTier) -> None:
        result = append_rows(tier, [(1, 1, None, None, values_of(1)), (1, 1, None, None, values_of(1))])
        assert result.arrivals.tolist() == [1, 2]
        found = read(tier, [1])
        assert found.event_ids is not None
        assert found.event_ids.valid is not None
        assert not found.event_ids.valid.any()

    def test_one_id_twice_in_a_call_is_refused(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 1, 5, None, values_of(1))])
        for name in (5, 6):
            rows = [(u, 1, i, None, values_of(1)) for u, i in ((2, 5), (1, name), (3, 1), (1, name))]
            with pytest.raises(DuplicateEventError, match=f"rows 1 and 3: event id {name} of user"):
                append_rows(tier, rows)
        assert tier.users().tolist() == [1]
        assert read(tier, [1, 2, 3]).top.tolist() == [1, 0, 0]

    def test_longest_ids(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path / "tier", contract_schema("string", "string"))
        append_rows(tier, [("\0" * 255, 1, "\0" * 255, None, values_of(1)), (LONGEST, 1, LONGEST, None, values_of(2))])
        result = append_rows(
            tier, [(LONGEST, 2, LONGEST, None, values_of(2)), (LONGEST, 2, "n", LONGEST, values_of(3))]
        )
        assert result.duplicate.tolist() == [True, False]
        assert hides_of(read(tier, [LONGEST])) == {LONGEST: [(1, 1, 2)]}
        with pytest.raises(InputError, match="256 UTF-8 bytes"):
            append_rows(tier, [("a", 1, "é" * 128, None, values_of(1))])
        with pytest.raises(InputError, match="256 UTF-8 bytes"):
            append_rows(tier, [("é" * 128, 1, "a", None, values_of(1))])
        with pytest.raises(InputError, match="0 UTF-8 bytes"):
            append_rows(tier, [("", 1, "a", None, values_of(1))])
        tier.close()

    # --- corrections -------------------------------------------------------------------------------------------

    def test_corrections_name_time_and_arrival_of_their_target(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 50, 1, None, values_of(1)), (2, 60, 1, None, values_of(2))])
        append_rows(tier, [(1, 51, 2, 1, values_of(3)), (2, 61, None, None, values_of(4)), (2, 62, 3, 1, values_of(5))])
        found = read(tier, [2, 3, 1])
        assert hides_of(found) == {2: [(60, 1, 3)], 3: [], 1: [(50, 1, 2)]}
        assert hides_of(read(tier, [1, 2], [2, 2])) == {1: [], 2: [(60, 1, 3)]}

    def test_a_correction_may_follow_its_target_in_one_call(self, tier: RecentTier) -> None:
        append_rows(
            tier,
            [
                (2, 5, 1, None, values_of(1)),
                (1, 5, 1, None, values_of(1)),
                (1, 6, 2, 1, values_of(2)),
                (1, 7, 3, 2, values_of(2)),
            ],
        )
        assert hides_of(read(tier, [1])) == {1: [(5, 1, 2), (6, 2, 3)]}

    def test_a_correction_may_name_a_trimmed_event(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 50, 1, None, values_of(1))])
        tier.trim(np.array([1]), np.array([1]))
        append_rows(tier, [(1, 51, 2, 1, values_of(2))])
        assert hides_of(read(tier, [1])) == {1: [(50, 1, 2)]}

    def test_a_correction_survives_a_trim_within_its_call(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 50, 1, None, values_of(1)), (1, 51, 2, 1, values_of(2)), (1, 52, 3, 2, values_of(3))])
        tier.trim(np.array([1]), np.array([2]))
        assert hides_of(read(tier, [1])) == {1: [(51, 2, 3)]}

    def test_resolve_finds_events_outside(self, tier: RecentTier) -> None:
        asked = []

        def resolve(user: int | str, name: int | str) -> tuple[int, int] | None:
            asked.append((user, name))
            # A resolver may read the tier.
            assert read(tier, [5]).top.tolist() == [10]
            return (40, 9) if name == 77 else None

        tier.raise_counters(np.array([5]), np.array([10]))
        append_rows(tier, [(5, 50, 1, 77, values_of(1)), (5, 51, 2, 1, values_of(2))], resolve)
        assert asked == [(5, 77)]
        assert hides_of(read(tier, [5])) == {5: [(40, 9, 11), (50, 11, 12)]}

    def test_a_correction_of_an_unknown_event_is_refused(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 50, 1, None, values_of(1))])
        before = state_of(tier, [1, 2])
        good = (1, 60, 9, None, values_of(2))
        for bad, message in (
            ((1, 60, 2, 8, values_of(2)), "row 1: supersedes 8, an event that user 1 does not have"),
            ((2, 60, 2, 1, values_of(2)), "row 1: supersedes 1, an event that user 2 does not have"),
            ((1, 60, 2, 2, values_of(2)), "an event must arrive before its correction"),
        ):
            with pytest.raises(UnknownEventError, match=message):
                append_rows(tier, [good, bad], lambda user, name: None)
            with pytest.raises(UnknownEventError, match=message):
                append_rows(tier, [good, bad])
        with pytest.raises(UnknownEventError, match="has arrival 3"):
            append_rows(tier, [(1, 60, 2, 3, values_of(2)), (1, 60, 3, None, values_of(2))])
        assert state_of(tier, [1, 2]) == before

    def test_a_retried_correction_changes_nothing(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 50, 1, None, values_of(1)), (1, 51, 2, 1, values_of(2))])
        before = state_of(tier, [1])
        # The retry's target is not even looked up: the first time decided.
        assert append_rows(tier, [(1, 51, 2, 404, values_of(2))]).duplicate.tolist() == [True]
        assert state_of(tier, [1]) == before

    def test_all_corrections_of_unknown_events_are_named(self, tier: RecentTier) -> None:
        with pytest.raises(UnknownEventError, match="row 1") as caught:
            append_rows(
                tier,
                [
                    (7, 10, 1, None, values_of(1)),
                    (7, 11, 2, 99, values_of(1)),
                    (8, 12, 3, None, values_of(1)),
                    (7, 13, 4, 98, values_of(1)),
                ],
            )
        assert set(caught.value.rows) <= {1, 3}
        assert 1 in caught.value.rows

    def test_a_failing_resolver_leaves_the_tier_as_it_was(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 50, 1, None, values_of(1))])
        before = state_of(tier, [1])

        def resolve(user: int | str, name: int | str) -> tuple[int, int] | None:
            raise RuntimeError("archive is away")

        with pytest.raises(RuntimeError, match="archive is away"):
            append_rows(tier, [(1, 51, 2, None, values_of(1)), (1, 52, 3, 99, values_of(2))], resolve)
        assert state_of(tier, [1]) == before
        assert append_rows(tier, [(1, 51, 2, None, values_of(1))]).arrivals.tolist() == [2]

    def test_known_users_outlive_their_events(self, tier: RecentTier) -> None:
        assert len(tier.known_users()) == 0
        append_rows(tier, [(u, 1, u, None, values_of(u)) for u in (7, -7)])
        tier.trim(np.array([7, -7]), np.array([1, 1]))
        tier.raise_counters(np.array([9]), np.array([4]))
        assert len(tier.users()) == 0
        assert tier.known_users().tolist() == [-7, 7, 9]
        assert tier.known_users(1).tolist() == [-7]
        tier.check_ids()

    # --- input that cannot be used -----------------------------------------------------------------------------

    def test_bad_input_names_the_row_and_changes_nothing(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, 1, None, None, values_of(1))])
        before = state_of(tier, [1, 2])
        users, times = np.array([2, 1]), np.array([3, 4])
        columns = repeated(tier.schema, 2, 2)
        short = {**columns, "item": column_of([1], "int64")}
        null = {**columns, "kind": Column(np.zeros(2, np.int8), np.array([True, False]))}
        narrow = {**columns, "item": column_of([1, 2], "int32")}
        missing = {name: c for name, c in columns.items() if name != "shop"}
        plain = {**columns, "shop": column_of([1, 2], "int32")}
        codes = {**columns, "shop": Column(np.array([0, 5], np.int32), None, pa.array(["a"]))}
        flat = {**columns, "seen": column_of([1, 2], "int16")}
        wide = {**columns, "spot": Column(np.zeros((2, 3), np.float32))}
        elements, cuts = np.zeros(3, np.int16), np.array([0, 1, 2])
        torn = {**columns, "seen": Column(elements, None, None, cuts)}
        tags = Column(np.zeros(2, np.int32), np.array([False, True]), pa.array(["a"]), cuts)
        full = {**columns, "tags": tags}
        long = {**columns, "seen": Column(np.zeros(32_769, np.int16), None, None, np.array([0, 0, 32_769]))}
        cases: list[tuple[type[Exception], str, Any]] = [
            (InputError, "row 1: event_ts is -4", (users, np.array([3, -4]), columns)),
            (InputError, "row 0: event_ts is null", (users, Column(times, np.array([False, True])), columns)),
            (InputError, "event_ts has 1 values for 2 users", (users, times[:1], columns)),
            (InputError, "event_ts has dtype float64", (users, times / 2, columns)),
            (InputError, "item has 1 values for 2 users", (users, times, short)),
            (InputError, "row 1: kind is null", (users, times, null)),
            (SchemaError, "'item' holds int32, but the schema says int64", (users, times, narrow)),
            (SchemaError, "'shop' is missing", (users, times, missing)),
            (SchemaError, "'shop' holds int32, but the schema says string", (users, times, plain)),
            (SchemaError, "'extra' is not in the schema", (users, times, {**columns, "extra": columns["item"]})),
            (InputError, "codes 0 to 5", (users, times, codes)),
            (SchemaError, "'seen' holds single values, but the schema says lists", (users, times, flat)),
            (SchemaError, "'spot' holds vectors of 3, but the schema says vectors of 2", (users, times, wide)),
            (InputError, "'seen' has offsets from 0 to 2 for 3 elements", (users, times, torn)),
            (InputError, "'tags' is null in row 0, which has elements", (users, times, full)),
            (InputError, "a list of 32769 elements in row 1; at most 32768", (users, times, long)),
            (UserKindError, "kind string, but this store holds int64", (np.array(["a", "b"], object), times, columns)),
            (SchemaError, "'event_id' holds a dictionary", (users, times, columns, column_of(["a", "b"], "string"))),
            (InputError, "event_id has 1 values", (users, times, columns, column_of([1], "int64"))),
            (InputError, "supersedes has 1 values", (users, times, columns, None, column_of([1], "int64"))),
        ]
        for error, message, arguments in cases:
            with pytest.raises(error, match=message):
                tier.append(*arguments)
        assert state_of(tier, [1, 2]) == before

    def test_ids_need_a_schema_with_ids(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path / "tier", contract_schema("string", None))
        columns = repeated(tier.schema, 2, 1)
        with pytest.raises(InputError, match="no event ids"):
            tier.append(users_of(["a"], "string"), np.array([1]), columns, column_of([1], "int64"))
        with pytest.raises(UserKindError, match="kind int64"):
            tier.append(np.array([1]), np.array([1]), columns)
        assert read(tier, ["a"]).event_ids is None
        tier.close()

    def test_bounds_are_checked(self, tier: RecentTier) -> None:
        users = np.array([1, 2])
        for call in (tier.read_since, tier.trim, tier.raise_counters):
            with pytest.raises(InputError, match="user 1 is asked for twice"):
                call(np.array([1, 1]), np.array([0, 0]))
            with pytest.raises(InputError, match="1 x int64 for 2 users"):
                call(users, np.array([0]))
            with pytest.raises(InputError, match=r"\[1\] is -1"):
                call(users, np.array([0, -1]))
            with pytest.raises(InputError, match="must be an arrival number"):
                call(users, np.array([0, NEVER]))
            with pytest.raises(UserKindError):
                call(np.array(["a"], object), np.array([0]))
        assert len(tier.users()) == 0

    # --- trim and counters -------------------------------------------------------------------------------------

    def test_trim_anywhere_leaves_exactly_the_rest(self, tmp_path: Path) -> None:
        for kind, users in (("int64", (3, -3, 4)), ("string", ("b", "a", "b\0"))):
            tier = self.open_tier(tmp_path / kind, contract_schema(kind, "string"))  # type: ignore[arg-type]
            model = ModelTier()
            for call in range(3):
                rows = [(users[i % 3], i, f"{call}.{i}", None, values_of(i)) for i in range(call * 10, call * 10 + 25)]
                append_rows(tier, rows)
                model.append(rows)
            for through in ((1, 0, 9), (4, 4, 5), (8, 9, 9), (10, 10, 10), (2, 26, 11), (25, 26, 30)):
                tier.trim(users_of(users, tier.schema.user_kind), np.array(through))
                for user, bound in zip(users, through, strict=True):
                    model.trim(user, bound)
                model.check(tier, users, [0, 0, 0])
                model.check(tier, users, [7, 9, 12])
            assert len(tier.users()) == 0
            tier.close()

    def test_numbers_go_on_after_a_trim(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, i, None, None, values_of(i)) for i in range(5)])
        tier.trim(np.array([1]), np.array([5]))
        found = read(tier, [1])
        assert (found.top.tolist(), found.trimmed_through.tolist()) == ([5], [5])
        assert append_rows(tier, [(1, 9, None, None, values_of(9))]).arrivals.tolist() == [6]

    def test_a_trimmed_number_is_never_given_out(self, tier: RecentTier) -> None:
        tier.trim(np.array([1]), np.array([8]))
        found = read(tier, [1])
        assert (found.top.tolist(), found.trimmed_through.tolist()) == ([8], [8])
        assert append_rows(tier, [(1, 9, None, None, values_of(9))]).arrivals.tolist() == [9]
        assert [e[0] for e in listed(read(tier, [1]))[1]] == [9]

    def test_counters_only_rise(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, i, None, None, values_of(i)) for i in range(3)])
        tier.raise_counters(np.array([1, 2]), np.array([2, 40]))
        assert append_rows(tier, [(u, 9, None, None, values_of(9)) for u in (1, 2)]).arrivals.tolist() == [4, 41]
        found = read(tier, [1, 2])
        assert (found.top.tolist(), found.trimmed_through.tolist()) == ([4, 41], [0, 0])
        assert [e[0] for e in listed(found)[2]] == [41]

    def test_reserved_numbers_are_never_given_out(self, tier: RecentTier) -> None:
        append_rows(tier, [(1, i, None, None, values_of(i)) for i in range(3)])
        tier.trim(np.array([1]), np.array([2]))
        first = tier.reserve(np.array([2, 1, 3]), np.array([9, 0, 0]), np.array([5, 10, 0]))
        assert first.tolist() == [9, 3, 0]
        assert append_rows(tier, [(u, 9, None, None, values_of(9)) for u in (1, 2, 3)]).arrivals.tolist() == [14, 15, 1]
        found = read(tier, [1, 2])
        assert (found.trimmed_through.tolist(), found.top.tolist()) == ([2, 0], [14, 15])
        assert [[e[0] for e in events] for events in listed(found).values()] == [[3, 14], [15]]
        with pytest.raises(InputError, match="user 1 has counter 14; arrival numbers end at"):
            tier.reserve(np.array([1]), np.array([0]), np.array([NEVER - 5]))
        assert append_rows(tier, [(1, 9, None, None, values_of(9))]).arrivals.tolist() == [15]

    def test_numbers_end_before_never(self, tier: RecentTier) -> None:
        tier.raise_counters(np.array([1]), np.array([NEVER - 2]))
        row = (1, 9, None, None, values_of(9))
        with pytest.raises(InputError, match="arrival numbers end at"):
            append_rows(tier, [row, row])
        assert append_rows(tier, [row]).arrivals.tolist() == [NEVER - 1]
        assert [e[0] for e in listed(read(tier, [1], [NEVER - 2]))[1]] == [NEVER - 1]

    # --- all of it together ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(6))
    def test_random_operations_agree_with_the_model(self, tmp_path: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        kind: UserKind = "string" if seed % 2 else "int64"
        users = list(INT_USERS if kind == "int64" else TEXT_USERS)
        schema = contract_schema(kind, ("int64", "int64", "string")[seed % 3])
        tier, model = self.open_tier(tmp_path / "tier", schema), ModelTier()
        for step in range(40):
            if rng.random() < 0.65:
                rows = random_rows(rng, users, model, schema, step)
                result = append_rows(tier, rows)
                assert list(zip(*(a.tolist() for a in fields_of(result)), strict=True)) == model.append(rows)
            elif rng.random() < 0.7:
                some = [users[i] for i in rng.permutation(len(users))[:3]]
                tops = read(tier, some).top
                through = rng.integers(0, tops + 2)
                tier.trim(users_of(some, kind), through)
                for user, bound in zip(some, through.tolist(), strict=True):
                    model.trim(user, bound)
            elif self.durable:
                tier.close()
                tier = self.open_tier(tmp_path / "tier", schema)
            asked = [users[i] for i in rng.permutation(len(users))[: rng.integers(0, len(users) + 1)]]
            model.check(tier, asked, rng.integers(0, 30, len(asked)).tolist())
        tier.close()

    def test_readers_see_whole_calls_while_a_writer_appends_and_trims(self, tier: RecentTier) -> None:
        users, failures, done = [1, 2, 3], [], threading.Event()

        def reader() -> None:
            try:
                while not done.is_set():
                    found = read(tier, users)
                    tops, held = found.top.tolist(), listed(found)
                    assert not tier.atomic_over_users or tops[0] == tops[1] == tops[2]
                    for user, top, trimmed in zip(users, tops, found.trimmed_through.tolist(), strict=True):
                        assert top % 4 == 0
                        assert [e[0] for e in held[user]] == list(range(trimmed + 1, top + 1))
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=reader) for _ in range(3)]
        for thread in threads:
            thread.start()
        for i in range(40):
            append_rows(tier, [(u, i, None, None, values_of(i)) for u in users for _ in range(4)])
            if i % 4 == 3:
                tier.trim(np.array(users), np.array([4 * i - 9, 4 * i - 2, 4 * i]))
        done.set()
        for thread in threads:
            thread.join()
        assert not failures

    def test_writers_of_several_threads_lose_nothing(self, tier: RecentTier) -> None:
        given: list[int] = []

        def writer(k: int) -> None:
            for i in range(15):
                given.extend(append_rows(tier, [(1, i, 100 * k + i, None, values_of(i))]).arrivals.tolist())

        threads = [threading.Thread(target=writer, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(given) == list(range(1, 61))
        assert [e[0] for e in listed(read(tier, [1]))[1]] == list(range(1, 61))

    def test_what_was_acknowledged_is_there_after_reopening(self, tmp_path: Path) -> None:
        if not self.durable:
            pytest.skip("this tier keeps nothing after close")
        schema = contract_schema("string", "string")
        tier = self.open_tier(tmp_path / "tier", schema)
        rows = [
            ("a\0", 1, "x", None, values_of(1)),
            ("a", 2, "x", None, values_of(2)),
            ("a", 3, "y", "x", values_of(3)),
        ]
        append_rows(tier, rows)
        tier.trim(users_of(["a"], "string"), np.array([1]))
        tier.raise_counters(users_of(["c"], "string"), np.array([9]))
        before = state_of(tier, ["a", "a\0", "c"])
        tier.close()
        tier = self.open_tier(tmp_path / "tier", schema)
        assert state_of(tier, ["a", "a\0", "c"]) == before
        assert append_rows(tier, rows).duplicate.all()
        tier.close()

    def test_a_closed_tier_says_so(self, tier: RecentTier) -> None:
        tier.close()
        tier.close()
        for call in (
            lambda: append_rows(tier, [(1, 1, None, None, values_of(1))]),
            lambda: append_rows(tier, []),
            lambda: read(tier, [1]),
            tier.users,
            lambda: tier.trim(np.array([1]), np.array([1])),
            lambda: tier.raise_counters(np.array([1]), np.array([1])),
        ):
            with pytest.raises(StoreError, match="closed"):
                call()
