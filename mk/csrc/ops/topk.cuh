// topk: adds the partial logits, picks the k largest of each row, and builds the layer's expert list. One warp.
#pragma once
#include "../wait.cuh"

// Order-preserving key of a logit; NaN counts as -inf, -0 as +0, and no logit maps to 0.
DEVICE uint32_t logit_key(float v) {
  uint32_t bits = __float_as_uint(v == v ? v + 0.f : __int_as_float(0xff800000));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Ids that replace the router's choice in some routing modes, [row][rank] over the lanes; NONE where they do not.
// Loaded before the wait, into registers that nothing but top-k reads: the ids still come into being after the logits
// are complete, without a cold load in the way.
class ReplacedIds {
 public:
  DEVICE ReplacedIds() = default;
  DEVICE ReplacedIds(const StepParams& p, int layer, int lane) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      int at = lane + i * 32;
      id[i] = p.forced_ids && at < MAX_ROWS * TOP_K ? p.forced_ids[layer * MAX_ROWS * TOP_K + at] : NONE;
    }
  }
  // Lanes may ask for different ranks.
  DEVICE int of(int row, int rank) const {
    const int at = row * TOP_K + rank;
    int found = NONE;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int held = __shfl_sync(~0u, id[i], at % 32);
      if (at / 32 == i) found = held;
    }
    return found;
  }

 private:
  static constexpr int PER_LANE = (MAX_ROWS * TOP_K + 31) / 32;
  int id[PER_LANE];
};

// Lane l holds experts 4l .. 4l+3.
class TopK {
 public:
  DEVICE TopK(const StepParams& params, Shared& shared, const int* d, int lane_)
      : p(params), s(shared), route(shared.route[d[W_LAYER] & 1]), lane(lane_),
        published(d[W_FLAGS] & FLAG_PUBLISH ? params.route_ids + d[W_LAYER] * MAX_ROWS * TOP_K : nullptr) {}

  // What the producer waits for comes first: the list of experts. Their weights follow, for the down projection.
  DEVICE void run(const ReplacedIds& replaced, uint32_t lap) {
    uint32_t rows = 0;  // byte j: rows that go to expert 4 lane + j
    float4 parts[HIDDEN_SLOTS];
    load(parts, 0);
#pragma unroll 1
    for (int row = 0; row < p.rows; ++row) {
      float logit[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int k = 0; k < HIDDEN_SLOTS; ++k)
        logit[0] += parts[k].x, logit[1] += parts[k].y, logit[2] += parts[k].z, logit[3] += parts[k].w;
      load(parts, min(row + 1, p.rows - 1));  // on its way while this row is picked
      if (s.keys[row] == 0) continue;
      int* ids = published ? published + row * TOP_K : nullptr;
      const bool forced = replaced.of(row, 0) != NONE;
      uint32_t mine = largest(row, logit, forced ? nullptr : ids);
      if (forced) mine = named(row, replaced, ids);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (mine >> j & 1) route.weight[lane * 4 + j][row] = logit[j];
        rows |= (mine >> j & 1) << (8 * j + row);
      }
    }
#ifdef MK_ORACLE
    if (!all_named(replaced)) announce(rows, lap);
#else
    announce(rows, lap);
#endif
    for (; rows; rows &= rows - 1) {  // from the logits that this lane put there
      const int bit = __ffs(rows) - 1;
      float& weight = route.weight[lane * 4 + bit / 8][bit % 8];
      weight = weight == weight ? 1.f / (1.f + expf(-weight)) : 0.f;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.route_weighed);
  }

#ifdef MK_ORACLE
  // What an ablation prices: ids that are known before the logits are.
  DEVICE void foresee(const ReplacedIds& replaced, uint32_t lap) {
    if (!all_named(replaced)) return;
    uint32_t rows = 0;
#pragma unroll 1
    for (int row = 0; row < p.rows; ++row) {
      const uint32_t mine = s.keys[row] ? named(row, replaced, nullptr) : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) rows |= (mine >> j & 1) << (8 * j + row);
    }
    announce(rows, lap);
  }
#endif

 private:
#ifdef MK_ORACLE
  DEVICE bool all_named(const ReplacedIds& replaced) const {
    bool all = true;
#pragma unroll 1
    for (int row = 0; row < p.rows; ++row) all &= s.keys[row] == 0 || replaced.of(row, 0) != NONE;
    return all;
  }
#endif
  DEVICE void announce(uint32_t rows, uint32_t lap) {
    list(rows);
    if (lane == 0) route.lap = lap;
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.route_ready);
  }
  DEVICE void load(float4 (&parts)[HIDDEN_SLOTS], int row) const {
#pragma unroll
    for (int k = 0; k < HIDDEN_SLOTS; ++k)
      parts[k] = load_l2(reinterpret_cast<const float4*>(p.router_part + (k * MAX_ROWS + row) * 128) + lane);
  }

  // The TOP_K largest logits, equal ones by the lower id: this lane's, as bits.
  DEVICE uint32_t largest(int row, const float (&logit)[4], int* ids) const {
    uint32_t key[4];
    bool bad = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool exists = lane * 4 + j < EXPERTS;
      key[j] = exists ? logit_key(logit[j]) : 0;
      bad |= exists && logit[j] != logit[j];
    }
    if (bad) atomicOr(p.status + row, STATUS_ROUTER_NAN);
    int before[4];  // keys of this lane that are taken before each
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      before[j] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) before[j] += i < j ? key[i] >= key[j] : key[i] > key[j];
    }
    settle(key[0], key[1]), settle(key[2], key[3]), settle(key[0], key[2]), settle(key[1], key[3]), settle(key[1], key[2]);
    const uint32_t lower_lanes = (1u << lane) - 1;
    int taken = 0;       // of this lane's
    uint32_t ranks = 0;  // of those, four bits each
#pragma unroll 2
    for (int rank = 0; rank < TOP_K; ++rank) {
      const uint32_t top = __reduce_max_sync(~0u, key[0]);
      const uint32_t equal = __ballot_sync(~0u, key[0] == top);
      if (key[0] == top && !(equal & lower_lanes)) {
        ranks |= rank << 4 * taken++;
        key[0] = key[1], key[1] = key[2], key[2] = key[3], key[3] = 0;
      }
    }
    uint32_t mine = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (before[j] >= taken) continue;
      mine |= 1u << j;
      if (ids) ids[ranks >> 4 * before[j] & 15] = lane * 4 + j;
    }
    return mine;
  }
  static DEVICE void settle(uint32_t& larger, uint32_t& smaller) {
    const uint32_t most = max(larger, smaller);
    smaller = min(larger, smaller), larger = most;
  }

  // The ids that a routing mode names instead.
  DEVICE uint32_t named(int row, const ReplacedIds& replaced, int* ids) const {
    const int id = replaced.of(row, lane % TOP_K);
    const bool here = lane < TOP_K, exists = here && id >= 0 && id < EXPERTS;
    uint32_t mine = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) {  // experts 32 word .. + 31
      const uint32_t some = __reduce_or_sync(~0u, exists && id / 32 == word ? 1u << id % 32 : 0);
      if (lane / 8 == word) mine = some >> lane % 8 * 4 & 15;
    }
    if (exists && ids) ids[lane] = id;
    if (__any_sync(~0u, here && !exists) && lane == 0) atomicOr(p.status + row, STATUS_EXPERT_ID);
    return mine;
  }

  // The rows of every expert, and the ascending list of those that have any.
  DEVICE void list(uint32_t rows) {
    reinterpret_cast<uint32_t*>(route.rows)[lane] = rows;
    const uint32_t lower_lanes = (1u << lane) - 1;
    int at = 0, all = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t some = __ballot_sync(~0u, rows >> 8 * j & 0xff);
      at += __popc(some & lower_lanes), all += __popc(some);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (rows >> 8 * j & 0xff) route.active[at++] = lane * 4 + j;
    if (lane == 0) route.n_active = all;
  }

  const StepParams& p;
  Shared& s;
  Route& route;
  const int lane;
  int* const published;
};
