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
  // The same in all lanes.
  DEVICE int of(int row, int rank) const {
    const int at = row * TOP_K + rank;
    int held = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) held |= id[i] & (at / 32 == i ? ~0 : 0);  // an index would move it to local memory
    return __shfl_sync(~0u, held, at % 32);
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

  DEVICE void run(const ReplacedIds& replaced) {
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
        const float v = logit[j], weight = v == v ? 1.f / (1.f + expf(-v)) : 0.f;  // of all four: no lane waits for another
        if (mine >> j & 1) route.weight[lane * 4 + j][row] = weight;
        rows |= (mine >> j & 1) << (8 * j + row);
      }
    }
    list(rows);
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.route_ready);
  }

 private:
  DEVICE void load(float4 (&parts)[HIDDEN_SLOTS], int row) const {
#pragma unroll
    for (int k = 0; k < HIDDEN_SLOTS; ++k)
      parts[k] = load_l2(reinterpret_cast<const float4*>(p.router_part + (k * MAX_ROWS + row) * 128) + lane);
  }

  // The TOP_K largest logits, equal ones by the lower id: this lane's, as bits.
  DEVICE uint32_t largest(int row, const float (&logit)[4], int* ids) const {
    uint32_t key[4], mine = 0;
    bool bad = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool exists = lane * 4 + j < EXPERTS;
      key[j] = exists ? logit_key(logit[j]) : 0;
      bad |= exists && logit[j] != logit[j];
    }
    if (bad) atomicOr(p.status + row, STATUS_ROUTER_NAN);
#pragma unroll 1
    for (int rank = 0; rank < TOP_K; ++rank) {
      const uint32_t top = __reduce_max_sync(~0u, max(max(key[0], key[1]), max(key[2], key[3])));
      const bool equal[4] = {key[0] == top, key[1] == top, key[2] == top, key[3] == top};
      const bool any = equal[0] || equal[1] || equal[2] || equal[3];
      const bool own = lane == __ffs(__ballot_sync(~0u, any)) - 1;
      const int j = equal[0] ? 0 : equal[1] ? 1 : equal[2] ? 2 : 3;
#pragma unroll
      for (int i = 0; i < 4; ++i)  // no index: an indexed array would live in local memory
        if (own && i == j) key[i] = 0;
      if (own) mine |= 1u << j;
      if (own && ids) ids[rank] = lane * 4 + j;
    }
    return mine;
  }

  // The ids that a routing mode names instead.
  DEVICE uint32_t named(int row, const ReplacedIds& replaced, int* ids) const {
    uint32_t mine = 0;
    bool bad = false;
#pragma unroll
    for (int rank = 0; rank < TOP_K; ++rank) {
      const int id = replaced.of(row, rank);
      const bool exists = id >= 0 && id < EXPERTS;
      bad |= !exists;
      if (exists && lane == id >> 2) mine |= 1u << (id & 3);
      if (exists && ids && lane == 0) ids[rank] = id;
    }
    if (bad && lane == 0) atomicOr(p.status + row, STATUS_EXPERT_ID);
    return mine;
  }

  // The rows of every expert, and the ascending list of those that have any.
  DEVICE void list(uint32_t rows) {
    reinterpret_cast<uint32_t*>(route.rows)[lane] = rows;
    int mine = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) mine += (rows >> 8 * j & 0xff) != 0;
    int end = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int below = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += below;
    }
    int at = end - mine;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (rows >> 8 * j & 0xff) route.active[at++] = lane * 4 + j;
    if (lane == 31) route.n_active = end;
  }

  const StepParams& p;
  Shared& s;
  Route& route;
  const int lane;
  int* const published;
};
