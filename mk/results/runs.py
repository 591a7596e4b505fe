"""Run folders: what ran, where, from which code, and the rows that came out.

A folder `runs/<date>-<experiment>-<hash>` holds config.yaml (what `--cfg job` prints), meta.json (hash, commit,
environment), rows.jsonl and the same as rows.csv, raw.jsonl (what a row's figures were computed from, a line a row,
named by its sha256), and whatever figures the experiment adds. A run of several configurations keeps each in
`configs/<hash>.yaml`.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mk.compose import to_yaml
from mk.config import Config, config_hash, resolved
from mk.errors import MkError
from mk.model.files import folder_digest, model_files
from mk.results.kept import NAMES_FILES, TEXTS, host_free, leaves_of, model_name, sampling_text
from mk.results.loggers import Logger, make_logger
from mk.results.recompute import figures, with_told
from mk.results.rows import SCHEMA, Row, read_raw
from mk.results.sources import ROOT, commit_source_hash, recent_commits, source_hash

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "hydra-core", "omegaconf")


class RunFolder:
    """A folder of this run alone. A context manager: leaving it closes the logger."""

    def __init__(self, path: Path, config: Config, meta: dict[str, Any], logger: Logger) -> None:
        self.path = path
        self.config = config
        self.meta = meta
        self._logger = logger
        self._files = (path / "rows.jsonl", path / "raw.jsonl")
        self._final: tuple[int, ...] = ()  # sizes of the files without drafts; empty where there are none

    @classmethod
    def create(cls, cfg: Config, root: str | Path | None = None) -> RunFolder:
        """Make the folder under `root` (default `cfg.run_dir`) and write config.yaml and meta.json.

        Raises MkError when the folder cannot be written.
        """
        digest = config_hash(cfg)
        now = datetime.now(UTC)
        path = _unique_folder(Path(root or cfg.run_dir), f"{now:%Y-%m-%d}-{cfg.experiment.name}-{digest[:8]}")
        commit, dirty = git_commit()
        meta = {
            "config_hash": digest,
            "commit": commit,
            "dirty": dirty,
            "source_hash": source_hash(),
            "command": command_line(sys.argv),
            "started": now.isoformat(timespec="seconds"),
            "environment": environment(),
        }
        (path / "config.yaml").write_text(to_yaml(cfg))
        (path / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        return cls(path, cfg, meta, make_logger(cfg, path))

    def row(self, *, engine: str, dtype: str, context: list[int], checks: dict[str, bool], **more: Any) -> Row:
        """A row of this run: the given fields, the configuration's axes, and where and from which code it ran.

        engine: the one that ran. more: any other field of `Row`; it goes before what the configuration says.
        """
        cfg, env = self.config, self.meta["environment"]
        values: dict[str, Any] = {
            "schema": SCHEMA,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "experiment": cfg.experiment.name,
            "engine": engine,
            "model": model_name(cfg.model.name, cfg.model.path),
            "model_window": cfg.model.window if cfg.model.window != "hf" else None,
            "weights": cfg.weights.name,
            "gpu": cfg.gpu.name,
            "dtype": dtype,
            "batch": cfg.batch.size,
            "context": context,
            "routing": cfg.routing.name,
            "schedule": cfg.schedule.name,
            "wave_order": cfg.wave_order.name,
            "placement": cfg.placement.name,
            "sampling": sampling_text(cfg.sampling.temperature, cfg.sampling.top_k, cfg.sampling.top_p),
            "commit": self.meta["commit"] + "-dirty" * self.meta["dirty"],
            "config_hash": self.meta["config_hash"],
            "source_hash": self.meta["source_hash"],
            "command": self.meta["command"],
            "seeds": seeds_of(resolved(cfg)) or None,
            "data": data_of(resolved(cfg)) or None,
            "build_hash": None,
            "checks": checks,
            "env": {
                "python": env["python"],
                "torch": env["packages"]["torch"],
                "platform": env["platform"],
                "device": ", ".join(env["gpus"]) or env["cpu"],
            },
        }
        return Row.from_json(values | more)

    def under(self, cfg: Config) -> RunFolder:
        """The same folder for another configuration: of one variant of several in a run."""
        if cfg == self.config:
            return self
        digest = config_hash(cfg)
        (self.path / "configs").mkdir(exist_ok=True)
        (self.path / "configs" / f"{digest[:16]}.yaml").write_text(to_yaml(cfg))
        return RunFolder(self.path, cfg, {**self.meta, "config_hash": digest}, self._logger)

    def measured(self, raw: Mapping[str, Any], *, engine: str, dtype: str, context: list[int], **more: Any) -> Row:
        """A row as `row` makes it, whose figures and verdicts are what its raw data gives (mk/results/recompute.py)."""
        row = self.row(engine=engine, dtype=dtype, context=context, **{"checks": {}, **more})
        return dataclasses.replace(row, **figures(row, json.loads(_line(raw))))

    def append_row(self, row: Row, raw: Mapping[str, Any] | None = None) -> Row:
        """Write the row at once, so that an aborted run keeps its rows, tell the logger, and return it as written.

        raw: what its figures were computed from, as JSON values; figures that it does not give are added as they are.
        Drafts are dropped.
        """
        self._drop_drafts()
        row = self._write(row, raw)
        self._logger.log(row.to_json())
        return row

    def draft(self, rows: Sequence[tuple[Row, Mapping[str, Any]]]) -> None:
        """Write rows whose measurement goes on, in the place of the last drafts: an aborted run keeps these.

        `append_row` of this object begins where they began.
        """
        self._drop_drafts()
        self._final = tuple(path.stat().st_size if path.exists() else 0 for path in self._files)
        for row, raw in rows:
            self._write(row, raw)

    def _drop_drafts(self) -> None:
        for path, size in zip(self._files, self._final, strict=False):
            if path.exists():
                os.truncate(path, size)
        self._final = ()

    def _write(self, row: Row, raw: Mapping[str, Any] | None) -> Row:
        rows, raws = self._files
        if raw is not None:
            line = _line(with_told(row, raw))
            row = dataclasses.replace(row, raw_sha256=hashlib.sha256(line.encode()).hexdigest())
            with raws.open("a") as file:
                file.write(line + "\n")
        row = row.sealed()
        with rows.open("a") as file:
            file.write(row.line())
        return row

    def raw_of(self, row: Row) -> dict[str, Any]:
        """What a row of this run was written with."""
        return read_raw(self.path / "raw.jsonl")[row.raw_sha256 or ""]

    def close(self, failed: bool = False) -> None:
        """Write the rows as a table too, rows.csv, and close the logger."""
        if (self.path / "rows.jsonl").exists():
            write_csv(self.path / "rows.jsonl", self.path / "rows.csv")
        self._logger.close(failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)
        if kind is not None and self._files[0].exists():
            print(f"the rows so far are in {self.path}", file=sys.stderr)


def _line(raw: Mapping[str, Any]) -> str:
    """Of a raw.jsonl file. Raises ValueError for a number that is not finite."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _unique_folder(root: Path, name: str) -> Path:
    """A new folder `name`, `name-2`, ... under `root`: mkdir is atomic, so two runs never share one."""
    path = root
    try:
        root.mkdir(parents=True, exist_ok=True)
        for suffix in itertools.count(1):
            path = root / (name if suffix == 1 else f"{name}-{suffix}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    except OSError as error:
        raise MkError(f"cannot make the run folder {path}: {error.strerror}", hint="run_dir=<folder>") from error
    return path


def git_commit() -> tuple[str, bool]:
    """(commit of this code, whether the sources differ from its); ("none", False) outside a repository."""
    head = next(iter(recent_commits(1, ROOT)), "none")
    return head, head != "none" and source_hash(ROOT) != commit_source_hash(head, ROOT)


def write_csv(rows: Path, table: Path) -> None:
    """A column a field that any row has, in the rows' order; lists and dicts as JSON."""
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    columns = list(dict.fromkeys(name for row in found for name in row))
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in found:
            writer.writerow({k: json.dumps(v) if isinstance(v, (dict, list)) else v for k, v in row.items()})


def command_line(argv: list[str]) -> str | None:
    """The command that repeats this run, folders of this host left out; None where no command line started it."""
    if Path(argv[0]).name != "run.py":
        return None

    def local(argument: str) -> str:
        key, equals, value = argument.partition("=")
        return argument if key.rpartition(".")[2] in TEXTS else f"{key}{equals}{host_free(value)}"

    return shlex.join(["python", "run.py", *map(local, argv[1:])])


def seeds_of(values: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Every seed of a resolved configuration by its key."""
    found: dict[str, int] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= seeds_of(value, f"{prefix}{name}.")
        elif name.endswith("seed") and value is not None:
            found[prefix + name] = value
    return found


def data_of(values: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of each file that one of `NAMES_FILES` names, by its key; of a checkpoint's folder that of what is read to
    tell it from others. What is not on this host, such as a hub id, has none."""
    leaves = dict(leaves_of(values))
    paths = {key: Path(leaves[key]) for key in NAMES_FILES if leaves.get(key)}
    return {key: _content(path, _state(path)) for key, path in paths.items() if path.exists()}


def _state(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times, by which a file that was written again is read again."""
    states = [(of.name, of.stat()) for of in (model_files(path) if path.is_dir() else [path])]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in states)


@functools.lru_cache(maxsize=64)  # each row of a run asks for it
def _content(path: Path, state: tuple[tuple[str, int, int], ...]) -> str:
    return folder_digest(path) if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()


def environment() -> dict[str, Any]:
    """What the figures depend on besides the code: python, platform, cpu, gpus, package versions. No host name."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "kernel": platform.release(),  # in meta.json only: a row names what figures depend on, not a host
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else [],
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
