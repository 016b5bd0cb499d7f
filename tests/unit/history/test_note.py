"""The sealed files that name a store's places outside its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinrow.core.errors import CorruptionError
from thinrow.history import place, tiers
from thinrow.history.recent.redis_link import RedisLocation
from thinrow.storage.s3 import S3Location
from thinrow.storage.sealed import seal


def test_a_place_is_read_back_and_forgotten(tmp_path: Path) -> None:
    location = S3Location.parse("s3://histories/shop")
    assert place.remembered(tmp_path) is None
    place.remember(tmp_path, location)
    assert place.remembered(tmp_path) == location
    place.forget(tmp_path)
    assert place.remembered(tmp_path) is None


def test_a_file_of_another_kind_is_none_of_a_place(tmp_path: Path) -> None:
    place.remember(tmp_path, S3Location.parse("s3://histories/shop"))
    (tmp_path / place.FILE).rename(tmp_path / tiers.FILE)
    with pytest.raises(CorruptionError, match=r"recent\.json"):
        tiers.remembered_tier(tmp_path)


@pytest.mark.parametrize("body", [{}, {"recent": 3}, {"recent": "s3://histories"}])
def test_a_sealed_file_that_names_no_server_is_damaged(tmp_path: Path, body: dict[str, object]) -> None:
    (tmp_path / tiers.FILE).write_bytes(seal(body, 1, "place of recent events"))
    with pytest.raises(CorruptionError, match="it names no Redis server"):
        tiers.remembered_tier(tmp_path)


def test_the_options_of_a_server_are_kept(tmp_path: Path) -> None:
    location = RedisLocation.parse("redis://cache:6379/0?name=shop&durability=always")
    (tmp_path / tiers.FILE).write_bytes(seal({"recent": str(location)}, 1, "place of recent events"))
    assert tiers.remembered_tier(tmp_path) == location
