"""User ids: what is taken and what is refused, their order, and Iceberg's bucket of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType, StringType

from thinrow.core.errors import InputError, UserKindError
from thinrow.core.units import MAX_USER_BYTES
from thinrow.core.users import as_users, bucket_of, distinct, kind_of, plain

#: So many buckets that the bucket is the whole (non-negative) hash.
WHOLE_HASH = 1 << 31

INTS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.text(min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (7, [7]),
        (np.int32(-7), [-7]),
        (np.array(7), [7]),
        ([3, 1, 3], [3, 1, 3]),
        ((1, 2), [1, 2]),
        (range(3), [0, 1, 2]),
        (np.array([1, 2], np.uint32), [1, 2]),
        (np.arange(6, dtype=np.int64)[::-2], [5, 3, 1]),
        ([-(1 << 63), (1 << 63) - 1], [-(1 << 63), (1 << 63) - 1]),
    ],
)
def test_integers_become_contiguous_int64(values: Any, expected: list[int]) -> None:
    users = as_users(values)
    assert users.dtype == np.int64
    assert users.flags.c_contiguous
    assert users.tolist() == expected
    assert kind_of(users) == "int64"
    assert np.array_equal(as_users(users, "int64"), users)


@pytest.mark.parametrize("values", ["ada", ["ada"], ("ada",), np.array(["ada"]), np.array("ada"), [np.str_("ada")]])
def test_strings_become_objects(values: Any) -> None:
    users = as_users(values)
    assert users.dtype == object
    assert users.tolist() == ["ada"]
    assert kind_of(users) == "string"
    assert as_users(users, "string").tolist() == ["ada"]


@pytest.mark.parametrize(("kind", "dtype"), [(None, np.int64), ("int64", np.int64), ("string", object)])
@pytest.mark.parametrize("values", [[], (), np.empty(0), np.empty(0, object)])
def test_no_ids_are_of_the_kind_asked_for(values: Any, kind: Any, dtype: Any) -> None:
    users = as_users(values, kind)
    assert users.shape == (0,)
    assert users.dtype == dtype
    assert bucket_of(users, 4).shape == (0,)


def test_trailing_nuls_tell_users_apart() -> None:
    users = as_users(["a", "a\0", "a\0\0", "\0"])
    assert users.tolist() == ["a", "a\0", "a\0\0", "\0"]
    assert len(distinct(users)[0]) == 4
    assert len(set(bucket_of(users, WHOLE_HASH).tolist())) == 4


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([1.5], None, r"user id 1\.5 \(float64\) is neither an int64 nor a string; cast the column first"),
        ([1, "b"], None, r"user id 1 \(object\)"),
        (["b", 1], None, r"user id 1 \(object\)"),
        ([1, None], None, r"user id None \(object\)"),
        ([None, "a"], None, r"user id None \(object\)"),
        (True, None, r"user id True \(bool\)"),
        ([b"ada"], None, r"user id b'ada'"),
        ([1 << 63], None, r"user id 9223372036854775808 \(uint64\)"),
        ([1 << 64], None, r"user id 18446744073709551616 \(object\)"),
        (np.array([1], np.uint64), None, r"user id 1 \(uint64\)"),
        (b"ada", None, "must be an int64 or string sequence, got bytes"),
        ({1, 2}, None, "must be an int64 or string sequence, got set"),
        (None, None, "must be an int64 or string sequence, got NoneType"),
        (np.array([[1, 2]]), None, r"user ids have shape \(1, 2\)"),
        ([["a"], ["b"]], None, r"user ids have shape \(2, 1\)"),
        ([[1, 2], [3]], None, "not one flat sequence; pass one id per element"),
        (["7"], "int64", "user id '7' is of kind string, but this store holds int64 ids; cast the column to int64"),
        ([7], "string", "user id 7 is of kind int64, but this store holds string ids; cast the column to string"),
    ],
)
def test_another_kind_is_refused(values: Any, kind: Any, message: str) -> None:
    with pytest.raises(UserKindError, match=message):
        as_users(values, kind)


def test_string_ids_have_1_to_255_utf8_bytes() -> None:
    assert MAX_USER_BYTES == 255
    longest = ["x" * 255, "é" * 127 + "x", "日" * 85]
    assert as_users(longest).tolist() == longest
    for text, size in (("", 0), ("x" * 256, 256), ("é" * 128, 256), ("日" * 86, 258)):
        with pytest.raises(InputError, match=f"has {size} UTF-8 bytes; 1 to 255 are allowed") as caught:
            as_users(["fine", text])
        assert not isinstance(caught.value, UserKindError)


def test_a_string_without_utf8_form_is_refused() -> None:
    with pytest.raises(InputError, match=r"user id 'a\\udcff' has no UTF-8 form"):
        as_users(["fine", "a\udcff"])


def test_plain_shows_python_values() -> None:
    assert type(plain(np.int64(5))) is int
    assert plain(np.int64(5)) == 5
    assert plain("5") == "5"


@given(st.one_of(st.lists(INTS), st.lists(TEXTS)))
def test_distinct_ids_ascend_and_rows_lead_back(values: list[Any]) -> None:
    users = as_users(values)
    found, row_of = distinct(users)
    assert found.tolist() == sorted(set(values))
    assert row_of.dtype == np.int64
    assert found[row_of].tolist() == values


@given(st.lists(TEXTS))
@example(["\uffff", "\U00010000"])
def test_strings_sort_as_their_utf8_bytes(values: list[str]) -> None:
    encoded = [text.encode() for text in distinct(as_users(values, "string"))[0]]
    assert encoded == sorted(encoded)


def test_bucket_hash_is_the_one_of_the_iceberg_specification() -> None:
    """Iceberg specification, appendix B: 34 -> 2017239379, "iceberg" -> 1210000089."""
    assert bucket_of(as_users([34]), WHOLE_HASH).tolist() == [2017239379]
    assert bucket_of(as_users(["iceberg"]), WHOLE_HASH).tolist() == [1210000089]
    assert bucket_of(as_users([34]), 16).tolist() == [2017239379 % 16]


@given(st.lists(INTS, min_size=1), st.integers(1, 1 << 20))
def test_bucket_of_integers_is_pyicebergs(values: list[int], n_buckets: int) -> None:
    iceberg: Any = BucketTransform(n_buckets).transform(LongType())
    buckets = bucket_of(as_users(values), n_buckets)
    assert buckets.dtype == np.int64
    assert buckets.tolist() == [iceberg(v) for v in values]


@given(st.lists(TEXTS, min_size=1), st.integers(1, 1 << 20))
@example(["é", "日本", "\U0001f600", "a\0", "\0\0\0\0", "abcd", "abcde", "x" * 255], WHOLE_HASH)
def test_bucket_of_strings_is_pyicebergs(values: list[str], n_buckets: int) -> None:
    iceberg: Any = BucketTransform(n_buckets).transform(StringType())
    assert bucket_of(as_users(values), n_buckets).tolist() == [iceberg(v) for v in values]


def test_a_bucket_depends_on_the_id_alone() -> None:
    """Hashing is vectorised over padded words: a longer neighbour must not reach a shorter id."""
    texts = ["a" * n for n in range(1, 40)]
    alone = [int(bucket_of(as_users(t), WHOLE_HASH)[0]) for t in texts]
    assert bucket_of(as_users(texts), WHOLE_HASH).tolist() == alone
    assert len(set(alone)) == len(texts)
