"""The bars on several data sets side by side, as a Markdown table, from what ``limits`` wrote with ``--json FILE``.

::

    python -m bench limits --data retail --json retail.json
    python -m bench.table synthetic.json retail.json git.json

A cell is the worst ratio that was measured for the bar, bold where it misses it::

    | `single` `vs_*.p50` | at least 1 | 1.2 | **0.8** | 1.1 |
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """One line a bar, one column a result of ``limits``, in that order; all results have the same bars.

    Raises:
        SystemExit: the results are of other versions of the bars.
    """
    bars = [r["figures"]["bars"] for r in results]
    keys = [[(b["case"], b["ratios"], b["required"]) for b in some] for some in bars]
    if any(k != keys[0] for k in keys):
        raise SystemExit("the files hold other bars each; run `python -m bench limits` for all of them anew")
    names = [_name(r) for r in results]
    lines = [f"| bar | required | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for i, (case, ratios, required) in enumerate(keys[0]):
        # A pattern's alternatives are set apart by a sign that would end a cell.
        shown = " or ".join(f"`{r}`" for r in ratios.split("|"))
        lines.append(f"| `{case}` {shown} | {required} | {' | '.join(_cell(some[i]) for some in bars)} |")
    return "\n".join(lines)


def _name(result: Mapping[str, Any]) -> str:
    parameters: Mapping[str, Any] = next((p for p in result["parameters"].values() if "events" in p), {})
    name = parameters.get("data", "synthetic")
    return f"{name}, {parameters['events']:,} events" if "events" in parameters else str(name)


def _cell(bar: Mapping[str, Any]) -> str:
    if bar["measured"] is None:
        return "not measured"
    text = f"{bar['measured']:.3g}"
    return f"**{text}**" if bar["met"] is False else text


def main(files: Sequence[str]) -> int:
    """Print the table of some files."""
    if not files:
        sys.stderr.write("usage: python -m bench.table FILE...  (what `python -m bench limits --json FILE` wrote)\n")
        return 2
    sys.stdout.write(table([json.loads(Path(f).read_text()) for f in files]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
