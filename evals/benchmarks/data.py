"""A benchmark's rows: from `data_dir/<file>.jsonl`, or from the hub where there is one; counted and hashed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mk.config import BenchmarkConfig
from mk.errors import MkError


def load_rows(
    config: BenchmarkConfig,
    data_dir: Path,
    fields: Sequence[str],
    keep: Callable[[Mapping[str, Any]], bool] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of a set, and what is known of them: source, rows, sha256, whether that is the one in the configuration.

    The hash is of the values of `fields` alone, as canonical JSON, so that it does not depend on where they came from.
    keep: which rows belong to the benchmark; the others are neither counted nor hashed.

    Raises MkError where neither place has the set, naming the path, the fields and the hub id; for a row without a
    field; and for another number of rows or another hash than the configuration's.
    """
    path = data_dir / f"{config.file}.jsonl"
    if path.exists():
        rows, source = _parse(path), path.name
    else:
        rows, source = _from_hub(config, path, fields), f"{config.hub}:{config.split}"
    for number, row in enumerate(rows, start=1):
        missing = [field for field in fields if field not in row]
        if missing:
            raise MkError(f"{source}: row {number} has no {', '.join(missing)}", hint=f"a row has {', '.join(fields)}")
    if keep is not None:
        rows = [row for row in rows if keep(row)]
    values = [[row[field] for field in fields] for row in rows]
    digest = hashlib.sha256(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
    if config.count is not None and len(rows) != config.count:
        raise MkError(
            f"{source} has {len(rows)} rows, benchmark={config.name} has {config.count}",
            hint="benchmark.count=null takes another number",
        )
    if config.sha256 is not None and digest != config.sha256:
        raise MkError(
            f"{source} has sha256 {digest}, benchmark={config.name} has {config.sha256}",
            hint=f"benchmark.sha256={digest} takes these rows",
        )
    return rows, {"source": source, "rows": len(rows), "sha256": digest, "hash_known": config.sha256 is not None}


def _parse(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MkError(f"{path} cannot be read: {error}", hint="a file of JSON lines in UTF-8") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise MkError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(row, Mapping):
            raise MkError(f"{path}:{number}: not a JSON object")
        rows.append(dict(row))
    return rows


def _from_hub(config: BenchmarkConfig, path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    where = f"no data for benchmark={config.name}: {path} does not exist"
    hint = f"put a JSON object a line there, with {', '.join(fields)}"
    if config.hub is None:
        raise MkError(where, hint=hint)
    hint += f"; or let the hub's {config.hub} be reached (HF_TOKEN for one that asks for consent)"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise MkError(f"{where}, and HF_HUB_OFFLINE=1 keeps from the hub's {config.hub}", hint=hint)
    from datasets import load_dataset

    try:
        if config.files is None:
            found = load_dataset(config.hub, config.subset, split=config.split)
        else:
            files = [f"hf://datasets/{config.hub}/{name}" for name in config.files]
            found = load_dataset("json", data_files={str(config.split): files}, split=config.split)
    except Exception as error:  # connection, consent, a set that is gone: the library raises many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MkError(f"{where}, and the hub's {config.hub} cannot be read: {reason}", hint=hint) from error
    return [dict(row) for row in found]
