"""Settings of the tests as a whole."""

from __future__ import annotations

from hypothesis import settings


# No deadline for a single example: the machine is shared, and an example that takes 2 ms may wait for 300.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
