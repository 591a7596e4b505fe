// Thin names for the Hopper instructions the engine uses: mbarriers, bulk copies, scoped loads and mma.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

// Everything is inlined: state that the roles pass by reference must stay in registers.
#define DEVICE __device__ __forceinline__

DEVICE uint32_t smem_addr(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers ---------------------------------------------------------------------------------------------------

using Barrier = uint64_t;

DEVICE void barrier_init(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(b)), "r"(arrivals));
}
DEVICE void barrier_arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(b)) : "memory");
}
DEVICE void barrier_arrive(Barrier* b, int count) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(b)), "r"(count) : "memory");
}
DEVICE void barrier_expect(Barrier* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(b)), "r"(bytes) : "memory");
}
// One bounded hardware wait; true once the phase of that parity has completed.
DEVICE bool barrier_try(Barrier* b, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(smem_addr(b)), "r"(parity)
      : "memory");
  return done;
}
// The same without waiting.
DEVICE bool barrier_test(Barrier* b, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(smem_addr(b)), "r"(parity)
      : "memory");
  return done;
}
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;"); }

// The first THREADS threads of the block meet; whether all of them came with `vote`.
template <int THREADS>
DEVICE bool block_meets(bool vote) {
  uint32_t all;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.and.pred q, 1, %2, p; selp.u32 %0, 1, 0, q; }"
      : "=r"(all)
      : "r"(static_cast<uint32_t>(vote)), "n"(THREADS)
      : "memory");
  return all;
}

// ---- programmatic dependent launch -------------------------------------------------------------------------------

// The next launch on the stream may begin where SMs are free, once every block of this one has said so or ended.
DEVICE void let_dependents_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
// Waits until the launches before this one have ended; what they stored is visible then.
DEVICE void await_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- bulk copies ------------------------------------------------------------------------------------------------

// Generic-proxy accesses of this CTA's shared memory before, async-proxy accesses after.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// `bytes` (a multiple of 16) from global to shared memory; completes on `b`. Weights and KV are read once: evict first.
DEVICE void bulk_copy(void* dst, const void* src, uint32_t bytes, Barrier* b) {
  constexpr uint64_t EVICT_FIRST = 0x12F0000000000000ull;
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          smem_addr(dst)),
      "l"(src), "r"(bytes), "r"(smem_addr(b)), "l"(EVICT_FIRST)
      : "memory");
}

// Asks for `bytes` (a multiple of 16) to be in L2 soon.
DEVICE void prefetch_l2(const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

// ---- global memory written in this launch: never through the read-only path or a stale L1 line ------------------

DEVICE uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// An acquire without a load, for loads that were relaxed.
DEVICE void acquire_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void signal_release(uint32_t* p, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
DEVICE void add_l2(uint64_t* p, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DEVICE void add_l2(uint32_t* p, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
DEVICE uint4 load_l2(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE float4 load_l2(const float4* p) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE float load_l2(const float* p) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DEVICE uint32_t load_l2(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE uint64_t load_l2(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE double load_l2(const double* p) {
  double v;
  asm volatile("ld.relaxed.gpu.global.f64 %0, [%1];" : "=d"(v) : "l"(p) : "memory");
  return v;
}
DEVICE int load_l2(const int* p) {
  return static_cast<int>(load_l2(reinterpret_cast<const uint32_t*>(p)));
}
DEVICE bf16 load_l2(const bf16* p) {
  unsigned short v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return __ushort_as_bfloat16(v);
}

// To memory that the host reads: whoever sees the value sees all that was written before it.
DEVICE void store_release_system(uint64_t* p, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// ---- arithmetic -------------------------------------------------------------------------------------------------

// c[16 x 8] += a[16 x 16] b[16 x 8]; a0/a1 rows g and g+8 at the lane's first k pair, a2/a3 at its second.
DEVICE void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same value, unknown to the optimiser. A resident kernel is one long loop: without this the compiler computes the
// addresses of every operation before it and keeps them in registers for the whole step.
DEVICE int hidden(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
DEVICE uint32_t pack_bf16(float lo, float hi) {
  __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<uint32_t*>(&v);
}
DEVICE float2 unpack_bf16(uint32_t v) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&v));
}
DEVICE long long sm_cycles() {
  long long t;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(t));
  return t;
}
DEVICE uint32_t sm_number() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  return sm;
}
DEVICE uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
