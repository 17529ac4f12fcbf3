"""The roles that backends have: which one a pass needs, and what a Selection calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attn_core.decision import Selection
from attn_core.forward import ForwardMode

Role = Literal["prefill", "decode", "verify", "draft", "encode"]

ROLE_OF_MODE: Mapping[ForwardMode, Role] = {
    ForwardMode.EXTEND: "prefill",
    ForwardMode.MIXED: "prefill",
    ForwardMode.DECODE: "decode",
    ForwardMode.TARGET_VERIFY: "verify",
    ForwardMode.DRAFT_DECODE: "draft",
    ForwardMode.DRAFT_EXTEND: "draft",
}
MISSING: Mapping[Role, str] = {
    "verify": "without speculation; select again with --speculative-eagle-topk",
    "draft": "without speculation; select again with --speculative-eagle-topk",
    "encode": "without a vision tower; select again with the model's vision config",
}


def selected(selection: Selection) -> dict[Role, tuple[str, str | None]]:
    """Give each role its name in a Selection's rows, and the backend chosen for it."""
    return {
        "prefill": ("prefill", selection.prefill),
        "decode": ("decode", selection.decode),
        "verify": ("verify", selection.verify),
        "draft": ("draft", selection.draft),
        "encode": ("multimodal", selection.multimodal),
    }
