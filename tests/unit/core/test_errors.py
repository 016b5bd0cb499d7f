"""The error tree: as drawn at the top of its module, and messages that say where the damage is."""

from __future__ import annotations

import re

import pytest

from thinrow.core import errors
from thinrow.core.errors import CorruptionError, MissingExtraError, ThinrowError, VersionMismatch


def drawn_tree() -> dict[str, tuple[str, ...]]:
    """Class -> its bases, from the drawing in the docstring: the parent, then the built-in in parentheses."""
    path: list[str] = []
    bases: dict[str, tuple[str, ...]] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r" {4}((?:[│ ] {3})*)(├── |└── )?(\w+)(?: \((\w+)\))?(?: |$)", line)
        if not found:
            continue
        depth = len(found[1]) // 4 + 1 if found[2] else 0
        del path[depth:]
        bases[found[3]] = (*path[-1:], *([found[4]] if found[4] else []))
        path.append(found[3])
    return bases


def real_tree() -> dict[str, tuple[str, ...]]:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, BaseException)]
    bases = {c.__name__: tuple(b.__name__ for b in c.__bases__) for c in classes}
    return bases | {"ThinrowError": ()}


def test_the_tree_is_the_one_drawn() -> None:
    assert drawn_tree() == real_tree()
    assert errors.ThinrowError.__bases__ == (Exception,)


def test_the_drawing_is_read_whole() -> None:
    tree = drawn_tree()
    assert len(tree) >= 15
    assert tree["VersionMismatch"] == ("CorruptionError",)
    assert tree["InputError"] == ("ThinrowError", "ValueError")


@pytest.mark.parametrize("kind", [CorruptionError, VersionMismatch])
def test_corruption_names_file_user_and_column(kind: type[CorruptionError]) -> None:
    error = kind("CRC differs", file="segments/3.thin", user="ada", column="price")
    assert (error.what, error.file, error.user, error.column) == ("CRC differs", "segments/3.thin", "ada", "price")
    assert str(error) == (
        "corrupt data (file segments/3.thin, user 'ada', column 'price'): CRC differs; "
        "run `thinrow verify` on the store to list all damage"
    )


def test_corruption_names_only_what_is_known() -> None:
    assert "(file f)" in str(CorruptionError("x", file="f"))
    assert "(file f, user 0)" in str(CorruptionError("x", file="f", user=0))
    assert "(file f, column 'c')" in str(CorruptionError("x", file="f", column="c"))


def test_a_missing_extra_names_the_extra_and_is_an_import_error() -> None:
    error = MissingExtraError("duckdb", "demo")
    assert isinstance(error, ImportError)
    assert isinstance(error, ThinrowError)
    assert str(error) == "duckdb is not installed; run: pip install 'thinrow[demo]'"
