"""The kernel behind the built-in server, asked a benchmark on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.eval_rig import CHECKS, run

CARD = ["benchmark=nano_code", "engine=cuda", "prefill=triton", "gpu=h200", "batch.size=8", "experiment.limit=24"]


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", ["greedy", "top_p"])
def test_nano_code_through_the_kernel(sampling: str, tmp_path: Path, figure: Any) -> None:
    runs = 2 if sampling == "top_p" else 1
    ran = run(tmp_path, *CARD, f"sampling={sampling}", f"experiment.runs={runs}")
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.engine == "cuda" and ran.row.answers == 24 * runs
    assert all(sample.completion.token_ids and sample.completion.prompt_ids for sample in ran.samples)
    speed = f"{ran.row.tok_s or 0:.0f} tokens/s in {ran.row.wall_s:.1f} s"
    figure(f"nano_code, {sampling}: score {ran.row.score:.3f}, {speed}")
