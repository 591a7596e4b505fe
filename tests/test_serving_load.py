"""experiment=serving: what its client sees, the figures that follow, and both engines on a CPU, vLLM by a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import load, serving
from experiments.load_client import Answer, Client
from experiments.load_figures import base_of, figures, percentile, raw_load
from experiments.load_report import ONCE
from experiments.settings.serving import Workload
from mk.compose import load_config
from mk.errors import MkError
from mk.results.promote import promote
from mk.results.rows import Row, read_rows
from mk.results.sources import ROOT
from mk.sampling import SamplingParams
from tests.engine_rig import interpreted
from tests.promotion import committed, edit, folder_of, problems, repository, require_kept
from tests.server_rig import TOKENIZER
from tests.server_rig import serving as serve

__all__ = ["committed", "repository"]

SITE = Path(__file__).resolve().parent / "fake_vllm"
SMALL = [
    "experiment=serving",
    "model=nano",
    "gpu=cpu",
    "engine=interpreter",
    "prefill=torch",
    "wave_order=default",
    "server=default",
    "server.slots=2",
    "server.batches=[1]",
    "server.context=256",
    "batch.size=2",
    "experiment.fixed.requests=4",
    "experiment.fixed.prompt=20",
    "experiment.fixed.tokens=6",
    "experiment.aime.requests=3",
    "experiment.aime.prompt=9",
    "experiment.aime.scale=0.001",
]
NO_ROW = Row.__new__(Row)


def run(root: Path, *overrides: str) -> tuple[int, list[Row]]:
    status = serving.main(load_config([*SMALL, f"run_dir={root}", *overrides]))
    return status, read_rows(folder_of(root) / "rows.jsonl")


# ---- the workload ----


def test_lengths_are_seeded_and_have_the_mean() -> None:
    aime = Workload(requests=30, prompt=192, tokens=10440, spread=0.5, scale=0.25)
    found = load.lengths(aime, 0)
    assert found == load.lengths(aime, 0) != load.lengths(aime, 1)
    assert sum(found) == 30 * 2610 and len(set(found)) > 25 and min(found) > 0
    assert np.std(np.log(found)) == pytest.approx(0.5, rel=0.3)
    assert load.lengths(Workload(requests=3, prompt=1, tokens=512, spread=0, scale=1), 0) == [512] * 3


def test_every_engine_is_asked_the_same_and_warmed_with_something_else() -> None:
    workload = Workload(requests=6, prompt=12, tokens=5, spread=0.5, scale=1)
    asked = load.bodies(workload, 1000, 3, SamplingParams(1.0, top_p=0.9))
    assert asked == load.bodies(workload, 1000, 3, SamplingParams(1.0, top_p=0.9))
    assert load.digest(asked) != load.digest(load.bodies(workload, 1000, 4, SamplingParams(1.0, top_p=0.9)))
    assert len({tuple(body["prompt"]) for body in asked}) == 6 and all(len(body["prompt"]) == 12 for body in asked)
    assert all(body["ignore_eos"] and body["top_p"] == 0.9 and "top_k" not in body for body in asked)
    longest, own = load.warming(workload, 1000, 3, 4, SamplingParams(1.0))
    totals = {len(body["prompt"]) + body["max_tokens"] for body in longest}
    assert totals == {load.longest_of(workload, 3)} == {12 + max(body["max_tokens"] for body in asked)}
    assert len({body["max_tokens"] for body in longest}) == 4  # so they end one after the other
    assert [len(body["prompt"]) for body in own] == [12] * 8
    assert {body["temperature"] for body in [*longest, *own]} == {1.0}  # steps that draw are other programs
    begun = {tuple(body["prompt"][:4]) for body in asked}
    assert not {tuple(body["prompt"][:4]) for body in [*longest, *own]} & begun


@pytest.mark.parametrize("tokens", (1, 2, 40, 512))
def test_warming_answers_last_until_all_prompts_are_in(tokens: int) -> None:
    workload = Workload(requests=8, prompt=30, tokens=tokens, spread=0, scale=1)
    longest, own = load.warming(workload, 1000, 0, 8, SamplingParams())
    assert all(body["prompt"] and body["max_tokens"] >= 1 for body in [*longest, *own])
    assert all(len(body["prompt"]) + body["max_tokens"] <= 30 + tokens for body in [*longest, *own])
    shortest = min(body["max_tokens"] for body in longest)
    assert shortest >= min(load.TOGETHER_TOKENS, (30 + tokens) // 2)


def test_a_workload_meets_no_program_that_its_warming_did_not() -> None:
    workload = Workload(requests=6, prompt=200, tokens=70, spread=0.1, scale=1)  # past a bucket's 256 keys
    engine = interpreted(4)

    def lowered() -> dict[int, set[tuple[int, bool]]]:
        return {size: set(programs._made) for size, programs in engine.programs.items()}

    with serve(engine=engine, policy={"chunk": 32, "prefill": "interleave", "steps_between": 8}) as served:
        client, fresh = Client(f"{served.url}/v1", 30), lowered()
        for wave in load.warming(workload, engine.geometry.vocab, 0, 4, SamplingParams()):
            client.drive(load.COMPLETIONS, wave, 4, lambda _: None)
        warm = lowered()
        client.drive(
            load.COMPLETIONS, load.bodies(workload, engine.geometry.vocab, 0, SamplingParams()), 4, lambda _: None
        )
    assert lowered() == warm and all((512, False) in warm[size] - fresh[size] for size in (1, 2, 4))


# ---- figures ----


def answer(sent: float, arrivals: list[tuple[float, int]], prompt: int = 3) -> Answer:
    return Answer(sent, arrivals, prompt, sum(tokens for _, tokens in arrivals))


def two_answers() -> dict[str, Any]:
    """One from 10 to 11 s, of which 0.8 s of tokens; one from 10.5 to 12."""
    first = answer(10.0, [(10.2, 1), (10.4, 1), (11.0, 3)])
    second = answer(10.5, [(11.0, 1), (12.0, 1)])
    return raw_load([first, second], [5, 2], 2)


def test_figures_of_a_timeline() -> None:
    found = figures(NO_ROW, json.loads(json.dumps(two_answers())))
    assert found["wall_s"] == 2.0 and found["tok_s"] == pytest.approx(7 / 2.0)
    assert (found["answers"], found["usage_prompt_tokens"], found["usage_completion_tokens"]) == (2, 6, 7)
    assert found["ttft_ms"] == pytest.approx(350.0) and found["ttft_p99_ms"] == pytest.approx(497.0)
    # gaps: 200 once, then 600 ms that brought three tokens, and 1000
    assert (found["itl_p50_ms"], found["itl_p99_ms"], found["itl_most_ms"]) == (200.0, 1000.0, 1000.0)
    assert found["tpot_ms"] == pytest.approx((200.0 + 1000.0) / 2)
    assert found["active_batch"] == pytest.approx((0.8 + 1.0) / 1.8)
    assert found["checks"] == {"tokens_as_asked": True, "in_flight_within_batch": True}


def test_verdicts_fail() -> None:
    raw = two_answers()
    assert not figures(NO_ROW, raw | {"asked": [5, 3]})["checks"]["tokens_as_asked"]
    assert not figures(NO_ROW, raw | {"parallel": 1})["checks"]["in_flight_within_batch"]
    with pytest.raises(ValueError, match="did not take and generate as many tokens"):
        figures(NO_ROW, raw | base_of(raw | {"tokens": [5, 3]}))
    slow = {"last_s": [1.0, 4.0]}
    assert figures(NO_ROW, raw | slow | base_of(raw))["ratio"] == pytest.approx(2.0)


def test_percentiles_are_of_all_gaps() -> None:
    values = np.random.default_rng(0).integers(1, 50, 999)
    counted = np.unique(values, return_counts=True)
    for percent in (1, 50, 99, 100):
        ours = percentile(counted[0].tolist(), counted[1].tolist(), percent)
        assert ours == np.percentile(values, percent, method="inverted_cdf")


# ---- the client ----


@contextmanager
def speaking(lines: Callable[[], list[bytes]]) -> Iterator[str]:
    """A server that streams these lines to every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "any"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for line in lines():
                self.wfile.write(b"data: " + line + b"\n\n")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_tokens_are_counted_by_usage_and_not_by_text() -> None:
    half = next(token for token in range(16, TOKENIZER.vocab) if TOKENIZER.token_bytes(token) == b"\xc4")
    with serve() as served:
        question = served.says([half] * 40)
        client = Client(f"{served.url}/v1", 10)
        body = {"prompt": TOKENIZER.encode("word " * 60 + question), "max_tokens": 7, "ignore_eos": True}
        answers = client.drive("/completions", [body] * 5, 2, lambda _: None)
    for one in answers:
        assert one.tokens == 7 and [tokens for _, tokens in one.arrivals] == [1] * 7
        assert one.prompt_tokens == len(body["prompt"]) and one.arrivals[0][0] > one.sent
    cached = sorted(one.cached or 0 for one in answers)  # two came first, in either order
    assert cached[0] == 0 < cached[-1] == (len(body["prompt"]) - 1) // 64 * 64
    assert figures(NO_ROW, raw_load(answers, [7] * 5, 2))["checks"]["in_flight_within_batch"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([b'{"choices": []}'], r"ended before \[DONE\]"),
        ([b'{"error": {"message": "out of pages"}}', b"[DONE]"], "broke off: .*out of pages"),
        ([b"{no json"], "does not answer"),
        ([b"[DONE]"], "an answer without tokens"),
        ([b'{"choices": [{"text": "a"}]}', b"[DONE]"], "knows no continuous_usage_stats"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(lines: list[bytes], says: str) -> None:
    with speaking(lambda: lines) as url, pytest.raises(MkError, match=says):
        Client(url, 10).drive("/completions", [{}, {}, {}], 2, lambda _: None)


# ---- the experiment ----


def test_both_engines_are_measured_and_kept(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(tmp_path, "weights=random", f"baseline.vllm.site={SITE}")
    assert status == 0
    named = [(row.engine, row.workload, row.weights, row.batch) for row in rows]
    assert named == [(e, w, "random", 2) for e in ("interpreter", "vllm") for w in ("fixed", "aime")]
    for ours, theirs in ((rows[0], rows[2]), (rows[1], rows[3])):
        assert ours.requests_hash == theirs.requests_hash and theirs.ratio_to == ours.digest
        assert ours.usage_completion_tokens == theirs.usage_completion_tokens
        assert theirs.ratio == pytest.approx(theirs.wall_s / ours.wall_s) and ours.ratio is None
        assert (theirs.schedule, theirs.same_weights, theirs.dtype) == ("vllm", True, "bfloat16")
        assert (theirs.moe_backend, theirs.graph_mode) == ("TRITON", "FULL_AND_PIECEWISE")
        assert 1 <= ours.active_batch <= 2 and ours.itl_p50_ms <= ours.itl_p99_ms
    assert (rows[0].answers, rows[0].usage_prompt_tokens, rows[0].usage_completion_tokens) == (4, 80, 24)
    shown = capsys.readouterr().out
    assert "vLLM's weights: same" in shown and shown.count(f"NOT at least 1.25 ({ONCE})") == 2 and "FAILED" not in shown
    names = ("wall_s", "tok_s", "ttft_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tpot_ms", "active_batch",
             "usage_completion_tokens", "ratio")  # fmt: skip
    require_kept(committed, folder_of(tmp_path), **dict.fromkeys(names, lambda value: value + 1))


def test_a_ratio_is_to_the_row_that_it_names(committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "alike")
    _, made = run(tmp_path, f"baseline.vllm.site={SITE}")
    assert [row.same_weights for row in made] == [None, None, False, False]
    (folder,) = promote(folder_of(tmp_path), committed / "results", committed)
    path = folder / "rows.jsonl"
    rows = read_rows(path)
    edit(path, 2, lambda values: Row.from_json(values | {"ratio_to": rows[1].digest}).sealed().to_json())
    wanted = f"rows.jsonl:3: its ratio is not to the steps of the row {rows[1].digest}"
    assert [problem for problem in problems(committed) if problem.endswith(wanted)]


def test_no_ratio_between_runs_of_other_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "short")
    status, rows = run(tmp_path, "weights=checkpoint", f"baseline.vllm.site={SITE}", "experiment.workloads=[fixed]")
    assert status == 1 and rows[1].ratio is None and not rows[1].checks["tokens_as_asked"]
    assert rows[0].checks["tokens_as_asked"] and rows[1].same_weights is None
    assert "no ratio, the engines did not take and generate as many tokens" in capsys.readouterr().out


def test_a_vllm_that_fails_fails_the_run_but_not_our_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "dies")
    status, rows = run(tmp_path, f"baseline.vllm.site={SITE}", "experiment.workloads=[aime]")
    assert status == 1 and [row.engine for row in rows] == ["interpreter"]
    assert "vLLM: vLLM's server ended with status 1: " in capsys.readouterr().out


def test_a_named_server_is_measured_alone(committed: Path, tmp_path: Path) -> None:
    with serve() as served:
        served.overrides[""] = lambda history: {20: 5.0}
        status, rows = run(tmp_path, f"experiment.base_url={served.url}/v1", "experiment.workloads=[aime]")
    assert status == 0 and [(row.engine, row.dtype, row.model) for row in rows] == [("served", "unknown", "nano")]
    require_kept(committed, folder_of(tmp_path), tok_s=lambda value: value * 2)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["server.context=25"], "requests of 26 tokens exceed server.context=25"),
        (["experiment.workloads=[other]"], "experiment.workloads=other is not one of fixed, aime"),
        (["experiment.workloads=[fixed,fixed]"], "experiment.workloads names 'fixed' twice"),
        (["experiment.fixed.requests=0"], "experiment.fixed.requests=0 must be at least 1"),
        (["experiment.aime.scale=0.00001"], "a request generates at least 1"),
        (["baseline.vllm.site=/no/such/folder"], "site=/no/such/folder is no folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(MkError, match=says):
        run(tmp_path, *overrides)
    assert not list(tmp_path.iterdir())


def test_a_server_of_ours_that_does_not_start_is_told_by_its_log(tmp_path: Path) -> None:
    with pytest.raises(MkError, match=r"our server ended with status 2: .*error: .*full") as caught:
        run(tmp_path, "server.kv_tokens.full=64", "baseline=none")
    assert "raise " not in str(caught.value) and "File " not in str(caught.value)


def test_a_server_that_cannot_even_read_its_configuration_says_so_in_two_lines(tmp_path: Path) -> None:
    """A defect, whose traceback lies in a file."""
    env = {name: value for name, value in os.environ.items() if name != "MK_TRACEBACK"} | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "experiments.serve", str(tmp_path / "none.yaml")]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    error, hint = ran.stderr.splitlines()[-2:]
    assert (ran.returncode, error.split(":")[:2]) == (1, ["error", " FileNotFoundError"])
    assert hint.startswith(f"hint: the traceback is in {tmp_path}")


def test_its_configuration_is_the_full_model_on_a_card_beside_vllm() -> None:
    cfg = load_config(["experiment=serving"])
    assert (cfg.model.preset, cfg.weights.name, cfg.engine.name) == ("north_mini_code", "random", "cuda")
    assert cfg.batch.size == cfg.server.slots == 8 and cfg.baseline.name == "vllm"
    fixed, aime = (getattr(cfg.experiment, name) for name in cfg.experiment.workloads)
    assert (fixed.requests, fixed.prompt, set(load.lengths(fixed, 0))) == (64, 1024, {512})
    assert aime.requests == 30 and sum(load.lengths(aime, 0)) == 30 * 2610
    assert load.longest_of(aime, cfg.experiment.seed) * cfg.batch.size <= cfg.server.kv_tokens.full
