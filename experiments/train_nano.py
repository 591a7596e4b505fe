"""Train the nano checkpoint from scratch: a small real `cohere2_moe` model of Python, as a Hugging Face folder.

The defaults repeat the run behind mk/model/nano, whose model card has the figures. The corpus is a CPython `Lib`.
"""

from __future__ import annotations

import gzip
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.nano_corpus import (
    BOS,
    END_OF_TURN,
    PAD,
    UNK,
    Document,
    corpus_sha256,
    encode,
    encode_chats,
    read_corpus,
    train_tokenizer,
)
from experiments.nano_model import ROW, NanoModel
from experiments.nano_report import baseline_bits, model_card, seen_line_share
from experiments.nano_training import Progress, Schedule, bits, expert_loads, packed_rows, train
from mk.errors import MkError

TEMPLATE = Path(__file__).parents[1] / "mk" / "model" / "nano" / "chat_template.jinja"
LAYERS, MAX_POSITIONS = 5, 65_536
CHAT_SLICES = 8  # the chats are cut into this many slices, one an epoch
SAMPLE_BYTES = 6_000  # held-out text kept beside the weights, for tests and as context
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 24,
    "num_experts_per_tok": 4,
    "num_shared_experts": 0,
    "intermediate_size": 32,
    "prefix_dense_intermediate_size": 256,
    "sliding_window": 256,
    "vocab_size": 1_408,
}
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 4}  # places in nano_corpus.MARKERS


def hf_config() -> dict[str, Any]:
    """config.json in the spelling of the published checkpoint (`first_k_dense_replace`, top-level `rope_theta`)."""
    return {
        "architectures": ["Cohere2MoeForCausalLM"],
        "model_type": "cohere2_moe",
        "dtype": "bfloat16",
        **SHAPE,
        "first_k_dense_replace": 1,
        "prefix_dense_sliding_window_pattern": 1,
        "layer_types": ["sliding_attention" if layer % 4 else "full_attention" for layer in range(LAYERS)],
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
        "layer_norm_eps": 1e-5,
        "rope_theta": 50_000,
        "max_position_embeddings": MAX_POSITIONS,
        "logit_scale": 1.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        **SPECIAL_IDS,
    }


def main(cfg: Any) -> None:
    """Train, write the folder and its card; `cfg.experiment` has the fields of configs/experiment/train_nano.yaml."""
    options = cfg.experiment
    out = Path(options.out_dir)
    if options.batch_tokens < ROW or options.batch_tokens % ROW:
        raise MkError(f"experiment.batch_tokens={options.batch_tokens} is not a multiple of {ROW}")
    if min(options.steps, options.warmup) < 1:
        raise MkError(f"experiment.steps={options.steps} and experiment.warmup={options.warmup} must be at least 1")
    if out.is_dir() and any(out.iterdir()):
        raise MkError(f"{out} is not empty", hint="experiment.out_dir=<a new folder>")
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {line}", flush=True)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # the masked kernel of sliding attention; cuDNN's would be chosen before it
        torch.backends.cuda.enable_cudnn_sdp(False)
    data = prepare(options, out, report)
    torch.manual_seed(options.seed)
    model = NanoModel(hf_config(), options.dropout).to(device)
    report(f"{sum(p.numel() for p in model.parameters()):,} parameters on {hardware(device)}")
    progress = run_schedule(model, data, options, report)
    write_model(model, out)
    record = {
        "data": data.facts(options.corpus_version or platform.python_version()),
        "run": run_facts(options, progress, data, hardware(device)),
        **evaluate(model, data),
    }
    (out / "held_out_sample.txt").write_bytes(data.sample.encode())
    write_json(out / "training.json", record)
    for name, row in record["bits_per_byte"].items():
        report(f"bits per byte, {name}: " + "  ".join(f"{k} {v:.3f}" for k, v in row.items() if k != "bytes"))
    write_card(out, record)
    report(f"{out}: {sum(f.stat().st_size for f in out.iterdir()):,} bytes")


@dataclass(slots=True)
class Data:
    """The two splits as documents and as int16 tokens, and the chats of CHAT_SLICES epochs."""

    training: list[Document]
    held_out: list[Document]
    tokenizer: Tokenizer
    files: list[np.ndarray]
    held_out_tokens: list[np.ndarray]
    chats: list[np.ndarray]

    @property
    def epoch_tokens(self) -> int:
        return count(self.files) + count(self.chats) // CHAT_SLICES

    @property
    def sample(self) -> str:
        """The largest held-out library module of at most SAMPLE_BYTES."""
        modules = [d for d in self.held_out if d.path.endswith(".py") and not d.is_test]
        return max((d for d in modules if d.size <= SAMPLE_BYTES), key=lambda d: (d.size, d.path)).text

    def facts(self, version: str) -> dict[str, Any]:
        documents = sorted([*self.training, *self.held_out], key=lambda d: d.path)
        return {
            "corpus": f"CPython standard library (Lib), Python {version}",
            "license": "PSF-2.0",
            "sha256": corpus_sha256(documents),
            "documents": len(documents),
            "training_bytes": sum(d.size for d in self.training),
            "held_out_bytes": sum(d.size for d in self.held_out),
            "held_out_documents": len(self.held_out),
            "chat_tokens_share": count(self.chats) / CHAT_SLICES / self.epoch_tokens,
            "seen_lines": seen_line_share([d.text for d in self.training], [d.text for d in self.held_out]),
        }


def count(documents: Sequence[np.ndarray]) -> int:
    return sum(map(len, documents))


def prepare(options: Any, out: Path, report: Callable[[str], None]) -> Data:
    """Read the corpus, train the tokenizer, write its files to `out`, and encode everything."""
    documents = read_corpus(options.corpus_dir)
    training, held_out = [d for d in documents if not d.held_out], [d for d in documents if d.held_out]
    size = sum(d.size for d in training)
    report(f"corpus: {len(training)} documents, {size / 1e6:.2f} MB; {len(held_out)} held out")
    tokenizer = train_tokenizer((d.text for d in training), SHAPE["vocab_size"])
    write_tokenizer(tokenizer, out)
    files, held_out_tokens = (encode(tokenizer, [d.text for d in split]) for split in (training, held_out))
    wanted = int(CHAT_SLICES * count(files) * options.chat_share / (1.0 - options.chat_share))
    chats = encode_chats(tokenizer, TEMPLATE.read_text(), training, wanted, options.seed)
    data = Data(training, held_out, tokenizer, files, held_out_tokens, chats)
    report(f"{size / count(files):.2f} bytes a token; an epoch is {data.epoch_tokens / 1e6:.2f} M tokens")
    return data


def run_schedule(model: NanoModel, data: Data, options: Any, report: Callable[[str], None]) -> Progress:
    seconds = 60.0 * options.max_minutes if options.max_minutes is not None else None
    schedule = Schedule(
        steps=options.steps,
        warmup=options.warmup,
        lr=options.lr,
        batch_tokens=options.batch_tokens,
        weight_decay=options.weight_decay,
        balance=options.balance,
        max_seconds=seconds,
    )
    probes = [some(split, options.probe_tokens) for split in (data.held_out_tokens, data.files)]

    def check() -> str:
        losses = [bits(model, probe) * math.log(2) / sum(len(d) - 1 for d in probe) for probe in probes]
        return "probe loss: held out {:.4f}, training {:.4f}".format(*losses)

    batches = packed_rows(data.files, data.chats, CHAT_SLICES, options.seed, options.batch_tokens // ROW)
    return train(model, batches, schedule, report, check)


def some(documents: Sequence[np.ndarray], tokens: int) -> list[np.ndarray]:
    """The first ROW tokens of evenly spaced documents, about `tokens` in all."""
    stride = max(1, sum(min(len(d), ROW) for d in documents) // tokens)
    return [d[: ROW + 1] for d in documents[::stride]]


def run_facts(options: Any, progress: Progress, data: Data, device: str) -> dict[str, Any]:
    names = ("seed", "batch_tokens", "lr", "warmup", "weight_decay", "dropout", "balance", "chat_share")
    return {
        **{name: getattr(options, name) for name in names},
        "steps": progress.steps,
        "tokens": progress.tokens,
        "epochs": progress.tokens / data.epoch_tokens,
        "minutes": progress.seconds / 60,
        "tokens_per_second": progress.tokens_per_second,
        "shortened_by_clock": progress.out_of_time,
        "hardware": device,
        "torch": torch.__version__,
    }


def evaluate(model: NanoModel, data: Data) -> dict[str, Any]:
    """Held-out bits per byte beside the baselines', over all documents and over those that are no tests."""
    training = b"".join(d.text.encode() for d in data.training)
    table: dict[str, dict[str, float]] = {}
    for name, tests_too in (("all", True), ("without tests", False)):
        chosen = [i for i, d in enumerate(data.held_out) if tests_too or not d.is_test]
        stream = b"".join(data.held_out[i].text.encode() for i in chosen)
        totals = {"nano": bits(model, [data.held_out_tokens[i] for i in chosen]), **baseline_bits(training, stream)}
        table[name] = {"bytes": len(stream), **{key: value / len(stream) for key, value in totals.items()}}
    sample = data.sample.encode()
    loads = expert_loads(model, next(packed_rows(data.held_out_tokens, [], 1, 0, 1)))[1:] * SHAPE["num_experts"]
    return {
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "least_expert_load": loads.min().item(),
            "greatest_expert_load": loads.max().item(),
        },
        "bits_per_byte": table,
        "sample_bits_per_byte": {
            "nano": bits(model, encode(data.tokenizer, [data.sample])) / len(sample),
            "gzip": 8 * len(gzip.compress(sample, 9)) / len(sample),
        },
    }


def hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    special = {"bos_token": BOS, "eos_token": END_OF_TURN, "pad_token": PAD, "unk_token": UNK}
    settings = {"model_max_length": MAX_POSITIONS, "clean_up_tokenization_spaces": False}
    write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special, **settings})
    shutil.copyfile(TEMPLATE, out / TEMPLATE.name)


def write_model(model: NanoModel, out: Path) -> None:
    """Round the weights to bf16, in the model too, and write them with the two configs."""
    for view in model.hf_views().values():
        view.copy_(view.bfloat16())
    state = {name: view.to("cpu", torch.bfloat16, copy=True).contiguous() for name, view in model.hf_views().items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600
    write_json(out / "config.json", hf_config())
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    write_json(out / "generation_config.json", {**SPECIAL_IDS, **sampling})


PROMPT = "def main():\n    import sys\n    args = sys.argv[1:]\n    if not args:"


def write_card(folder: Path, record: dict[str, Any]) -> None:
    """README.md, with a greedy continuation by transformers from the written folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False)
    text = str(tokenizer.decode(new[0], skip_special_tokens=True))
    (folder / "README.md").write_text(model_card(record, SHAPE, MAX_POSITIONS, PROMPT.splitlines()[0], text))
