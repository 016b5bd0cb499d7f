"""What starts quickly: neither the package nor the list of commands loads a heavy library."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("lmdb", "numba", "pandas", "pyarrow", "pyiceberg", "sqlalchemy", "torch", "triton", "zstandard")


@pytest.mark.parametrize(
    "code",
    [
        "import thinrow",
        "import thinrow.examples",
        "import thinrow.cli.main",
        "from click.testing import CliRunner\n"
        "from thinrow.cli.main import cli\n"
        "result = CliRunner().invoke(cli, ['--help'])\n"
        "assert result.exit_code == 0 and 'ingest' in result.output, result.output",
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
