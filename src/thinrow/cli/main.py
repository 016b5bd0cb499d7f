"""``thinrow``: one command per module. Commands load when they are called, so that ``--help`` is quick."""

from __future__ import annotations

import importlib
import os
import sys
import warnings

import click

from thinrow.core.errors import ThinrowError

#: Command -> (module under thinrow.cli, one line for the list of commands).
COMMANDS = {
    "ingest": ("ingest", "Append events from files, a broker or a table to a store."),
    "sources": ("sources", "Look at event sources, and at what could not be taken in."),
    "outcomes": ("outcomes", "Read outcomes from files, a broker or a table into an outcome log."),
    "compact": ("compact", "Move recent events into the archive."),
    "erase": ("erase", "Erase users, or events of one."),
    "retain": ("retain", "Let go of events that are older, or more, than a policy keeps."),
    "gc": ("gc", "Remove old generations and what killed writers left."),
    "rebucket": ("rebucket", "Rewrite a store to twice as many buckets, or more."),
    "backup": ("backup", "Copy a store while it is written to."),
    "restore": ("restore", "Make a store from a backup."),
    "read": ("read", "Print or export histories as of a time."),
    "backfill": ("backfill", "Give old events values of a column."),
    "schema": ("schema", "Show or change the columns of a store."),
    "verify": ("verify", "Check every byte of a store."),
    "inspect": ("inspect", "Show one user's history, versions and segments."),
    "export": ("export", "Write the events of a store as an Iceberg table."),
    "import-fat-rows": ("import_fat_rows", "Turn fat rows into a store and a table of thin examples."),
    "shadow": ("shadow", "Compare the fat rows of an existing pipeline with the store, difference by difference."),
    "train": ("train", "Train a ranker on the examples of a table."),
    "size": ("size", "Show how large the model of a recipe is, and what a request costs."),
    "dpp": ("dpp", "Share workers among readers of training batches, and watch them."),
    "evaluate": ("evaluate", "Score examples with a checkpoint: NE, AUC, GAUC."),
    "plan": ("plan", "Show the feature plan of a checkpoint, as text or as a picture."),
    "rank": ("rank", "Rank requests with a checkpoint, and log the impressions."),
    "release": ("release", "Write what is served of a checkpoint: vectors for servers, weights for rankers."),
    "rollback": ("rollback", "Make an earlier release the newest again."),
    "serve": ("serve", "Serve histories, embeddings or rankings, logging what was shown."),
    "ab": ("ab", "Compare the arms of an experiment, with intervals."),
    "replay": ("replay", "Rebuild what was served, and compare it with what the rankers read."),
    "demo": ("demo.command", "Run the whole loop on real data: a year of shopping, or a git history."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"thinrow.cli.{COMMANDS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="thinrow")
def cli() -> None:
    """Ultra-long user histories for recommendation models: stored once, rebuilt exactly.

    \b
    First steps:
      thinrow ingest events.parquet --store S --create --schema events.toml
      thinrow compact --store S
      thinrow read 42 --store S --newest 10
    """


def main() -> None:
    """Run the command line; a ThinrowError becomes one line on standard error and exit code 1."""
    # Torch's idle threads spin for milliseconds by default. Where another process has work for the processor, each
    # operation then waits for the scheduler: training took ten times as long beside one busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.formatwarning = lambda message, *_: f"thinrow: {message}\n"
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo(
            "thinrow: interrupted; what the store holds is whole, --help of the command says how to go on", err=True
        )
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except ThinrowError as e:
        click.echo(f"thinrow: {' '.join(str(e).split())}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of our output has seen enough; a second message on closing it would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as e:
        where = f" {e.filename}" if e.filename else ""
        click.echo(f"thinrow: {e.strerror or e}:{where}; check the path, permissions and free space", err=True)
        sys.exit(1)
