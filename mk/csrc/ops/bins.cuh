// Bins of a row: where they lie in memory, and how a warp finds the ones in which the cuts are.
#pragma once
#include "drawing.cuh"

template <class T>
DEVICE T* bins_of(const StepParams& p, T* bins, uint32_t parity, int row) {
  return bins + (static_cast<size_t>(parity & 1) * MAX_ROWS + row) * BINS;
}

// The bins of a row as one warp reads them, after the warps that share the row have brought them to shared memory. Lane
// l holds the sum of bins 32 l .. 32 l + 31 and of all before; T is uint64_t for masses, uint32_t for counts.
template <class T>
class Bins {
 public:
  static constexpr int PER_LANE = BINS / 32, PER_LOAD = 16 / sizeof(T), LOADS = PER_LANE / PER_LOAD;
  static_assert(PER_LANE == 32, "a lane a bin");
  // Where a bin is stored: a lane's bins 16 bytes apart by 32 lanes, so that its loads are coalesced.
  static DEVICE int place(int bin) {
    int within = bin % PER_LANE;
    return (within / PER_LOAD * 32 + bin / PER_LANE) * PER_LOAD + within % PER_LOAD;
  }
  struct Found {
    int bin;
    uint64_t before, here;  // the sum of all bins before it, and its own
  };

  // This warp's part of the bins. Nothing of the row may be looked up before the warps have met.
  static DEVICE void gather(const T* bins, T* kept, uint64_t (*sums)[32], const Drawing& row) {
    constexpr int BATCH = 8;
    const int lane = threadIdx.x % 32;
    const uint4* from = reinterpret_cast<const uint4*>(bins) + lane;
    uint4* to = reinterpret_cast<uint4*>(kept) + lane;
    uint64_t sum = 0;
#pragma unroll 1
    for (int first = row.mine.part; first < LOADS; first += BATCH * row.mine.parts) {
      uint4 v[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        int at = first + i * row.mine.parts;
        v[i] = at < LOADS ? load_l2(from + at * 32) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        int at = first + i * row.mine.parts;
        if (at < LOADS) to[at * 32] = v[i];
        if constexpr (sizeof(T) == 8)
          sum += wide(v[i].x, v[i].y) + wide(v[i].z, v[i].w);
        else
          sum += static_cast<uint64_t>(v[i].x) + v[i].y + v[i].z + v[i].w;
      }
    }
    sums[row.warp][lane] = sum;
  }
  DEVICE Bins(const T* kept, const uint64_t (*sums)[32], const Share& mine) : bins(kept), lane(threadIdx.x % 32) {
#pragma unroll
    for (int part = 0; part < CONSUMERS; ++part)
      if (part < mine.parts) sum_ += sums[mine.row * mine.parts + part][lane];
    through_ = scan(sum_);
  }
  DEVICE uint64_t total() const { return __shfl_sync(~0u, through_, 31); }
  // The first bin through which the sums reach `need`, at least 1; bin BINS if none do.
  DEVICE Found find(uint64_t need) const {
    const uint32_t enough = __ballot_sync(~0u, through_ >= need);
    if (!enough) return {BINS, total(), 0};
    return look(__ffs(enough) - 1, need, NONE);
  }
  // What is known of a bin below BINS.
  DEVICE Found of(int bin) const { return look(bin / PER_LANE, 0, bin % PER_LANE); }

 private:
  static DEVICE uint64_t wide(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }
  // The bins of lane `owner`, one a lane: the one at `within`, or else the first that reaches `need`.
  DEVICE Found look(int owner, uint64_t need, int within) const {
    const uint64_t here = bins[place(owner * PER_LANE + lane)];
    const uint64_t end = __shfl_sync(~0u, through_ - sum_, owner) + scan(here);
    if (within == NONE) within = __ffs(__ballot_sync(~0u, end >= need)) - 1;
    return {owner * PER_LANE + within, __shfl_sync(~0u, end - here, within), __shfl_sync(~0u, here, within)};
  }
  DEVICE uint64_t scan(uint64_t v) const {
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      uint64_t below = __shfl_up_sync(~0u, v, step);
      if (lane >= step) v += below;
    }
    return v;
  }
  const T* bins;
  const int lane;
  uint64_t sum_ = 0, through_;
};
