"""A history that git wrote is read as it was made; one that cannot be replayed is refused with a remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from thinrow.cli.demo import git_log
from thinrow.cli.demo.git_log import ACTION_NAMES, CommitLog, read_log
from thinrow.core.errors import InputError
from thinrow.testing.git_repo import Commit, delete, make_repo, rename, run_git, write

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

ANN, BOB = "Ann@Example.org", "bob@example.org"
ODD = 'tab\there/new\nline/ä "q" \\ 文.tar.GZ'
BYTES = b"latin/caf\xe9.txt"


def changes_of(log: CommitLog) -> list[list[tuple[str, bytes, bytes | None]]]:
    rows = [
        (ACTION_NAMES[a], log.paths[p], log.paths[o] if o >= 0 else None)
        for a, p, o in zip(log.action.tolist(), log.path.tolist(), log.old_path.tolist(), strict=True)
    ]
    return [rows[a:b] for a, b in zip(log.offsets[:-1].tolist(), log.offsets[1:].tolist(), strict=True)]


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    commits = [
        Commit(ANN, 1_000, 1_000, (write("a.py"), write("lib/b.py"), write(ODD)), zone="+0530"),
        # Made before the first commit, taken long after it.
        Commit(BOB, 500, 9_000, (write("a.py", 1), rename("lib/b.py", "lib/deep/c.py"))),
        Commit(ANN, 9_500, 9_500, (write(BYTES),), branch="topic", base="main"),
        Commit(BOB, 9_600, 9_600, (delete("a.py"),), zone="-0330"),
        Commit(BOB, 9_700, 9_700, (), merges="topic"),
        # Nothing changes.
        Commit(BOB, 9_800, 9_800, ()),
        # Made after it was taken.
        Commit(ANN, 12_000, 10_000, (write(ODD, 1),)),
    ]
    return make_repo(tmp_path_factory.mktemp("git") / "repo", commits)


def test_commits_come_in_order_of_arrival_with_their_changes(repo: Path) -> None:
    log = read_log(repo, 100)
    odd = ODD.encode()
    assert [sorted(c) for c in changes_of(log)] == [
        [("add", b"a.py", None), ("add", b"lib/b.py", None), ("add", odd, None)],
        [("modify", b"a.py", None), ("rename", b"lib/deep/c.py", b"lib/b.py")],
        [("add", BYTES, None)],
        [("delete", b"a.py", None)],
        [("modify", odd, None)],
    ]
    assert log.authors == [
        "ann@example.org",
        "bob@example.org",
        "ann@example.org",
        "bob@example.org",
        "ann@example.org",
    ]
    assert log.author_ts.tolist() == [1_000_000, 500_000, 9_500_000, 9_600_000, 10_000_000]
    assert log.commit_ts.tolist() == [1_000_000, 9_000_000, 9_500_000, 9_600_000, 10_000_000]
    assert log.zone_minutes.tolist() == [330, 0, 0, -210, 0]
    assert (log.is_capped, log.n_clamped) == (False, 1)
    shown = run_git(repo, "log", "--no-merges", "--format=%H").decode().split()
    assert log.hashes == [h for h in shown[::-1] if h in set(log.hashes)]


def test_the_newest_are_kept(repo: Path) -> None:
    log = read_log(repo, 3)
    # The empty commit is one of the three.
    assert changes_of(log) == [[("delete", b"a.py", None)], [("modify", ODD.encode(), None)]]
    assert log.is_capped
    assert not read_log(repo, 6).is_capped


def test_reading_in_pieces_changes_nothing(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_log(repo, 100)
    monkeypatch.setattr(git_log, "_CHUNK_BYTES", 3)
    assert changes_of(read_log(repo, 100)) == changes_of(whole)


def test_settings_of_the_user_change_nothing(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_log(repo, 100)
    settings = "[log]\nshowRoot = false\nshowSignature = true\n[diff]\nrenames = false\nrelative = true\n"
    (tmp_path / "config").write_text(settings + "[core]\nquotePath = true\n[i18n]\nlogOutputEncoding = latin1\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    # As in a hook of another repository.
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert changes_of(read_log(repo, 100)) == changes_of(whole)


def test_a_bare_repository_and_a_folder_inside_serve(repo: Path, tmp_path: Path) -> None:
    run_git(tmp_path, "clone", "--quiet", "--bare", str(repo), "bare.git")
    assert changes_of(read_log(tmp_path / "bare.git", 100)) == changes_of(read_log(repo, 100))
    (repo / "inside").mkdir(exist_ok=True)
    assert changes_of(read_log(repo / "inside", 100)) == changes_of(read_log(repo, 100))


def test_a_clone_without_contents_is_read_without_fetching_them(repo: Path, tmp_path: Path) -> None:
    run_git(tmp_path, "clone", "--quiet", "--bare", str(repo), "source.git")
    run_git(tmp_path / "source.git", "config", "uploadpack.allowFilter", "true")
    run_git(
        tmp_path, "clone", "--quiet", "--no-checkout", "--filter=blob:none", f"file://{tmp_path}/source.git", "thin"
    )
    shutil.rmtree(tmp_path / "source.git")
    assert changes_of(read_log(tmp_path / "thin", 100)) == changes_of(read_log(repo, 100))


def test_what_cannot_be_replayed_is_refused(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="nowhere is not a folder; pass a git checkout"):
        read_log(tmp_path / "nowhere", 10)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(InputError, match=r"is no git repository that git can read \(fatal: not a git repository"):
        read_log(tmp_path, 10)
    run_git(tmp_path, "init", "--quiet", "empty")
    with pytest.raises(InputError, match="has no commit yet; commit something"):
        read_log(tmp_path / "empty", 10)
    run_git(tmp_path, "clone", "--quiet", "--depth=2", f"file://{repo}", "shallow")
    with pytest.raises(InputError, match=r"is a shallow clone.*git fetch --unshallow"):
        read_log(tmp_path / "shallow", 10)
    with pytest.raises(InputError, match="max_commits=0; it must be 1 or more"):
        read_log(repo, 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="git was not found on the PATH"):
        read_log(repo, 10)


def test_a_damaged_repository_is_told(repo: Path, tmp_path: Path) -> None:
    run_git(tmp_path, "clone", "--quiet", "--bare", "--no-hardlinks", str(repo), "bare.git")
    first = read_log(repo, 100).hashes[0]
    # A pack within the repository would be left packed.
    packs = [p.rename(tmp_path / p.name) for p in (tmp_path / "bare.git" / "objects" / "pack").glob("*.pack")]
    for pack in packs:
        run_git(tmp_path / "bare.git", "unpack-objects", "-q", stdin=pack.read_bytes())
    (tmp_path / "bare.git" / "objects" / first[:2] / first[2:]).unlink()
    with pytest.raises(InputError, match=r"git log of .* failed .*; run there: git fsck"):
        read_log(tmp_path / "bare.git", 100)


def header(made: str, taken: str, email: str = "a@b", name: str = "A") -> bytes:
    return b"\x01" + "\x01".join(["0" * 40, made, taken, email, name]).encode()


@pytest.mark.parametrize(
    ("made", "taken", "expected"),
    [
        ("5 +0000", "7 +0000", (5_000, 7_000, 0)),
        ("-5", "7", (0, 7_000, 1)),
        ("9", "7", (7_000, 7_000, 1)),
        ("5", "99999999", (5_000, 1_000_000, 1)),
        ("99999999999999999999", "99999999999999999999", (0, 0, 1)),
        ("", "7", (7_000, 7_000, 0)),
        ("", "", (0, 0, 1)),
    ],
)
def test_dates_that_cannot_be_are_put_right(made: str, taken: str, expected: tuple[int, int, int]) -> None:
    parser = git_log._Parser()
    parser.read([header(made, taken), b"\nM", b"a"])
    log = parser.log(10, 1_000_000)
    assert (log.author_ts[0], log.commit_ts[0], log.n_clamped) == expected


def test_who_wrote_it_is_always_an_id() -> None:
    parser = git_log._Parser()
    long = "ü" * 200 + "@example.org"
    cases = [("", "No Mail"), (" Mixed@Case.ORG ", "x"), ("", ""), (long, "x")]
    for email, name in cases:
        parser.read([header("1", "1", email, name), b"\nT", b"a"])
    parser.read([header("1", "1").replace(b"a@b", b"caf\xe9@b"), b"\nC100", b"a", b"b"])
    log = parser.log(10, 1_000_000)
    assert log.authors == [r"caf\xe9@b", "ü" * 127, "()", "mixed@case.org", "(No Mail)"]
    assert log.zone_minutes.tolist() == [0] * 5
    assert [ACTION_NAMES[a] for a in log.action] == ["add", "type", "type", "type", "type"]
    assert np.array_equal(log.old_path, np.full(5, -1))
