// topk: adds the partial logits, picks the k largest of each row, and builds the layer's expert list. One warp.
#pragma once
#include "../wait.cuh"

// Order-preserving key of a logit; NaN counts as -inf, -0 as +0, and no logit maps to 0.
DEVICE uint32_t logit_key(float v) {
  uint32_t bits = __float_as_uint(v == v ? v + 0.f : __int_as_float(0xff800000));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Ids that replace the router's choice in some routing modes, as each lane's part of them: lane l holds experts 4l ..
// 4l+3. Made before the wait, in registers that nothing but top-k reads: the ids still come into being after the logits
// are complete, without a cold load in the way.
class ReplacedIds {
 public:
  ReplacedIds() = default;
  DEVICE ReplacedIds(const StepParams& p, int layer, int lane) {
    if (!p.forced_ids) return;
#pragma unroll 1
    for (int row = 0; row < p.rows; ++row) {
      const bool here = lane < TOP_K;
      const int id = here ? p.forced_ids[(layer * MAX_ROWS + row) * TOP_K + lane] : NONE;
      if (__shfl_sync(~0u, id, 0) == NONE) continue;
      const bool exists = id >= 0 && id < EXPERTS;
      named_ |= 1u << row, bad_ |= __any_sync(~0u, here && !exists) << row;
#pragma unroll
      for (int word = 0; word < 4; ++word) {  // experts 32 word .. + 31
        const uint32_t some = __reduce_or_sync(~0u, exists && id / 32 == word ? 1u << id % 32 : 0);
        if (lane / 8 == word) mine_ |= (some >> lane % 8 * 4 & 15) << row * 4;
      }
    }
  }
  DEVICE bool names(int row) const { return named_ >> row & 1; }
  DEVICE bool bad(int row) const { return bad_ >> row & 1; }  // an id that no expert has
  DEVICE uint32_t mine(int row) const { return mine_ >> row * 4 & 15; }

 private:
  uint32_t named_ = 0, bad_ = 0, mine_ = 0;
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
      if (row + 1 < p.rows) load(parts, row + 1);  // on its way while this row is picked
      if (s.keys[row] == 0) continue;
      uint32_t mine = largest(row, logit, replaced.names(row));
      if (replaced.names(row)) mine = replaced.mine(row);
      if (replaced.bad(row) && lane == 0) atomicOr(p.status + row, STATUS_EXPERT_ID);
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
    if (published) publish_named(replaced);
  }

#ifdef MK_ORACLE
  // What an ablation prices: ids that are known before the logits are.
  DEVICE void foresee(const ReplacedIds& replaced, uint32_t lap) {
    if (!all_named(replaced)) return;
    uint32_t rows = 0;
#pragma unroll 1
    for (int row = 0; row < p.rows; ++row) {
      const uint32_t mine = s.keys[row] ? replaced.mine(row) : 0;
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
    for (int row = 0; row < p.rows; ++row) all &= s.keys[row] == 0 || replaced.names(row);
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
    const float4* from = reinterpret_cast<const float4*>(p.router_part) + row * 32 + lane;
#pragma unroll
    for (int k = 0; k < HIDDEN_SLOTS; ++k) parts[k] = load_l2(from + k * MAX_ROWS * 32);
  }

  // The TOP_K largest logits, equal ones by the lower id: this lane's, as bits.
  DEVICE uint32_t largest(int row, const float (&logit)[4], bool named) const {
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
    for (int j = 0; j < 4; ++j) mine |= static_cast<uint32_t>(before[j] < taken) << j;
    if (published && !named) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (mine >> j & 1) published[row * TOP_K + (ranks >> 4 * before[j] & 15)] = lane * 4 + j;
    }
    return mine;
  }
  static DEVICE void settle(uint32_t& larger, uint32_t& smaller) {
    const uint32_t most = max(larger, smaller);
    smaller = min(larger, smaller), larger = most;
  }

  // The ids that a routing mode named instead, those that exist.
  DEVICE void publish_named(const ReplacedIds& replaced) const {
#pragma unroll 1
    for (int i = lane; i < p.rows * TOP_K; i += 32) {
      const int id = replaced.names(i / TOP_K) ? p.forced_ids[published - p.route_ids + i] : NONE;
      if (id >= 0 && id < EXPERTS && s.keys[i / TOP_K]) published[i] = id;
    }
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
