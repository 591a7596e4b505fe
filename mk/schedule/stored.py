"""A schedule as a file: what a search found, for any run to load with `schedule=search schedule.path=FILE`.

Loading replaces the axes that a search goes over, so the run's resolved configuration says what really runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from mk.errors import MkError
from mk.ring import SLOT_KB, window_for

if TYPE_CHECKING:
    from mk.config import Config


@dataclass(frozen=True, slots=True)
class StoredSchedule:
    """The axes of a schedule. Claimers: 0 = static. window: ring slots outstanding, of any batch size."""

    waves: tuple[str, ...]
    placement: str
    attention_claimers: int
    moe_claimers: int
    claim_ahead: int
    split_keys: int
    max_splits: int
    window: int

    @classmethod
    def of(cls, config: Config, rows: int) -> StoredSchedule:
        """The one that a configuration spells out for steps of so many rows."""
        schedule, attention = config.schedule, config.engine.attention
        return cls(
            tuple(config.wave_order.waves),
            config.placement.name,
            schedule.attention_claimers or 0,
            schedule.moe_claimers or 0,
            schedule.claim_ahead or 2,
            attention.split_keys,
            attention.max_splits,
            window_for(config.engine.ring.windows, rows),
        )

    def save(self, path: Path, comment: str) -> None:
        """comment: where it comes from, a line or several."""
        values = dataclasses.asdict(self) | {"waves": list(self.waves)}
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        path.write_text(lines + yaml.safe_dump(values, sort_keys=False))

    @classmethod
    def load(cls, path: Path) -> StoredSchedule:
        """Raises MkError for a file that is missing or is no schedule, naming what is wrong with it."""
        hint = "experiment=schedule_search writes schedules in its run folder"
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "no such file"
            raise MkError(f"schedule.path={path}: {what}", hint=hint)
        try:
            values = yaml.safe_load(path.read_text())
            found = cls(**{**values, "waves": tuple(values["waves"])})
        except (yaml.YAMLError, TypeError, KeyError, UnicodeDecodeError) as error:
            raise MkError(f"schedule.path={path}: is no schedule ({type(error).__name__})", hint=hint) from error
        numbers = [f.name for f in dataclasses.fields(cls) if f.name not in ("waves", "placement")]
        for name in numbers:
            if type(getattr(found, name)) is not int:
                raise MkError(f"schedule.path={path}: {name}={getattr(found, name)!r} is no integer", hint=hint)
        return found

    def apply(self, config: Config) -> Config:
        """The configuration with this schedule on its axes. Raises MkError for a value that an axis refuses."""
        schedule = dataclasses.replace(
            config.schedule,
            attention_claimers=self.attention_claimers or None,
            moe_claimers=self.moe_claimers or None,
            claim_ahead=self.claim_ahead if self.attention_claimers or self.moe_claimers else None,
        )
        engine = dataclasses.replace(
            config.engine,
            attention=dataclasses.replace(
                config.engine.attention, split_keys=self.split_keys, max_splits=self.max_splits
            ),
            ring=dataclasses.replace(config.engine.ring, window_kb=self.window * SLOT_KB),
        )
        order = dataclasses.replace(config.wave_order, name="custom", waves=list(self.waves))
        path = config.placement.path if self.placement == "sm_map" else None
        placement = dataclasses.replace(config.placement, name=self.placement, path=path)
        return dataclasses.replace(config, schedule=schedule, engine=engine, wave_order=order, placement=placement)
