// histogram: counts and masses of a row's logits by bin, the first of the waves that sample (mk/shortlist.py).
//
// An SM adds up its slice in shared memory first. Rows that need no bins signal at once, and go on to their shortlist
// while the signals are on their way.
#pragma once
#include "shortlist.cuh"

// Sums of a slice by bin, in the order in which bins are stored. Those of masses are 64 bits wide, in two halves: shared
// memory has no such addition.
struct SliceBins {
  uint32_t *counts, *low, *high;
  DEVICE SliceBins(Scratch& kept, int row)
      : counts(kept.counts[row]), low(reinterpret_cast<uint32_t*>(kept.masses[row])), high(low + BINS) {}
  DEVICE void clear(const Share& mine) const {
#pragma unroll 2
    for (int i = mine.part * 32 + threadIdx.x % 32; i < BINS; i += mine.parts * 32) counts[i] = low[i] = high[i] = 0;
  }
  DEVICE void add(const RowSampling& q, int bin, uint32_t mass) const {
    if (q.top_k) atomicAdd(counts + Bins<uint32_t>::place(bin), 1u);
    const int at = Bins<uint64_t>::place(bin);
    if (q.top_p < 1. && atomicAdd(low + at, mass) + mass < mass) atomicAdd(high + at, 1u);
  }
  DEVICE void add_to(const StepParams& p, const Share& mine) const {
    uint32_t* all_counts = bins_of(p, p.bin_count, p.epoch, mine.row);
    uint64_t* all_masses = bins_of(p, p.bin_mass, p.epoch, mine.row);
#pragma unroll 2
    for (int i = mine.part * 32 + threadIdx.x % 32; i < BINS; i += mine.parts * 32) {
      const uint64_t mass = static_cast<uint64_t>(high[i]) << 32 | low[i];
      if (mass) add_l2(all_masses + i, mass);
      if (counts[i]) add_l2(all_counts + i, counts[i]);
    }
  }
};

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

// Every consumer warp runs this; `ok` says whether its wait was met, see Attention::run for why it goes on if not.
DEVICE bool fill_histogram(const StepParams& p, Shared& s, Streams& st, const int* d, Drawing& row, bool ok) {
  ok = __all_sync(~0u, ok);
  if (ok) clear_idle_bins(p, d, hidden(threadIdx.x));
  const bool drawn = ok && row.drawn(), binned = drawn && row.binned(p);
  if (ok && !binned) ok = st.put_done();
  if (!drawn) {
    consumers_meet(), consumers_meet();
    return ok;
  }
  const SliceBins bins(scratch(s), row.mine.row);
  if (binned) bins.clear(row.mine);
  Likeliest head(p, row.mine.row);
  Slice slice(p, s, d, row, false);
  head.over_warp(p, row.mine.row);
  const bool listed = row.listed(p);
  row.view = RowView(row.q, head.value, listed ? head.reached_by(row.q.top_k) : head.low);
  consumers_meet();  // the row's bins are cleared
  if (binned)
    slice.each([&](int, const float(&v)[4], int tokens) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int bin = j < tokens ? row.view.bin(v[j]) : NONE;
        const uint32_t mass = row.view.mass(v[j]);
        if (bin != NONE) bins.add(row.q, bin, mass);
      }
    });
  consumers_meet();  // and hold all of the slice
  if (binned) {
    bins.add_to(p, row.mine);
    return st.put_done();
  }
  scan(p, s, slice, row, listed ? 0 : BINS, BINS - 1);
  return ok;
}
