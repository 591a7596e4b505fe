// The consumers: eight warps that multiply what the ring brings.
#pragma once
#include "delay.cuh"
#include "ops/attention.cuh"
#include "ops/draw.cuh"
#include "ops/experts.cuh"
#include "ops/router.cuh"

class Consumer {
 public:
  DEVICE Consumer(const StepParams& params, Shared& shared)
      : p(params), s(shared), g(params, shared, ROLE_CONSUMER), entries(params, shared, g), st(shared, g) {}

  DEVICE void run() {
    if (!layers() || !ending()) entries.report();
    consumers_leave();
    g.finish();
  }

 private:
  // Two loops, so that what ends a step takes neither registers nor instruction cache from the layers.
  static_assert(OP_SHORTLIST == OP_HISTOGRAM + 1 && OP_DRAW == OP_SHORTLIST + 1, "what ends a step");
  DEVICE bool layers() {
    for (;;) {
      if (!entries.next()) return false;
      const int op = entries.words[W_OPCODE];
      if ((op >= OP_HISTOGRAM && op <= OP_DRAW) || op == OP_END) return true;
      taken();
      if (!work(entries.words)) return false;
      done();
    }
  }
  DEVICE bool ending() {
    if (entries.words[W_OPCODE] == OP_END) return true;
    Drawing row(p, s, hidden(threadIdx.x));
    while (entries.words[W_OPCODE] != OP_END) {
      taken();
      if (!sample(entries.words, row, opened())) return false;
      done();
      row.next_wave();
      if (!entries.next()) return false;
    }
    return true;
  }
  DEVICE void mark(TraceWord word) const {
    if (threadIdx.x == 0) trace_mark(s.marks, entries.index(), word);
  }
  DEVICE void taken() {
    mark(T_TAKEN);
    inject_delay(p, DELAY_TAKE, entries.words[W_TASK]);
    slow_down(p, entries.words);
  }
  DEVICE void done() {
    mark(T_DONE);
    if (threadIdx.x == 0) {
      trace_spent(s.marks, entries.index(), T_RING_EMPTY, st.ring_empty);
      trace_spent(s.marks, entries.index(), T_TILE_FULL, st.tile_full);
    }
    st.ring_empty = st.tile_full = {};
    entries.release();
  }
  DEVICE bool work(const int* d) {
    const int op = d[W_OPCODE], layer = d[W_LAYER];
    const bool normed = reads_normed(op);
    if (!(normed || op == OP_O_PROJ || op == OP_DENSE_DOWN || op == OP_MOE_DOWN || op == OP_MOE_DOWN_OWNED ||
          op == OP_ATTENTION))
      return true;  // the storer's alone
    if (normed && layer != x_layer_) {
      if (!load_input(layer)) return false;
    } else if (!opened()) {
      return false;
    }
    if (op == OP_ROUTER) return multiply_router(st, x_, d);
    if (normed) return mma_strips<HIDDEN_SLOTS>(st, x_, d[W_TILES]);
    if (op == OP_ATTENTION) return Attention(p, s, hidden(threadIdx.x)).run(d, st);
    if (op == OP_MOE_DOWN) return down_tiles(p, s, st, d);
    bool ok;
    if (op == OP_MOE_DOWN_OWNED)
      ok = g.wait(&s.route_weighed, s.route[layer & 1].lap) && down_owned(p, s, st, d);
    else
      ok = op == OP_O_PROJ ? product<Q_SLOTS>(d, p.attn_out) : product<DENSE_SLOTS>(d, p.dense_hidden);
    forget();  // also where the step is given up: otherwise registers spill
    return ok;
  }

  // What follows the head. `ok`: what the wait said; some of these meet the other warps, given up or not.
  DEVICE bool sample(const int* d, Drawing& row, bool ok) {
    switch (d[W_OPCODE]) {
      case OP_HISTOGRAM: return fill_histogram(p, s, st, d, row, ok);
      case OP_SHORTLIST: return make_shortlist(p, s, st, d, row, ok);
      case OP_DRAW: return draw(p, s, st, row, ok);
      default: return ok;  // the storer's alone
    }
  }
  DEVICE bool opened() const {
    bool ok = entries.opened();
    mark(T_OPENED);
    return ok;
  }
  // The layer's normed input, loaded once and kept through qkv, router and up/gate.
  DEVICE bool load_input(int layer) {
    Fragment<HIDDEN_SLOTS> norm;
    load_norm(norm, p.norms + layer * HIDDEN);  // on its way during the wait
    if (!opened()) return false;
    x_layer_ = layer;
    load_fragment(x_, p.x + (layer & 1) * MAX_ROWS * HIDDEN_PAD, (1u << p.rows) - 1);
    apply_norm(x_, norm);
    return true;
  }

  // Strips over an activation of SLOTS slots a row.
  template <int SLOTS>
  DEVICE bool product(const int* d, const bf16* x) {
    Fragment<SLOTS> b;
    load_fragment(b, x, (1u << p.rows) - 1);
    return mma_strips(st, b, d[W_TILES]);
  }
  // Ends the life of the normed input, whose registers an operation with many fragments of its own needs.
  DEVICE void forget() {
    x_layer_ = NONE;
    x_ = Fragment<HIDDEN_SLOTS>{};
  }

  const StepParams& p;
  Shared& s;
  const Guard g;
  EntryReader entries;
  Streams st;
  Fragment<HIDDEN_SLOTS> x_;
  int x_layer_ = NONE;
};
