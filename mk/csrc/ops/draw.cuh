// histogram, shortlist, draw: what top-k and top-p keep, and the token drawn from it, without a sort (mk/shortlist.py).
//
// In the first two, the eight warps share a slice of the vocabulary: each takes a part of it for one row. In `draw`,
// warp w ends row w. All sums are of integers, so neither the order of SMs nor that of lanes changes a token.
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

DEVICE uint64_t warp_sum(uint64_t v) {
  for (int step = 1; step < 32; step *= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
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

// The head's candidates of a row over all SMs: its likeliest token and the range of its logits.
DEVICE void likeliest(const StepParams& p, int row, float& value, float& low, int& id) {
  value = -INFINITY, low = INFINITY, id = MAX_ID;
  for (int sm = threadIdx.x % 32; sm < p.n_sm; sm += 32) {
    float v = load_l2(p.candidate_value + sm * MAX_ROWS + row);
    int candidate = load_l2(p.candidate_id + sm * MAX_ROWS + row);
    low = fminf(low, load_l2(p.candidate_low + sm * MAX_ROWS + row));
    if (v > value || (v == value && candidate < id)) value = v, id = candidate;
  }
  for (int step = 1; step < 32; step *= 2) {
    keep_better(value, id, step);
    low = fminf(low, __shfl_xor_sync(~0u, low, step));
  }
}
DEVICE RowView view_of(const StepParams& p, int row) {
  float top, low;
  int id;
  likeliest(p, row, top, low, id);
  return RowView(p.sampling[row], top, low);
}

// Calls f(first id, four logits, how many of them are tokens) for a warp's part of a slice; all lanes take part. The
// next load is under way while f works.
template <class F>
DEVICE void each_four(const StepParams& p, const int* d, const Share& mine, F f) {
  const int lane = threadIdx.x % 32, end = (d[W_TILE] + d[W_TILES]) * 4, stride = mine.parts * 32;
  const float4* logits = reinterpret_cast<const float4*>(p.logits + static_cast<size_t>(mine.row) * VOCAB_PAD);
  auto load = [&](int at) { return at < end ? load_l2(logits + at) : make_float4(0.f, 0.f, 0.f, 0.f); };
  float4 next = load(d[W_TILE] * 4 + mine.part * 32 + lane);
#pragma unroll 1
  for (int base = d[W_TILE] * 4 + mine.part * 32; base < end; base += stride) {
    float4 four = next;
    next = load(base + stride + lane);
    int id = (base + lane) * 4;
    const float v[4] = {four.x, four.y, four.z, four.w};
    f(id, v, base + lane < end ? max(0, min(4, VOCAB - id)) : 0);
  }
}

// ---- histogram --------------------------------------------------------------------------------------------------

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
    uint64_t before;  // the sum of all bins before it
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
    if (!enough) return {BINS, total()};
    int owner = __ffs(enough) - 1;
    uint64_t before = __shfl_sync(~0u, through_ - sum_, owner);
    uint64_t first = value(owner, 2 * lane), second = value(owner, 2 * lane + 1), end = before + scan(first + second);
    int pair = __ffs(__ballot_sync(~0u, end >= need)) - 1;
    bool in_first = end - second >= need;
    int bin = owner * PER_LANE + 2 * lane + !in_first;
    before = in_first ? end - second - first : end - second;
    return {__shfl_sync(~0u, bin, pair), __shfl_sync(~0u, before, pair)};
  }
  // The sum of all bins before `bin`, which is below BINS.
  DEVICE uint64_t before(int bin) const {
    int owner = bin / PER_LANE, within = bin % PER_LANE;
    uint64_t part = (2 * lane < within ? value(owner, 2 * lane) : 0) +
                    (2 * lane + 1 < within ? value(owner, 2 * lane + 1) : 0);
    return __shfl_sync(~0u, through_ - sum_, owner) + warp_sum(part);
  }
  DEVICE uint64_t at(int bin) const { return value(bin / PER_LANE, bin % PER_LANE); }

 private:
  static DEVICE uint64_t wide(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }
  DEVICE uint64_t value(int owner, int within) const { return load_l2(bins + place(owner * PER_LANE + within)); }
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

DEVICE bool fill_histogram(const StepParams& p, const Shared& s, Streams& st, const int* d) {
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
    RowView view = view_of(p, mine.row);
    uint32_t* counts = bins_of(p, p.bin_count, p.epoch, mine.row);
    unsigned long long* masses =
        reinterpret_cast<unsigned long long*>(bins_of(p, p.bin_mass, p.epoch, mine.row));
    each_four(p, d, mine, [&](int, const float(&v)[4], int tokens) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        count_tokens(view, counts, masses, j < tokens ? view.bin(v[j]) : NONE, view.mass(v[j]));
    });
  }
  return st.put_done();
}

// ---- shortlist --------------------------------------------------------------------------------------------------

// A warp's part of a tile: bounds for the warps of a row, tokens on their way to the shortlist, the best sure one.
struct Offer {
  static constexpr int ROOM = 60;
  uint64_t pending[ROOM];
  int first, last, at_limit;  // bins, as mk/shortlist.py's Bounds
  int id;
  double score;
};
static_assert(sizeof(Offer) <= sizeof(Shared::tile[0][0]), "an offer is handed over as a tile");
DEVICE Offer* offers(Shared& s, int tile) { return reinterpret_cast<Offer*>(s.tile[tile]); }

// The bins that hold the cuts. The whole warp of a row's first part does this.
DEVICE void find_bounds(const StepParams& p, const RowSampling& q, int row, Offer& out) {
  int first = BINS, last = BINS, at_limit = NONE;
  if (q.top_k) {
    int bin = Bins<uint32_t>(bins_of(p, p.bin_count, p.epoch, row)).find(q.top_k).bin;
    if (bin < BINS) first = last = at_limit = bin;
  }
  if (q.top_p < 1.) {
    Bins<uint64_t> masses(bins_of(p, p.bin_mass, p.epoch, row));
    uint64_t least = at_limit == NONE ? masses.total() : masses.before(at_limit);
    uint64_t most = at_limit == NONE ? least : least + masses.at(at_limit);
    first = last = masses.find(needed_mass(least, q.top_p)).bin;
    if (most != least) last = masses.find(needed_mass(most, q.top_p)).bin;
  }
  if (threadIdx.x % 32 == 0) out.first = first, out.last = last, out.at_limit = at_limit;
}

// Every consumer warp runs this; `ok` says whether its wait was met, see Attention::chunk for why it goes on if not.
DEVICE bool make_shortlist(const StepParams& p, Shared& s, Streams& st, const int* d, bool ok) {
  const int thread = hidden(threadIdx.x), lane = thread % 32, warp = thread / 32;
  ok = ok && st.await_tile();
  Share mine(p, warp);
  Offer* of_tile = offers(s, st.tile_index());
  Offer& own = of_tile[warp];
  const bool busy = ok && is_drawn(p, s, mine.row), cuts = busy && p.sampling[mine.row].cuts;
  if (cuts && mine.part == 0) find_bounds(p, p.sampling[mine.row], mine.row, own);
  consumers_meet();
  Best best;
  if (busy) {
    const Offer& bounds = of_tile[mine.row * mine.parts];
    const int first = cuts ? bounds.first : BINS, last = cuts ? bounds.last : NONE;
    const int at_limit = cuts ? bounds.at_limit : NONE;
    const RowView view = view_of(p, mine.row);
    int pending = 0;
    auto flush = [&] {
      __syncwarp();
      uint32_t base = 0;
      if (lane == 0) base = atomicAdd(p.undecided_count + (p.epoch & 1) * MAX_ROWS + mine.row, pending);
      uint64_t* list = p.undecided + static_cast<size_t>(mine.row) * VOCAB_PAD + __shfl_sync(~0u, base, 0);
      for (int i = lane; i < pending; i += 32) list[i] = own.pending[i];
      pending = 0;
      __syncwarp();
    };
    each_four(p, d, mine, [&](int id, const float(&v)[4], int tokens) {
      uint32_t sure = 0, open = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int bin = j < tokens ? view.bin(v[j]) : NONE;
        if (bin == NONE) continue;
        sure |= (bin < first) << j;
        open |= ((bin >= first && bin <= last) || bin == at_limit) << j;
      }
      if (sure) {
        uint32_t word[4];
        philox(word, id / 4, s.keys[mine.row], view.q.seed);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (sure >> j & 1) best.take(noisy_score(v[j], view.q.temperature, word[j]), id + j);
      }
      if (!__any_sync(~0u, open)) return;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t here = __ballot_sync(~0u, open >> j & 1);
        if (pending + __popc(here) > Offer::ROOM) flush();
        if (open >> j & 1) own.pending[pending + __popc(here & ((1u << lane) - 1))] = token_rank(v[j], id + j);
        pending += __popc(here);
      }
    });
    if (pending) flush();
    best.over_warp();
  }
  if (lane == 0) own.score = best.score, own.id = best.id;
  return ok && st.put_done();
}

// The storer's part: the best of a row's warps.
DEVICE void store_offers(const StepParams& p, const Place& at, const int* d, const Offer* of_tile) {
  Share first(p, 0);
  if (at.lane >= p.rows) return;
  Best best;
  for (int part = 0; part < first.parts; ++part) {
    const Offer& offer = of_tile[at.lane * first.parts + part];
    best.take(offer.score, offer.id);
  }
  p.best_score[d[W_RANK] * MAX_ROWS + at.lane] = best.score;
  p.best_id[d[W_RANK] * MAX_ROWS + at.lane] = best.id;
}

// ---- draw -------------------------------------------------------------------------------------------------------

// A row's undecided tokens as their warp sees them: the first ones stay in registers.
class Undecided {
 public:
  static constexpr int HELD = 8;
  const int tokens;
  DEVICE Undecided(const uint64_t* list_, int tokens_) : tokens(tokens_), list(list_), lane(threadIdx.x % 32) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) held[i] = i * 32 + lane < tokens ? load_l2(list + i * 32 + lane) : 0;
  }
  template <class F>
  DEVICE void each(F f) const {
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (held[i]) f(held[i]);
#pragma unroll 4
    for (int i = HELD * 32 + lane; i < tokens; i += 32) f(load_l2(list + i));
  }
  // The largest bound that the tokens of `bin` ranked at or above it weigh at least `need` together; they do in all.
  template <class Weight>
  DEVICE uint64_t cut(const RowView& view, int bin, uint64_t need, Weight weight) const {
    uint64_t lo = ~0ull, hi = 0;  // at or above lo they weigh enough, at or above hi they do not
    int inside = 0;               // tokens in between
    each([&](uint64_t rank) {
      if (view.bin(rank_logit(rank)) == bin) lo = min(lo, rank), hi = max(hi, rank + 1), ++inside;
    });
    for (int step = 1; step < 32; step *= 2) {
      lo = min(lo, static_cast<uint64_t>(__shfl_xor_sync(~0u, lo, step)));
      hi = max(hi, static_cast<uint64_t>(__shfl_xor_sync(~0u, hi, step)));
    }
    inside = static_cast<int>(warp_sum(inside));
    int above = 0;
#pragma unroll 1
    while (inside > 1) {
      uint64_t middle = lo + (hi - lo) / 2, sum = 0;
      int upper = 0;
      each([&](uint64_t rank) {
        if (rank >= middle && view.bin(rank_logit(rank)) == bin) sum += weight(rank), ++upper;
      });
      sum = warp_sum(sum), upper = static_cast<int>(warp_sum(upper));
      if (sum >= need)
        lo = middle, inside = upper - above;
      else
        hi = middle, inside -= upper - above, above = upper;
    }
    return lo;
  }

 private:
  const uint64_t* list;
  const int lane;
  uint64_t held[HELD];
};

// The rank from which on both cuts keep a row's undecided tokens.
DEVICE uint64_t settle(const StepParams& p, const RowView& view, int row, const Undecided& open) {
  const RowSampling& q = view.q;
  auto mass = [&](uint64_t rank) -> uint64_t { return view.mass(rank_logit(rank)); };
  uint64_t keep = 0;
  int at_limit = BINS;
  if (q.top_k) {
    auto limit = Bins<uint32_t>(bins_of(p, p.bin_count, p.epoch, row)).find(q.top_k);
    at_limit = limit.bin;
    if (at_limit < BINS) keep = open.cut(view, at_limit, q.top_k - limit.before, [](uint64_t) { return 1ull; });
  }
  if (q.top_p < 1.) {
    Bins<uint64_t> masses(bins_of(p, p.bin_mass, p.epoch, row));
    uint64_t total = masses.total();
    if (at_limit < BINS) {
      uint64_t kept = 0;
      open.each([&](uint64_t rank) {
        if (rank >= keep && view.bin(rank_logit(rank)) == at_limit) kept += mass(rank);
      });
      total = masses.before(at_limit) + warp_sum(kept);
    }
    uint64_t need = needed_mass(total, q.top_p);
    auto nucleus = masses.find(need);
    keep = max(keep, open.cut(view, nucleus.bin, need - nucleus.before, mass));
  }
  return keep;
}

// The token of a row that is drawn.
DEVICE int draw_token(const StepParams& p, const Shared& s, int row) {
  const int lane = threadIdx.x % 32;
  const RowView view = view_of(p, row);
  Best best;
  for (int slice = lane; slice < min(p.n_sm, VOCAB_PAD / 16); slice += 32)
    best.take(load_l2(p.best_score + slice * MAX_ROWS + row), load_l2(p.best_id + slice * MAX_ROWS + row));
  int tokens = view.q.cuts ? load_l2(p.undecided_count + (p.epoch & 1) * MAX_ROWS + row) : 0;
  if (tokens) {
    Undecided open(p.undecided + static_cast<size_t>(row) * VOCAB_PAD, tokens);
    uint64_t keep = settle(p, view, row, open);
    open.each([&](uint64_t rank) {
      if (rank < keep) return;
      int id = rank_id(rank);
      uint32_t word[4];
      philox(word, id / 4, s.keys[row], view.q.seed);
      uint32_t mine = id % 4 == 0 ? word[0] : id % 4 == 1 ? word[1] : id % 4 == 2 ? word[2] : word[3];
      best.take(noisy_score(rank_logit(rank), view.q.temperature, mine), id);
    });
  }
  best.over_warp();
  return best.id;
}

// Warp w hands row w's token to the storer, MAX_ID where there is none.
DEVICE bool draw(const StepParams& p, Shared& s, Streams& st) {
  const int row = hidden(threadIdx.x) / 32;
  int id = MAX_ID;
  if (is_drawn(p, s, row)) {
    id = draw_token(p, s, row);
  } else if (row < p.rows) {
    float value, low;
    likeliest(p, row, value, low, id);
  }
  if (!st.await_tile()) return false;
  if (threadIdx.x % 32 == 0) offers(s, st.tile_index())[row].id = id;
  return st.put_done();
}
