// attention: one split of one (row, KV head), all query heads of the group, 128 keys at a time.
//
// S^T = K q^T: warp w owns 16 of the chunk's keys. P goes through shared memory. O^T = V^T P^T: warp w owns 16 of the
// head's dims. So no warp merges another's O. K blocks lie in the weight packing, V blocks transposed in it, and both
// come through the ring; the token of this step is patched into the ring copy, since its page may be written just now.
#pragma once
#include "../gemm.cuh"
#include "../splits.cuh"

// Zeroes the bf16 pair elements whose key lies outside [lo, hi).
DEVICE uint32_t keep_keys(uint32_t v, int key, int lo, int hi) {
  if (key < lo || key >= hi) v &= 0xffff0000u;
  if (key + 1 < lo || key + 1 >= hi) v &= 0x0000ffffu;
  return v;
}

class Attention {
 public:
  DEVICE Attention(const StepParams& params, Shared& shared, int thread)
      : p(params), s(shared), warp(thread / 32), lane(thread % 32), g(lane / 4), t(lane % 4) {}

  DEVICE bool run(const int* d, Streams& st) {
    row = d[W_ROW], head = d[W_HEAD];
    Splits cut(s.keys[row], d[W_FLAGS] & FLAG_SLIDING);
    if (d[W_SPLIT] >= cut.count()) return st.put_done();
    lo = cut.lo(d[W_SPLIT]), hi = cut.hi(d[W_SPLIT]);
    newest = cut.keys - 1;
    load_query();
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] = o_odd[i] = l[i] = 0.f;
    m[0] = m[1] = -INFINITY;
    bool ok = true;
#pragma unroll 1
    for (int base = lo / KEYS_CHUNK * KEYS_CHUNK; base < hi; base += KEYS_CHUNK) {
      const int present = chunk_pages(base, lo, hi);
      float c[4];
      // a warp that gives the step up still comes to every meeting, so that it leaves no other warp stuck in one
      ok &= scores(base, present, st, c);
      softmax(base, c);
      ok &= values(base, present, st);
    }
    if (!ok) return false;
    store(d[W_SPLIT]);
    return st.put_done();
  }

 private:
  DEVICE void load_query() {
    const bf16* base = p.qkv + row * QKV_ROWS + head * GROUP * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      q[j] = g < GROUP ? load_l2(reinterpret_cast<const uint4*>(base + g * 128 + j * 32 + t * 8)) : make_uint4(0, 0, 0, 0);
  }

  // This warp's 16 keys: page warp / 4 of the chunk, key strip warp % 4 of the page; a slot holds two key strips.
  DEVICE bool scores(int base, int present, Streams& st, float (&c)[4]) {
    const int slots = present == 3 ? 4 : 2, mine = warp / 2 - (present == 2 ? 2 : 0);
    float odd[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = odd[i] = 0.f;
    if (!(present >> warp / 4 & 1)) return st.skip_slots(slots), true;
    st.skip_slots(mine);
    if (!st.await_slot()) return false;
    uint8_t* strip = st.slot() + warp % 2 * 4096;  // [4][16][32]
    const int patch = newest - (base + warp * 16);
    if (patch >= 0 && patch < 16 && newest < hi) {
      const bf16* k = p.qkv + row * QKV_ROWS + Q_WIDTH + head * 128;
      uint32_t v[2] = {load_l2(reinterpret_cast<const uint32_t*>(k + lane * 4)),
                       load_l2(reinterpret_cast<const uint32_t*>(k + lane * 4 + 2))};
      *reinterpret_cast<uint2*>(strip + lane / 8 * 1024 + patch * 64 + lane % 8 * 8) = make_uint2(v[0], v[1]);
      __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) mma_subtile(j % 2 ? odd : c, reinterpret_cast<const uint4*>(strip) + j * 64, q[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += odd[i];
    st.release_slot(CONSUMERS / 2);
    st.skip_slots(slots - mine - 1);
    return true;
  }

  // From this warp's scores to the chunk's P in shared memory, O and the sums rescaled to the new maximum.
  DEVICE void softmax(int base, float (&c)[4]) {
    // c[0], c[1]: key g, heads 2t and 2t+1; c[2], c[3]: key g + 8
    constexpr float SCALE = 0.08838834764831845f * 1.4426950408889634f;  // 128^-0.5 and log2(e)
    const int key = base + warp * 16 + g;
    const bool seen0 = key >= lo && key < hi, seen1 = key + 8 >= lo && key + 8 < hi;
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = (i < 2 ? seen0 : seen1) ? c[i] * SCALE : -INFINITY;
    float top[2] = {fmaxf(c[0], c[2]), fmaxf(c[1], c[3])};
#pragma unroll
    for (int x = 4; x < 32; x *= 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], x));
    if (g == 0) *reinterpret_cast<float2*>(&s.head_max[warp][2 * t]) = make_float2(top[0], top[1]);
    consumers_meet();
    float all[2] = {m[0], m[1]};
#pragma unroll
    for (int w = 0; w < CONSUMERS; ++w) {
      float2 other = *reinterpret_cast<const float2*>(&s.head_max[w][2 * t]);
      all[0] = fmaxf(all[0], other.x), all[1] = fmaxf(all[1], other.y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s.p[2 * t + i][warp * 16 + g] = __float2bfloat16_rn(exp2f(c[i] - all[i]));
      s.p[2 * t + i][warp * 16 + g + 8] = __float2bfloat16_rn(exp2f(c[2 + i] - all[i]));
      const float alpha = exp2f(m[i] - all[i]);
      m[i] = all[i];
      o[i] *= alpha, o[2 + i] *= alpha, o_odd[i] *= alpha, o_odd[2 + i] *= alpha, l[i] *= alpha;
    }
    consumers_meet();
  }

  // This warp's 16 dims: dim strip `warp`, whose two 32-key sub-tiles lie in slot warp / 4 of each V block.
  DEVICE bool values(int base, int present, Streams& st) {
    const bool whole = lo <= base && hi >= base + KEYS_CHUNK;
#pragma unroll 1
    for (int j = 0; j < 2; ++j) {
      if (!(present >> j & 1)) continue;
      st.skip_slots(warp / 4);
      if (!st.await_slot()) return false;
      const int page = base + j * PAGE, patch = newest - page;
      uint8_t* strip = st.slot() + warp % 4 * 2048;  // [2][16][32]
      if (patch >= 0 && patch < PAGE && newest < hi) {
        const bf16* v = p.qkv + row * QKV_ROWS + Q_WIDTH + KV_WIDTH + head * 128 + warp * 16;
        if (lane < 16)
          *reinterpret_cast<bf16*>(strip + patch / 32 * 1024 + lane * 64 + patch % 32 * 2) = load_l2(v + lane);
        __syncwarp();
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) value_subtile(strip + k * 1024, page + k * 32, j * PAGE + k * 32, whole);
      st.release_slot(CONSUMERS / 4);
      st.skip_slots(1 - warp / 4);
    }
    return true;
  }

  DEVICE void value_subtile(const uint8_t* subtile, int key, int column, bool whole) {
    const uint4* a = reinterpret_cast<const uint4*>(subtile);
    uint4 x = a[lane], y = a[lane + 32];
    if (!whole) {  // unused keys may hold anything, NaN included
      int k = key + t * 8;
      x = make_uint4(keep_keys(x.x, k, lo, hi), keep_keys(x.y, k + 2, lo, hi), keep_keys(x.z, k + 4, lo, hi),
                     keep_keys(x.w, k + 6, lo, hi));
      y = make_uint4(keep_keys(y.x, k, lo, hi), keep_keys(y.y, k + 2, lo, hi), keep_keys(y.z, k + 4, lo, hi),
                     keep_keys(y.w, k + 6, lo, hi));
    }
    const uint4 b = *reinterpret_cast<const uint4*>(&s.p[g][column + t * 8]);
    constexpr uint32_t ONES = 0x3f803f80;  // the sum of P is its product with ones: one row of them would do
    mma_16x8x16(o, x.x, y.x, x.y, y.y, b.x, b.y);
    mma_16x8x16(o_odd, x.z, y.z, x.w, y.w, b.z, b.w);  // a second chain hides the first one's latency
    mma_16x8x16(l, ONES, ONES, ONES, ONES, b.x, b.y);
    mma_16x8x16(l, ONES, ONES, ONES, ONES, b.z, b.w);
  }

  DEVICE void store(int split) {
    int unit = (row * KV_HEADS + head) * SPLIT_STRIDE + split;
    float* out = p.partial_o + static_cast<size_t>(unit) * GROUP * 128 + warp * 16 + g;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int n = 2 * t + i;
      if (n >= GROUP) continue;
      out[n * 128] = o[i] + o_odd[i], out[n * 128 + 8] = o[2 + i] + o_odd[2 + i];
      if (warp == 0 && g == 0) p.partial_ml[unit * 16 + n] = m[i], p.partial_ml[unit * 16 + 8 + n] = l[i];
    }
  }

  const StepParams& p;
  Shared& s;
  const int warp, lane, g, t;
  int row = 0, head = 0, lo = 0, hi = 0, newest = 0;
  uint4 q[4];
  // heads 2t and 2t + 1: O of dims g and g + 8 in two parts, the largest score, and the sum of P as the product sees it,
  // rounded to bf16 (l[2], l[3] repeat l[0], l[1])
  float o[4], o_odd[4], m[2], l[4];
};
