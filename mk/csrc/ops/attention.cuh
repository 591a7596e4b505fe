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
    for (int i = 0; i < 4; ++i) o[i] = o_odd[i] = 0.f;
    m[0] = m[1] = -INFINITY, l = 0.f;
    bool ok = true;
    for (int base = lo / KEYS_CHUNK * KEYS_CHUNK; base < hi; base += KEYS_CHUNK)
      ok &= chunk(base, st);
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

  // A warp that gives the step up still comes to every meeting, so that it leaves no other warp stuck in one.
  DEVICE bool chunk(int base, Streams& st) {
    int present = chunk_pages(base, lo, hi);
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    bool ok;
    {
      Spend spend(s.profile, SPENT_SCORES);
      ok = scores(base, present, st, c);
    }
    softmax(base, c);
    Spend spend(s.profile, SPENT_VALUES);
    return values(base, present, st) && ok;
  }

  // From this warp's scores to the chunk's P in shared memory, O and the sums rescaled to the new maximum.
  DEVICE void softmax(int base, float (&c)[4]) {
    Spend spend(s.profile, SPENT_SOFTMAX);
    // c[0], c[1]: key g, heads 2t and 2t+1; c[2], c[3]: key g + 8
    constexpr float SCALE = 0.08838834764831845f * 1.4426950408889634f;  // 128^-0.5 and log2(e)
    int key = base + warp * 16 + g;
    bool seen0 = key >= lo && key < hi, seen1 = key + 8 >= lo && key + 8 < hi;
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = (i < 2 ? seen0 : seen1) ? c[i] * SCALE : -INFINITY;
    float top[2] = {fmaxf(c[0], c[2]), fmaxf(c[1], c[3])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int x = 4; x < 32; x *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], x));
      if (g == 0) s.head_max[warp][2 * t + i] = top[i];
    }
    consumers_meet();
    float alpha[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float all = m[i];
      for (int w = 0; w < CONSUMERS; ++w) all = fmaxf(all, s.head_max[w][2 * t + i]);
      alpha[i] = exp2f(m[i] - all);
      m[i] = all;
      float p0 = exp2f(c[i] - all), p1 = exp2f(c[2 + i] - all);
      s.p[2 * t + i][warp * 16 + g] = __float2bfloat16_rn(p0);
      s.p[2 * t + i][warp * 16 + g + 8] = __float2bfloat16_rn(p1);
      o[i] *= alpha[i], o[2 + i] *= alpha[i];
      o_odd[i] *= alpha[i], o_odd[2 + i] *= alpha[i];
    }
    float even = __shfl_sync(~0u, alpha[0], g / 2), odd = __shfl_sync(~0u, alpha[1], g / 2);
    l *= g % 2 ? odd : even;
    consumers_meet();
  }

  // This warp's 16 keys: page warp / 4 of the chunk, key strip warp % 4 of the page; a slot holds two key strips.
  DEVICE bool scores(int base, int present, Streams& st, float (&c)[4]) {
#pragma unroll 1  // the code of one layer should fit the instruction cache
    for (int slot = 0; slot < 4; ++slot) {
      if (!(present >> slot / 2 & 1)) continue;
      if (warp / 2 != slot) {
        st.decline_slot();
      } else {
        if (!st.await_slot()) return false;
        uint8_t* strip = st.slot() + warp % 2 * 4096;  // [4][16][32]
        int patch = newest - (base + warp * 16);
        if (patch >= 0 && patch < 16 && newest < hi) {
          const bf16* k = p.qkv + row * QKV_ROWS + Q_WIDTH + head * 128;
          uint32_t v[2] = {load_l2(reinterpret_cast<const uint32_t*>(k + lane * 4)),
                           load_l2(reinterpret_cast<const uint32_t*>(k + lane * 4 + 2))};
          *reinterpret_cast<uint2*>(strip + lane / 8 * 1024 + patch * 64 + lane % 8 * 8) = make_uint2(v[0], v[1]);
          __syncwarp();
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_subtile(c, reinterpret_cast<const uint4*>(strip) + j * 64, q[j]);
        st.release_slot(1);
      }
    }
    return true;
  }

  // This warp's 16 dims: dim strip `warp`, whose two 32-key sub-tiles lie in slot warp / 4 of each V block.
  DEVICE bool values(int base, int present, Streams& st) {
    bool whole = lo <= base && hi >= base + KEYS_CHUNK;
#pragma unroll 1  // the code of one layer should fit the instruction cache
    for (int slot = 0; slot < 4; ++slot) {
      if (!(present >> slot / 2 & 1)) continue;
      if (warp / 4 != slot % 2) {
        st.decline_slot();
      } else {
        if (!st.await_slot()) return false;
        int page = base + slot / 2 * PAGE;
        uint8_t* strip = st.slot() + warp % 4 * 2048;  // [2][16][32]
        int patch = newest - page;
        if (patch >= 0 && patch < PAGE && newest < hi) {
          const bf16* v = p.qkv + row * QKV_ROWS + Q_WIDTH + KV_WIDTH + head * 128 + warp * 16;
          if (lane < 16)
            *reinterpret_cast<bf16*>(strip + patch / 32 * 1024 + lane * 64 + patch % 32 * 2) = load_l2(v + lane);
          __syncwarp();
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) value_subtile(strip + j * 1024, page + j * 32, page - base + j * 32, whole);
        st.release_slot(1);
      }
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
    uint4 b = *reinterpret_cast<const uint4*>(&s.p[g][column + t * 8]);
    float2 p0 = unpack_bf16(b.x), p1 = unpack_bf16(b.y), p2 = unpack_bf16(b.z), p3 = unpack_bf16(b.w);
    l += ((p0.x + p0.y) + (p1.x + p1.y)) + ((p2.x + p2.y) + (p3.x + p3.y));
    mma_16x8x16(o, x.x, y.x, x.y, y.y, b.x, b.y);
    mma_16x8x16(o_odd, x.z, y.z, x.w, y.w, b.z, b.w);  // a second chain hides the first one's latency
  }

  DEVICE void store(int split) {
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    int unit = (row * KV_HEADS + head) * SPLIT_STRIDE + split;
    float* out = p.partial_o + static_cast<size_t>(unit) * GROUP * 128 + warp * 16 + g;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int n = 2 * t + i;
      if (n < GROUP) out[n * 128] = o[i] + o_odd[i], out[n * 128 + 8] = o[2 + i] + o_odd[2 + i];
      if (warp == 0 && g == 0) p.partial_ml[unit * 16 + n] = m[i];
    }
    if (warp == 0 && t == 0) p.partial_ml[unit * 16 + 8 + g] = l;
  }

  const StepParams& p;
  Shared& s;
  const int warp, lane, g, t;
  int row = 0, head = 0, lo = 0, hi = 0, newest = 0;
  uint4 q[4];
  float o[4], o_odd[4], m[2];  // heads 2t and 2t + 1
  float l;           // head g: this lane's share of the sum of P as the product sees it, rounded to bf16
};
