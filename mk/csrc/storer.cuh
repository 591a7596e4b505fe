// The storer: adds the eight warps' partial tiles in warp order, runs an operation's epilogue, publishes, signals.
#pragma once
#include "ops/combine.cuh"
#include "ops/experts.cuh"
#include "ops/head.cuh"
#include "ops/qkv.cuh"
#include "ops/residual.cuh"
#include "ops/router.cuh"
#include "ops/up.cuh"

class Storer {
 public:
  DEVICE Storer(const StepParams& params, Shared& shared)
      : p(params), s(shared), g(params, shared, ROLE_STORER), entries(shared, g), at(threadIdx.x % 32) {}

  DEVICE void run() {
    while (entries.next()) {
      const int* d = entries.words;
      if (d[W_OPCODE] == OP_END) return;
      // opened: an entry may only store and signal after its waits, also when it has nothing to do
      if (!entries.opened() || !store(d)) break;
      __syncwarp();
      if (at.lane == 0 && d[W_SIGNAL] != NONE)
        signal_release(p.counters + static_cast<size_t>(d[W_SIGNAL]) * COUNTER_STRIDE, d[W_SIGNAL_VALUE]);
      entries.release();
    }
    entries.report();
  }

 private:
  DEVICE bool store(const int* d) {
    switch (d[W_OPCODE]) {
      case OP_EMBED: return embed(p, s, at, d), true;
      case OP_QKV: return normed(d, [&](int strip, const float (&v)[4]) { store_qkv(p, s, at, d, strip, v); });
      case OP_ROUTER: return normed(d, [&](int strip, const float (&v)[4]) { store_router(p, at, d, strip, v); });
      case OP_DENSE_UP: return normed(d, [&](int strip, const float (&v)[4]) { store_dense_up(p, at, strip, v); });
      case OP_MOE_UP: return normed(d, [&](int flat, const float (&v)[4]) { store_moe_up(p, s, at, d, flat, v); });
      case OP_LM_HEAD:
        if (!normed(d, [&](int strip, const float (&v)[4]) { store_logits(p, at, candidates, strip, v); })) return false;
        return publish_candidates(p, at, candidates), true;
      case OP_O_PROJ: return contribution(d, s.acc_attn, d[W_DST] == BUF_ACC_ATTN, p.oproj_out);
      case OP_DENSE_DOWN: return contribution(d, s.acc_ffn, d[W_DST] == BUF_ACC_FFN, p.ffn_out);
      case OP_MOE_DOWN_OWNED: return contribution(d, s.acc_ffn, true, nullptr);
      case OP_MOE_DOWN:
        return each_tile(d, [&](int flat, const float (&v)[4]) { store_expert_part(p, s, at, d, flat, v); });
      case OP_MOE_COMBINE: return moe_combine(p, s, at, d), true;
      case OP_RESIDUAL: return residual(p, s, at, d), true;
      case OP_ATTENTION: return await_tile() && (give_back(), true);
      case OP_ATTN_COMBINE: return merged_head(d);
      case OP_ROUTE_SETUP: return clear_idle_queues(d), true;
      case OP_HISTOGRAM: return await_tile() && (give_back(), true);
      case OP_SHORTLIST: return offered(d);
      case OP_DRAW: return drawn();
      case OP_SAMPLE: return sample(p, s, at), true;
      default: return true;
    }
  }

  // ---- tiles from the consumers ----
  DEVICE bool await_tile() { return g.wait(&s.tile_full[tile_.index], tile_.lap); }
  DEVICE void give_back() {
    __syncwarp();
    if (at.lane == 0) barrier_arrive(&s.tile_empty[tile_.index]);
    tile_.next();
  }
  DEVICE bool take(float (&v)[4]) {
    if (!await_tile()) return false;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < CONSUMERS; ++w) {
      float4 part = reinterpret_cast<const float4*>(s.tile[tile_.index][w])[at.lane];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
    give_back();
    return true;
  }
  template <class Body>
  DEVICE bool each_tile(const int* d, Body body) {
    for (int i = 0; i < d[W_TILES]; ++i) {
      float v[4];
      if (!take(v)) return false;
      body(d[W_TILE] + i, v);
    }
    return true;
  }
  // The same for products of the normed input: 1 / rms of the two batch rows is applied here.
  template <class Body>
  DEVICE bool normed(const int* d, Body body) {
    if (d[W_LAYER] != norm_layer_) load_rstd(d[W_LAYER]);
    return each_tile(d, [&](int tile, float (&v)[4]) {
      v[0] *= rstd_[0], v[2] *= rstd_[0], v[1] *= rstd_[1], v[3] *= rstd_[1];
      body(tile, v);
    });
  }
  DEVICE void load_rstd(int layer) {
    norm_layer_ = layer;
    // lane: rows 4 (lane % 2) .. + 3 of every sixteenth strip, all loads in flight at once
    const float4* parts = reinterpret_cast<const float4*>(p.sumsq + (layer & 1) * (HIDDEN / 16) * MAX_ROWS) + at.lane;
    constexpr int LOADS = (HIDDEN / 16 + 15) / 16;
    float4 part[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      part[i] = i * 16 + at.lane / 2 < HIDDEN / 16 ? load_l2(parts + i * 32) : make_float4(0.f, 0.f, 0.f, 0.f);
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < LOADS; ++i) sum[0] += part[i].x, sum[1] += part[i].y, sum[2] += part[i].z, sum[3] += part[i].w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      for (int step = 2; step < 32; step *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
      float rstd = rsqrtf(sum[i] / HIDDEN + RMS_EPS);
      float low = __shfl_sync(~0u, rstd, 0), high = __shfl_sync(~0u, rstd, 1);  // rows i and i + 4
      if (at.n % 4 == (i & ~1)) rstd_[i & 1] = at.n < 4 ? low : high;
    }
  }

  // A contribution to the residual: kept here by the strips' owner, in fp32 memory otherwise.
  DEVICE bool contribution(const int* d, float (*owned)[128], bool keep, float* out) {
    for (int i = 0; i < d[W_TILES]; ++i) {
      float v[4];
      if (!take(v)) return false;
      if (keep)
        reinterpret_cast<float4*>(owned[i])[at.lane] = make_float4(v[0], v[1], v[2], v[3]);
      else
        store_columns(at, out, d[W_TILE] + i, (1u << p.rows) - 1, v);
    }
    return true;
  }
  DEVICE bool merged_head(const int* d) {
    if (!await_tile()) return false;
    float denominator = s.denominator[tile_.index], v[4];
    take(v);
    store_head(p, s, at, d, denominator, v);
    return true;
  }
  // ---- sampling ----
  DEVICE bool offered(const int* d) {
    if (!await_tile()) return false;
    store_offers(p, at, d, offers(s, tile_.index));
    give_back();
    return true;
  }
  DEVICE bool drawn() {
    if (!await_tile()) return false;
    publish_tokens(p, s, at.lane, at.lane < CONSUMERS ? offers(s, tile_.index)[at.lane].id : MAX_ID);
    give_back();
    return true;
  }
  // route_setup: the ticket heads that the next step will use.
  DEVICE void clear_idle_queues(const int* d) {
    uint32_t* idle = p.queues + (~p.epoch & 1) * p.n_queues + d[W_QUEUE];
    if (at.lane < d[W_TILES]) idle[at.lane] = 0;
  }

  const StepParams& p;
  Shared& s;
  const Guard g;
  EntryReader entries;
  const Place at;
  Cursor<TILES_RING> tile_;
  int norm_layer_ = NONE;
  float rstd_[2] = {0.f, 0.f};
  Candidates candidates;
};
