"""Settings of the tests as a whole."""

from __future__ import annotations

import os


# Before anything reads them: no model hub, no notices, one thread per process (two cores are shared by several).
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings  # noqa: E402


# No deadline for a single example: the machine is shared, and an example that takes 2 ms may wait for 300.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
