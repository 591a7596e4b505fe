// topk: adds the partial logits, picks the k largest of each row, and builds the layer's expert list.
//
// Consumer warp w picks row w's experts, all rows at the same time; warp 0 then merges the rows.
#pragma once
#include "../gemm.cuh"

// Order-preserving key of a logit; NaN counts as -inf, -0 as +0, and no logit maps to 0.
DEVICE uint32_t logit_key(float v) {
  uint32_t bits = __float_as_uint(v == v ? v + 0.f : __int_as_float(0xff800000));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// One row's experts: lane l holds logits 4l .. 4l+3. Equal logits go to the lower id. `forced` is lane l's l-th id where
// a routing mode replaces the router's choice, NONE where it does not.
DEVICE void pick_experts(const StepParams& p, Route& route, int layer, int row, int forced, bool publish) {
  const int lane = threadIdx.x % 32;
  float4 parts[HIDDEN_SLOTS];
#pragma unroll
  for (int k = 0; k < HIDDEN_SLOTS; ++k)
    parts[k] = load_l2(reinterpret_cast<const float4*>(p.router_part + (k * MAX_ROWS + row) * 128) + lane);
  float logit[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int k = 0; k < HIDDEN_SLOTS; ++k)
    logit[0] += parts[k].x, logit[1] += parts[k].y, logit[2] += parts[k].z, logit[3] += parts[k].w;
  uint32_t key[4];
  bool bad = false;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    key[j] = lane * 4 + j < EXPERTS ? logit_key(logit[j]) : 0;
    bad |= lane * 4 + j < EXPERTS && logit[j] != logit[j];
  }
  if (bad) atomicOr(p.status + row, STATUS_ROUTER_NAN);
  uint32_t chosen = 0;  // this lane's four experts, as bits
#pragma unroll 1
  for (int rank = 0; rank < TOP_K; ++rank) {
    int id = __shfl_sync(~0u, forced, rank);
    if (id == NONE) {
      uint32_t best = max(max(key[0], key[1]), max(key[2], key[3]));
      uint32_t top = __reduce_max_sync(~0u, best);
      int owner = __ffs(__ballot_sync(~0u, best == top)) - 1;
      int j = key[0] == top ? 0 : key[1] == top ? 1 : key[2] == top ? 2 : 3;
      id = __shfl_sync(~0u, lane * 4 + j, owner);
    }
    if (id >= EXPERTS) {  // only a replaced id can be
      if (lane == 0) atomicOr(p.status + row, STATUS_EXPERT_ID);
      continue;
    }
    if (lane == id / 4) {
      uint32_t bits = 0;  // masks, not an index: an indexed array would live in local memory
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t mask = j == id % 4 ? ~0u : 0u;
        bits |= __float_as_uint(logit[j]) & mask;
        key[j] &= ~mask;
      }
      float v = __uint_as_float(bits);
      chosen |= 1u << id % 4;
      route.weight[id][row] = v == v ? 1.f / (1.f + expf(-v)) : 0.f;
      if (publish) p.route_ids[(layer * MAX_ROWS + row) * TOP_K + rank] = id;
    }
  }
  route.chosen[row][lane] = chosen;
}

// The rows of every expert and the ascending list of those that have any.
DEVICE void merge_rows(const StepParams& p, const Shared& s, Route& route) {
  const int lane = threadIdx.x % 32;
  uint32_t rows = 0;  // byte j: rows of expert 4 lane + j
  for (int row = 0; row < p.rows; ++row) {
    uint32_t bits = s.keys[row] ? route.chosen[row][lane] : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) rows |= (bits >> j & 1) << (8 * j + row);
  }
  reinterpret_cast<uint32_t*>(route.rows)[lane] = rows;
  int mine = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) mine += (rows >> 8 * j & 0xff) != 0;
  int end = mine;
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

// The id that replaces this lane's choice for row `warp`. Loaded before the wait, into registers that nothing but top-k
// reads: the ids still come into being after the logits are complete, without a cold load in the way.
DEVICE int replaced_id(const StepParams& p, int layer) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  return p.forced_ids && lane < TOP_K ? p.forced_ids[(layer * MAX_ROWS + row) * TOP_K + lane] : NONE;
}

// Every consumer warp runs this; `ok` says whether its wait was met, see Attention::chunk for why it goes on if not.
DEVICE bool topk(const StepParams& p, Shared& s, const int* d, int forced, bool ok) {
  const int warp = threadIdx.x / 32, layer = d[W_LAYER];
  Route& route = s.route[layer & 1];
  if (ok && warp < p.rows && s.keys[warp]) pick_experts(p, route, layer, warp, forced, d[W_FLAGS] & FLAG_PUBLISH);
  consumers_meet();
  if (warp == 0) {
    merge_rows(p, s, route);
    __syncwarp();
    if (hidden(threadIdx.x) == 0) barrier_arrive(&s.route_ready);
  }
  consumers_meet();  // the list is complete for every warp's later tasks
  return ok;
}
