// The consumers: eight warps that multiply what the ring brings.
#pragma once
#include "ops/attention.cuh"
#include "ops/combine.cuh"
#include "ops/draw.cuh"
#include "ops/experts.cuh"
#include "ops/router.cuh"
#include "ops/topk.cuh"

class Consumer {
 public:
  DEVICE Consumer(const StepParams& params, Shared& shared)
      : p(params), s(shared), entries(shared, Guard(params, shared, ROLE_CONSUMER)),
        st(shared, Guard(params, shared, ROLE_CONSUMER)) {}

  DEVICE void run() {
    while (entries.next()) {
      if (entries.words[W_OPCODE] == OP_END) return;
      if (!timed_work(entries.words)) break;
      entries.release();
    }
    entries.report();
  }

 private:
  DEVICE bool opened() {
    Spend spend(s.profile, SPENT_GO);
    return entries.opened();
  }
  DEVICE bool timed_work(const int* d) {
#ifdef MK_PROFILE
    if (threadIdx.x == 0) s.profile.opcode = d[W_OPCODE];
#endif
    Spend spend(s.profile, SPENT_ALL);
    return work(d);
  }
  DEVICE bool work(const int* d) {
    switch (d[W_OPCODE]) {
      case OP_QKV: case OP_DENSE_UP: case OP_LM_HEAD: case OP_MOE_UP:
        return normed(d) && mma_strips<HIDDEN_SLOTS>(st, x_, d[W_TILES]);
      case OP_ROUTER: return normed(d) && multiply_router(st, x_, d);
      case OP_TOPK: {
        int forced = replaced_id(p, d[W_LAYER]);
        return topk(p, s, d, forced, opened());
      }
      case OP_MOE_DOWN_OWNED: {
        bool ok = opened() && down_owned(p, s, st, d);
        forget();
        return ok;
      }
      case OP_MOE_DOWN: return opened() && down_tiles(p, s, st, d);
      case OP_O_PROJ: return product<Q_SLOTS>(d, p.attn_out);
      case OP_DENSE_DOWN: return product<DENSE_SLOTS>(d, p.dense_hidden);
      case OP_ATTENTION: return opened() && Attention(p, s, hidden(threadIdx.x)).run(d, st);
      case OP_ATTN_COMBINE: return opened() && combine_splits(p, s, st, d);
      case OP_HISTOGRAM: return fill_histogram(p, s, st, d, opened());
      case OP_SHORTLIST: return make_shortlist(p, s, st, d, opened());
      case OP_DRAW: return draw(p, s, st, opened());
      default: return true;  // the storer's alone
    }
  }

  // Strips over an activation of SLOTS slots a row.
  template <int SLOTS>
  DEVICE bool product(const int* d, const bf16* x) {
    if (!opened()) return false;
    Fragment<SLOTS> b;
    load_fragment(b, x, (1u << p.rows) - 1);
    bool ok = mma_strips(st, b, d[W_TILES]);
    forget();
    return ok;
  }

  // The layer's normed input, loaded once and kept through qkv, router and up/gate.
  DEVICE bool normed(const int* d) {
    int layer = d[W_LAYER];
    if (layer == x_layer_) return opened();
    x_layer_ = layer;
    Fragment<HIDDEN_SLOTS> norm;
    load_norm(norm, p.norms + layer * HIDDEN);
    if (!opened()) return false;
    load_fragment(x_, p.x + (layer & 1) * MAX_ROWS * HIDDEN_PAD, (1u << p.rows) - 1);
    apply_norm(x_, norm);
    return true;
  }
  // Ends the life of the normed input, whose registers an operation with many fragments of its own needs.
  DEVICE void forget() {
    x_layer_ = NONE;
    x_ = Fragment<HIDDEN_SLOTS>{};
  }

  const StepParams& p;
  Shared& s;
  EntryReader entries;
  Streams st;
  Fragment<HIDDEN_SLOTS> x_;
  int x_layer_ = NONE;
};
