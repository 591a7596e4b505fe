// router: one k slot's part of the expert logits of some strips.
#pragma once
#include "../gemm.cuh"
#include "../tile.cuh"

// Masks pick the fragment: an index would push the registers to local memory.
DEVICE bool multiply_router(Streams& st, const Fragment<HIDDEN_SLOTS>& x, const int* d) {
  int slot = d[W_K_SLOT];
#pragma unroll 1
  for (int i = 0; i < d[W_TILES]; ++i) {
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    if (!st.await_slot()) return false;
    if constexpr (x.BY_SLOT) {
#pragma unroll
      for (int round = 0; round < x.ROUNDS; ++round)
        if (slot == st.warp + round * CONSUMERS) mma_slot(c, st.slot(), x.v + round * SUBTILES);
    } else {
      uint4 b = make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < HIDDEN_SLOTS; ++j) {
        uint32_t mask = j == slot ? ~0u : 0u;
        b.x |= x.v[j].x & mask, b.y |= x.v[j].y & mask, b.z |= x.v[j].z & mask, b.w |= x.v[j].w & mask;
      }
      mma_subtile(c, reinterpret_cast<const uint4*>(st.slot()) + st.warp * 64, b);
    }
    st.release_slot(1);
    if (!st.put(c)) return false;
  }
  return true;
}

DEVICE void store_router(const StepParams& p, const Place& at, const int* d, int strip, const float (&v)[4]) {
  float* out = p.router_part + d[W_K_SLOT] * MAX_ROWS * 128 + strip * 16 + at.r;
#pragma unroll
  for (int i = 0; i < 2; ++i) out[(at.n + i) * 128] = v[i], out[(at.n + i) * 128 + 8] = v[2 + i];
}
