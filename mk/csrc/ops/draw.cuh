// draw: what both cuts keep of a row's shortlist, and the best of all that is kept. Warp w ends row w.
#pragma once
#include "shortlist.cuh"

// A row's undecided tokens as their warp sees them: the first ones stay in registers.
class Undecided {
 public:
  // All loads are in flight before the first is looked at: what lies behind the list's end is dropped then.
  DEVICE Undecided(const StepParams& p, int row)
      : list(p.undecided + static_cast<size_t>(row) * VOCAB_PAD), lane(threadIdx.x % 32),
        tokens_(load_l2(p.undecided_count + (p.epoch & 1) * MAX_ROWS + row)) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) held[i] = i * 32 + lane < VOCAB_PAD ? load_l2(list + i * 32 + lane) : 0;
  }
  DEVICE bool none() {
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (i * 32 + lane >= static_cast<int>(tokens_)) held[i] = 0;
    return tokens_ == 0;
  }
  template <class F>
  DEVICE void each(F f) const {
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (held[i]) f(held[i]);
    rest(f);
  }
  // The rank of the token with which those of `bin`, by falling rank, first weigh `need` together; they do in all.
  template <class Weight>
  DEVICE uint64_t cut(const RowView& view, int bin, uint64_t need, Weight weight_of) const {
    auto weigh = [&](uint64_t rank) -> uint32_t { return view.bin(rank_logit(rank)) == bin ? weight_of(rank) : 0; };
    uint32_t weight[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) weight[i] = held[i] ? weigh(held[i]) : 0;
    auto each_weighed = [&](auto f) {
#pragma unroll
      for (int i = 0; i < HELD; ++i)
        if (weight[i]) f(held[i], weight[i]);
      rest([&](uint64_t rank) {
        if (uint32_t w = weigh(rank)) f(rank, w);
      });
    };
    uint64_t lo = ~0ull, hi = 0;  // at or above lo they weigh enough, at or above hi they do not
    int inside = 0, above = 0;    // how many lie in between, and above
    each_weighed([&](uint64_t rank, uint32_t) { lo = min(lo, rank), hi = max(hi, rank + 1), ++inside; });
    lo = ~warp_max(~lo), hi = warp_max(hi);
    inside = __reduce_add_sync(~0u, inside);
#pragma unroll 1
    while (inside > 1) {
      uint64_t middle = lo + (hi - lo) / 2, sum = 0;
      int upper = 0;
      each_weighed([&](uint64_t rank, uint32_t w) {
        if (rank >= middle) sum += w, ++upper;
      });
      sum = warp_sum(sum), upper = __reduce_add_sync(~0u, upper);
      if (sum >= need)
        lo = middle, inside = upper - above;
      else
        hi = middle, inside -= upper - above, above = upper;
    }
    uint64_t last = 0;  // the only one of [lo, hi)
    each_weighed([&](uint64_t rank, uint32_t) {
      if (rank >= lo && rank < hi) last = rank;
    });
    return warp_max(last);
  }

 private:
  static constexpr int HELD = 8;
  static DEVICE uint64_t warp_max(uint64_t v) {
    for (int step = 1; step < 32; step *= 2) v = max(v, static_cast<uint64_t>(__shfl_xor_sync(~0u, v, step)));
    return v;
  }
  template <class F>
  DEVICE void rest(F f) const {
#pragma unroll 4
    for (int i = HELD * 32 + lane; i < static_cast<int>(tokens_); i += 32) f(load_l2(list + i));
  }
  const uint64_t* list;
  const int lane;
  const uint32_t tokens_;
  uint64_t held[HELD];
};

// The rank from which on both cuts keep a row's undecided tokens.
DEVICE uint64_t settle(const StepParams& p, const RowView& view, int row, const Undecided& open) {
  const RowSampling& q = view.q;
  auto mass = [&](uint64_t rank) { return view.mass(rank_logit(rank)); };
  uint64_t keep = 0;
  int at_limit = BINS;
  if (q.top_k) {
    auto limit = Bins<uint32_t>(bins_of(p, p.bin_count, p.epoch, row)).find(q.top_k);
    at_limit = limit.bin;
    if (at_limit < BINS) keep = open.cut(view, at_limit, q.top_k - limit.before, [](uint64_t) { return 1u; });
  }
  if (q.top_p < 1.) {
    Bins<uint64_t> masses(bins_of(p, p.bin_mass, p.epoch, row));
    uint64_t total = masses.total();
    if (at_limit < BINS) {
      uint64_t kept = 0;
      open.each([&](uint64_t rank) {
        if (rank >= keep && view.bin(rank_logit(rank)) == at_limit) kept += mass(rank);
      });
      total = masses.of(at_limit).before + warp_sum(kept);
    }
    uint64_t need = needed_mass(total, q.top_p);
    auto nucleus = masses.find(need);
    keep = max(keep, open.cut(view, nucleus.bin, need - nucleus.before, mass));
  }
  return keep;
}

// The token of a row that is drawn. What is loaded first is loaded together.
DEVICE int draw_token(const StepParams& p, const Shared& s, int row) {
  const int slices = min(p.n_sm, VOCAB_PAD / 16);
  const bool cuts = p.sampling[row].cuts;
  Likeliest head(p, row);
  Undecided open(p, row);
  Best best;
#pragma unroll 1
  for (int first = 0; first < slices; first += IN_FLIGHT * 32) {
    Column<double> scores(p.best_score, first, slices, row, -INFINITY);
    Column<int> ids(p.best_id, first, slices, row, MAX_ID);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) best.take(scores.v[i], ids.v[i]);
  }
  if (cuts && !open.none()) {
    head.over_warp(p, row);
    const RowView view(p.sampling[row], head.value, head.low);
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
DEVICE bool draw(const StepParams& p, Shared& s, Streams& st, bool ok) {
  if (!__all_sync(~0u, ok)) return false;
  const int row = hidden(threadIdx.x) / 32;
  int id = MAX_ID;
  if (is_drawn(p, s, row)) {
    id = draw_token(p, s, row);
  } else if (row < p.rows) {
    Likeliest head(p, row);
    head.over_warp(p, row);
    id = head.id;
  }
  if (!st.await_tile()) return false;
  if (threadIdx.x % 32 == 0) offers(s, st.tile_index())[row].id = id;
  return st.put_done();
}
