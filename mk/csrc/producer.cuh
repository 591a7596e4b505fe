// The producer: streams every operation's weights and KV pages into the ring, in list order, ahead of the consumers.
#pragma once
#include "splits.cuh"
#include "wait.cuh"

class Producer {
 public:
  DEVICE Producer(const StepParams& params, Shared& shared) : p(params), s(shared), g(params, shared, ROLE_PRODUCER) {}

  // Runs on one lane.
  DEVICE void run() {
    if (!stream_list()) g.report(NONE, 0, 0);
    // a block may not end with copies in flight
    for (; landed_ < issued_; ++landed_) {
      while (!barrier_try(&s.ring_full[oldest_.index], oldest_.lap)) {
      }
      oldest_.next();
    }
  }

 private:
  DEVICE bool stream_list() {
    Cursor<ENTRIES> at;
    for (;;) {
      if (!g.wait(&s.entry_full[at.index], at.lap)) return false;
      const int* d = s.entry[at.index];
      g.at(at.index);
      if (d[W_OPCODE] == OP_END) return true;
      int2 first = ahead_ ? looked_up_ : d[W_OPCODE] == OP_ATTENTION ? first_pages(d) : make_int2(0, 0);
      Cursor<ENTRIES> following = at;
      following.next();
      ahead_ = barrier_test(&s.entry_full[following.index], following.lap);
      const int* e = s.entry[following.index];
      if (ahead_ && e[W_OPCODE] == OP_ATTENTION) looked_up_ = first_pages(e);
      if (!stream(d, first)) return false;
      barrier_arrive(&s.entry_empty[at.index]);
      at = following;
    }
  }

  DEVICE bool stream(const int* d, int2 first) {
    switch (d[W_OPCODE]) {
      case OP_QKV: case OP_O_PROJ: case OP_DENSE_UP: case OP_DENSE_DOWN: case OP_LM_HEAD:
        return push(d[W_WEIGHT] + d[W_TILE] * d[W_STRIP_PITCH], d[W_TILES] * d[W_K_SLOTS]);
      case OP_ROUTER:
        for (int i = 0; i < d[W_TILES]; ++i)
          if (!push(d[W_WEIGHT] + (d[W_TILE] + i) * d[W_STRIP_PITCH] + d[W_K_SLOT], d[W_K_SLOTS])) return false;
        return true;
      case OP_MOE_UP: return flat_tiles(d, UP_STRIPS);
      case OP_MOE_DOWN: return flat_tiles(d, HIDDEN_STRIPS);
      case OP_MOE_DOWN_OWNED: return owned_tiles(d);
      case OP_ATTENTION: return pages(d, first);
      default: return true;
    }
  }

  // Flat (expert, strip) tiles [TILE, TILE + TILES); runs within an expert are contiguous.
  DEVICE bool flat_tiles(const int* d, int strips) {
    const Route& route = s.route[d[W_LAYER] & 1];
    for (int flat = d[W_TILE], end = flat + d[W_TILES]; flat < end;) {
      int rank = flat / strips, strip = flat % strips, n = min(end - flat, strips - strip);
      int first = d[W_WEIGHT] + route.active[rank] * d[W_EXPERT_PITCH] + strip * d[W_STRIP_PITCH];
      if (!push(first, n * d[W_K_SLOTS])) return false;
      flat += n;
    }
    return true;
  }

  DEVICE bool owned_tiles(const int* d) {
    const Route& route = s.route[d[W_LAYER] & 1];
    for (int i = 0; i < d[W_TILES]; ++i)
      for (int a = 0; a < route.n_active; ++a) {
        int first = d[W_WEIGHT] + route.active[a] * d[W_EXPERT_PITCH] + (d[W_TILE] + i) * d[W_STRIP_PITCH];
        if (!push(first, d[W_K_SLOTS])) return false;
      }
    return true;
  }

  DEVICE const int* table_row(const int* d) const {
    return (d[W_FLAGS] & FLAG_SLIDING ? p.table_sliding : p.table_full) + d[W_ROW] * p.table_stride;
  }
  // Pages of an attention task's first chunk. Looked up a task ahead, so that the load's latency passes behind copies.
  DEVICE int2 first_pages(const int* d) const {
    Splits cut(s.keys[d[W_ROW]], d[W_FLAGS] & FLAG_SLIDING);
    if (d[W_SPLIT] >= cut.count()) return make_int2(0, 0);
    int block = cut.lo(d[W_SPLIT]) / KEYS_CHUNK * (KEYS_CHUNK / PAGE);
    const int* table = table_row(d);
    return make_int2(table[block], block + 1 < p.table_stride ? table[block + 1] : NONE);
  }

  // K pages of a chunk, then its V pages. The newest token's row is still old here: the consumers put it in.
  DEVICE bool pages(const int* d, int2 first) {
    bool sliding = d[W_FLAGS] & FLAG_SLIDING;
    Splits cut(s.keys[d[W_ROW]], sliding);
    if (d[W_SPLIT] >= cut.count()) return true;
    int lo = cut.lo(d[W_SPLIT]), hi = cut.hi(d[W_SPLIT]);
    const int* table = table_row(d);
    const uint8_t* pool = sliding ? p.pool_sliding : p.pool_full;
    int layers = sliding ? SLIDING_LAYERS : FULL_LAYERS;
    int index = KIND_INDEX[d[W_LAYER]];
    int start = lo / KEYS_CHUNK * KEYS_CHUNK;
    for (int base = start; base < hi; base += KEYS_CHUNK) {
      int present = chunk_pages(base, lo, hi);
      const uint8_t* block[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (present >> j & 1) {
          size_t page = base == start ? (j ? first.y : first.x) : table[base / PAGE + j];
          block[j] = pool + ((page * layers + index) * KV_HEADS + d[W_HEAD]) * 2 * KV_BLOCK_BYTES;
        }
#pragma unroll
      for (int half = 0; half < 2; ++half)  // K, then V
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (present >> j & 1)
            for (int slot = 0; slot < KV_BLOCK_BYTES / SLOT_BYTES; ++slot)
              if (!copy(block[j] + half * KV_BLOCK_BYTES + slot * SLOT_BYTES)) return false;
    }
    return true;
  }

  DEVICE bool push(int slot, int n) {
    const uint8_t* src = p.slots + static_cast<size_t>(slot) * SLOT_BYTES;
    for (int i = 0; i < n; ++i)
      if (!copy(src + static_cast<size_t>(i) * SLOT_BYTES)) return false;
    return true;
  }

  // One slot. At most `window_slots` are outstanding: bytes in flight queue ahead of the polls and small loads that
  // carry the dependencies, so more of them than the latency needs makes every hand-off slower.
  DEVICE bool copy(const uint8_t* src) {
    if (!g.wait(&s.ring_empty[at_.index], at_.lap ^ 1)) return false;
    if (issued_ - landed_ >= p.window_slots) {
      if (!g.wait(&s.ring_full[oldest_.index], oldest_.lap)) return false;
      oldest_.next(), ++landed_;
    }
    fence_async_shared();
    barrier_expect(&s.ring_full[at_.index], SLOT_BYTES);
    bulk_copy(s.ring[at_.index], src, SLOT_BYTES, &s.ring_full[at_.index]);
    at_.next(), ++issued_;
    return true;
  }

  const StepParams& p;
  Shared& s;
  const Guard g;
  Cursor<RING_SLOTS> at_, oldest_;
  int issued_ = 0, landed_ = 0;
  bool ahead_ = false;  // `looked_up_` belongs to the entry that comes next
  int2 looked_up_ = make_int2(0, 0);
};
