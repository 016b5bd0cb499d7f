"""Set before anything imports torch: with its idle threads spinning, tests on a busy machine take ten times as long.

Nothing here is timed by hypothesis: the first example of a property compiles the kernel that it tests.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
settings.register_profile("thinrow", deadline=None)
settings.load_profile("thinrow")
