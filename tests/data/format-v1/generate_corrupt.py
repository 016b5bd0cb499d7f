"""Makes ``corrupt/`` beside it: files of the archive ``int64``, each damaged in one way that a reader must find.

Run once, as ``generate.py``. A name says which file it stands for and what is wrong with it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

HERE = Path(__file__).parent


def flipped(data: bytes, at: int) -> bytes:
    """The same with the lowest bit of one byte changed."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def main() -> None:
    """Write each damaged file, and ``corrupt.json``: for each, the file of the archive that it stands for."""
    archive, target = HERE / "int64", HERE / "corrupt"
    target.mkdir(exist_ok=True)
    segment = min(archive.glob("segments/*/*.seg"), key=lambda p: p.stat().st_size)
    manifest = next(archive.glob("manifests/*.json"))
    data = segment.read_bytes()
    place, length = struct.unpack_from("<QI", data, len(data) - 32)
    sections = json.loads(data[place : place + length])["sections"]
    middle = {name: offset + n // 2 for name, (offset, n, _) in sections.items() if n}
    made = {
        "head.seg": flipped(data, 3),
        "tail.seg": flipped(data, len(data) - 20),
        "meta.seg": flipped(data, place + length // 2),
        "keys.seg": flipped(data, middle["group:keys"]),
        "item.seg": flipped(data, middle["group:item"]),
        "index.seg": flipped(data, middle["pieces"]),
        "directory.seg": flipped(data, middle["stripes.directory"]),
        "cut.seg": data[: len(data) // 2],
        "empty.seg": b"",
        "longer.seg": data + b"\0",
        "manifest.json": flipped(manifest.read_bytes(), manifest.stat().st_size // 2),
        "manifest-cut.json": manifest.read_bytes()[:-5],
    }
    for name, damaged in made.items():
        (target / name).write_bytes(damaged)
    stands_for = {n: str((segment if n.endswith(".seg") else manifest).relative_to(archive)) for n in made}
    (HERE / "corrupt.json").write_text(json.dumps(stands_for, indent=1) + "\n")


if __name__ == "__main__":
    main()
