"""Programs by context bucket: lowered, verified once, kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from mk.config import Config
from mk.errors import MkError
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
        try:
            splits = SplitPolicy(attention.split_keys, attention.max_splits)
        except ValueError as error:
            raise MkError(f"engine.attention: {error}") from error
        return cls(
            n_sm=config.gpu.sms,
            wave_order=tuple(config.wave_order.waves),
            placement=config.placement.name,
            attention_claimers=schedule.attention_claimers or 0,
            moe_claimers=schedule.moe_claimers or 0,
            claim_ahead=schedule.claim_ahead or 0,
            splits=splits,
        )


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
            program = lower(self._shape(bucket), self.plan.wave_order, self.plan.placement)
            verify(program)
            self._by_bucket[bucket] = program
        return self._by_bucket[bucket]

    def _shape(self, bucket: int) -> StepShape:
        plan = self.plan
        try:
            return StepShape(
                self.geometry,
                self.rows,
                bucket,
                plan.n_sm,
                own_rows=plan.placement == "row_owner",
                attention_claimers=plan.attention_claimers,
                moe_claimers=plan.moe_claimers,
                claim_ahead=plan.claim_ahead,
                splits=plan.splits,
            )
        except ValueError as error:
            raise MkError(f"schedule: {error}") from error
