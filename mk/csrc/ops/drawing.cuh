// What the waves that sample share: how a row falls to warps, what they keep from wave to wave, how they read a slice.
//
// The eight warps share a slice of the vocabulary: each takes a part of it for one row. All sums are of integers, so
// neither the order of SMs nor that of lanes changes a token. This code runs once a step, so its instructions come from
// L2: loops are not unrolled further than their latency asks for.
#pragma once
#include "../gemm.cuh"
#include "../sampling.cuh"
#include "../tile.cuh"

constexpr int MAX_ID = 0x7fffffff;  // no token yet: any other wins

struct Best {
  double score = -INFINITY;
  int id = MAX_ID;
  DEVICE void take(double other, int other_id) {
    if (other > score || (other == score && other_id < id)) score = other, id = other_id;
  }
  DEVICE void over_warp() {
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      double other = __shfl_xor_sync(~0u, score, step);
      take(other, __shfl_xor_sync(~0u, id, step));
    }
  }
};

// The sum of a value below 2^51 over the warp.
DEVICE uint64_t warp_sum(uint64_t v) {
  constexpr int LOW = 24;  // bits: 32 lanes of either part stay below 2^32
  uint32_t low = __reduce_add_sync(~0u, static_cast<uint32_t>(v) & ((1u << LOW) - 1));
  uint32_t high = __reduce_add_sync(~0u, static_cast<uint32_t>(v >> LOW));
  return (static_cast<uint64_t>(high) << LOW) + low;
}

// Which row a consumer warp works on and which of the row's `parts` it takes; `row` is NONE for a warp left over.
struct Share {
  int row, part, parts;
  DEVICE Share(const StepParams& p, int warp) : parts(CONSUMERS / p.rows) {
    row = warp / parts < p.rows ? warp / parts : NONE;
    part = warp % parts;
  }
};

// The ring, as these waves use it. Nothing streams through it any more: the last product of this SM was done before the
// first of them could open.
struct Scratch {
  static constexpr int STAGED = 16, PENDING = 64;  // float4 a lane, tokens a warp
  float4 logits[CONSUMERS][STAGED][32];
  uint4 pending[CONSUMERS][PENDING];
  uint64_t masses[MAX_ROWS][BINS], mass_sums[CONSUMERS][32];
  uint64_t count_sums[CONSUMERS][32];
  uint32_t counts[MAX_ROWS][BINS];
};
static_assert(sizeof(Scratch) <= sizeof(Shared::ring), "sampling works in the ring");
DEVICE Scratch& scratch(Shared& s) { return *reinterpret_cast<Scratch*>(s.ring); }

// A value an SM or slice, of one row: [n][MAX_ROWS]. A lane loads those of every 32nd, `IN_FLIGHT` of them in flight.
constexpr int IN_FLIGHT = 5;
template <class T>
struct Column {
  T v[IN_FLIGHT];
  DEVICE Column(const T* values, int first, int n, int row, T none) {
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      int at = first + i * 32 + threadIdx.x % 32;
      v[i] = at < n ? load_l2(values + at * MAX_ROWS + row) : none;
    }
  }
};

// The head's candidates of a row over all SMs: its likeliest token and the range of its logits. Loaded when made,
// looked at in `over_warp`.
class Likeliest {
 public:
  float value = -INFINITY, low = INFINITY;
  int id = MAX_ID;
  DEVICE Likeliest(const StepParams& p, int row) : first_(p, row, 0) {}
  DEVICE void over_warp(const StepParams& p, int row) {
    take(first_);
#pragma unroll 1
    for (int sm = IN_FLIGHT * 32; sm < p.n_sm; sm += IN_FLIGHT * 32) take(Batch(p, row, sm));
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      keep_better(value, id, step);
      low = fminf(low, __shfl_xor_sync(~0u, low, step));
    }
  }
  // The largest number, but for its last bits, that the candidates of `k` SMs reach. So do the k largest logits.
  DEVICE float reached_by(int k) const {
    constexpr uint32_t LAST_BIT = 1u << 12, LEAST_FINITE = 0x00800000u;
    uint32_t key[IN_FLIGHT], reached = 0;
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) key[i] = ordered_key(first_.values.v[i]);
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit >= LAST_BIT; bit >>= 1) {
      int n = 0;
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) n += key[i] >= (reached | bit);
      if (__reduce_add_sync(~0u, n) >= k) reached |= bit;
    }
    return reached < LEAST_FINITE ? -INFINITY : float_of_key(reached);
  }

 private:
  struct Batch {
    Column<float> values, lows;
    Column<int> ids;
    DEVICE Batch(const StepParams& p, int row, int sm)
        : values(p.candidate_value, sm, p.n_sm, row, -INFINITY), lows(p.candidate_low, sm, p.n_sm, row, INFINITY),
          ids(p.candidate_id, sm, p.n_sm, row, MAX_ID) {}
  };
  DEVICE void take(const Batch& b) {
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      low = fminf(low, b.lows.v[i]);
      bool better = b.values.v[i] > value || (b.values.v[i] == value && b.ids.v[i] < id);
      if (better) value = b.values.v[i], id = b.ids.v[i];
    }
  }
  const Batch first_;
};

// A warp's row through the waves of a step. histogram and shortlist of a slice lie on one SM, so what the first has
// loaded the second need not.
struct Drawing {
  int warp;
  Share mine;
  RowSampling q{};  // of a row that is drawn, else zeros; asked for before the first wave opens
  RowView view;
  Best best;  // of this warp's tokens that are sure to be kept
  DEVICE Drawing(const StepParams& p, const Shared& s, int thread) : warp(thread / 32), mine(p, warp) {
    if (mine.row != NONE && s.keys[mine.row]) q = p.sampling[mine.row];
  }
  // Between waves: no address that follows from these is worth a register from one to the next.
  DEVICE void next_wave() {
    warp = hidden(warp), mine.row = hidden(mine.row), mine.part = hidden(mine.part), mine.parts = hidden(mine.parts);
  }
  DEVICE bool drawn() const { return q.temperature > 0.f; }  // greedy rows take the head's candidate
  // Whether the head's candidates bound the cut of top-k so closely that all above the bound is shortlisted.
  DEVICE bool listed(const StepParams& p) const { return q.top_k && q.top_k <= min(p.n_sm, IN_FLIGHT * 32); }
  // Whether bins must tell where the cuts lie.
  DEVICE bool binned(const StepParams& p) const { return q.cuts && !listed(p); }
};

// A warp's part of a slice, four logits a lane at a time.
class Slice {
 public:
  // The first logits are loaded, all of them in flight; or `kept`, from a wave before, where these were all.
  DEVICE Slice(const StepParams& p, Shared& s, const int* d, const Drawing& row, bool kept)
      : logits(reinterpret_cast<const float4*>(p.logits + static_cast<size_t>(row.mine.row) * VOCAB_PAD)),
        staged(&scratch(s).logits[row.warp][0][threadIdx.x % 32]), end((d[W_TILE] + d[W_TILES]) * 4),
        stride(row.mine.parts * 32), at_(d[W_TILE] * 4 + row.mine.part * 32 + threadIdx.x % 32) {
    if (!kept || d[W_TILES] * 4 > Scratch::STAGED * stride) stage();
  }
  // Calls f(first id, four logits, how many of them are tokens); all lanes take part.
  template <class F>
  DEVICE void each(F f) {
#pragma unroll 1
    for (int i = 0; __any_sync(~0u, at_ < end); at_ += stride) {
      if (i == Scratch::STAGED) stage(), i = 0;
      float4 four = staged[i++ * 32];
      const float v[4] = {four.x, four.y, four.z, four.w};
      f(at_ * 4, v, at_ < end ? max(0, min(4, VOCAB - at_ * 4)) : 0);
    }
  }

 private:
  DEVICE void stage() {
    float4 v[Scratch::STAGED];
#pragma unroll
    for (int i = 0; i < Scratch::STAGED; ++i) {
      int at = at_ + i * stride;
      v[i] = at < end ? load_l2(logits + at) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int i = 0; i < Scratch::STAGED; ++i) staged[i * 32] = v[i];  // read by the lane that wrote it
  }
  const float4* logits;
  float4* staged;
  const int end, stride;
  int at_;
};
