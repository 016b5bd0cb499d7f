"""What is said of a checkpoint in its ``checkpoint.json``, and which checkpoints a folder holds.

A checkpoint may rest on another: a delta says the step and the CRC of its base, so a chain holds together in one order
only. ``chain`` follows it from the full one on; where a link is missing or another one, nothing of it is loaded.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinrow.checkpoints.scratch import scratch
from thinrow.checkpoints.tensorfile import crc_of_file, write_bytes
from thinrow.core.errors import CorruptionError, InputError, NewerFormatError, ObjectNotFound, StoreError
from thinrow.core.routing import Routing
from thinrow.storage import swap
from thinrow.storage.objects import sync_directory
from thinrow.storage.sealed import crc_of_body, seal, unseal

FORMAT = 2
TENSORS, MANIFEST = "tensors.safetensors", "checkpoint.json"
REMEDY = "restore it from a copy or load an earlier step"
MAX_STEP = 10**18 - 1

_NAME = re.compile(r"step-(\d{8,18})")
_KEYS = {"files", "meta", "step"}


@dataclass(frozen=True, slots=True)
class Version:
    """Which checkpoint: two of one step are told apart by what they hold.

    Attributes:
        step: number of training steps done.
        crc32c: of what ``checkpoint.json`` says, and so of every byte.
    """

    step: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Attributes:
    path: the checkpoint's folder.
    step: number of training steps done.
    meta: JSON of the caller.
    files: of each other file its ``bytes`` and ``crc32c``.
    base: what it is a delta on; None for a full one.
    routing: of the shards that its tables are in; None where they are with the other tensors.
    """

    path: Path
    step: int
    meta: Mapping[str, Any]
    files: Mapping[str, Mapping[str, int]]
    base: Version | None = None
    routing: Routing | None = None

    @property
    def version(self) -> Version:
        """Which checkpoint it is."""
        return Version(self.step, crc_of_body(self._body()))

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"files": dict(self.files), "meta": dict(self.meta), "step": self.step}
        if self.base is None and self.routing is None:
            return body
        base = None if self.base is None else {"crc32c": self.base.crc32c, "step": self.base.step}
        # In hexadecimal: not every reader of JSON has integers of 64 bits.
        routing = None if self.routing is None else [f"{start:016x}" for start in self.routing.starts]
        return body | {"base": base, "routing": routing}

    def sealed(self) -> bytes:
        """The bytes of ``checkpoint.json``. Raises InputError where ``meta`` is not JSON."""
        if not isinstance(self.meta, Mapping):
            raise InputError(f"meta is a {type(self.meta).__name__}; it must be a dict with string keys")
        body = self._body()
        # The oldest format that says it all, so that earlier releases read what they can.
        return seal(body, 1 if set(body) == _KEYS else FORMAT, "checkpoint")

    def write(self) -> None:
        """Make ``checkpoint.json``, its bytes durable."""
        write_bytes(self.path / MANIFEST, [self.sealed()])

    def check_sizes(self) -> None:
        """Raises CorruptionError or ObjectNotFound unless all files are there, of the sizes stated."""
        for name, stated in self.files.items():
            file = self.path / name
            try:
                size = file.stat().st_size
            except FileNotFoundError:
                raise _missing(file) from None
            if size != stated["bytes"]:
                raise CorruptionError(f"it has {size} bytes, not {stated['bytes']}", file=str(file), remedy=REMEDY)

    def checked(self, name: str) -> Path:
        """The path of a file, all bytes of which were checked. Raises CorruptionError or ObjectNotFound."""
        file = self.path / name
        try:
            if crc_of_file(file) != self.files[name]["crc32c"]:
                raise CorruptionError("its CRC does not match", file=str(file), remedy=REMEDY)
        except FileNotFoundError:
            raise _missing(file) from None
        return file

    def chain(self) -> list[Manifest]:
        """The full checkpoint, what rests on it, ..., this one, all files there.

        Raises:
            ObjectNotFound: a link is missing.
            CorruptionError: a link is not what the next one was written on.
        """
        links = [self]
        while (base := links[-1].base) is not None:
            path = self.path.parent / name_of(base.step)
            of = f"step {links[-1].step} is a delta on step {base.step}"
            if not path.is_dir():
                raise ObjectNotFound(f"{of}, which is not in {path.parent}; {REMEDY}")
            found = read(path)
            if found.version != base or base.step >= links[-1].step:
                what = f"{of} with CRC {base.crc32c:08x}, and this one's is {found.version.crc32c:08x}"
                raise CorruptionError(what, file=str(path), remedy=REMEDY)
            if found.routing != self.routing:
                raise CorruptionError(f"{of}, which has other shards", file=str(path), remedy=REMEDY)
            links.append(found)
        for link in links:
            link.check_sizes()
        return links[::-1]


def read(path: Path) -> Manifest:
    """What is said of the checkpoint at ``path``. Raises CorruptionError, ObjectNotFound or NewerFormatError."""
    file = path / MANIFEST
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(file) from None
    try:
        body = unseal(data, FORMAT, "checkpoint", str(file))
    except CorruptionError as e:
        raise CorruptionError(e.what, file=e.file, remedy=REMEDY) from e
    if set(body) not in (_KEYS, {*_KEYS, "base", "routing"}):
        raise CorruptionError("it is not the JSON of a checkpoint", file=str(file), remedy=REMEDY)
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != body["step"]:
        raise CorruptionError(f"it describes step {body['step']}", file=str(file), remedy=REMEDY)
    try:
        return _manifest(path, body)
    except (KeyError, ValueError, TypeError, AttributeError, InputError) as e:
        raise CorruptionError(f"it is not the JSON of a checkpoint: {e!r}", file=str(file), remedy=REMEDY) from e


def _manifest(path: Path, body: Mapping[str, Any]) -> Manifest:
    base, starts = body.get("base"), body.get("routing")
    numbers = [body["step"]]
    for name, stated in body["files"].items():
        numbers += stated["bytes"], stated["crc32c"]
        if Path(name).name != name:
            raise ValueError(f"file {name!r} is not beside it")
    if base is not None:
        numbers += base["step"], base["crc32c"]
    if not all(type(number) is int and number >= 0 for number in numbers) or TENSORS not in body["files"]:
        raise ValueError(f"files {sorted(body['files'])}, numbers {numbers}")
    return Manifest(
        path,
        body["step"],
        dict(body["meta"].items()),
        body["files"],
        None if base is None else Version(**base),
        None if starts is None else Routing(tuple(int(start, 16) for start in starts)),
    )


def frozen(step: int, meta: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``meta`` as it is now. Raises InputError where it is not JSON."""
    copied: dict[str, Any] = json.loads(Manifest(Path(), step, meta, {}).sealed())["body"]["meta"]
    return copied


def version_of(path: str | Path) -> Version:
    """Which checkpoint is at ``path``. Raises CorruptionError, ObjectNotFound or NewerFormatError."""
    return read(Path(path)).version


def linked(manifest: Manifest, folder: Path, step: int, meta: Mapping[str, Any]) -> Path:
    """``folder/step-<step>`` of the same files and base, other ``meta``; durable, and files are linked, not copied.

    Raises:
        StoreError: the medium refuses.
    """
    path = folder / name_of(step)
    with told(step, folder), scratch(folder) as temporary:
        temporary.mkdir()
        for name in manifest.files:
            os.link(manifest.path / name, temporary / name)
        Manifest(temporary, step, frozen(step, meta), manifest.files, manifest.base, manifest.routing).write()
        sync_directory(temporary)
        put_in_place(temporary, path)
    return path


def name_of(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def is_named(path: Path) -> bool:
    """Whether ``path`` is a folder named as a checkpoint."""
    return bool(_NAME.fullmatch(path.name)) and path.is_dir()


def in_place(folder: Path) -> list[int]:
    """Steps of the entries of ``folder`` that are named as checkpoints, ascending."""
    found = [_NAME.fullmatch(p.name) for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    return sorted(int(m[1]) for m in found if m and m[0] == name_of(int(m[1])))


def whole(folder: Path) -> dict[int, set[int]]:
    """Step -> the steps that it rests on and itself, of the checkpoints that look whole, ascending."""
    out: dict[int, set[int]] = {}
    links: dict[int, Manifest] = {}
    for step in in_place(folder):
        try:
            found = read(folder / name_of(step))
            found.check_sizes()
        except NewerFormatError:
            out[step] = {step}
            continue
        except (CorruptionError, ObjectNotFound):
            continue
        # A base is earlier, so it has been looked at.
        below = None if found.base is None else links.get(found.base.step)
        if found.base is None:
            out[step] = {step}
        elif below is not None and (below.version, below.routing) == (found.base, found.routing):
            out[step] = {step, *out[below.step]}
        else:
            continue
        links[step] = found
    return out


def check_base(folder: Path, base: Version, step: int, routing: Routing | None) -> Manifest:
    """What is said of ``base``. Raises InputError unless it is in ``folder`` and a delta of ``step`` can rest on it."""
    path = folder / name_of(base.step)
    try:
        found = read(path)
        found.check_sizes()
    except (CorruptionError, ObjectNotFound) as e:
        raise InputError(f"a delta on step {base.step}, which is not whole in {folder}: {e}; save a full one") from e
    if found.version != base:
        raise InputError(f"a delta on {base}, but {path} is {found.version}; save a full one")
    if base.step >= step:
        raise InputError(f"step {step} cannot be a delta on step {base.step}; pass a base that is earlier")
    if found.routing != routing:
        raise InputError(f"a delta by {routing} on step {base.step}, which has {found.routing}; save a full one")
    return found


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename ``temporary`` to ``path``, durably. What was there before is at ``temporary`` then, or gone."""
    while True:
        try:
            temporary.rename(path)
            break
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        # No rename replaces a folder that holds files.
        if swap.folders(temporary, path):
            break
        # Here nothing swaps two folders at once: the old one goes first, and who is killed now leaves neither.
        remove(path)
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """Take the checkpoint away in one rename, so that nobody sees half of it; nothing happens where there is none."""
    with scratch(path.parent) as gone, suppress(FileNotFoundError):
        path.rename(gone)


def drop_older(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to ``step`` remove all but the newest ``keep`` and those that they rest on."""
    chains = {s: links for s, links in whole(folder).items() if s <= step}
    kept = sorted(chains)[-keep:]
    needed = {link for s in kept for link in chains[s]}
    if len(chains) > keep:
        for s in in_place(folder):
            if s < kept[0] and s not in needed:
                remove(folder / name_of(s))


@contextmanager
def told(step: int, folder: Path) -> Iterator[None]:
    """What the operating system refuses, as a StoreError that says what is left."""
    try:
        yield
    except OSError as e:
        raise StoreError(
            f"cannot save step {step} in {folder}: {e.strerror or e}; earlier checkpoints are as they were, "
            "free space or check permissions and save again"
        ) from e


def _missing(file: Path) -> ObjectNotFound:
    return ObjectNotFound(f"{file} is missing; {REMEDY}")
