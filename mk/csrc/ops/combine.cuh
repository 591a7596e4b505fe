// attn_combine: merges the splits of 32 dims of one (row, query head).
//
// Lane (i, j) takes dims 4j .. 4j+3 of splits i, i + 4, ...; the four lanes of a dim then add up, nearest first. The
// order depends on the splits alone. One warp.
#pragma once
#include "../splits.cuh"

class Combine {
 public:
  DEVICE Combine(const StepParams& params, Shared& shared, const int* descriptor, int lane_)
      : p(params), s(shared), d(descriptor), lane(lane_),
        splits(Splits(shared.keys[descriptor[W_ROW]], descriptor[W_FLAGS] & FLAG_SLIDING).count()),
        first((descriptor[W_ROW] * KV_HEADS + descriptor[W_HEAD] / GROUP) * SPLIT_STRIDE) {}

  DEVICE void run() {
    float scale = 0.f;
#pragma unroll 1
    for (int part = d[W_TILE], end = part + d[W_TILES]; part < end; ++part) {
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
      for (int at = lane / DIM_LANES; at < WEIGHTS; at += TOGETHER * APART) {
        float4 v[TOGETHER];
        load(v, part, at);
        if (part == d[W_TILE] && at < APART) scale = share();  // whose loads come with the same trip to L2
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
          const float w = s.split_weight[at + i * APART];
          sum.x += w * v[i].x, sum.y += w * v[i].y, sum.z += w * v[i].z, sum.w += w * v[i].w;
        }
      }
#pragma unroll
      for (int x = DIM_LANES; x < 32; x *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, x), sum.y += __shfl_xor_sync(~0u, sum.y, x);
        sum.z += __shfl_xor_sync(~0u, sum.z, x), sum.w += __shfl_xor_sync(~0u, sum.w, x);
      }
      if (lane < DIM_LANES)
        *reinterpret_cast<uint2*>(p.attn_out + d[W_ROW] * Q_PAD + d[W_HEAD] * 128 + part * 32 + lane * 4) =
            make_uint2(pack_bf16(sum.x * scale, sum.y * scale), pack_bf16(sum.z * scale, sum.w * scale));
    }
  }

 private:
  static constexpr int DIM_LANES = 8, APART = 32 / DIM_LANES;  // lanes of 32 dims; splits side by side
  static constexpr int A_LANE = (SPLIT_STRIDE + APART - 1) / APART;  // splits that a lane adds up
  static constexpr int ROUNDS = A_LANE <= 9 ? 1 : (A_LANE + 5) / 6;  // of loads that fit the warp's registers
  static constexpr int TOGETHER = (A_LANE + ROUNDS - 1) / ROUNDS;
  static constexpr int WEIGHTS = ROUNDS * TOGETHER * APART;
  static_assert(WEIGHTS <= MAX_STRIDE, "room for the weights");

  // Splits at, at + APART, ... of 32 dims.
  DEVICE void load(float4 (&v)[TOGETHER], int part, int at) const {
    const float* from = p.partial_o + (static_cast<size_t>(first + at) * GROUP + d[W_HEAD] % GROUP) * 128 +
                        part * 32 + lane % DIM_LANES * 4;
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i)
      v[i] = at + i * APART < splits ? load_l2(reinterpret_cast<const float4*>(from + i * APART * GROUP * 128))
                                     : make_float4(0.f, 0.f, 0.f, 0.f);
  }

  // Each split's share of the softmax, 2^(m - max m), to shared memory; returns 1 over the sum of share x split's sum.
  // An inactive row attends to nothing: 0.
  DEVICE float share() {
    constexpr int PER_LANE = (WEIGHTS + 31) / 32;
    float m[PER_LANE], mass[PER_LANE], top = -INFINITY, sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const float* ml = p.partial_ml + (first + lane + i * 32) * 16 + d[W_HEAD] % GROUP;
      const bool used = lane + i * 32 < splits;
      m[i] = used ? load_l2(ml) : -INFINITY;
      mass[i] = used ? load_l2(ml + 8) : 0.f;
      top = fmaxf(top, m[i]);
    }
#pragma unroll
    for (int x = 1; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const float w = lane + i * 32 < splits ? exp2f(m[i] - top) : 0.f;
      if (lane + i * 32 < WEIGHTS) s.split_weight[lane + i * 32] = w;
      sum += w * mass[i];
    }
#pragma unroll
    for (int x = 1; x < 32; x *= 2) sum += __shfl_xor_sync(~0u, sum, x);
    __syncwarp();
    return splits ? 1.f / sum : 0.f;
  }

  const StepParams& p;
  Shared& s;
  const int* d;
  const int lane, splits, first;
};
