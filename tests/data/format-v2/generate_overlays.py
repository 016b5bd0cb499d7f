"""Makes ``overlays/`` beside it: archives of format version 2 with overlays, tombstones and hide-lists, of integer and
of string users, and what they must read as.

Run once, as ``generate.py``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from thinrow.core.units import NEVER
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import read_everything
from thinrow.storage.objects import LocalObjects
from thinrow.testing.fuzz.world import sound_worlds

HERE = Path(__file__).parent


def contents(archive: Archive) -> dict[str, Any]:
    """Everything that the newest generation holds, as JSON, and the watermarks of its users' tombstones."""
    generation = archive.pin()
    columns = [c for c in stored_columns(generation.schema) if c.group != "keys"]
    held = read_everything(generation, generation.users(), columns, ReadStats())
    values = {n: c.to_arrow().to_pylist() for n, c in held.columns.items()}
    values["blob"] = [v.hex() for v in values["blob"]]
    return {
        "users": held.users.tolist(),
        "offsets": held.offsets.tolist(),
        "event_ts": held.event_ts.tolist(),
        "arrival": held.arrival.tolist(),
        "hidden_from": [None if h == NEVER else h for h in held.hidden_from.tolist()],
        "erased": generation.tombstones(held.users).watermark().tolist(),
        "columns": values,
    }


def main() -> None:
    """Write the files that the newest generation of each needs."""
    shutil.rmtree(HERE / "overlays", ignore_errors=True)
    for world in sound_worlds()[:2]:
        folder = HERE / "overlays" / world.kind
        for name in world.live:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(world.files[name])
        expected = contents(Archive(LocalObjects(folder)))
        text = json.dumps(expected, ensure_ascii=False, separators=(",", ":"))
        (HERE / "overlays" / f"{world.kind}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
