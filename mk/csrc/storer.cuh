// The storer: adds the eight warps' partial tiles in warp order, runs an operation's epilogue, publishes, signals.
#pragma once
#include "delay.cuh"
#include "ops/experts.cuh"
#include "ops/head.cuh"
#include "ops/qkv.cuh"
#include "ops/residual.cuh"
#include "ops/router.cuh"
#include "ops/topk.cuh"
#include "ops/up.cuh"

class Storer {
 public:
  DEVICE Storer(const StepParams& params, Shared& shared)
      : p(params), s(shared), g(params, shared, ROLE_STORER), entries(params, shared, g), at(threadIdx.x % 32) {}

  DEVICE void run() {
    bool ok;
    while ((ok = entries.next()) && entries.words[W_OPCODE] != OP_END) {
      const int* d = entries.words;
      if (d[W_OPCODE] == OP_TOPK) {
        replaced_ = ReplacedIds(p, d[W_LAYER], at.lane);
#ifdef MK_ORACLE
        TopK(p, s, d, at.lane).foresee(replaced_, topks_ & 1);
#endif
      }
      // opened: an entry may only store and signal after its waits, also when it has nothing to do
      if (!(ok = entries.opened())) break;
      if (at.lane == 0) trace_mark(s.marks, entries.index(), T_STORING);
      if (!(ok = products(d))) break;
      others(d);
      inject_delay(p, DELAY_SIGNAL, d[W_TASK]);
      __syncwarp();
      if (at.lane == 0) tell(p, d);
      if (at.lane == 0) trace_mark(s.marks, entries.index(), T_SIGNALLED);
      entries.release();
    }
    if (!ok) entries.report();
    g.finish();
  }

 private:
  // ---- tiles from the consumers ----
  DEVICE bool products(const int* d) {
    const int op = d[W_OPCODE];
    const bool normed = reads_normed(op);
    const bool adds = op == OP_O_PROJ || op == OP_DENSE_DOWN || op == OP_MOE_DOWN_OWNED;
    if (op == OP_SHORTLIST || op == OP_DRAW) return offers_of(d);
    if (op == OP_ATTENTION || op == OP_HISTOGRAM)
      return g.wait(&s.tile_full[tile_.index], tile_.lap) && (give_back(), true);
    if (!normed && !adds && op != OP_MOE_DOWN) return true;
    if (normed && d[W_LAYER] != norm_layer_) load_rstd(d[W_LAYER]);
#pragma unroll 1
    for (int i = 0; i < d[W_TILES]; ++i) {
      float v[4];
      if (!take(v)) return false;
      if (normed) v[0] *= rstd_[0], v[2] *= rstd_[0], v[1] *= rstd_[1], v[3] *= rstd_[1];
      const int tile = d[W_TILE] + i;
      switch (op) {
        case OP_QKV: store_qkv(p, s, at, d, tile, v); break;
        case OP_ROUTER: store_router(p, at, d, tile, v); break;
        case OP_MOE_UP: store_moe_up(p, s, at, d, tile, v); break;
        case OP_DENSE_UP: store_dense_up(p, at, tile, v); break;
        case OP_LM_HEAD: store_logits(p, at, candidates, tile, v); break;
        case OP_MOE_DOWN: store_expert_part(p, s, at, d, tile, v); break;
        default: contribution(d, op == OP_O_PROJ, i, tile, v);
      }
    }
    return true;
  }
  DEVICE void give_back() {
    __syncwarp();
    if (at.lane == 0) barrier_arrive(&s.tile_empty[tile_.index]);
    tile_.next();
  }
  DEVICE bool take(float (&v)[4]) {
    if (!g.wait(&s.tile_full[tile_.index], tile_.lap)) return false;
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
  // A contribution to the residual: kept here by the strips' owner, in fp32 memory otherwise.
  DEVICE void contribution(const int* d, bool attention, int i, int strip, const float (&v)[4]) {
    if (d[W_DST] == BUF_ACC_ATTN || d[W_DST] == BUF_ACC_FFN)
      reinterpret_cast<float4*>(attention ? s.acc_attn[i] : s.acc_ffn[i])[at.lane] = make_float4(v[0], v[1], v[2], v[3]);
    else
      store_columns(at, attention ? p.oproj_out : p.ffn_out, strip, (1u << p.rows) - 1, v);
  }

  // ---- what is the storer's alone, and what follows a product's last tile ----
  DEVICE void others(const int* d) {
    const Place at(hidden(this->at.lane));  // no address of these is worth a register all through the step
    switch (d[W_OPCODE]) {
      case OP_EMBED: return embed(p, s, at, d);
      case OP_TOPK: return TopK(p, s, d, at.lane).run(replaced_, topks_++ & 1);
      case OP_MOE_COMBINE: return moe_combine(p, s, at, d);
      case OP_RESIDUAL: return residual(p, s, at, d);
      case OP_ROUTE_SETUP: return clear_idle_queues(d);
      case OP_LM_HEAD: return publish_candidates(p, at, candidates);
      case OP_SAMPLE: return sample(p, s, at);
    }
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

  // ---- sampling ----
  // A tile that holds what the warps found, not products to be added.
  DEVICE bool offers_of(const int* d) {
    if (!g.wait(&s.tile_full[tile_.index], tile_.lap)) return false;
    if (d[W_OPCODE] == OP_SHORTLIST)
      store_offers(p, at, d, offers(s, tile_.index));
    else
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
  ReplacedIds replaced_;
  uint32_t topks_ = 0;  // of this SM so far
};
