"""What a generation did, round by round; recorded only inside `record_generation()`."""

import json
import os
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["GenerationReport", "RequestRecord", "RoundRecord", "active_report", "record_generation"]

active_report: ContextVar["GenerationReport | None"] = ContextVar("hf_dspark_report", default=None)


@dataclass(slots=True)
class RoundRecord:
    """One round after the prefill: tokens gained, drafts sent to the target, drafts accepted, and c_k of each draft sent (or None)."""

    tokens: int
    drafted: int
    accepted: int
    confidence: list[float] | None = None

    @property
    def verified(self) -> int:
        """Drafts whose outcome is known: those accepted and the first rejected. What follows a stop was never decided."""
        rejected = self.accepted < self.drafted and self.tokens == self.accepted + 1
        return self.accepted + rejected


@dataclass(slots=True)
class RequestRecord:
    """One request. Times in seconds; `missing_context_tokens`: tokens in the cache that the draft never saw; `draft_failure`: its cause."""

    prompt_tokens: int
    new_tokens: int = 0
    rounds: list[RoundRecord] = field(default_factory=list)
    time_to_first_token_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    total_seconds: float = 0.0
    missing_context_tokens: int = 0
    draft_failure: str | None = None

    def append_to(self, path: str | os.PathLike) -> None:
        """Appends this record as one line of JSON to the file at `path`."""
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


@dataclass(slots=True)
class GenerationReport:
    """The requests of every generate() with a draft inside one `record_generation()`; a request's record ends with the request."""

    requests: list[RequestRecord] = field(default_factory=list)

    @property
    def rounds(self) -> list[RoundRecord]:
        """The rounds of all requests, in order."""
        return [round_ for request in self.requests for round_ in request.rounds]

    @property
    def tokens_per_round(self) -> float:
        """tau: tokens gained a round, the target's own included; nan without a round."""
        rounds = self.rounds
        return sum(round_.tokens for round_ in rounds) / len(rounds) if rounds else float("nan")

    @property
    def conditional_acceptance(self) -> list[float]:
        """For each draft position, the share accepted of those decided, that is, whose predecessors were all accepted."""
        rounds = self.rounds
        depth = max((round_.verified for round_ in rounds), default=0)
        decided = [sum(round_.verified > k for round_ in rounds) for k in range(depth)]
        return [sum(round_.accepted > k for round_ in rounds) / decided[k] for k in range(depth)]

    @property
    def confidence_outcomes(self) -> list[list[tuple[float, bool]]]:
        """For each draft position, (c_k, accepted) of every decided draft: what calibration is fitted on."""
        rounds = [round_ for round_ in self.rounds if round_.confidence is not None]
        depth = max((round_.verified for round_ in rounds), default=0)
        return [[(r.confidence[k], r.accepted > k) for r in rounds if r.verified > k] for k in range(depth)]

    def seconds(self, part: str) -> float:
        """Seconds of all requests in "target", "draft", "total", "rest" (neither model) or until the "first_token"."""
        if part == "rest":
            return self.seconds("total") - self.seconds("target") - self.seconds("draft")
        names = {"target": "target_seconds", "draft": "draft_seconds", "total": "total_seconds", "first_token": "time_to_first_token_seconds"}
        if part not in names:
            raise ValueError(f"part must be one of {sorted([*names, 'rest'])}, got {part!r}")
        return sum(getattr(request, names[part]) for request in self.requests)


@contextmanager
def record_generation():
    """Records every generate() with a DSpark draft inside this context (and thread) into the yielded [`GenerationReport`]."""
    report = GenerationReport()
    token = active_report.set(report)
    try:
        yield report
    finally:
        active_report.reset(token)
