// The producer: streams every operation's weights and KV pages into the ring, in list order, ahead of the consumers.
#pragma once
#include "splits.cuh"
#include "wait.cuh"

class Producer {
 public:
  static constexpr int LANES = PRODUCER_LANES;
  DEVICE Producer(const StepParams& params, Shared& shared)
      : p(params), s(shared), g(params, shared, ROLE_PRODUCER), lane(threadIdx.x % 32) {
    at_.skip(lane);
    landed_.lap = 1;
    landed_.skip(RING_SLOTS - p.window_slots + lane);
  }

  // Runs on the first LANES lanes of a warp: a slot each, so that the latencies of issuing a copy are paid once for all.
  DEVICE void run() {
    if (!stream_list()) g.report(NONE, 0, 0);
    if (lane == 0) drain();
    g.finish();
  }

 private:
  static constexpr uint32_t MASK = (1u << LANES) - 1;
  static constexpr int CHUNK_SLOTS = KEYS_CHUNK / PAGE * KV_BLOCK_BYTES / SLOT_BYTES;  // K, or V, of a chunk of keys
  static_assert(LANES == CHUNK_SLOTS, "a batch is the K or the V of a chunk");

  DEVICE bool stream_list() {
    Cursor<ENTRIES> at;
    for (;;) {
      if (!g.wait(&s.entry_full[at.index], at.lap)) return false;
      const int* d = s.entry[at.index];
      g.at(at.index);
      if (d[W_OPCODE] == OP_END) return true;
#ifdef MK_NO_RUN_AHEAD  // no weights past a wait
      if (!g.wait(&s.entry_go[at.index], at.lap)) return false;
#endif
      if (lane == 0) trace_mark(s.marks, at.index, T_STREAM);
      Cursor<ENTRIES> following = at;
      following.next();
      const int first = ahead_ ? looked_up_ : look_up(d, 0);
      ahead_ = barrier_test(&s.entry_full[following.index], following.lap);
      if (ahead_) looked_up_ = look_up(s.entry[following.index], 0);
      if (d[W_OPCODE] == OP_PREFETCH) prefetch(d, following);
      if (!(d[W_OPCODE] == OP_ATTENTION ? stream_pages(d, first) : stream_weights(d))) return false;
      if (lane == 0) {
        trace_mark(s.marks, at.index, T_STREAMED);
        trace_spent(s.marks, at.index, T_RING_FULL, ring_full_);
        trace_spent(s.marks, at.index, T_WINDOW, window_);
      }
      ring_full_ = window_ = {};
      __syncwarp(MASK);
      if (lane == 0) barrier_arrive(&s.entry_empty[at.index]);
      at = following;
    }
  }

  // ---- weights ----
  DEVICE bool stream_weights(const int* d) {
    const int op = d[W_OPCODE], k_slots = d[W_K_SLOTS];
    const bool line = op == OP_QKV || op == OP_O_PROJ || op == OP_DENSE_UP || op == OP_DENSE_DOWN || op == OP_LM_HEAD;
    if (!line && op != OP_ROUTER && op != OP_MOE_UP && op != OP_MOE_DOWN && op != OP_MOE_DOWN_OWNED) return true;
    const Route& route = s.route[d[W_LAYER] & 1];
    const bool owned = op == OP_MOE_DOWN_OWNED, routed = owned || op == OP_MOE_UP || op == OP_MOE_DOWN;
    const int experts = routed ? d[W_EXPERT_PITCH] : 0, pitch = d[W_STRIP_PITCH], active = route.n_active;
    const int strips = op == OP_MOE_UP ? UP_STRIPS : op == OP_MOE_DOWN ? HIDDEN_STRIPS : 1 << 30;
    const int total = d[W_TILES] * k_slots * (owned ? active : 1);
    const int start = d[W_WEIGHT] + (line ? d[W_TILE] * pitch : 0) + (op == OP_ROUTER ? d[W_K_SLOT] : 0);
    // this lane's slot: of which active expert, which of its strips, and how far into that
    int rank = 0, strip = line ? 0 : d[W_TILE], k = lane;
    if (routed && !owned) rank = strip / strips, strip %= strips;
#pragma unroll 1
    for (int i = 0; i < total; i += LANES, k += LANES) {
      if (!line) {
#pragma unroll 1
        for (; k >= k_slots; k -= k_slots) {
          // owned strips take every expert's share one after the other, other tasks an expert's strips
          if (owned && ++rank == active) rank = 0, ++strip;
          if (!owned && ++strip == strips) strip = 0, ++rank;
        }
      }
      const int expert = routed ? route.active[min(rank, EXPERTS - 1)] * experts : 0;
      if (!copy(p.slots + static_cast<size_t>(start + expert + strip * pitch + k) * SLOT_BYTES, min(total - i, LANES)))
        return false;
    }
    return true;
  }

  // Weights that a later task will stream are brought to L2, at the pace of memory, until the next task can be streamed.
  DEVICE void prefetch(const int* d, const Cursor<ENTRIES>& following) const {
    constexpr int BATCH_CYCLES = 1700;  // in which memory delivers a batch to each SM
    const uint8_t* src = p.slots + static_cast<size_t>(d[W_WEIGHT] + d[W_TILE] * d[W_STRIP_PITCH]) * SLOT_BYTES;
    const int total = d[W_TILES] * d[W_K_SLOTS];
#pragma unroll 1
    for (int i = 0; i < total; i += LANES) {
      const long long until = sm_cycles() + BATCH_CYCLES;
      if (i + lane < total) prefetch_l2(src + static_cast<size_t>(i + lane) * SLOT_BYTES, SLOT_BYTES);
      do {
        if (__any_sync(MASK, barrier_test(&s.entry_full[following.index], following.lap))) return;
      } while (__any_sync(MASK, sm_cycles() < until));
    }
  }

  // ---- KV pages ----
  DEVICE const int* table_row(const int* d) const {
    return (d[W_FLAGS] & FLAG_SLIDING ? p.table_sliding : p.table_full) + d[W_ROW] * p.table_stride;
  }
  // This lane's page of the LANES from an attention task's `chunk`-th chunk on; NONE for other tasks. Looked up a task
  // ahead, so that the load's latency passes behind copies.
  DEVICE int look_up(const int* d, int chunk) const {
    if (d[W_OPCODE] != OP_ATTENTION) return NONE;
    const Splits cut(s.keys[d[W_ROW]], d[W_FLAGS] & FLAG_SLIDING);
    if (d[W_SPLIT] >= cut.count()) return NONE;
    const int block = (cut.lo(d[W_SPLIT]) / KEYS_CHUNK + chunk) * (KEYS_CHUNK / PAGE) + lane;
    return block < p.table_stride ? table_row(d)[block] : NONE;
  }

  // K pages of a chunk, then its V pages. The newest token's row is still old here: the consumers put it in.
  DEVICE bool stream_pages(const int* d, int pages) {
    constexpr int PAGES = KEYS_CHUNK / PAGE, CHUNKS = LANES / PAGES, SLOTS = KV_BLOCK_BYTES / SLOT_BYTES;
    const bool sliding = d[W_FLAGS] & FLAG_SLIDING;
    const Splits cut(s.keys[d[W_ROW]], sliding);
    if (d[W_SPLIT] >= cut.count()) return true;
    const int lo = cut.lo(d[W_SPLIT]), hi = cut.hi(d[W_SPLIT]);
    const uint8_t* pool = sliding ? p.pool_sliding : p.pool_full;
    const int layers = sliding ? SLIDING_LAYERS : FULL_LAYERS, index = KIND_INDEX[d[W_LAYER]], head = d[W_HEAD];
    int later = NONE;
#pragma unroll 1
    for (int chunk = 0, base = lo / KEYS_CHUNK * KEYS_CHUNK; base < hi; ++chunk, base += KEYS_CHUNK) {
      if (chunk && chunk % CHUNKS == 0) pages = later;
      if (chunk % CHUNKS == 0 && base + CHUNKS * KEYS_CHUNK < hi) later = look_up(d, chunk + CHUNKS);
      const int present = chunk_pages(base, lo, hi);
      const int page = lane / SLOTS + (present == 2);  // this lane's of the chunk; a chunk may lack either
      const size_t held = __shfl_sync(MASK, pages, chunk % CHUNKS * PAGES + min(page, PAGES - 1));
      const uint8_t* block = pool + ((held * layers + index) * KV_HEADS + head) * 2 * KV_BLOCK_BYTES;
#pragma unroll 1
      for (int half = 0; half < 2; ++half)
        if (!copy(block + half * KV_BLOCK_BYTES + lane % SLOTS * SLOT_BYTES, present == 3 ? LANES : LANES / 2))
          return false;
    }
    return true;
  }

  // A block may not end with copies in flight. A step that was given up may not have issued the last of them: after a
  // time in which any copy lands, there is none.
  DEVICE void drain() {
    for (int i = 0, tries = 0; i < p.window_slots; ++i, landed_.next())
      while (!barrier_try(&s.ring_full[landed_.index], landed_.lap) && !(g.given_up() && ++tries > 10000)) {
      }
  }

  // One slot a lane from its own `src`, by the first `slots` lanes. At most `window_slots` are outstanding: bytes in
  // flight queue ahead of the polls and small loads that carry the dependencies, so more of them than the latency needs
  // makes every hand-off slower.
  DEVICE bool copy(const uint8_t* src, int slots) {
    bool ok = true;
    if (lane < slots) {
      ok = g.wait(&s.ring_empty[at_.index], at_.lap ^ 1, ring_full_);
      if (ok) {
        fence_async_shared();
        barrier_expect(&s.ring_full[at_.index], SLOT_BYTES);
        ok = g.wait(&s.ring_full[landed_.index], landed_.lap, window_);  // last: nothing but the copy follows
      }
      if (ok)
#pragma unroll
        for (int part = 0; part < SLOT_BYTES; part += COPY_BYTES)
          bulk_copy(s.ring[at_.index] + part, src + part, COPY_BYTES, &s.ring_full[at_.index]);
    }
    at_.skip(slots), landed_.skip(slots);
    return __all_sync(MASK, ok);
  }

  const StepParams& p;
  Shared& s;
  const Guard g;
  const int lane;
  // where this lane's next copy goes, and the one, `window_slots` earlier, that must have landed before: none at first,
  // and the lap before the first counts as landed
  Cursor<RING_SLOTS> at_, landed_;
  bool ahead_ = false;  // `looked_up_` belongs to the entry that comes next
  int looked_up_ = NONE;
  Tally ring_full_, window_;  // waits for a free slot, and for a copy to land
};
