// attn_combine: the splits of one (row, query head). Warp w adds splits w, w + 8, ...; the storer adds the warps.
#pragma once
#include "../gemm.cuh"
#include "../tile.cuh"

DEVICE bool combine_splits(const StepParams& p, Shared& s, Streams& st, const int* d) {
  const int thread = hidden(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int row = d[W_ROW], n = d[W_HEAD] % GROUP;
  int splits = Splits(s.keys[row], d[W_FLAGS] & FLAG_SLIDING).count();
  int first = (row * KV_HEADS + d[W_HEAD] / GROUP) * SPLIT_STRIDE;
  constexpr int PER_LANE = (SPLIT_STRIDE + 31) / 32, PER_WARP = (SPLIT_STRIDE + CONSUMERS - 1) / CONSUMERS;
  float4 v[PER_WARP];
#pragma unroll
  for (int i = 0; i < PER_WARP; ++i) {
    int split = warp + i * CONSUMERS;
    const float* src = p.partial_o + (static_cast<size_t>(first + split) * GROUP + n) * 128 + lane * 4;
    v[i] = split < splits ? load_l2(reinterpret_cast<const float4*>(src)) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  float weight[PER_LANE], top = -INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    int split = lane + i * 32;
    weight[i] = split < splits ? load_l2(p.partial_ml + (first + split) * 16 + n) : -INFINITY;
    top = fmaxf(top, weight[i]);
  }
  for (int x = 1; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    int split = lane + i * 32;
    weight[i] = split < splits ? exp2f(weight[i] - top) : 0.f;
    if (split < splits) sum += weight[i] * load_l2(p.partial_ml + (first + split) * 16 + 8 + n);
  }
  for (int x = 1; x < 32; x *= 2) sum += __shfl_xor_sync(~0u, sum, x);
  float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < PER_WARP; ++i) {
    int split = warp + i * CONSUMERS;
    float w = 0.f;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
      float candidate = __shfl_sync(~0u, weight[j], split % 32);
      if (split / 32 == j) w = candidate;
    }
    c[0] += w * v[i].x, c[1] += w * v[i].y, c[2] += w * v[i].z, c[3] += w * v[i].w;
  }
  if (!st.await_tile()) return false;
  if (warp == 0 && lane == 0) s.denominator[st.tile_index()] = sum;
  return st.put(c);
}

// The warps' sum `v` over the splits' common denominator: four dims a lane. An inactive row attends to nothing.
DEVICE void store_head(const StepParams& p, const Shared& s, const Place& at, const int* d, float denominator,
                       float (&v)[4]) {
  bool active = s.keys[d[W_ROW]] > 0;
  float scale = active ? 1.f / denominator : 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = active ? v[i] * scale : 0.f;
  *reinterpret_cast<uint2*>(p.attn_out + d[W_ROW] * Q_PAD + d[W_HEAD] * 128 + at.lane * 4) =
      make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}
