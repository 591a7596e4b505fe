// The controller: fetches descriptors, expands phases into the task ring, and polls counters.
//
// It is the main track's only poller, but for builds in which every warp polls. Entries are opened strictly in list
// order: an entry's `go` says that its own counters and those of everything before it were reached.
#pragma once
#include "delay.cuh"
#include "splits.cuh"
#include "wait.cuh"

class Controller {
 public:
  DEVICE Controller(const StepParams& params, Shared& shared)
      : p(params), s(shared), g(params, shared, ROLE_CONTROLLER), lane(threadIdx.x % 32) {}

  DEVICE void run() {
    first_ = p.offsets[blockIdx.x], total_ = p.offsets[blockIdx.x + 1] - first_;
    fetch(0), fetch(1);
    uint32_t idle = 0;
    while (!closed_ || opened_ < published_) {
      bool moved = false;
      // entries that need no poll cost little: as many as there are, before the next look at a counter
      for (int i = 0; i < ENTRIES / 2 && !closed_ && publish(); ++i) {
        moved = true;
        if (opened_ + 1 == published_ && free()) open();
      }
      while (open()) moved = true;
      idle = moved ? 0 : idle + 1;
      if ((idle & 255) == 255 && g.expired()) return g.report(polled_, target_, seen_);
    }
    if (lane == 0) trace_end(s.marks, (published_ - 1) % ENTRIES);
    // the others still wait for each other: somebody must watch the clock
    for (idle = 1; !barrier_test(&s.finished, 0); ++idle)
      if ((idle & 255) == 0) g.expired();
    flush_trace(p, s.marks, published_, lane);
  }

 private:
  // ---- descriptors ----
  DEVICE void fetch(int chunk) {
    int begin = chunk * CHUNK, n = min(CHUNK, total_ - begin);
    if (n <= 0 || lane != 0) return;
    fence_async_shared();
    barrier_expect(&s.chunk_full[chunk & 1], n * DESCRIPTOR_WORDS * 4);
    bulk_copy(s.chunk[chunk & 1], p.words + static_cast<size_t>(first_ + begin) * DESCRIPTOR_WORDS,
              n * DESCRIPTOR_WORDS * 4, &s.chunk_full[chunk & 1]);
  }
  DEVICE int word(int w) const { return __shfl_sync(~0u, mine_, w); }
  DEVICE void advance() {
    loaded_ = false;
    if (++next_ % CHUNK == 0) {
      __syncwarp();
      fetch(next_ / CHUNK + 1);
    }
  }

  // Puts the next entry into the task ring if there is one and there is room. False when nothing could be done.
  DEVICE bool publish() {
    if (!barrier_test(&s.entry_empty[at_.index], at_.lap ^ 1)) return false;
    if (next_ == total_) {
      mine_ = lane == W_OPCODE ? OP_END : lane == W_WAIT0 || lane == W_WAIT1 || lane == W_SIGNAL ? NONE : 0;
      put(mine_);
      closed_ = true;
      return true;
    }
    if (!loaded_) {
      int chunk = next_ / CHUNK;
      if (next_ % CHUNK == 0 && !barrier_test(&s.chunk_full[chunk & 1], chunk >> 1 & 1)) return false;
      mine_ = s.chunk[chunk & 1][next_ % CHUNK][lane];
      loaded_ = true;
    }
    int opcode = word(W_OPCODE), layer = word(W_LAYER);
    bool routed = opcode == OP_MOE_UP || opcode == OP_MOE_DOWN || opcode == OP_MOE_DOWN_OWNED ||
                  opcode == OP_MOE_UP_DRAIN || opcode == OP_MOE_DOWN_DRAIN || opcode == OP_MOE_COMBINE;
    // addresses of a routed phase exist once this SM's last top-k is done
    if (routed && !barrier_test(&s.route_ready, (topks_ - 1) & 1)) return false;
    switch (opcode) {
      case OP_TOPK:
        ++topks_;
        put(mine_);
        advance();
        return true;
      case OP_MOE_UP: case OP_MOE_DOWN: put(shared_tiles(layer)); advance(); return true;
      case OP_ATTN_DRAIN: case OP_MOE_UP_DRAIN: case OP_MOE_DOWN_DRAIN: return claim(opcode, layer);
      default: put(mine_); advance(); return true;
    }
  }

  // This SM's share of a phase's flat tiles, as TILE and TILES.
  DEVICE int shared_tiles(int layer) {
    int total = s.route[layer & 1].n_active * word(W_TILES), rank = word(W_RANK), ranks = word(W_RANKS);
    int lo = total * rank / ranks, hi = total * (rank + 1) / ranks;
    return lane == W_TILE ? lo : lane == W_TILES ? hi - lo : mine_;
  }

  // One ticket of a queue: an entry for its tile, or, after the last one, the entry that signals for the whole phase.
  DEVICE bool claim(int opcode, int layer) {
    int ahead = published_ - word(W_CLAIM_AHEAD);
    if (ahead >= claimed_from_ && claiming_) {
      int slot = ahead % ENTRIES;  // CLAIM_AHEAD <= ENTRIES: the entry after it in this slot is not published yet
      if (!barrier_test(&s.entry_empty[slot], ahead / ENTRIES & 1)) return false;
    }
    if (!claiming_) claiming_ = true, claimed_from_ = published_;
    int queue = word(W_QUEUE);
    inject_delay(p, DELAY_CLAIM, published_);
    uint32_t ticket = 0;
    if (lane == 0) ticket = atomicAdd(p.queues + (p.epoch & 1) * p.n_queues + queue, 1u);
    ticket = __shfl_sync(~0u, ticket, 0);
    int value = mine_;
    bool first = published_ == claimed_from_;
    bool valid;
    if (opcode == OP_ATTN_DRAIN) {
      valid = attention_item(ticket, value);
    } else {
      int total = s.route[layer & 1].n_active * word(W_TILES);
      valid = static_cast<int>(ticket) < total;
      if (lane == W_OPCODE) value = opcode == OP_MOE_UP_DRAIN ? OP_MOE_UP : OP_MOE_DOWN;
      if (lane == W_TILE) value = ticket;
      if (lane == W_TILES) value = 1;
    }
    if (valid && lane == W_SIGNAL) value = NONE;
    if (!valid && lane == W_OPCODE) value = OP_NOP;
    if (!first && (lane == W_WAIT0 || lane == W_WAIT1)) value = NONE;
    put(value);
    if (!valid) {
      claiming_ = false;
      advance();
    }
    return true;
  }
  DEVICE bool attention_item(uint32_t ticket, int& value) {
    bool sliding = word(W_FLAGS) & FLAG_SLIDING;
    int left = static_cast<int>(ticket);
    for (int row = 0; row < p.rows; ++row) {
      int splits = Splits(s.keys[row], sliding).count();
      if (left < splits * KV_HEADS) {
        if (lane == W_OPCODE) value = OP_ATTENTION;
        if (lane == W_ROW) value = row;
        if (lane == W_HEAD) value = left / splits;
        if (lane == W_SPLIT) value = left % splits;
        return true;
      }
      left -= splits * KV_HEADS;
    }
    return false;
  }

  DEVICE void put(int value) {
    trace_turn(p, s.marks, at_.index, published_ + 1, lane);
    s.entry[at_.index][lane] = value;
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.entry_full[at_.index]);
    trace_published(s.marks, at_.index, lane, value);
    at_.next();
    ++published_;
  }

  // ---- waits ----
  // Whether the oldest unopened entry waits for no counter.
  DEVICE bool free() const {
    const int* d = s.entry[opens_.index];
    return d[W_WAIT0] == NONE && d[W_WAIT1] == NONE;
  }
  // Opens the oldest unopened entry if its counters were reached.
  DEVICE bool open() {
    if (opened_ == published_) return false;
    const int* d = s.entry[opens_.index];
    g.at(opens_.index);
    if (!reached(d, W_WAIT0) || !reached(d, W_WAIT1)) return false;
    __syncwarp();
    inject_delay(p, DELAY_WAIT, opened_);
    if (lane == 0) barrier_arrive(&s.entry_go[opens_.index]), trace_mark(s.marks, opens_.index, T_GO);
    opens_.next();
    ++opened_;
    return true;
  }

  DEVICE bool reached(const int* d, int slot) {
#ifdef MK_POLL_BY_WARPS
    return true;
#else
    if (d[slot] == NONE) return true;
    polled_ = d[slot], target_ = counter_target(p, d[slot + 2], d[slot + 1]);
    return counter_reached(p, polled_, target_, seen_);
#endif
  }

  const StepParams& p;
  Shared& s;
  const Guard g;
  const int lane;
  int first_ = 0, total_ = 0, next_ = 0;     // descriptors of this SM; the next one to publish
  int mine_ = 0;                             // lane's word of the current descriptor
  bool loaded_ = false, closed_ = false;
  Cursor<ENTRIES> at_, opens_;
  int published_ = 0, opened_ = 0;
  int topks_ = 0;                            // top-k entries published
  bool claiming_ = false;
  int claimed_from_ = 0;
  int polled_ = NONE;
  uint32_t target_ = 0, seen_ = 0;
};
