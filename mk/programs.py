"""Programs by context bucket: lowered, verified once, kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from mk.config import Config
from mk.graph import StepShape
from mk.model.geometry import Geometry
from mk.schedule.lower import Program, lower
from mk.splits import SplitPolicy
from mk.verify import verify

SMALLEST_BUCKET = 256


def bucket_for(keys: int) -> int:
    """The smallest power of two, at least 256, that covers a context of `keys` tokens. It sizes lists, nothing else."""
    return max(SMALLEST_BUCKET, 1 << (keys - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step is lowered from, the model, the batch and the bucket apart."""

    n_sm: int
    wave_order: tuple[str, ...]
    placement: str
    attention_claimers: int = 0
    moe_claimers: int = 0
    claim_ahead: int = 2
    splits: SplitPolicy = SplitPolicy()

    @classmethod
    def from_config(cls, config: Config) -> Plan:
        schedule, attention = config.schedule, config.engine.attention
        return cls(
            n_sm=config.gpu.sms,
            wave_order=tuple(config.wave_order.waves),
            placement=config.placement.name,
            attention_claimers=schedule.attention_claimers or 0,
            moe_claimers=schedule.moe_claimers or 0,
            claim_ahead=schedule.claim_ahead or 0,
            splits=SplitPolicy(attention.split_keys, attention.max_splits),
        )

    def lower(self, geometry: Geometry, rows: int, bucket: int) -> Program:
        """The step of `rows` sequences of at most `bucket` keys, not verified. Raises MkError for what cannot be."""
        shape = StepShape(
            geometry,
            rows,
            bucket,
            self.n_sm,
            own_rows=self.placement == "row_owner",
            attention_claimers=self.attention_claimers,
            moe_claimers=self.moe_claimers,
            claim_ahead=self.claim_ahead,
            splits=self.splits,
        )
        return lower(shape, self.wave_order, self.placement)


@dataclass(slots=True)
class Programs:
    """The programs of one model, batch size and plan."""

    geometry: Geometry
    rows: int
    plan: Plan
    _by_bucket: dict[int, Program] = field(default_factory=dict)

    def get(self, bucket: int) -> Program:
        """The program with room for contexts up to `bucket`. Raises MkError (a VerifyError) if the plan cannot run."""
        if bucket not in self._by_bucket:
            program = self.plan.lower(self.geometry, self.rows, bucket)
            verify(program)
            self._by_bucket[bucket] = program
        return self._by_bucket[bucket]
