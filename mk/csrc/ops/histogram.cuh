// histogram: counts and masses of a row's logits by bin, the first of the waves that sample (mk/shortlist.py).
//
// Rows that need no bins go on to their shortlist while the others' signals are on their way.
#pragma once
#include "shortlist.cuh"

// Adds four tokens a lane to their bins. Where all are in one, as in a row of equal logits, one lane adds.
DEVICE void count_tokens(const RowSampling& q, uint32_t* counts, unsigned long long* masses, const int (&bin)[4],
                         const uint32_t (&mass)[4]) {
  const bool alike = bin[0] == bin[1] && bin[0] == bin[2] && bin[0] == bin[3];
  const int common = __shfl_sync(~0u, bin[0], 0);
  if (__all_sync(~0u, alike && bin[0] == common)) {
    uint64_t sum = warp_sum(static_cast<uint64_t>(mass[0]) + mass[1] + mass[2] + mass[3]);
    if (common == NONE || threadIdx.x % 32) return;
    if (q.top_k) atomicAdd(counts + Bins<uint32_t>::place(common), 128u);
    if (q.top_p < 1.) atomicAdd(masses + Bins<uint64_t>::place(common), static_cast<unsigned long long>(sum));
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (bin[j] == NONE) continue;
    if (q.top_k) atomicAdd(counts + Bins<uint32_t>::place(bin[j]), 1u);
    if (q.top_p < 1.)
      atomicAdd(masses + Bins<uint64_t>::place(bin[j]), static_cast<unsigned long long>(mass[j]));
  }
}

// The idle set: each slice clears its part of every row.
DEVICE void clear_idle_bins(const StepParams& p, const int* d, int thread) {
  const int lo = BINS * d[W_RANK] / d[W_RANKS], bins = BINS * (d[W_RANK] + 1) / d[W_RANKS] - lo;
#pragma unroll 1
  for (int i = thread; i < bins * MAX_ROWS; i += CONSUMERS * 32) {
    bins_of(p, p.bin_mass, ~p.epoch, i % MAX_ROWS)[lo + i / MAX_ROWS] = 0;
    bins_of(p, p.bin_count, ~p.epoch, i % MAX_ROWS)[lo + i / MAX_ROWS] = 0;
  }
  if (d[W_RANK] == 0 && thread < MAX_ROWS) p.undecided_count[(~p.epoch & 1) * MAX_ROWS + thread] = 0;
}

// Every consumer warp runs this; `ok` says whether its wait was met.
DEVICE bool fill_histogram(const StepParams& p, Shared& s, Streams& st, const int* d, Drawing& row, bool ok) {
  if (!__all_sync(~0u, ok)) return false;
  clear_idle_bins(p, d, hidden(threadIdx.x));
  const bool binned = row.binned(p);
  if (!binned && !st.put_done()) return false;
  if (!row.drawn()) return true;
  Likeliest head(p, row.mine.row);
  Slice slice(p, s, d, row);
  head.over_warp(p, row.mine.row);
  row.view = RowView(row.q, head.value, row.listed(p) ? head.reached_by(row.q.top_k) : head.low);
  if (!binned) {
    scan(p, s, slice, row, row.listed(p) ? 0 : BINS, BINS - 1);
    return true;
  }
  uint32_t* counts = bins_of(p, p.bin_count, p.epoch, row.mine.row);
  auto* masses = reinterpret_cast<unsigned long long*>(bins_of(p, p.bin_mass, p.epoch, row.mine.row));
  slice.each([&](int, const float(&v)[4], int tokens) {
    int bin[4];
    uint32_t mass[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bin[j] = j < tokens ? row.view.bin(v[j]) : NONE;
      mass[j] = row.view.mass(v[j]);
    }
    count_tokens(row.q, counts, masses, bin, mass);
  });
  return st.put_done();
}
