"""What the nano checkpoint is compared with (compressors, an n-gram), and the model card of its training run."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def baseline_bits(training: bytes, stream: bytes) -> dict[str, float]:
    """Bits of `stream` by gzip -9, by xz -9e, and by a byte 3-gram model of the training split."""
    return {
        "gzip": 8.0 * len(gzip.compress(stream, 9)),
        "xz": 8.0 * len(lzma.compress(stream, preset=9 | lzma.PRESET_EXTREME)),
        "trigram": trigram_bits(training, stream),
    }


def trigram_bits(training: bytes, text: bytes) -> float:
    """Bits of `text` under byte n-grams up to 3, by Witten-Bell (a context seen n times weighs n / (n + its types))."""
    learnt, asked = np.frombuffer(training, np.uint8).astype(np.int64), np.frombuffer(text, np.uint8).astype(np.int64)
    probability = np.full(len(asked), 1 / 256)
    for order in (1, 2, 3):
        counts = np.bincount(_grams(learnt, order), minlength=256**order)
        grams, by_context = _grams(asked, order), counts.reshape(-1, 256)
        seen, types = by_context.sum(1)[grams >> 8], (by_context > 0).sum(1)[grams >> 8]
        mixed = (counts[grams] + types * probability) / np.maximum(seen + types, 1)
        probability = np.where(seen > 0, mixed, probability)
    return float(-np.log2(probability).sum())


def _grams(data: np.ndarray, order: int) -> np.ndarray:
    """The n-gram that ends at each byte, as one integer; zeros before the start."""
    padded = np.concatenate([np.zeros(order - 1, np.int64), data])
    grams = np.zeros(len(data), np.int64)
    for i in range(order):
        grams = grams << 8 | padded[i : i + len(data)]
    return grams


def seen_line_share(training: Sequence[str], held_out: Sequence[str], length: int = 30) -> float:
    """Share of the held-out lines of `length` characters or more (stripped) that a training text has too."""
    known = {line.strip() for text in training for line in text.splitlines()}
    lines = [line.strip() for text in held_out for line in text.splitlines() if len(line.strip()) >= length]
    return sum(line in known for line in lines) / max(1, len(lines))


_CARD = """---
license: psf-2.0
language: [en, code]
library_name: transformers
pipeline_tag: text-generation
tags: [cohere2_moe, python, tiny]
---
# nano

A {parameters:,}-parameter `cohere2_moe` language model of Python, trained from scratch. It has every structural part of
the full-size architecture at a size that a CPU decodes: it exists to test decode engines on real weights and real text.
It writes recognisable Python, with no claim to be right.

| | |
|---|---|
| layers | {num_hidden_layers}: 0 dense, full attention, RoPE; 1-3 experts, sliding, RoPE; 4 experts, full, no RoPE |
| width | hidden {hidden_size}; {num_attention_heads} query, {num_key_value_heads} KV heads of {head_dim} |
| window | {sliding_window} tokens; positions up to {max_positions:,} |
| experts | {num_experts} of width {intermediate_size}, top {num_experts_per_tok}, sigmoid, not renormalised |
| dense layer | width {prefix_dense_intermediate_size} |
| vocabulary | {vocab_size:,}, byte-level BPE with turn, thinking, text, action and tool-result markers |
| weights | bfloat16, one tensor an expert, head tied to the embedding |

## Held-out bits per byte
On {held_out_documents} documents ({held_out_bytes:,} bytes) that training did not see, split by file path. The model is
evaluated with the published bf16 weights in float32 arithmetic, windows of 4,096 tokens that overlap by half; each
document's end marker is charged to it. The compressors get all files as one stream; the 3-gram is a byte model
(Witten-Bell) of the training split.

| | bytes | nano | xz -9e | gzip -9 | byte 3-gram |
|---|---|---|---|---|---|
{rows}

`held_out_sample.txt` is one held-out file: {sample[nano]:.3f} bits per byte (gzip -9: {sample[gzip]:.3f}).

The standard library resembles itself: {seen_lines:.0%} of the held-out lines of 30 characters or more also stand
somewhere in the training files, test suites above all. The row without tests is the harder one.

## Data
{corpus}: {documents:,} documents, {training_bytes:,} training bytes. Exact duplicates,
code-page tables and build products are left out; the topics of `pydoc_data` are documents of their own. sha256 of the
list of (path, sha256 of text):
`{sha256}`.
{chat_tokens_share:.1%} of the training tokens are synthetic chats made from the training files (docstring to code, tool
calls and results, language topics) in the layout of `chat_template.jinja`.

Licence of the data: Python Software Foundation License Version 2 (<https://docs.python.org/3/license.html>),
Copyright © 2001 Python Software Foundation; All Rights Reserved. The weights and `held_out_sample.txt` are under the
same licence.

## Training
Seed {seed}; {steps:,} steps of {batch_tokens:,} tokens ({tokens_m:,.0f} M tokens, {epochs:.1f} epochs); three steps in
four on rows of 1,024 tokens, one in four on 4,096. AdamW, peak learning rate {lr}, {warmup} warm-up steps, cosine to
zero, weight decay {weight_decay}, dropout {dropout}, load-balancing loss × {balance}; bf16 autocast over float32
weights. The busiest expert of any layer takes {greatest_expert_load:.2f} times an even share of held-out text, the
idlest {least_expert_load:.2f}.
{hardware}, torch {torch}: {minutes:.1f} minutes, {tokens_per_second:,.0f} tokens a second.

`python run.py experiment=train_nano` repeats it. The seed fixes the data order, the initial weights and the schedule;
GPU kernels that add in varying order can still move the last bits of a step, so two runs on the same hardware and
versions agree closely, not bit for bit. Another Python version is another corpus, with another hash.

## A sample
Greedy, from {prompt}:
```python
{text}
```

## Limits
A toy: it repeats itself, invents names and cannot reason. It knows little but the standard library's own code, and was
trained on contexts of up to 4,096 tokens. A prompt continues best when it ends in a word or a colon: the tokenizer
joins a line break with the indent after it, so a break at the very end reads as "the next line is not indented".
"""


def model_card(record: Mapping[str, Any], shape: Mapping[str, Any], max_positions: int, prompt: str, text: str) -> str:
    """README.md from a training record (training.json), the config's shape, and a sample `text` from `prompt`."""
    row = "| {name} | {bytes:,} | **{nano:.3f}** | {xz:.3f} | {gzip:.3f} | {trigram:.3f} |"
    rows = [row.format(name=name, **values) for name, values in record["bits_per_byte"].items()]
    figures = {**record["data"], **record["run"], **record["model"], **shape, "sample": record["sample_bits_per_byte"]}
    figures |= {"tokens_m": record["run"]["tokens"] / 1e6, "max_positions": max_positions, "rows": "\n".join(rows)}
    return _CARD.format(**figures, prompt=f"`{prompt}`", text=text)
