"""By which costs attn_core weighs and picks inside of an engine that is timed."""

from __future__ import annotations

import json
import math
import pathlib
from collections import Counter

from benchmarks.engines.configurations import NEW_TOKENS, Configuration

CASES = "cases"  # as a workload: the requests of the configuration's cases


def variables(
    profile: pathlib.Path | None, workload: str, configuration: Configuration
) -> dict[str, str]:
    """Return the variables that attn_core reads.

    profile: a file of `attn tune`. workload: JSON, a file of it, or "cases".
    """
    if workload == CASES:
        workload = json.dumps(workload_of(configuration))
    result = {"ATTN_PROFILE": str(profile.resolve()) if profile else "", "ATTN_WORKLOAD": workload}
    return {name: value for name, value in result.items() if value}


def by_costs(profile: pathlib.Path | None, workload: str) -> dict[str, str]:
    """Return the same for a record: the profile's name, and the workload as it was named."""
    result = {"profile": profile.name if profile else "", "workload": workload}
    return {name: value for name, value in result.items() if value}


def workload_of(configuration: Configuration) -> dict[str, object]:
    """Return what requests look like: those of the cases, lengths within 10 %.

    A step is timed while a request generates its first NEW_TOKENS tokens.
    """
    every = (length for case in configuration.cases for length in case.lengths)
    lengths = Counter(round(2 ** (round(4 * math.log2(n)) / 4)) for n in every)
    return {
        "prompts": {str(length): n for length, n in sorted(lengths.items())},
        "requests": {str(case.batch): 1 for case in configuration.cases},
        "output": NEW_TOKENS,
    }
