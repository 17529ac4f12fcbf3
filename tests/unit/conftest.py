"""Bound the number of random examples."""

import os

from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples every time, so that a change is judged by the change; `nox -s full` draws new.
settings.register_profile("default", max_examples=60, derandomize=True, **COMMON)
settings.register_profile("random", max_examples=300, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
