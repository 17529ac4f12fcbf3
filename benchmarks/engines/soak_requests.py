"""The requests of a soak: drawn from a seed, and what came of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

ENDS = ("length", "stop", "abort", "cached_tokens", "prompt_tokens", "new_tokens")
EOS = 2
VOCABULARY = 16384


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: its tokens, how it may end, and the seconds after which it is aborted."""

    ids: list[int]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    abort_after_s: float | None = None


@dataclass(kw_only=True)
class Served:
    """What came of the requests of a soak; answers are (prompt, new tokens)."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class Workload:
    """Draws requests from a seed."""

    def __init__(self, seed: int, vocabulary: int, longest: int = 2000) -> None:
        self.generator = random.Random(seed)
        self.vocabulary = vocabulary
        self.longest = longest
        self.prefixes = [self._tokens(longest * (i + 1) // 8) for i in range(8)]

    def draw(self) -> Request:
        """Return the next request; half of them begin with a part of a shared prefix."""
        ids = self._tokens(self._length() // 4 + 1)
        if self.generator.random() < 0.5:
            prefix = self.generator.choice(self.prefixes)
            ids = prefix[: self.generator.randint(1, len(prefix))] + ids
        stops: tuple[int, ...] = ()
        if self.generator.random() < 0.3:  # one of 16 tokens ends it
            stops = tuple(range(self.generator.randrange(16), self.vocabulary, 16))
        aborts = self.generator.random() < 0.1
        return Request(
            ids=ids,
            max_new_tokens=self.generator.choice((1, 2, 7, 16, 40, 100, 200)),
            stop_token_ids=stops,
            abort_after_s=self.generator.random() * 0.5 if aborts else None,
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.generator.randrange(3, self.vocabulary) for _ in range(count)]

    def _length(self) -> int:
        return int(self.longest ** self.generator.random())  # as many short as long


def named(ids: list[int], vocabulary: int = VOCABULARY) -> list[int]:
    """Return the names of tokens in SGLang's input_token_logprobs.

    SGLang names the vocabulary's last token 0. It clips what is no token, the hashes of images, one
    token too early (_process_input_token_logprobs, 0.5.14 to 0.5.17). The logprob is that of the
    last token itself.
    """
    return [token if token < vocabulary - 1 else 0 for token in ids]


def note(request: Request, out: dict[str, Any], served: Served) -> None:
    """Count an answer, keep it for the reference, and check that it ended as it should."""
    meta, ids = out["meta_info"], list(out["output_ids"])
    reason = meta["finish_reason"]["type"]
    served.counts[reason] = served.counts.get(reason, 0) + 1
    served.counts["cached_tokens"] += meta.get(
        "cached_tokens", 0
    )  # absent where it was aborted early
    served.counts["prompt_tokens"] += len(request.ids)
    served.counts["new_tokens"] += len(ids)
    complete = len(ids) == request.max_new_tokens
    stopped = bool(ids) and ids[-1] in (*request.stop_token_ids, EOS)
    as_asked = {
        "length": complete,
        "stop": bool(request.stop_token_ids) and stopped,
        "abort": request.abort_after_s is not None,
    }
    if not as_asked.get(reason, False):
        served.unexpected.append(f"{reason} after {len(ids)} of {request.max_new_tokens} tokens")
    elif ids:
        served.answers.append((request.ids, ids))
