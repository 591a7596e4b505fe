// moe_down, moe_combine: the routed experts' down projections, summed by the owner of a residual strip, or tile by tile
// into fp32 parts that moe_combine adds.
#pragma once
#include "../gemm.cuh"
#include "../tile.cuh"

DEVICE void load_hidden(Fragment<FFN_SLOTS>& b, const StepParams& p, const Route& route, int a) {
  if (a >= route.n_active) return;
  int expert = route.active[a];
  load_fragment(b, p.hidden + static_cast<size_t>(expert) * MAX_ROWS * FFN_SLOTS * 256, route.rows[expert]);
}

// Owned strips: sum over active experts, ascending id, of weight x (down hidden). The activations of several
// experts are loaded together: one expert's slots pass in less time than a load takes.
DEVICE bool down_owned(const StepParams& p, Shared& s, Streams& st, const int* d) {
  const Route& route = s.route[d[W_LAYER] & 1];
  constexpr int TOGETHER = 4;
  const int n0 = threadIdx.x % 4 * 2;  // this lane's columns of the product: batch rows n0 and n0 + 1
#pragma unroll 1
  for (int strip = 0; strip < d[W_TILES]; ++strip) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    auto add = [&](const Fragment<FFN_SLOTS>& b, int a) {
      if (a >= route.n_active) return true;
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      if (!mma_strip(st, c, b)) return false;
      int expert = route.active[a];
      uint32_t rows = route.rows[expert];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (rows >> (n0 + i) & 1) {
          float w = route.weight[expert][n0 + i];
          sum[i] += w * c[i], sum[2 + i] += w * c[2 + i];
        }
      return true;
    };
#pragma unroll 1
    for (int first = 0; first < route.n_active; first += TOGETHER) {
      Fragment<FFN_SLOTS> b[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) load_hidden(b[i], p, route, first + i);
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i)
        if (!add(b[i], first + i)) return false;
    }
    if (!st.put(sum)) return false;
  }
  return true;
}

// Flat (expert, strip) tiles, unweighted: other placements add the experts in moe_combine.
DEVICE bool down_tiles(const StepParams& p, Shared& s, Streams& st, const int* d) {
  const Route& route = s.route[d[W_LAYER] & 1];
  Fragment<FFN_SLOTS> b;
  int loaded = NONE;
#pragma unroll 1
  for (int flat = d[W_TILE], end = flat + d[W_TILES]; flat < end; ++flat) {
    int a = flat / HIDDEN_STRIPS;
    if (a != loaded) load_hidden(b, p, route, a);
    loaded = a;
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    if (!mma_strip(st, c, b) || !st.put(c)) return false;
  }
  return true;
}

DEVICE void store_expert_part(const StepParams& p, const Shared& s, const Place& at, const int* d, int flat,
                              const float (&v)[4]) {
  const Route& route = s.route[d[W_LAYER] & 1];
  int expert = route.active[flat / HIDDEN_STRIPS];
  store_columns(at, p.ffn_part + static_cast<size_t>(expert) * MAX_ROWS * HIDDEN, flat % HIDDEN_STRIPS,
                route.rows[expert], v);
}

// The weighted sum of a strip's expert parts, ascending id.
DEVICE void moe_combine(const StepParams& p, const Shared& s, const Place& at, const int* d) {
  const Route& route = s.route[d[W_LAYER] & 1];
#pragma unroll 1
  for (int i = 0; i < d[W_TILES]; ++i) {
    int strip = d[W_TILE] + i;
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int a = 0; a < route.n_active; ++a) {
      int expert = route.active[a];
      const float* part = p.ffn_part + static_cast<size_t>(expert) * MAX_ROWS * HIDDEN + strip * 16 + at.r;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (route.rows[expert] >> at.row(j) & 1)
          sum[j] += route.weight[expert][at.row(j)] * load_l2(part + at.row(j) * HIDDEN + j / 2 * 8);
    }
    store_columns(at, p.ffn_out, strip, (1u << p.rows) - 1, sum);
  }
}
