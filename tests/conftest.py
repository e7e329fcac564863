"""What holds for all tests."""

from __future__ import annotations

import os

# pytest-xdist starts one process for each core: more compute threads in each would only fight for the cores. Set before
# torch is imported, and inherited by the programs that end-to-end tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Models come from the catalogue, from directories, or are built in memory; a test that asks a hub is wrong.
os.environ["HF_HUB_OFFLINE"] = "1"
