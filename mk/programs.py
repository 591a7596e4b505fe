"""Programs by context bucket and kind of sampling: lowered, verified once, kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mk.config import Config
from mk.errors import MkError
from mk.graph import StepShape
from mk.model.geometry import Geometry
from mk.roofline import uniform_experts
from mk.schedule.costs import Costs
from mk.schedule.greedy import Earliest, greedy_order
from mk.schedule.lower import Program, lower
from mk.schedule.placement import OWNING, make_placement
from mk.schedule.sm_map import SmMap
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
    barriers: bool = False  # between waves, in the place of waits for what is read
    costs: Costs | None = None  # with them, list scheduling chooses the order and the SMs (mk/schedule/greedy.py)
    sm_map: SmMap | None = None  # of placement=sm_map

    @classmethod
    def from_config(cls, config: Config) -> Plan:
        """Raises MkError for schedule=greedy on a card without costs, or beside a placement that it has no use for, and
        for a map that is none of the card.
        """
        schedule, attention = config.schedule, config.engine.attention
        greedy = schedule.name == "greedy"
        if greedy and config.gpu.costs is None:
            raise MkError(f"schedule=greedy needs costs, and gpu={config.gpu.name} has none", hint="gpu=h200")
        if greedy and config.placement.name not in OWNING:
            raise MkError(
                f"schedule=greedy places tasks itself, not placement={config.placement.name}",
                hint="placement=row_owner",
            )
        sm_map = None
        if config.placement.name == "sm_map":
            sm_map = SmMap.load(Path(config.placement.path or ""))
            sm_map.require(config.gpu.name, config.gpu.sms)
        return cls(
            n_sm=config.gpu.sms,
            wave_order=tuple(config.wave_order.waves),
            placement=config.placement.name,
            attention_claimers=schedule.attention_claimers or 0,
            moe_claimers=schedule.moe_claimers or 0,
            claim_ahead=schedule.claim_ahead or 0,
            splits=SplitPolicy(attention.split_keys, attention.max_splits),
            barriers=config.engine.handoff.barriers,
            costs=config.gpu.costs if greedy else None,
            sm_map=sm_map,
        )

    def lower(self, geometry: Geometry, rows: int, bucket: int, draws: bool = False) -> Program:
        """The step of `rows` sequences of at most `bucket` keys, not verified. Raises MkError for what cannot be.

        draws: rows may be sampled; a program without is a little faster.
        """
        shape = StepShape(
            geometry,
            rows,
            bucket,
            self.n_sm,
            own_rows=self.placement in OWNING,
            attention_claimers=self.attention_claimers,
            moe_claimers=self.moe_claimers,
            claim_ahead=self.claim_ahead,
            splits=self.splits,
            draws=draws,
        )
        if self.costs is None:
            placer = make_placement(self.placement, shape, self.sm_map)
            return lower(shape, self.wave_order, self.placement, placer, self.barriers)
        order = greedy_order(shape, self.costs, uniform_experts(geometry, rows))
        return lower(shape, order, self.placement, Earliest(shape, self.costs, self.sm_map), self.barriers)


def programs_by_size(geometry: Geometry, sizes: Sequence[int], plan: Plan) -> dict[int, Programs]:
    """The programs of several batch sizes, each with its first one made. Raises MkError for a plan that cannot run."""
    if list(sizes) != sorted(set(sizes)) or not sizes or sizes[0] < 1:
        raise MkError(f"batch sizes {list(sizes)} must ascend from 1 or more")
    found = {size: Programs(geometry, size, plan) for size in sizes}
    for programs in found.values():
        programs.get(SMALLEST_BUCKET)  # refused here, not in the middle of a decode
    return found


@dataclass(slots=True)
class Programs:
    """The programs of one model, batch size and plan."""

    geometry: Geometry
    rows: int
    plan: Plan
    _made: dict[tuple[int, bool], Program] = field(default_factory=dict)

    def get(self, bucket: int, draws: bool = False) -> Program:
        """The program with room for contexts up to `bucket`; `draws`: that samples rows.

        Raises MkError (a VerifyError) if the plan cannot run.
        """
        if (bucket, draws) not in self._made:
            self._made[bucket, draws] = self.make(bucket, draws)
        return self._made[bucket, draws]

    def make(self, bucket: int, draws: bool) -> Program:
        """As `get`, and keeps nothing."""
        program = self.plan.lower(self.geometry, self.rows, bucket, draws)
        verify(program)
        return program

    def put(self, bucket: int, draws: bool, program: Program) -> None:
        """Keep one that was made elsewhere, and verified."""
        self._made.setdefault((bucket, draws), program)

    def fit(self, current: Program | None, keys: int, draws: bool) -> Program:
        """`current` where it is of this batch, holds `keys` keys and samples as asked, else the one to change to."""
        if (
            current is not None
            and current.shape.rows == self.rows
            and keys <= current.shape.bucket
            and draws == current.shape.draws
        ):
            return current
        return self.get(max(bucket_for(keys), current.shape.bucket if current else 0), draws)
