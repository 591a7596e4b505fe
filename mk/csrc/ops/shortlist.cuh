// shortlist: of a slice of the vocabulary, the best token that is sure to be kept, and those that may be.
#pragma once
#include "histogram.cuh"

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
    uint64_t least = masses.total(), most = least;
    if (at_limit != NONE) {
      auto limit = masses.of(at_limit);
      least = limit.before, most = least + limit.here;
    }
    first = last = masses.find(needed_mass(least, q.top_p)).bin;
    if (most != least) last = masses.find(needed_mass(most, q.top_p)).bin;
  }
  if (threadIdx.x % 32 == 0) out.first = first, out.last = last, out.at_limit = at_limit;
}

// Every consumer warp runs this; `ok` says whether its wait was met, see Attention::chunk for why it goes on if not.
DEVICE bool make_shortlist(const StepParams& p, Shared& s, Streams& st, const int* d, bool ok) {
  const int thread = hidden(threadIdx.x), lane = thread % 32, warp = thread / 32;
  ok = __all_sync(~0u, ok && st.await_tile());
  Share mine(p, warp);
  Offer* of_tile = offers(s, st.tile_index());
  Offer& own = of_tile[warp];
  Best best;
  if (!ok || !is_drawn(p, s, mine.row)) {
    consumers_meet();
  } else {
    const bool cuts = p.sampling[mine.row].cuts;
    Fours fours(p, d, mine);
    Likeliest head(p, mine.row);
    if (cuts && mine.part == 0) find_bounds(p, p.sampling[mine.row], mine.row, own);
    consumers_meet();
    const Offer& bounds = of_tile[mine.row * mine.parts];
    const int first = cuts ? bounds.first : BINS, last = cuts ? bounds.last : NONE;
    const int at_limit = cuts ? bounds.at_limit : NONE;
    head.over_warp(p, mine.row);
    const RowView view(p.sampling[mine.row], head.value, head.low);
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
    fours.each([&](int id, const float(&v)[4], int tokens) {
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
