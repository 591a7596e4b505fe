"""What an experiment does not read of a configuration it refuses: its rows would name it all the same."""

from __future__ import annotations

from collections.abc import Sequence

from mk.compose import load_config
from mk.config import Config
from mk.errors import MkError

PLANNED = ("schedule", "wave_order", "placement")  # of an experiment that lowers no step
STEP = ("model", "weights", *PLANNED, "routing", "batch", "engine", "sampling")  # and of one that has steps of its own


def require_router(cfg: Config) -> None:
    """Raises MkError for a routing mode, where experts are what the model's router chooses."""
    if cfg.routing.name != "checkpoint":
        raise MkError(
            f"{cfg.experiment.name} leaves routing to the router, not to routing={cfg.routing.name}",
            hint="routing=checkpoint",
        )


def require_kernel(cfg: Config, name: str | None = None) -> None:
    """Raises MkError for another engine, where the kernel is timed. name: of the experiment that was asked for, where
    it is another one."""
    if cfg.engine.name not in ("auto", "cuda"):
        raise MkError(
            f"{name or cfg.experiment.name} times the kernel, not engine={cfg.engine.name}", hint="engine=cuda"
        )


def require_greedy(cfg: Config) -> None:
    """Raises MkError for tokens that are to be drawn, where the likeliest is taken, or none."""
    if cfg.sampling.temperature > 0:
        raise MkError(f"{cfg.experiment.name} draws no tokens by sampling={cfg.sampling.name}", hint="sampling=greedy")


def require_untouched(cfg: Config, groups: Sequence[str]) -> None:
    """Raises MkError for one of the groups that is not as the experiment has it by itself."""
    plain = load_config([f"experiment={cfg.experiment.name}"])
    for group in groups:
        if getattr(cfg, group) != getattr(plain, group):
            hint = f"{group}={getattr(plain, group).name}, and no other key of {group}"
            raise MkError(f"{cfg.experiment.name} has a {group} of its own", hint=hint)
