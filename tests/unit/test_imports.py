"""What starts quickly: neither the package nor the help of a command loads a heavy library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from thinrow.cli.main import COMMANDS

HEAVY = ("lmdb", "numba", "pandas", "pyarrow", "pyiceberg", "sqlalchemy", "torch", "triton", "zstandard")
_HELP = """
from click.testing import CliRunner
from thinrow.cli.main import cli
result = CliRunner().invoke(cli, {})
assert result.exit_code == 0 and "Usage" in result.output, result.output
"""


@pytest.mark.parametrize(
    "code",
    [
        "import thinrow",
        "import thinrow.examples",
        "import thinrow.cli.main",
        _HELP.format(["--help"]),
        *(_HELP.format([name, "--help"]) for name in COMMANDS),
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    report = f"\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n", f"loaded: {done.stdout}"


def test_every_name_of_the_package_loads() -> None:
    import thinrow
    import thinrow.examples

    for package in (thinrow, thinrow.examples):
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = package.nothing
