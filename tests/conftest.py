"""Set before anything imports torch: with its idle threads spinning, tests on a busy machine take ten times as long."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
