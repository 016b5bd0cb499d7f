"""Run one case. ``python -m bench --help`` lists them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from bench.datagen.datasets import DATA
from bench.harness import Options


def main() -> int:
    """Parse, run, print."""
    names = sorted(p.stem for p in (Path(__file__).parent / "cases").glob("*.py") if p.stem != "__init__")
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Run one case; docs/benchmarks.md says what each compares."
    )
    parser.add_argument("case", choices=[*names, "limits"], help="limits: all cases about stores, and their bars")
    parser.add_argument("--quick", action="store_true", help="small data, few rounds: does it run at all")
    parser.add_argument(
        "--json", default="-", metavar="FILE", help="where the JSON object goes; - (default) is the last line of output"
    )
    parser.add_argument("--data", choices=DATA, default="synthetic", help="whose histories (cases about stores)")
    parser.add_argument("--git-file", type=Path, help="with --data git: parquet file of public git histories")
    parser.add_argument("--work", type=Path, help="keep generated data and files of peers here for the next run")
    parser.add_argument("--rounds", type=int, help="interleaved rounds; default: the case's own number")
    for name in ("peers", "newest", "patterns"):
        parser.add_argument(f"--{name}", type=lambda text: tuple(text.split(",")), help="only these, comma-separated")
    args = parser.parse_args()
    asked = {k: v for k, v in vars(args).items() if k not in ("case", "json")}
    module = "bench.limits" if args.case == "limits" else f"bench.cases.{args.case}"
    result = importlib.import_module(module).run(Options(**asked))
    text = json.dumps(result.to_dict())
    if args.json == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(args.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
