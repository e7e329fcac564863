"""What a report holds, before it has a form. Every renderer reads these values and computes none of its own.

Numbers are kept as they were computed; rounding happens in ``kveval.report.wording``. NaN means "cannot be computed
from these rows", None means "not measured".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kveval.gate import ArmVerdict, Divergence, Verdict
    from kveval.stats.retention import Retention

REPORT_VERSION = 1  # of the JSON rendering; report.schema.json describes it


@dataclass(frozen=True)
class Footprint:
    """Bytes of one reading, taken when the whole context was in the cache. One stream, all layers."""

    context: int
    tokens: int
    predicted_bytes: int
    stored_bytes: int
    reserved_bytes: int
    weights_bytes: int
    peak_bytes: int
    start_bytes: int


@dataclass(frozen=True)
class Speed:
    """All stretches of one phase that ended with the same number of tokens in the cache, over all contexts."""

    phase: str  # prefill | ask | decode
    length: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Rate:
    """Tokens computed in so many seconds."""

    tokens: int
    seconds: float
    length: int | None = None  # tokens in the cache; None: over all lengths

    @property
    def tokens_per_s(self) -> float:
        """NaN where no time passed."""
        return self.tokens / self.seconds if self.seconds > 0 else float("nan")


@dataclass(frozen=True)
class Cell:
    """One (length, depth) of a grid. Scores are sums over ``scored`` questions; 0/1 scores make them counts."""

    length: int
    depth: float
    asked: int
    scored: int  # candidate: pairs with both arms scored
    score: float
    baseline_score: float  # over the same questions; of the baseline arm: its own
    discriminative: bool  # False: the baseline answers too little here for a loss to show

    @property
    def loss(self) -> float:
        """Score that the candidate lost against the baseline on the same questions; negative where it gained."""
        return self.baseline_score - self.score


@dataclass(frozen=True)
class Grid:
    """Length x depth of one arm and task. A cell that was never asked is None."""

    arm: str
    task: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cells: tuple[tuple[Cell | None, ...], ...]  # one tuple for each length, in the order of ``depths``


@dataclass(frozen=True)
class LengthRetention:
    """Retention over the questions of one length."""

    length: int
    retention: Retention


@dataclass(frozen=True)
class Coverage:
    """How many of an arm's predicted positions entered the divergence means."""

    positions: int  # rows
    scored: int  # outside planted needles: the PPL ratio is over these
    sampled: int  # of those, with KL and top-1 agreement


@dataclass(frozen=True)
class LostAnswer:
    """A question that the baseline answered better than the candidate."""

    arm: str
    task: str
    context: int
    length: int
    depth: float
    expected: str
    baseline_answer: str
    candidate_answer: str
    prompt_sha256: str


@dataclass(frozen=True)
class CheckRow:
    """One check of the evidence and what it came to for one arm."""

    check: str
    arm: str  # empty: of the whole run
    status: str  # passed | failed | not checked
    detail: str


@dataclass(frozen=True)
class Arm:
    """Everything measured of one arm."""

    name: str
    kv: str
    role: str  # baseline | candidate
    lossy: bool
    bytes_per_token: float  # of a token that is kept, all layers
    asked: int  # over all lengths
    scored: int
    deployed_asked: int  # at the deployed length
    deployed_scored: int
    deployed_score: float  # sum
    verdict: ArmVerdict | None  # None: the baseline
    by_length: tuple[LengthRetention, ...]  # empty: the baseline, or nothing could be paired
    divergence: Divergence | None
    coverage: Coverage | None
    footprints: tuple[Footprint, ...]
    speeds: tuple[Speed, ...]
    prefill: Rate | None  # the whole reading
    decode: Rate | None  # one stream, at the longest length measured
    read_tokens: int  # prompt tokens computed by readings
    question_tokens: int  # tokens computed to ask the questions after them
    read_ratio: float  # read_tokens / sum of the contexts' lengths; NaN without throughput rows
    lost_answers: int
    lost_examples: tuple[LostAnswer, ...]
    pairing_error: str | None  # why the arm's answers could not be paired with the baseline's
    divergence_error: str | None  # why its log-probabilities give no divergence

    @property
    def footprint(self) -> Footprint | None:
        """The largest reading: the one that decides whether the arm fits."""
        return max(self.footprints, key=lambda row: (row.stored_bytes, row.tokens), default=None)

    @property
    def peak_bytes(self) -> int | None:
        return max((row.peak_bytes for row in self.footprints), default=None)

    def retention_at(self, length: int) -> Retention | None:
        """The paired retention at ``length``, None where nothing was paired."""
        return next((row.retention for row in self.by_length if row.length == length), None)


@dataclass(frozen=True)
class Report:
    """A finished run, ready to be rendered."""

    question: str
    setting: str  # model, engine, machine and day on one line
    verdict: Verdict
    notice: str | None  # what the numbers are not about (a run on the probe)
    deployed_tokens: int
    confidence: float
    margin: float | None  # retention that the policy asks for
    arms: tuple[Arm, ...]  # the baseline first
    grids: tuple[Grid, ...]
    checks: tuple[CheckRow, ...]
    not_measured: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]  # model, versions, engine, seeds, hashes, machine: label and value
    command: str
    plan: dict[str, Any]
    manifest: dict[str, Any]
    policy: dict[str, Any]

    @property
    def baseline(self) -> Arm:
        return next(arm for arm in self.arms if arm.role == "baseline")

    @property
    def candidates(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.arms if arm.role == "candidate")
