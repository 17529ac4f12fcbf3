"""Which of the distributions that carry a backend's kernels it loads."""

from __future__ import annotations

from attn_core.errors import BackendError
from attn_core.libraries import installed, shortfall, used


def chosen(name: str, group: str) -> str:
    """Return the distribution of an any-of group that is used here.

    Raises BackendError where none is: the backend `name` was created without select().
    """
    found = installed([group])
    wanted = used(group, found)
    if wanted is None:
        raise BackendError(
            f"{name} needs {group}, here: {shortfall(group, found)}; install the one that "
            "`attn doctor` names"
        )
    return wanted.name
