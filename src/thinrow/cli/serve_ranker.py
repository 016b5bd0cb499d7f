"""``thinrow serve ranker`` and ``thinrow serve local``."""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import store_option
from thinrow.core.errors import InputError

if TYPE_CHECKING:
    from thinrow.serving.online.live import ArmSpec


@click.command()
@store_option
@click.option("--model", type=click.Path(path_type=Path), help="Folder of releases (the newest is followed), or one.")
@click.option(
    "--servers",
    multiple=True,
    metavar="ADDRESS,...",
    help="Replicas of one shard of embedding servers; give more for more shards, in order.  [none: map the rows here]",
)
@click.option("--arms", type=click.Path(path_type=Path), help="TOML of experiment arms, in place of --model.")
@click.option("--salt", default="", help="Of the experiment; with another one users are in other arms.")
@click.option("--log", type=click.Path(path_type=Path), help="Log impressions and outcomes here.")
@click.option("--table", type=click.Path(path_type=Path), help="Join closed requests into this table; made if absent.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65_535), default=8100, show_default=True, help="0: any free one.")
@click.option("--lookup-s", type=click.FloatRange(min=0.001), default=0.05, show_default=True, help="Of one look-up.")
@click.option("--hedge-s", type=click.FloatRange(min=0.0001), help="Ask a replica, too, after so long.  [never]")
@click.option("--lookup-dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option("--fail", is_flag=True, help="Refuse where rows are missing, in place of marking the answer degraded.")
@click.option("--cache", type=click.IntRange(min=0), default=0, show_default=True, help="MB: hot rows and batches.")
@click.option("--prefixes", type=click.IntRange(min=0), default=0, show_default=True, help="MB of kept user states.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Requests ranked together.")
@click.option("--batch-ms", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Wait for more so long.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Batches at once.")
@click.option("--torch-threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of one operation.")
@click.option("--waiting", type=click.IntRange(min=0), default=64, show_default=True, help="Requests that may wait.")
@click.option(
    "--deadline-s", type=click.FloatRange(min=0.001), default=1.0, show_default=True, help="Later is refused."
)
@click.option("--max-candidates", type=click.IntRange(min=1), default=4096, show_default=True, help="Of one request.")
@click.option("--max-body", type=click.IntRange(min=1), default=4, show_default=True, help="MB of one call.")
@click.option("--refresh-s", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Between releases.")
@click.option("--commit-s", type=click.FloatRange(min=0.05), default=60.0, show_default=True, help="Between commits.")
@click.option("--drain-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="From SIGTERM to end.")
@click.option("--say-requests", is_flag=True, help="A line of JSON on standard error for each request.")
def ranker(store_path: Path, model: Path | None, servers: tuple[str, ...], arms: Path | None, **o: Any) -> None:
    """Rank over HTTP, with rows from embedding servers (docs/ranker.md).

    An answer means that its impression is on disk, where there is a log. What cannot be answered in time is refused at
    once. SIGTERM ends it when all is answered.

    \b
    Examples:
      thinrow serve ranker --store S --model releases --servers unix:/run/e0 --servers unix:/run/e1 --log L
      thinrow serve ranker --store S --arms arms.toml --log L --table T --port 8100
    """
    from thinrow.serving.online.app import WebLimits
    from thinrow.serving.online.batcher import BatchLimits
    from thinrow.serving.online.live import ArmSpec, LookupOptions
    from thinrow.serving.online.process import RankerOptions, serve

    if (model is None) == (arms is None):
        raise InputError("name a folder of releases with --model, or arms with --arms")
    if arms is not None and servers:
        raise InputError("--servers goes with --model; with --arms the file names them")
    specs: tuple[ArmSpec, ...]
    if arms is not None:
        specs = read_arms(arms)
    else:
        assert model is not None
        specs = (ArmSpec(model, tuple(tuple(one.split(",")) for one in servers)),)
    serve(
        RankerOptions(
            store_path,
            specs,
            salt=o["salt"],
            log=o["log"],
            table=o["table"],
            host=o["host"],
            port=o["port"],
            refresh_s=o["refresh_s"],
            commit_s=o["commit_s"],
            drain_s=o["drain_s"],
            say_requests=o["say_requests"],
            torch_threads=o["torch_threads"],
            lookups=LookupOptions(
                o["lookup_s"], o["hedge_s"], o["lookup_dtype"], o["fail"], o["prefixes"] << 20, o["cache"] << 20
            ),
            batch=BatchLimits(
                requests=o["batch"],
                wait_s=o["batch_ms"] / 1e3,
                waiting=o["waiting"],
                deadline_s=o["deadline_s"],
                threads=o["threads"],
            ),
            web=WebLimits(body_bytes=o["max_body"] << 20, candidates=o["max_candidates"]),
        )
    )


def read_arms(file: Path) -> tuple[ArmSpec, ...]:
    """Arms of a TOML file: a table an arm, with ``model``, ``share`` and ``servers``.

    Raises:
        InputError: it is no such file.
    """
    from thinrow.serving.online.live import ArmSpec

    try:
        found = tomllib.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise InputError(f"{file} holds no arms in TOML: {e}") from e
    out = []
    for name, arm in found.items():
        known = {"model": str, "share": (int, float), "servers": list}
        wrong = not isinstance(arm, dict) or "model" not in arm or bool(arm.keys() - known.keys())
        if wrong or not all(isinstance(value, known[key]) for key, value in arm.items()):  # type: ignore[arg-type]
            raise InputError(f"{file}: arm {name!r} is {arm}; it has a model, a share, and servers as a list of lists")
        shards = arm.get("servers", [])
        if not all(isinstance(s, list) and s and all(isinstance(a, str) for a in s) for s in shards):
            raise InputError(f"{file}: servers of arm {name!r} are {shards}; give a list of addresses for each shard")
        # As in a shell, the paths are from where it is run.
        out.append(ArmSpec(Path(arm["model"]), tuple(map(tuple, shards)), name, float(arm.get("share", 1))))
    if not out:
        raise InputError(f"{file} has no arm; write a table for each: [control] model = 'releases'")
    return tuple(out)


@click.command()
@store_option
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Folder of releases.")
@click.option("--servers", type=click.IntRange(1), default=4, show_default=True, help="Shards of embedding servers.")
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Processes of each shard.")
@click.option("--log", type=click.Path(path_type=Path), help="Log impressions and outcomes here.")
@click.option("--table", type=click.Path(path_type=Path), help="Join closed requests into this table; made if absent.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65_535), default=8100, show_default=True, help="0: any free one.")
@click.option("--drain-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="From SIGTERM to end.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the servers' sockets.  [a temporary one]")
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
def local(
    store_path: Path,
    model: Path,
    servers: int,
    replicas: int,
    log: Path | None,
    table: Path | None,
    host: str,
    port: int,
    drain_s: float,
    work: Path | None,
    more: tuple[str, ...],
) -> None:
    """Run embedding servers and a ranker on this machine, and start again what ends (docs/ranker.md).

    What follows -- goes to thinrow serve ranker. SIGTERM ends the ranker first, then the servers.

    \b
    Examples:
      thinrow serve local --store S --model releases --servers 4
      thinrow serve local --store S --model releases --servers 2 --replicas 2 --log L -- --batch 1 --hedge-s 0.005
    """
    from thinrow.serving.online.cluster import Cluster, ClusterOptions

    arguments = ["--store", str(store_path), "--host", host, "--port", str(port), "--drain-s", str(drain_s), *more]
    for name, path in (("--log", log), ("--table", table)):
        arguments += [] if path is None else [name, str(path)]
    with tempfile.TemporaryDirectory(prefix="thinrow-") as temporary:
        sockets = Path(temporary) if work is None else work
        sockets.mkdir(parents=True, exist_ok=True)
        Cluster(ClusterOptions(model, servers, replicas, sockets, ranker=arguments)).run()
