"""Times vLLM's decode steps. A script for vLLM's interpreter, which need not have any of this project's packages.

    python vllm_bench.py SPEC.json       (experiments/baselines/vllm_process.py writes it, and reads the results)

One engine is started for all cases, pairs of a context and a batch. Results are lines of JSON in the file that the
specification names; what is printed is a log. A step is the gap between two outputs of the engine in a row in which
every sequence has one token more. `kv=prefilled`: the prompts are computed once, and their blocks found again in the
prefix cache; `kv=synthetic`: vLLM's DecodeBenchConnector fills them.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

REPEATS = 3
SHORT = 16  # tokens of the shorter of the two lengths whose difference is the cross-check
SPARE = 8  # tokens of a sequence beyond those timed: the engine may begin with the first before it has the last
HANDED = 8192  # tokens of a prompt whose handing over to the engine takes a step of those before at most
COUNTED = 32  # steps in which experts are counted


class NoRoom(Exception):
    """The engine never had all sequences of a case at a time."""


class Results:
    """The file of results. Not standard output: the engine's process writes there too, in the midst of lines."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def add(self, case: str, **values: Any) -> None:
        line = json.dumps({"case": case, **values})
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line[:160], flush=True)


def engine_arguments(spec: dict[str, Any], longest: int) -> dict[str, Any]:
    """Every batch that is measured has a full CUDA graph of its own size: no padding."""
    batches = batches_of(spec)
    arguments = {
        "model": spec["model"],
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": longest,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": spec["gpu_memory"],
        "enable_prefix_caching": spec["kv"] == "prefilled",
        "generation_config": "vllm",
        "seed": spec["seed"],
        "attention_backend": spec["attention_backend"],
        "moe_backend": spec["moe_backend"],
        "compilation_config": {"cudagraph_capture_sizes": batches, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        "worker_extension_cls": "experiments.baselines.vllm_extension.Extension",
    }
    if spec["kv"] == "synthetic":
        arguments["kv_transfer_config"] = {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": spec["kv_std"]},
        }
    return arguments


def batches_of(spec: dict[str, Any]) -> list[int]:
    return sorted({batch for _, batch in spec["cases"]})


def ahead(batch: int, prompt: int) -> int:
    """Steps that the first sequence of a batch may be ahead of the last one, beyond `SPARE`: long prompts take the
    engine a while to read."""
    return (batch - 1) * (prompt // HANDED)


class Bench:
    def __init__(self, spec: dict[str, Any], results: Results) -> None:
        from vllm import LLM

        self.spec, self.results, self.requests = spec, results, 0
        self.tokens = spec["warmup"] + spec["steps"] + 1 + SPARE
        longest = max(context + ahead(batch, context) for context, batch in spec["cases"]) + spec["steps"] + 64
        started = time.perf_counter()
        self.llm = LLM(**engine_arguments(spec, longest))
        self.results.add("started", seconds=round(time.perf_counter() - started, 1))
        weights = self.call("mk_load_weights", spec["model"], spec["seed"], spec["qk_scale"])
        self.results.add("engine", weights=weights, **self.call("mk_info"))
        draw = random.Random(spec["seed"])
        rows = max(batches_of(spec))
        self.prompts = [[draw.randrange(16, spec["vocab"]) for _ in range(longest)] for _ in range(rows)]

    def call(self, method: str, *args: Any) -> Any:
        """A method of the extension, in the worker."""
        (result,) = self.llm.collective_rpc(method, args=args)
        return result

    def run(self, batch: int, prompt: int, tokens: int, together: bool = False) -> tuple[list[float], float]:
        """`tokens` of every sequence: (milliseconds of each step, seconds from the first request to the last token).

        together: raises NoRoom where a sequence ends before all have begun. Raises ValueError where one sits out a step
        after that. The engine has no request left then.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        sampling.output_kind = RequestOutputKind.CUMULATIVE
        started = time.perf_counter()
        names = []
        for row in range(batch):
            self.requests += 1
            names.append(f"mk-{self.requests}")
            ids = TokensPrompt(prompt_token_ids=self.prompts[row][:prompt])
            engine.add_request(names[-1], ids, sampling.clone())
        stamps, ended = [], False
        try:
            while engine.has_unfinished_requests():
                outputs = engine.step()
                if len(outputs) == batch:
                    stamps.append(time.perf_counter())
                elif outputs and stamps and not ended:
                    raise ValueError(f"a sequence of {batch} sat out a step after {len(stamps)} of all")
                ended = ended or any(output.finished for output in outputs)
                if together and ended and not stamps:
                    raise NoRoom(f"never all {batch} sequences at a time: some ended before the last had room to begin")
        except (NoRoom, ValueError):
            engine.abort_request(names)
            raise
        seconds = time.perf_counter() - started
        return [(b - a) * 1e3 for a, b in zip(stamps, stamps[1:])], seconds  # noqa: B905, RUF007

    def measure(self, batch: int, context: int) -> None:
        """Steps around a mean context in all repeats, and the same by the difference of two lengths."""
        spec = self.spec
        prompt = context - (spec["steps"] - 1) // 2 - spec["warmup"]
        lengths = [tokens + ahead(batch, prompt) for tokens in (SHORT, self.tokens)]
        self.run(batch, prompt, lengths[0])  # fills KV, and warms up
        long, short, step_ms = [], [], []
        for _ in range(REPEATS):
            short.append(self.run(batch, prompt, lengths[0])[1])
            gaps, seconds = self.run(batch, prompt, lengths[1], together=True)
            long.append(seconds)
            timed = gaps[spec["warmup"] :][: spec["steps"]]
            if len(timed) != spec["steps"]:
                raise ValueError(f"{len(timed)} timed steps of all {batch} sequences, not {spec['steps']}")
            step_ms += timed
        tpot = (statistics.median(long) - statistics.median(short)) / (self.tokens - SHORT) * 1e3
        self.results.add("decode", batch=batch, context=context, step_ms=step_ms, tpot_ms=tpot)

    def count(self, batch: int, context: int) -> None:
        prompt = context - COUNTED // 2
        self.run(batch, prompt, 2)
        self.call("mk_count_begin")
        self.run(batch, prompt, COUNTED + ahead(batch, prompt))
        by_layer = self.call("mk_count_end", batch)
        self.results.add("experts", batch=batch, context=context, by_layer=by_layer)


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    import torch
    import vllm

    results = Results(spec["results"])
    results.add("version", vllm=vllm.__version__, torch=torch.__version__)
    bench = Bench(spec, results)
    cases = [(batch, context) for context, batch in spec["cases"]]
    for measured in (bench.measure, bench.count):  # what is timed first comes before anything that is only counted
        for case in list(cases):
            batch, context = case
            try:
                measured(batch, context)
            except Exception as error:
                why = "absent" if isinstance(error, NoRoom) else "failed"
                message = str(error) if isinstance(error, NoRoom) else f"{type(error).__name__}: {error}"
                results.add(why, batch=batch, context=context, error=message[:300])
                cases.remove(case)  # no count of what was not timed
    results.add("done")


if __name__ == "__main__":
    main(sys.argv[1])
