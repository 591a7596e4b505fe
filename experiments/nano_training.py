"""The training loop of the nano checkpoint, its packed batches, and its measure: bits of a text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.nano_model import ROW, NanoModel

SHORT = 1024  # most steps cut the rows of ROW tokens into rows of SHORT
LONG_EVERY = 4  # one step in LONG_EVERY trains on whole rows, so that contexts far past the window are learnt


@dataclass(frozen=True, slots=True)
class Schedule:
    steps: int  # upper bound when max_seconds is set
    warmup: int
    lr: float
    batch_tokens: int
    weight_decay: float
    balance: float  # weight of the load-balancing loss
    max_seconds: float | None


@dataclass(slots=True)
class Progress:
    """What a run did: enough for its model card, and `steps` to repeat it without a clock."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    out_of_time: bool = False  # the clock shortened the schedule after it was fixed: `steps` alone would not repeat it


def packed_rows(
    files: Sequence[np.ndarray], chats: Sequence[np.ndarray], chat_slices: int, seed: int, rows: int
) -> Iterator[np.ndarray]:
    """Endless batches [rows, ROW + 1] of the shuffled documents; an epoch has all files and one slice of the chats."""
    generator = np.random.default_rng(seed)
    epoch, rest = 0, np.empty(0, dtype=np.int16)
    while True:
        documents = [*files, *chats[epoch % chat_slices :: chat_slices]]
        stream = np.concatenate([rest, *(documents[i] for i in generator.permutation(len(documents)))])
        size = rows * ROW
        batches = (len(stream) - 1) // size
        for i in range(batches):
            piece = stream[i * size : (i + 1) * size + 1]
            yield np.lib.stride_tricks.sliding_window_view(piece, ROW + 1)[::ROW]
        epoch, rest = epoch + 1, stream[batches * size :]


def train(
    model: NanoModel,
    batches: Iterator[np.ndarray],
    schedule: Schedule,
    report: Callable[[str], None],
    check: Callable[[], str],
) -> Progress:
    """Train in place: bf16 autocast over float32 weights, AdamW, linear warm-up, then a cosine to zero.

    With `max_seconds` the number of steps is fixed once, from the speed measured during the warm-up, so that the same
    `steps` without a clock runs the same schedule.
    """
    device = model.embed.device
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=schedule.lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )

    def loss_of(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits, routing = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), routing[1:, -1].mean()

    step_loss = torch.compile(loss_of, dynamic=False) if device.type == "cuda" else loss_of
    model.train()
    progress, start, mark = Progress(), time.monotonic(), (0, 0.0)
    total, last_report, losses = schedule.steps, 0.0, []
    for step, rows in enumerate(batches):
        if step in (LONG_EVERY * 2, schedule.warmup):  # after compilation, and at the end of the warm-up
            if device.type == "cuda":
                torch.cuda.synchronize()
            now = time.monotonic() - start
            if step == schedule.warmup:
                rate = (step - mark[0]) / (now - mark[1])
                progress.tokens_per_second = rate * schedule.batch_tokens
                if schedule.max_seconds is not None:
                    total = min(total, step + int(rate * 0.97 * (schedule.max_seconds - now)))
                report(f"{progress.tokens_per_second:,.0f} tokens/s; {total} steps, about {total / rate / 60:.1f} min")
            mark = (step, now)
        if step >= total:
            break
        done = max(0.0, (step - schedule.warmup) / max(1, total - schedule.warmup))
        if schedule.max_seconds is not None and step > schedule.warmup:  # slower than measured by 8 %: the clock leads
            by_clock = (time.monotonic() - start - mark[1]) / (1.05 * (schedule.max_seconds - mark[1]))
            progress.out_of_time |= by_clock > done
            done = max(by_clock, done)
        if done >= 1.0:
            break
        rate_now = schedule.lr * min(1.0, (step + 1) / schedule.warmup) * 0.5 * (1.0 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate_now
        batch = torch.from_numpy(rows.astype(np.int64))
        batch = batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch
        tokens, targets = batch[:, :-1], batch[:, 1:]
        if step % LONG_EVERY != LONG_EVERY - 1:
            tokens, targets = tokens.reshape(-1, SHORT), targets.reshape(-1, SHORT)
        loss, balance = step_loss(tokens.contiguous(), targets.contiguous())
        (loss + schedule.balance * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        progress.steps, progress.tokens = step + 1, progress.tokens + batch[:, 1:].numel()
        if (step + 1) % max(1, total // 12) == 0 or time.monotonic() - last_report > 30:
            last_report = time.monotonic()
            mean = torch.stack(losses).mean().item()
            losses.clear()
            report(
                f"step {step + 1}/{total}  loss {mean:.4f}  balance {balance.item():.3f}  lr {rate_now:.2e}  "
                f"{last_report - start:.0f} s  {check()}"
            )
            model.train()
    if device.type == "cuda":
        torch.cuda.synchronize()
    progress.seconds = time.monotonic() - start
    model.eval()
    return progress


@torch.no_grad()
def bits(model: NanoModel, documents: Sequence[np.ndarray], rows: int = 8) -> float:
    """Total bits of all tokens after the first of each document, in float32.

    A document is read in windows of ROW tokens that overlap by half, so each token past the first window is predicted
    from at least ROW / 2 tokens of context.
    """
    model.eval()
    windows: list[tuple[np.ndarray, int]] = []  # tokens, and the first target that counts
    for document in documents:
        for begin in range(0, max(1, len(document) - 1 - ROW // 2), ROW // 2):
            windows.append((document[begin : begin + ROW + 1], 0 if begin == 0 else ROW // 2))
    windows.sort(key=lambda window: len(window[0]))
    total = 0.0
    for i in range(0, len(windows), rows):
        group = windows[i : i + rows]
        length = -(-(max(len(tokens) for tokens, _ in group) - 1) // 256) * 256
        batch = np.zeros((len(group), length + 1), dtype=np.int64)
        counted = np.zeros((len(group), length), dtype=bool)
        for row, (tokens, first) in enumerate(group):
            batch[row, : len(tokens)] = tokens
            counted[row, first : len(tokens) - 1] = True
        on_device = torch.from_numpy(batch).to(model.embed.device)
        logits, _ = model(on_device[:, :-1])
        nll = F.cross_entropy(logits.flatten(0, 1), on_device[:, 1:].flatten(), reduction="none")
        total += nll.double()[torch.from_numpy(counted).flatten().to(nll.device)].sum().item() / math.log(2)
    return total


@torch.no_grad()
def expert_loads(model: NanoModel, rows: np.ndarray) -> Tensor:
    """Share of the routed (token, expert) pairs by expert over `rows` [n, ROW + 1]: float32 [layers, experts]."""
    model.eval()
    return model(torch.from_numpy(rows[:, :-1].astype(np.int64)).to(model.embed.device))[1][:, :-1].cpu()
