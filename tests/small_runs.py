"""Every experiment at its smallest: what it takes on a CPU, or what it says where it needs more than one."""

from __future__ import annotations

from collections.abc import Sequence

from mk.results.sources import ROOT

INTERPRETED = ["model=nano", "weights=checkpoint", "gpu=cpu", "gpu.sms=2", "engine=interpreter"]
SERVED = [*INTERPRETED, "prefill=torch", "wave_order=default", "server=default"]
SIMULATED = [
    *("model=nano", "weights=checkpoint", "gpu.sms=16", "experiment.batches=[2]", "experiment.context=64"),
    *("experiment.steps=8", "experiment.warmup=2"),
]
CHECKED = [*SIMULATED, "experiment.check_tokens=8"]
CLAIMERS = "schedule=work_stealing schedule.attention_claimers=8 schedule.moe_claimers=8"


def variants(*each: str) -> str:
    return "experiment.variants=[" + ",".join(f'"{of}"' for of in each) + "]"


SMALL: dict[str, Sequence[str]] = {
    "quickstart": ["gpu.sms=2", "experiment.new_tokens=1", "experiment.ragged=null", "logger=wandb"],
    "context_sweep": [*CHECKED, variants("experiment.context=32,64")],
    "decode_throughput": CHECKED,
    "zero_wait_bound": CHECKED,
    "vllm_decode": [*CHECKED, "weights=random"],
    "wave_order_ablation": CHECKED,
    "placement_ablation": CHECKED,
    "schedule_ablation": [*CHECKED, variants("schedule=static", CLAIMERS)],
    "routing_ablation": CHECKED,
    "kernel_ablation": CHECKED,
    "slow_sm": [
        *("model=nano", "weights=checkpoint", "gpu.sms=16", "experiment.batch=2", "experiment.context=64"),
        *("experiment.steps=4", "experiment.warmup=1", "experiment.sm=3"),
    ],
    "ring_ablation": CHECKED,
    "sampling_ablation": CHECKED,
    "trace_ablation": CHECKED,
    "plan_ablation": [*CHECKED, variants("wave_order=default,parted")],
    "ladder": [
        *CHECKED,
        variants("placement=round_robin engine.handoff.barriers=true", "placement=round_robin", "placement=row_owner"),
    ],
    "op_bench": SIMULATED,
    "transformers_decode": [*CHECKED, "weights=random"],
    "wave_occupancy": [*SIMULATED, "experiment.layer=1"],
    "serving": [
        *SERVED,
        *("batch.size=2", "experiment.workloads=[fixed]"),
        *("experiment.fixed.requests=2", "experiment.fixed.prompt=8", "experiment.fixed.tokens=4"),
    ],
    "agent_trial": [
        *SERVED,
        *("agent.scale=0.02", "experiment.warm=8"),
    ],
    "schedule_search": [
        *("model=slice", "gpu.sms=8", "experiment.batches=[1]", "experiment.context=64", "experiment.steps=8"),
        *("experiment.warmup=2", "experiment.check_tokens=8", "experiment.candidates=1", "experiment.local_steps=1"),
    ],
    "simulator_accuracy": ["experiment.rows=[{measured}]"],
    "kernel_bits": [
        *INTERPRETED,
        *("experiment.context=3", "experiment.neighbours=[1]", "experiment.repeats=1", "experiment.switches=1"),
        "experiment.delays=1",
    ],
    "kernel_correctness": [*INTERPRETED, "experiment.batches=[[65]]", "experiment.layers=[1]"],
    "parity": ["gpu.sms=2", "engine=interpreter", "experiment.contexts=[40]", "experiment.steps=2"],
    "partial_step": ["gpu.sms=2", "weights=random", "experiment.start_at=1.qkv", "experiment.stop_after=1.topk"],
    "prefill_correctness": [
        *INTERPRETED,
        *("experiment.lengths=[2]", "experiment.cuts=[1]", "experiment.layers=[1]", "experiment.whole=false"),
    ],
    "prefill_throughput": [
        *("gpu=cpu", "model=nano", "weights=checkpoint", "experiment.lengths=[2]", "experiment.packed=[1]"),
        *("experiment.packed_rows=1", "experiment.repeats=1", "experiment.check_tokens=2"),
    ],
    "prefill_tiles": [
        *("gpu=cpu", "model=nano", "weights=checkpoint", "experiment.tokens=17", "experiment.repeats=1"),
        "experiment.kernels=[attention_sliding]",
    ],
    "served_step": [
        *INTERPRETED,
        *("prefill=torch", "prefill.chunk=8", "wave_order=default", "server.context=256", "server.slots=4"),
        *("server.batches=[1,2]", "experiment.batches=[1]", "experiment.context=8", "experiment.steps=2"),
        *("experiment.rounds=1", "experiment.prompt=20", "experiment.short=4", "experiment.events=1"),
    ],
    "batch_switching": [
        *INTERPRETED,
        *("prefill=torch", "wave_order=default", "server=default", "server.context=256", "server.slots=3"),
        *("server.batches=[1]", "experiment.context=8", "experiment.stagger=3", "experiment.rounds=2"),
    ],
    "serving_costs": [
        *("gpu.sms=2", "engine=interpreter", "server.context=512", "server.slots=2", "experiment.conversations=1"),
        *("experiment.context=4", "experiment.answer=66", "experiment.batches=[1]", "experiment.steps=1"),
        "experiment.rounds=1",
    ],
    "accuracy": [
        *("gpu.sms=2", "benchmark=nano_code", "benchmark.max_tokens=2", "experiment.runs=1", "experiment.limit=1"),
    ],
}

# further runs of some, by what else they take
AGAIN: dict[str, Sequence[str]] = {
    "agent_trial": [
        *INTERPRETED,
        *("prefill=torch", "wave_order=default", "server=default", "experiment.tasks=[rename_lookup]"),
        *("experiment.warm=8", "agent=opencode", f"agent.program={ROOT / 'tests' / 'stand_in_agent.py'}"),
    ],
}

# what it says, and does, on a machine without a card, a sanitizer or vLLM
REFUSED: dict[str, str] = {
    "sm_map": "sm_map measures a GPU",
    "sanitize": "no compute-sanitizer found",
    "vllm_serve": "no vLLM is configured",
    "accuracy_vllm": "no vLLM is configured",
}

# that make no row of their own
ROWLESS = {
    "serve": "runs until it is stopped: tests/test_serving_lifetime.py",
    "train_nano": "writes a checkpoint: tests/test_nano_training.py",
    "rerun": "repeats another experiment's run: tests/test_rerun.py",
}

# Leaves that none of those runs reads, and the file that does, with a card, a data set, vLLM or hours at hand. Not the
# place for a leaf that nothing reads: that one goes.
READ_ELSEWHERE = {
    "Accuracy.allow_missing": "experiments/accuracy.py",
    "Accuracy.served_model": "evals/asked.py",
    "BenchmarkConfig.code_s": "evals/benchmarks/livecode.py",
    **dict.fromkeys(
        (f"BenchmarkConfig.{leaf}" for leaf in ("count", "file", "files", "hub", "subset")), "evals/benchmarks/data.py"
    ),
    "BenchmarkConfig.split": "evals/benchmarks/scicode.py",
    "Config.debug": "experiments/rerun.py",
    "EngineConfig.run_ahead": "mk/engines/choice.py",
    "EngineConfig.script": "mk/engines/choice.py",
    "GpuConfig.l2_mb": "experiments/op_bench.py",
    "GpuConfig.measured": "mk/config.py",  # whether there has to be a measured_tb_s
    "GpuConfig.smem_per_block_kb": "mk/device.py",
    "KernelBits.delays_ns": "experiments/kernel_bits.py",
    "ModelConfig.revision": "mk/model/opening.py",
    "Parity.seed": "experiments/parity.py",
    "PlacementConfig.path": "mk/programs.py",
    "PrefillCorrectness.cuts": "experiments/prefill_prompts.py",  # of whole prompts
    "PrefillCorrectness.small_chunk": "experiments/prefill_prompts.py",
    "Rerun.run": "experiments/rerun.py",
    "Sanitize.timeout_s": "experiments/sanitize.py",
    "ScheduleConfig.path": "mk/compose.py",
    **dict.fromkeys(
        (f"SmMap.{leaf}" for leaf in ("launches", "lines", "rounds", "time_limit_s")), "experiments/sm_map.py"
    ),
    "TransformersDecode.experts": "experiments/transformers_decode.py",
    **dict.fromkeys(
        (
            f"TrainNano.{leaf}"
            for leaf in (
                *("balance", "batch_tokens", "chat_share", "corpus_dir", "corpus_version", "dropout", "lr"),
                *("max_minutes", "out_dir", "probe_tokens", "seed", "steps", "warmup", "weight_decay"),
            )
        ),
        "experiments/train_nano.py",
    ),
    **dict.fromkeys(
        (f"VllmConfig.{leaf}" for leaf in ("attention_backend", "gpu_memory", "timeout_s")),
        "experiments/baselines/vllm_process.py",
    ),
    "VllmConfig.arguments": "experiments/vllm_serve.py",
    "VllmConfig.kv": "experiments/vllm_rows.py",
    "VllmConfig.moe_backends": "experiments/vllm_rows.py",
    "VllmConfig.reasoning_parser": "experiments/vllm_serve.py",
    "VllmConfig.tool_parser": "experiments/vllm_serve.py",
}
