"""What the quickstart tells: on the terminal, and in the run folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from experiments.console import progress
from mk.config import Config
from mk.decode import Request
from mk.engines.choice import engine_name
from mk.engines.protocol import Engine
from mk.interpreter import StepOutputs
from mk.model.greedy_oracle import TRANSFORMERS, Divergence, GreedyOracle
from mk.model.opening import Model
from mk.model.tensors import parameter_count
from mk.results.rows import Row, dtype_of
from mk.results.runs import RunFolder
from mk.routing import Trace


@dataclass(slots=True)
class Decoded:
    """One batch, decoded. `requests[i]` is row i's, None where the row was inactive; `outputs` every step's."""

    engine: Engine
    requests: Sequence[Request | None]
    prefill_s: float = 0.0
    decode_s: float = 0.0
    outputs: list[StepOutputs] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[int, Request]]:
        """The active rows and their requests."""
        return [(row, request) for row, request in enumerate(self.requests) if request is not None]

    @property
    def active(self) -> list[int]:
        return [row for row, _ in self.rows]

    @property
    def new_tokens(self) -> int:
        return sum(len(request.tokens) for _, request in self.rows)

    @property
    def tokens_per_second(self) -> float | None:
        return token_rate([len(request.tokens) for _, request in self.rows], self.decode_s)

    @property
    def distinct_experts(self) -> float | None:
        """Experts that a sparse layer touched in a step, averaged over layers and steps."""
        if not self.outputs or not self.engine.geometry.sparse_layers:
            return None
        return sum(out.distinct_experts for out in self.outputs) / len(self.outputs)

    def equal_tokens(self, differences: Sequence[Divergence]) -> int:
        """Tokens before each row's first difference, all rows together."""
        first = {difference.row: difference.index for difference in reversed(differences)}
        return sum(first.get(row, len(request.tokens)) for row, request in self.rows)


class Report:
    """Compares every batch with the oracle's greedy decode, writes its files and prints its lines."""

    def __init__(self, cfg: Config, run: RunFolder, model: Model) -> None:
        self.cfg, self.run, self.model = cfg, run, model
        self.engine = engine_name(cfg, model.geometry, cfg.batch.size)
        self.dtype = dtype_of(self.engine, cfg.engine.numerics)
        self.agree = True  # no token has differed yet
        self._oracle: GreedyOracle | None = None

    def header(self) -> None:
        cfg, g = self.cfg, self.model.geometry
        experts = f", {g.experts} experts top-{g.top_k}" if g.sparse_layers else ""
        window = f", window {g.window_keys}" if g.sliding_layers else ""
        size = f"{parameter_count(g) / 1e6:,.1f} M parameters"
        print(f"model: {_model_name(cfg)}, {g.layers} layers{experts}{window}, {size}")
        print(f"weights: {self.model.weights_label}")
        sms = f", {cfg.gpu.sms} SMs" if self.engine == "interpreter" or cfg.gpu.kind == "cuda" else ""
        plan = f"{sms}, {cfg.schedule.name}, {cfg.wave_order.name}, {cfg.placement.name}"
        print(f"engine: {self.engine}, {self.dtype}{plan if self.engine != 'reference' else ''}", flush=True)

    def add(self, decoded: Decoded, suffix: str = "") -> None:
        """One decoded batch; `suffix` tells its files from another batch's."""
        if len(decoded.requests) > 1:
            self._print_rows(decoded)
        self._print_figures(decoded)
        skipped = self._why_unchecked()
        if not skipped:
            self._oracle = self._oracle or GreedyOracle(self.model)
            if self.rounds and self._oracle.name != TRANSFORMERS:
                skipped = f"{self.dtype} rounds where float32 does not, and the model is too large to say how much"
        if skipped or self._oracle is None:
            print(f"  not compared with a greedy decode: {skipped}", flush=True)
            self._write(decoded, suffix, {"oracle": None})
            return
        differences = self._compare(self._oracle, decoded)
        by_row = {row: list(own) for row, own in groupby(differences, lambda difference: difference.row)}
        noise: list[float] = []
        for row, request in decoded.rows if self.rounds else ():
            if own := by_row.get(row):
                noise += [self._oracle.noise(request.prompt, request.tokens)] * len(own)
        found = {
            "oracle": self._oracle.name,
            "differences": [[d.row, d.index, d.margin] for d in differences],
            "noise": noise,
        }
        self._print_verdict(self._oracle, decoded, differences, noise)
        self._write(decoded, suffix, found)
        self.agree &= within_noise(found)

    @property
    def rounds(self) -> bool:
        return self.dtype != "float32"

    def _why_unchecked(self) -> str | None:
        """Why the tokens are not compared with a greedy decode, None if they are."""
        cfg = self.cfg
        if not cfg.experiment.check:
            return "experiment.check=false"
        if cfg.sampling.temperature > 0:
            return f"sampling={cfg.sampling.name} draws tokens, there is no one right answer"
        if cfg.routing.name != "checkpoint":
            return f"routing={cfg.routing.name} replaces the model's own choice of experts"
        return None

    def _compare(self, oracle: GreedyOracle, decoded: Decoded) -> list[Divergence]:
        """Every difference, row by row."""
        found: list[Divergence] = []
        with progress(f"greedy decode by {oracle.name}", len(decoded.requests)) as done:
            for row, request in decoded.rows:
                found += oracle.compare(row, request.prompt, request.tokens, self.model.tokenizer.eos)
                done(row + 1)
        return found

    def _print_rows(self, decoded: Decoded) -> None:
        """Each row's continuation, after the line of its prompt that it continues."""
        for row, request in decoded.rows:
            print(f"  row {row}, context {len(request.prompt)}, ended by {request.finish}")
            decode = self.model.tokenizer.decode
            line = decode(request.prompt, skip_special=True).rsplit("\n", 1)[-1]
            print("  | " + indent(line + decode(request.tokens, skip_special=True)))

    def _print_figures(self, decoded: Decoded) -> None:
        rate, program = decoded.tokens_per_second, decoded.engine.program
        speed = f", {rate:.1f} tokens/s" if rate else ""
        seconds = f"prefill {decoded.prefill_s:.2f} s, decode {decoded.decode_s:.2f} s"
        print(f"  new tokens {decoded.new_tokens}, {seconds}{speed}; weights: {self.model.weights_label}")
        if program is not None:
            print(f"  schedule {program.schedule_hash}, {len(program.words)} descriptors, verified")
        if decoded.distinct_experts is not None:
            print(f"  distinct experts a layer touched in a step {decoded.distinct_experts:.2f}", flush=True)

    def _print_verdict(
        self, oracle: GreedyOracle, decoded: Decoded, differences: Sequence[Divergence], noise: Sequence[float]
    ) -> None:
        whose = "transformers'" if oracle.name == TRANSFORMERS else "the PyTorch reference's"
        verdict = "differs from" if differences else "equal to"
        tokens = f"{decoded.equal_tokens(differences)}/{decoded.new_tokens} tokens"
        of_rows = {d.row for d in differences}
        rows = f"rows {len(decoded.rows) - len(of_rows)}/{len(decoded.rows)}"
        print(f"  {verdict} {whose} greedy decode: {tokens}, {rows}", flush=True)
        bounds = noise or [None] * len(differences)
        lengths = {row: len(request.tokens) for row, request in decoded.rows}
        for row, own in groupby(zip(differences, bounds, strict=True), lambda pair: pair[0].row):
            (first, bound), *later = own
            _tell(f"row {row}, {self._said(first, whose)}", first, bound)
            rest = lengths[row] - first.index - 1
            after = f"row {row}, of the {rest} tokens after it, with {whose} forced onto the row's own"
            if later:
                worst, bound = max(later, key=lambda pair: pair[0].margin)
                _tell(f"{after}, {len(later)} different, most of all {self._said(worst, whose)}", worst, bound)
            elif rest and first.expected is not None:
                print(f"  {after}, none differs", flush=True)

    def _said(self, d: Divergence, whose: str) -> str:
        got, expected = (
            "the end" if token is None else f"{token} {self.model.tokenizer.decode([token])!r}"
            for token in (d.got, d.expected)
        )
        logits = f"the two tokens' logits there differ by {d.margin:.2e}"
        return f"new token {d.index}: {got} where {whose} is {expected}; {logits}"

    def _write(self, decoded: Decoded, suffix: str, found: Mapping[str, Any]) -> None:
        """The batch's row, its routing trace (what `routing=replay` reads), the picture of the program it ended on.

        found: what the oracle said, for the raw data.
        """
        program = decoded.engine.program
        tokens = [len(request.tokens) for _, request in decoded.rows]
        raw = {"kind": "decoded", "new_tokens": tokens, "decode_s": decoded.decode_s, "active": decoded.active, **found}
        verified = {} if program is None else {"schedule_verified": True}  # one that is refused is never loaded
        row = self.run.measured(
            raw,
            engine=decoded.engine.name,
            dtype=self.dtype,
            context=[0 if request is None else len(request.prompt) for request in decoded.requests],
            checks=verified,
            batch=len(decoded.requests),
            weights=self.model.weights_label,
            prefill_s=decoded.prefill_s,
            schedule_hash=decoded.engine.executed_hash(),
            distinct_experts=decoded.distinct_experts,
        )
        self.run.append_row(row, raw)
        if decoded.distinct_experts is not None:
            Trace.record([out.expert_ids for out in decoded.outputs]).save(self.run.path / f"routing{suffix}.npz")
        if program is not None:
            from mk.schedule.picture import draw_schedule  # matplotlib takes a second to import

            shape, cfg = program.shape, self.cfg
            title = "    ".join(
                (
                    f"{Path(_model_name(cfg)).name} (weights: {self.model.weights_label})",
                    f"batch {shape.rows}, contexts up to {shape.bucket}, {shape.n_sm} SMs",
                    f"{cfg.schedule.name}, {cfg.wave_order.name}, {program.placement}",
                    f"schedule {program.schedule_hash}",
                )
            )
            draw_schedule(program, self.run.path / f"schedule{suffix}.png", title, decoded.distinct_experts)


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row` from the new tokens of each row, the seconds that all together took, and the oracle's word."""
    tokens, seconds = raw["new_tokens"], raw["decode_s"]
    found = {"new_tokens": max(tokens), "decode_s": seconds, "tok_s": token_rate(tokens, seconds)}
    if raw["oracle"] is None:
        return found
    first = {row: index for row, index, _ in reversed(raw["differences"])}
    equal = [first.get(row, count) for row, count in zip(raw["active"], tokens, strict=True)]
    rounds = row.dtype != "float32"
    found["equal_tokens"] = sum(equal)
    found["checks"] = {
        **row.checks,
        f"{'within_noise_of' if rounds else 'equal_to'}_{raw['oracle']}": within_noise(raw),
    }
    if rounds:
        found["differs_at"] = [first.get(row) for row in raw["active"]]
    if raw["noise"]:
        found |= {"widest_margin": max(d[2] for d in raw["differences"]), "margin_noise": max(raw["noise"])}
    return found


def within_noise(found: Mapping[str, Any]) -> bool:
    """Whether every difference lies where the oracle's margin is within the noise; float32 has no excuse."""
    if not found["noise"]:
        return not found["differences"]
    return all(margin <= most for (_, _, margin), most in zip(found["differences"], found["noise"], strict=True))


def _tell(said: str, d: Divergence, bound: float | None) -> None:
    """bound: what bfloat16 does to a margin at most, None where nothing rounds; beyond it, a difference is an error."""
    if bound is not None and d.margin <= bound:
        print(f"  {said}, bfloat16 may change that by {bound:.2e}", flush=True)
    else:
        print(f"error: {said}", file=sys.stderr)


def token_rate(new_tokens: Sequence[int], seconds: float) -> float | None:
    """Of all rows together. Prefill gives each row its first token, which does not count."""
    stepped = sum(new_tokens) - len(new_tokens)
    return stepped / seconds if stepped else None


def indent(text: str) -> str:
    """Text whose new lines begin with the margin of quoted text."""
    return text.replace("\n", "\n  | ")


def _model_name(cfg: Config) -> str:
    return cfg.model.path or cfg.model.name
