// dense_up, moe_up: silu(gate) * up. A strip holds 8 gate rows and their 8 up rows, so a pair meets in one lane.
#pragma once
#include "../tile.cuh"

// Hidden column 8 strip + r, for the rows of `mask`.
DEVICE void store_gated(const Place& at, bf16* out, int stride, int strip, uint32_t mask, const float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (mask >> (at.n + i) & 1) {
      float gate = v[i];
      out[(at.n + i) * stride + strip * 8 + at.r] = __float2bfloat16_rn(gate / (1.f + expf(-gate)) * v[2 + i]);
    }
}

DEVICE void store_dense_up(const StepParams& p, const Place& at, int strip, const float (&v)[4]) {
  store_gated(at, p.dense_hidden, DENSE_SLOTS * 256, strip, ~0u, v);
}

// Rows that are not routed to the expert keep what they had: nothing reads it.
DEVICE void store_moe_up(const StepParams& p, const Shared& s, const Place& at, const int* d, int flat,
                         const float (&v)[4]) {
  const Route& route = s.route[d[W_LAYER] & 1];
  int expert = route.active[flat / UP_STRIPS];
  store_gated(at, p.hidden + static_cast<size_t>(expert) * MAX_ROWS * FFN_SLOTS * 256, FFN_SLOTS * 256, flat % UP_STRIPS,
              route.rows[expert], v);
}
