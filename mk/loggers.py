"""Where rows go besides rows.jsonl. A logger is never the only place a result is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mk.config import Config, resolved
from mk.errors import MkError


class Logger(Protocol):
    def log(self, row: Mapping[str, Any]) -> None:
        """Take one row as its JSON object."""

    def close(self) -> None:
        """Flush; nothing is logged afterwards."""


class NullLogger:
    def log(self, row: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class WandbLogger:
    """Weights & Biases. All its files lie in the run folder; offline needs neither account nor network."""

    def __init__(self, cfg: Config, folder: Path) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        try:
            self._run = wandb.init(
                project=cfg.logger.project,
                name=folder.name,
                mode="online" if cfg.logger.mode == "online" else "offline",
                dir=folder,
                config=resolved(cfg),
                settings=settings,
            )
        except wandb.Error as error:
            raise MkError(f"W&B cannot start: {str(error).splitlines()[0]}", hint="logger.mode=offline") from error

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(row))

    def close(self) -> None:
        self._run.finish()


def make_logger(cfg: Config, folder: Path) -> Logger:
    return WandbLogger(cfg, folder) if cfg.logger.name == "wandb" else NullLogger()
