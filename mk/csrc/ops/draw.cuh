// draw: what both cuts keep of a row's shortlist, and the best of all that is kept.
#pragma once
#include "histogram.cuh"

// A row's shortlist as its first warp sees it: brought to shared memory by all warps of the row, but for what does not
// fit there.
class Listed {
 public:
  // All loads are in flight before the first is looked at: what lies behind the list's end is dropped then.
  DEVICE Listed(const StepParams& p, Shared& s, const Share& mine)
      : list(p.undecided + static_cast<size_t>(mine.row) * VOCAB_PAD), room(min(ROOM / p.rows, VOCAB_PAD)),
        held(reinterpret_cast<uint4*>(s.ring) + mine.row * (ROOM / p.rows)), lane(threadIdx.x % 32),
        tokens(load_l2(p.undecided_count + (p.epoch & 1) * MAX_ROWS + mine.row)) {
    constexpr int BATCH = 8;
    int first = mine.part * 32 + lane, n = room;
#pragma unroll 1
    do {
      uint4 v[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        int at = first + i * mine.parts * 32;
        if (at < n) v[i] = load_l2(list + at);
      }
      n = min(room, tokens);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        int at = first + i * mine.parts * 32;
        if (at < n) held[at] = v[i];
      }
      first += BATCH * mine.parts * 32;
    } while (first < n);
  }
  template <class F>
  DEVICE void each(F f) const {
#pragma unroll 4
    for (int i = lane; i < min(room, tokens); i += 32) f(held[i]);
#pragma unroll 1
    for (int i = room + lane; i < tokens; i += 32 * TAIL) {
      uint4 v[TAIL];
#pragma unroll
      for (int j = 0; j < TAIL; ++j)
        if (i + j * 32 < tokens) v[j] = load_l2(list + i + j * 32);
#pragma unroll
      for (int j = 0; j < TAIL; ++j)
        if (i + j * 32 < tokens) f(v[j]);
    }
  }
  // The least rank from which on the tokens, by falling rank, weigh `need`; 0 where all of them weigh less.
  DEVICE uint64_t cut(uint64_t need, bool by_mass) const {
    uint32_t low = ~0u, high = 0;
    uint64_t all = 0;
    each([&](const uint4& token) {
      low = min(low, token.y), high = max(high, token.y), all += by_mass ? token.w : 1;
    });
    if (warp_sum(all) < need) return 0;
    // at or above lo they weigh enough, at or above hi they do not
    uint64_t lo = static_cast<uint64_t>(__reduce_min_sync(~0u, low)) << 32;
    uint64_t hi = (static_cast<uint64_t>(__reduce_max_sync(~0u, high)) + 1) << 32;
    int inside = tokens, above = 0;  // how many lie in between, and above
#pragma unroll 1
    while (inside > 1 && hi - lo > 1) {  // ends with any numbers, also where nobody waited for the right ones
      const uint64_t middle = lo + (hi - lo) / 2;
      uint64_t sum = 0;
      int upper = 0;
      each([&](const uint4& token) {
        if (rank_of(token) >= middle) sum += by_mass ? token.w : 1, ++upper;
      });
      sum = warp_sum(sum), upper = __reduce_add_sync(~0u, upper);
      if (sum >= need)
        lo = middle, inside = upper - above;
      else
        hi = middle, inside -= upper - above, above = upper;
    }
    return lo;
  }

 private:
  static constexpr int ROOM = sizeof(Shared::ring) / sizeof(uint4);  // of all rows
  static constexpr int TAIL = 4;  // loads in flight of what does not fit
  const uint4* list;
  const int room;
  uint4* held;
  const int lane;

 public:
  const int tokens;
};

DEVICE Cuts load_cuts(const Cuts* p) { return {load_l2(&p->over), load_l2(&p->mass_before), load_l2(&p->mass_beside)}; }

// The rank from which on both cuts keep a row's undecided tokens.
DEVICE uint64_t settle(const RowSampling& q, const Cuts& cuts, const Listed& open) {
  uint64_t keep = 0;
#pragma unroll 1
  for (int by_mass = 0; by_mass < 2; ++by_mass) {
    uint64_t need = cuts.over ? open.tokens - cuts.over : 0;
    if (by_mass) {
      if (q.top_p >= 1.) break;
      uint64_t kept = 0;
      open.each([&](const uint4& token) {
        if (rank_of(token) >= keep) kept += token.w;
      });
      need = needed_mass(cuts.mass_beside + warp_sum(kept), q.top_p) - cuts.mass_before;
    }
    if (need) keep = max(keep, open.cut(need, by_mass));
  }
  return keep;
}

// The best of all slices' sure tokens. Loaded when made, a part of them a lane, looked at in `best`.
class SliceBests {
 public:
  DEVICE SliceBests(const StepParams& p, int row) : n_(min(p.n_sm, VOCAB_PAD / 16)), batch_(p, row, 0, n_) {}
  DEVICE Best best(const StepParams& p, int row) {
    Best best;
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) best.take(batch_.scores.v[i], batch_.ids.v[i]);
      if ((first += IN_FLIGHT * 32) >= n_) return best;
      batch_ = Batch(p, row, first, n_);
    }
  }

 private:
  struct Batch {
    Column<double> scores;
    Column<int> ids;
    DEVICE Batch(const StepParams& p, int row, int first, int n)
        : scores(p.best_score, first, n, row, -INFINITY), ids(p.best_id, first, n, row, MAX_ID) {}
  };
  const int n_;
  Batch batch_;
};

// The first warp of a row hands the row's token to the storer, MAX_ID where there is none.
DEVICE bool draw(const StepParams& p, Shared& s, Streams& st, const Drawing& row, bool ok) {
  ok = __all_sync(~0u, ok && st.await_tile());
  int id = MAX_ID;
  if (!ok || row.mine.row == NONE) {
    consumers_meet();
  } else if (!row.drawn()) {
    consumers_meet();
    if (row.mine.part == 0) {
      Likeliest head(p, row.mine.row);
      head.over_warp(p, row.mine.row);
      id = head.id;
    }
  } else {
    const bool ends = row.mine.part == 0, binned = row.binned(p);  // this warp ends the row
    const int at = row.mine.row;
    SliceBests slices(p, at);
    Cuts cuts{};
    if (binned) cuts = load_cuts(p.cuts + at);
    Best best;
    if (!row.q.cuts) {
      consumers_meet();
      if (ends) best = slices.best(p, at);
    } else {
      const Listed open(p, s, row.mine);
      consumers_meet();
      if (ends) best = slices.best(p, at);
      if (ends && open.tokens) {
        if (!binned) cuts.over = max(open.tokens - row.q.top_k, 0);
        const uint64_t keep = settle(row.q, cuts, open);
        open.each([&](const uint4& token) {
          if (rank_of(token) < keep) return;
          best.take(noisy_score(float_of_key(token.y), row.q.temperature, __uint_as_float(token.z)), ~token.x);
        });
      }
    }
    best.over_warp();
    id = best.id;
  }
  if (row.mine.row != NONE && row.mine.part == 0 && threadIdx.x % 32 == 0)
    offers(s, st.tile_index())[row.mine.row].id = id;
  return ok && st.put_done();
}
