// Builds for the tests alone. MK_DELAYS: delays at claims, waits and signals, which must not change a bit, and an SM that
// is slower than the others. MK_PLANTED_RACE: a race that a race checker must find, or it is not looking.
#pragma once
#include "shared.cuh"

enum DelayAt : uint32_t { DELAY_CLAIM, DELAY_WAIT, DELAY_TAKE, DELAY_SIGNAL };

#ifdef MK_DELAYS
DEVICE void spin(int ns) {
  constexpr int CYCLES_PER_NS = 2;  // of a clock just below 2 GHz; the card's own timer ticks too coarsely
  for (const long long end = sm_cycles() + static_cast<long long>(ns) * CYCLES_PER_NS; sm_cycles() < end;) {
  }
}
// Up to delay_ns, by a hash of the seed, the step, the SM, the warp, the place in the code and `count`.
DEVICE void inject_delay(const StepParams& p, DelayAt where, uint32_t count) {
  uint32_t h = p.delay_seed ^ p.epoch * 0x85ebca6bu;
  for (uint32_t word : {blockIdx.x << 8 | threadIdx.x / 32, count << 2 | where}) {  // the mixer of MurmurHash3
    h = (h ^ word) * 0xcc9e2d51u;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
  }
  if (p.delay_ns) spin(h % static_cast<uint32_t>(p.delay_ns));
}
// Before tiles that a claimer could have taken elsewhere: SM slow_sm is slow_ns slower with each. All SMs count theirs.
DEVICE void slow_down(const StepParams& p, const int* d) {
  const int op = d[W_OPCODE];
  if (op != OP_ATTENTION && op != OP_MOE_UP && op != OP_MOE_DOWN) return;
  const int tiles = op == OP_ATTENTION ? 1 : d[W_TILES];
  if (threadIdx.x == 0) p.tiles_taken[blockIdx.x] += tiles;
  if (p.slow_ns && blockIdx.x == p.slow_sm) spin(p.slow_ns * tiles);
}
#else
DEVICE void inject_delay(const StepParams&, DelayAt, uint32_t) {}
DEVICE void slow_down(const StepParams&, const int*) {}
#endif

#ifdef MK_PLANTED_RACE
// Two warps write a word of shared memory, and nothing orders them.
DEVICE void planted_race(Shared& s) {
  if (threadIdx.x % 32 == 0 && threadIdx.x < 64) *static_cast<volatile int*>(&s.planted) = threadIdx.x;
}
#else
DEVICE void planted_race(Shared&) {}
#endif
