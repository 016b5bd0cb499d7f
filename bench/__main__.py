"""Run one case. ``python -m bench --help`` lists them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path


def main() -> int:
    """Parse, run, print."""
    names = sorted(p.stem for p in (Path(__file__).parent / "cases").glob("*.py") if p.stem != "__init__")
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("case", choices=names)
    parser.add_argument("--quick", action="store_true", help="small data, few rounds: does it run at all")
    parser.add_argument(
        "--json", default="-", metavar="FILE", help="where the JSON object goes; - (default) is the last line of output"
    )
    args = parser.parse_args()
    result = importlib.import_module(f"bench.cases.{args.case}").run(quick=args.quick)
    text = json.dumps(result.to_dict())
    if args.json == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(args.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
