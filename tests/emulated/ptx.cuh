// Stands in for csrc/ptx.cuh where device code is compiled for the CPU: the lanes of a block are fibers that take
// turns, and meet in every warp-wide operation. Barriers are always complete, copies and mma do not exist.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_bf16.h"

using bf16 = __nv_bfloat16;
using std::max;
using std::min;
#define DEVICE inline

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx;

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct int2 {
  int x, y;
};
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// ---- fibers -----------------------------------------------------------------------------------------------------

struct Meeting {  // of `size` lanes; values of one meeting stay readable until the next but one
  int size, arrived = 0;
  unsigned generation = 0;
  std::vector<uint64_t> values[2];
  explicit Meeting(int n) : size(n) { values[0].resize(n), values[1].resize(n); }
};

struct Block {
  struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
  };
  ucontext_t scheduler;
  std::vector<Lane> lanes;
  std::vector<Meeting> warps;
  Meeting all;
  std::function<void()> body;

  explicit Block(int threads) : lanes(threads), warps(threads / 32, Meeting(32)), all(threads) {}
  void yield() {
    unsigned lane = threadIdx.x;
    swapcontext(&lanes[lane].context, &scheduler);
    threadIdx.x = lane;
  }
  const uint64_t* meet(Meeting& m, int place, uint64_t value) {
    unsigned now = m.generation;
    m.values[now & 1][place] = value;
    if (++m.arrived == m.size)
      m.arrived = 0, ++m.generation;
    else
      while (m.generation == now) yield();
    return m.values[now & 1].data();
  }
  void run();
};
inline Block* block;

inline void enter_lane() {
  block->body();
  block->lanes[threadIdx.x].done = true;
}
inline void Block::run() {
  block = this;
  constexpr size_t STACK = 256 << 10;
  for (Lane& lane : lanes) {
    lane.stack.reset(new char[STACK]);
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get(), lane.context.uc_stack.ss_size = STACK;
    lane.context.uc_link = &scheduler;
    makecontext(&lane.context, enter_lane, 0);
  }
  for (bool busy = true; busy;) {
    busy = false;
    for (unsigned lane = 0; lane < lanes.size(); ++lane)
      if (!lanes[lane].done) {
        threadIdx.x = lane, busy = true;
        swapcontext(&scheduler, &lanes[lane].context);
      }
  }
}
// Runs `body` once a thread of a block.
inline void run_block(int threads, std::function<void()> body) {
  Block b(threads);
  b.body = body;
  b.run();
}

inline const uint64_t* meet_warp(uint64_t value) {
  return block->meet(block->warps[threadIdx.x / 32], threadIdx.x % 32, value);
}
template <int>
bool block_meets(bool vote) {
  if (vote) std::abort();  // nobody leaves: what is emulated is a part of the step
  block->meet(block->all, threadIdx.x, 0);
  return false;
}

template <class T>
T of_lane(T v, unsigned lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof(T));
  bits = meet_warp(bits)[lane];
  std::memcpy(&v, &bits, sizeof(T));
  return v;
}
template <class T>
T __shfl_sync(unsigned, T v, int lane) {
  return of_lane(v, lane & 31);
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int step) {
  return of_lane(v, threadIdx.x % 32 ^ step);
}
template <class T>
T __shfl_up_sync(unsigned, T v, int step) {
  unsigned lane = threadIdx.x % 32;
  return of_lane(v, lane < static_cast<unsigned>(step) ? lane : lane - step);
}
inline uint32_t __ballot_sync(unsigned, int holds) {
  const uint64_t* values = meet_warp(holds != 0);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(values[lane]) << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int holds) { return __ballot_sync(mask, holds) != 0; }
inline int __all_sync(unsigned mask, int holds) { return __ballot_sync(mask, holds) == ~0u; }
template <class T>
T __reduce_add_sync(unsigned, T v) {
  const uint64_t* values = meet_warp(static_cast<uint32_t>(v));
  uint32_t sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += static_cast<uint32_t>(values[lane]);
  return static_cast<T>(sum);
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t v) {
  const uint64_t* values = meet_warp(v);
  return static_cast<uint32_t>(*std::min_element(values, values + 32));
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) {
  const uint64_t* values = meet_warp(v);
  return static_cast<uint32_t>(*std::max_element(values, values + 32));
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t v) {
  const uint64_t* values = meet_warp(v);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(values[lane]);
  return bits;
}
inline void __syncwarp() { meet_warp(0); }

// ---- arithmetic and memory --------------------------------------------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __int2float_rn(int v) { return static_cast<float>(v); }
template <class To, class From>
To bits_as(From v) {
  To to;
  std::memcpy(&to, &v, sizeof(to));
  return to;
}
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline uint32_t __float_as_uint(float v) { return bits_as<uint32_t>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline float __uint_as_float(uint32_t v) { return bits_as<float>(v); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs(v); }

template <class T, class U>
T atomicAdd(T* p, U v) {
  T old = *p;
  *p += v;
  return old;
}
template <class T, class U>
T atomicOr(T* p, U v) {
  T old = *p;
  *p |= v;
  return old;
}
inline uint32_t atomicCAS(uint32_t* p, uint32_t expected, uint32_t v) {
  uint32_t old = *p;
  if (old == expected) *p = v;
  return old;
}
inline int atomicExch(int* p, int v) { return std::exchange(*p, v); }
inline void __threadfence_system() {}

template <class T>
T load_l2(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
void add_l2(T* p, T value) {
  *p += value;
}
inline void store_release_system(uint64_t* p, uint64_t value) { *p = value; }

// ---- what other operations use; never called --------------------------------------------------------------------

using Barrier = uint64_t;
inline void barrier_arrive(Barrier*, int = 1) {}
inline bool barrier_try(Barrier*, uint32_t) { return true; }
inline bool barrier_test(Barrier*, uint32_t) { return true; }
inline void signal_release(uint32_t* p, uint32_t v) { *p += v; }
template <class T>
T load_acquire(const T* p) {
  return *p;
}
inline int atomicMax(int* p, int v) { return std::exchange(*p, max(*p, v)); }
inline unsigned __activemask() { return ~0u; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162) { return a; }
inline void mma_16x8x16(float (&)[4], uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) {}
inline int hidden(int v) { return v; }
inline uint32_t pack_bf16(float, float) { return 0; }
inline float2 unpack_bf16(uint32_t) { return {0, 0}; }
inline uint64_t nanoseconds() { return 0; }
