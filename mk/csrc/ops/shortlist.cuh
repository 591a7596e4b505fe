// shortlist: of a slice of the vocabulary, the best token that is sure to be kept, and those that may be.
#pragma once
#include "bins.cuh"

// What a warp hands the storer as its part of a tile.
struct Offer {
  double score;
  int id;
};
DEVICE Offer* offers(Shared& s, int tile) { return reinterpret_cast<Offer*>(s.tile[tile]); }

// A token of the shortlist. Their ranks give the order in which cuts keep tokens: larger logits first, equal ones by
// rising id.
DEVICE uint4 undecided_token(float logit, int id, float noise, uint32_t mass) {
  return {~static_cast<uint32_t>(id), ordered_key(logit), __float_as_uint(noise), mass};
}
DEVICE uint64_t rank_of(const uint4& token) { return static_cast<uint64_t>(token.y) << 32 | token.x; }

// Bins before `first` are kept, first .. last are undecided.
struct Bounds {
  int first, last;
  Cuts cuts;
};

// The bins that hold the cuts; each warp of a row finds them for itself.
DEVICE Bounds find_bounds(const RowSampling& q, Scratch& kept, const Share& mine) {
  Bounds found{BINS, BINS, {0, 0, 0}};
  if (q.top_k) {
    auto limit = Bins<uint32_t>(kept.counts[mine.row], kept.count_sums, mine).find(q.top_k);
    if (limit.bin < BINS) found = {limit.bin, limit.bin, {limit.before + limit.here - q.top_k, 0, 0}};
  }
  if (q.top_p < 1.) {
    const Bins<uint64_t> masses(kept.masses[mine.row], kept.mass_sums, mine);
    const bool limited = found.last < BINS;
    const uint64_t least = limited ? masses.of(found.last).before : masses.total();
    auto nucleus = masses.find(needed_mass(least, q.top_p));
    found.first = min(nucleus.bin, BINS - 1);
    found.cuts.mass_before = nucleus.before;
    found.cuts.mass_beside = limited ? nucleus.before : least - nucleus.here;
    if (!limited) found.last = found.first;
  }
  return found;
}

// A warp's part of a slice: tokens before bin `first` compete for the warp's best, those through `last` are listed.
DEVICE void scan(const StepParams& p, Shared& s, Slice& slice, Drawing& row, int first, int last) {
  const int lane = threadIdx.x % 32;
  uint4* waiting = scratch(s).pending[row.warp];
  const float temperature = row.q.temperature;
  int pending = 0;
  auto reserve = [&] {
    uint32_t base = 0;
    if (lane == 0 && pending)
      base = atomicAdd(p.undecided_count + (p.epoch & 1) * MAX_ROWS + row.mine.row, pending);
    return base;
  };
  auto flush = [&](uint32_t base) {
    __syncwarp();
    uint4* list = p.undecided + static_cast<size_t>(row.mine.row) * VOCAB_PAD + __shfl_sync(~0u, base, 0);
#pragma unroll 1
    for (int i = lane; i < pending; i += 32) list[i] = waiting[i];
    pending = 0;
    __syncwarp();
  };
  slice.each([&](int id, const float(&v)[4], int tokens) {
    int bin[4];
    bool any = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bin[j] = j < tokens ? row.view.bin(v[j]) : NONE;
      any |= bin[j] != NONE && bin[j] <= last;
    }
    if (!__any_sync(~0u, any)) return;
    uint32_t word[4];
    philox(word, id / 4, s.keys[row.mine.row], row.q.seed);
    float logit[4], noise[4];
    any = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      logit[j] = v[j], noise[j] = gumbel(word[j]);
      if (bin[j] != NONE && bin[j] < first) row.best.take(noisy_score(v[j], temperature, noise[j]), id + j);
      any |= bin[j] >= first && bin[j] <= last;
    }
    if (!__any_sync(~0u, any)) return;
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {
      const bool open = bin[0] >= first && bin[0] <= last;
      const uint32_t opens = __ballot_sync(~0u, open);
      if (pending + __popc(opens) > Scratch::PENDING) flush(reserve());
      if (open)
        waiting[pending + __popc(opens & ((1u << lane) - 1))] =
            undecided_token(logit[0], id + j, noise[0], row.view.mass(logit[0]));
      pending += __popc(opens);
#pragma unroll
      for (int i = 0; i < 3; ++i) bin[i] = bin[i + 1], noise[i] = noise[i + 1], logit[i] = logit[i + 1];
    }
  });
  const uint32_t base = reserve();
  row.best.over_warp();  // meanwhile
  flush(base);
}

// Every consumer warp runs this; `ok` says whether its wait was met, see Attention::run for why it goes on if not.
DEVICE bool make_shortlist(const StepParams& p, Shared& s, Streams& st, const int* d, Drawing& row, bool ok) {
  ok = __all_sync(~0u, ok && st.await_tile());
  if (!ok || !row.binned(p)) {
    consumers_meet();
  } else {
    Scratch& kept = scratch(s);
    const int at = row.mine.row;
    if (row.q.top_k)
      Bins<uint32_t>::gather(bins_of(p, p.bin_count, p.epoch, at), kept.counts[at], kept.count_sums, row);
    if (row.q.top_p < 1.)
      Bins<uint64_t>::gather(bins_of(p, p.bin_mass, p.epoch, at), kept.masses[at], kept.mass_sums, row);
    Slice slice(p, s, d, row, true);
    consumers_meet();
    const Bounds bounds = find_bounds(row.q, kept, row.mine);
    if (d[W_RANK] == 0 && row.mine.part == 0 && threadIdx.x % 32 == 0) p.cuts[at] = bounds.cuts;
    scan(p, s, slice, row, bounds.first, bounds.last);
  }
  if (threadIdx.x % 32 == 0) offers(s, st.tile_index())[row.warp] = {row.best.score, row.best.id};
  return ok && st.put_done();
}

// The storer's part: the best of a row's warps.
DEVICE void store_offers(const StepParams& p, const Place& at, const int* d, const Offer* of_tile) {
  const Share first(p, 0);
  if (at.lane >= p.rows) return;
  Best best;
  for (int part = 0; part < first.parts; ++part) {
    const Offer& offer = of_tile[at.lane * first.parts + part];
    best.take(offer.score, offer.id);
  }
  p.best_score[d[W_RANK] * MAX_ROWS + at.lane] = best.score;
  p.best_id[d[W_RANK] * MAX_ROWS + at.lane] = best.id;
}
