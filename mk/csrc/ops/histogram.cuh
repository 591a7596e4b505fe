// histogram: counts and masses of a row's logits by bin, the first of the waves that sample (mk/shortlist.py); and what
// these waves share.
//
// The eight warps share a slice of the vocabulary: each takes a part of it for one row. All sums are of integers, so
// neither the order of SMs nor that of lanes changes a token.
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

// Whether the row's token is drawn at all; greedy rows take the head's candidate.
DEVICE bool is_drawn(const StepParams& p, const Shared& s, int row) {
  return row != NONE && row < p.rows && s.keys[row] && p.sampling[row].temperature > 0.f;
}

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
    for (int step = 1; step < 32; step *= 2) {
      keep_better(value, id, step);
      low = fminf(low, __shfl_xor_sync(~0u, low, step));
    }
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

// A warp's part of a slice, four logits a lane at a time. The next ones are under way while the last are worked on.
class Fours {
 public:
  DEVICE Fours(const StepParams& p, const int* d, const Share& mine)
      : logits(reinterpret_cast<const float4*>(p.logits + static_cast<size_t>(mine.row) * VOCAB_PAD)),
        base_(d[W_TILE] * 4 + mine.part * 32), end((d[W_TILE] + d[W_TILES]) * 4), stride(mine.parts * 32),
        next_(load(base_)) {}
  // Calls f(first id, four logits, how many of them are tokens); all lanes take part.
  template <class F>
  DEVICE void each(F f) {
#pragma unroll 1
    for (; base_ < end; base_ += stride) {
      float4 four = next_;
      next_ = load(base_ + stride);
      int at = base_ + threadIdx.x % 32, id = at * 4;
      const float v[4] = {four.x, four.y, four.z, four.w};
      f(id, v, at < end ? max(0, min(4, VOCAB - id)) : 0);
    }
  }

 private:
  DEVICE float4 load(int base) const {
    int at = base + threadIdx.x % 32;
    return at < end ? load_l2(logits + at) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  const float4* logits;
  int base_;
  const int end, stride;
  float4 next_;
};

// The bins of a row as one warp reads them. Lane l holds the sum of bins 64 l .. 64 l + 63 and of all before; T is
// uint64_t for masses, uint32_t for counts.
template <class T>
class Bins {
 public:
  static constexpr int PER_LANE = BINS / 32, PER_LOAD = 16 / sizeof(T);
  // Where a bin is stored: a lane's bins 16 bytes apart by 32 lanes, so that its loads are coalesced.
  static DEVICE int place(int bin) {
    int within = bin % PER_LANE;
    return (within / PER_LOAD * 32 + bin / PER_LANE) * PER_LOAD + within % PER_LOAD;
  }
  struct Found {
    int bin;
    uint64_t before, here;  // the sum of all bins before it, and its own
  };

  DEVICE explicit Bins(const T* bins_) : bins(bins_), lane(threadIdx.x % 32) {
#pragma unroll 16
    for (int i = 0; i < PER_LANE / PER_LOAD; ++i) {
      uint4 v = load_l2(reinterpret_cast<const uint4*>(bins) + i * 32 + lane);
      if constexpr (sizeof(T) == 8)
        sum_ += wide(v.x, v.y) + wide(v.z, v.w);
      else
        sum_ += static_cast<uint64_t>(v.x) + v.y + v.z + v.w;
    }
    through_ = scan(sum_);
  }
  DEVICE uint64_t total() const { return __shfl_sync(~0u, through_, 31); }
  // The first bin through which the sums reach `need`, at least 1; bin BINS if none do.
  DEVICE Found find(uint64_t need) const {
    uint32_t enough = __ballot_sync(~0u, through_ >= need);
    if (!enough) return {BINS, total(), 0};
    Pairs at(*this, __ffs(enough) - 1);
    int pair = __ffs(__ballot_sync(~0u, at.end >= need)) - 1;
    return at.found(pair, __shfl_sync(~0u, at.end - at.v[1] < need, pair));
  }
  // What is known of a bin below BINS.
  DEVICE Found of(int bin) const { return Pairs(*this, bin / PER_LANE).found(bin % PER_LANE / 2, bin % 2); }

 private:
  static DEVICE uint64_t wide(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }
  // The bins of one lane, two a lane, cumulated.
  struct Pairs {
    const int owner;
    uint64_t v[2], end;
    DEVICE Pairs(const Bins& b, int owner_) : owner(owner_) {
#pragma unroll
      for (int i = 0; i < 2; ++i) v[i] = load_l2(b.bins + place(owner * PER_LANE + 2 * b.lane + i));
      end = __shfl_sync(~0u, b.through_ - b.sum_, owner) + b.scan(v[0] + v[1]);
    }
    DEVICE Found found(int pair, int second) const {
      uint64_t here = __shfl_sync(~0u, second ? v[1] : v[0], pair);
      uint64_t last = __shfl_sync(~0u, second ? 0 : v[1], pair);
      return {owner * PER_LANE + 2 * pair + second, __shfl_sync(~0u, end, pair) - last - here, here};
    }
  };
  DEVICE uint64_t scan(uint64_t v) const {
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

template <class T>
DEVICE T* bins_of(const StepParams& p, T* bins, uint32_t parity, int row) {
  return bins + (static_cast<size_t>(parity & 1) * MAX_ROWS + row) * BINS;
}

// Adds one token a lane to its bin. Lanes that agree, as in a row of equal logits, add once.
DEVICE void count_tokens(const RowView& view, uint32_t* counts, unsigned long long* masses, int bin, uint32_t mass) {
  int same;
  __match_all_sync(~0u, bin, &same);
  uint32_t tokens = 1;
  uint64_t sum = mass;
  if (same) sum = warp_sum(mass), tokens = 32;
  if (bin == NONE || (same && threadIdx.x % 32)) return;
  if (view.q.top_k) atomicAdd(counts + Bins<uint32_t>::place(bin), tokens);
  if (view.q.top_p < 1.) atomicAdd(masses + Bins<uint64_t>::place(bin), static_cast<unsigned long long>(sum));
}

// Every consumer warp runs this; `ok` says whether its wait was met.
DEVICE bool fill_histogram(const StepParams& p, const Shared& s, Streams& st, const int* d, bool ok) {
  if (!__all_sync(~0u, ok)) return false;
  const int thread = hidden(threadIdx.x);
  // the idle set: each slice clears its part of every row
  int lo = BINS * d[W_RANK] / d[W_RANKS], bins = BINS * (d[W_RANK] + 1) / d[W_RANKS] - lo;
  for (int i = thread; i < bins * MAX_ROWS; i += CONSUMERS * 32) {
    bins_of(p, p.bin_mass, ~p.epoch, i / bins)[lo + i % bins] = 0;
    bins_of(p, p.bin_count, ~p.epoch, i / bins)[lo + i % bins] = 0;
  }
  if (d[W_RANK] == 0 && thread < MAX_ROWS) p.undecided_count[(~p.epoch & 1) * MAX_ROWS + thread] = 0;
  Share mine(p, thread / 32);
  if (is_drawn(p, s, mine.row) && p.sampling[mine.row].cuts) {
    Fours fours(p, d, mine);
    Likeliest head(p, mine.row);
    head.over_warp(p, mine.row);
    const RowView view(p.sampling[mine.row], head.value, head.low);
    uint32_t* counts = bins_of(p, p.bin_count, p.epoch, mine.row);
    unsigned long long* masses =
        reinterpret_cast<unsigned long long*>(bins_of(p, p.bin_mass, p.epoch, mine.row));
    fours.each([&](int, const float(&v)[4], int tokens) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        count_tokens(view, counts, masses, j < tokens ? view.bin(v[j]) : NONE, view.mass(v[j]));
    });
  }
  return st.put_done();
}
