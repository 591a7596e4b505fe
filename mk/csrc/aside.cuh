// The track aside: operations that need neither the ring nor what the SM keeps to itself, run by a warp of their own, so
// that their waits hold up nothing of the main track.
#pragma once
#include "delay.cuh"
#include "ops/combine.cuh"
#include "wait.cuh"

class Aside {
 public:
  DEVICE Aside(const StepParams& params, Shared& shared)
      : p(params), s(shared), g(params, shared, ROLE_ASIDE), lane(threadIdx.x % 32) {}

  DEVICE void run() {
    const int track = p.n_sm + blockIdx.x, end = p.offsets[track + 1];
    int at = p.offsets[track];
    int mine = word_of(at, end);
    for (; at < end; ++at) {
      s.aside[lane] = mine;
      __syncwarp();
      mine = word_of(at + 1, end);  // on its way during the wait
      if (!await_counter(p, g, s.aside, W_WAIT0) || !await_counter(p, g, s.aside, W_WAIT1)) break;
      inject_delay(p, DELAY_WAIT, s.aside[W_TASK]);
      const uint32_t begun = trace_clock();
      work(s.aside);
      inject_delay(p, DELAY_SIGNAL, s.aside[W_TASK]);
      __syncwarp();
      if (lane == 0) tell(p, s.aside);
      trace_aside(p, at - p.offsets[track], s.aside, begun);
      __syncwarp();  // all have read the descriptor before the next one replaces it
    }
    g.finish();
  }

 private:
  DEVICE int word_of(int at, int end) const {
    return at < end ? p.words[static_cast<size_t>(at) * DESCRIPTOR_WORDS + lane] : 0;
  }
  DEVICE void work(const int* d) {
    switch (d[W_OPCODE]) {
      case OP_ATTN_COMBINE: return Combine(p, s, d, lane).run();
    }
  }

  const StepParams& p;
  Shared& s;
  const Guard g;
  const int lane;
};
