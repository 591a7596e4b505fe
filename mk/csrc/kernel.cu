// The decode megakernel: one block an SM, resident for the whole step, four roles over one task ring and one aside.
#include "aside.cuh"
#include "consumer.cuh"
#include "controller.cuh"
#include "delay.cuh"
#include "producer.cuh"
#include "storer.cuh"

// A part of a step that was launched before the part before it has ended (launches.cuh) waits here for all of that.
DEVICE void await_launch_before() {
#ifdef MK_DEPENDENT_LAUNCH
  let_dependents_launch();
  await_launches();
#endif
}

// What every epilogue of the step needs again and again: read once.
DEVICE void step_constants(const StepParams& p, Shared& s) {
  const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= MAX_ROWS) return;
  int keys = row < p.rows ? load_l2(p.keys + row) : 0;
  if (lane == 0) s.keys[row] = keys;
  if (keys == 0) return;
  if (lane < 2) {
    const int* table = (lane ? p.table_sliding : p.table_full) + row * p.table_stride;
    s.newest_page[lane][row] = table[(keys - 1) / PAGE];
  }
  for (int i = lane; i < 64; i += 32)
    s.rope[row][i] = reinterpret_cast<const float2*>(p.rope)[static_cast<size_t>(keys - 1) * 64 + i];
}

__global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ StepParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  await_launch_before();
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32;
  step_constants(p, s);
  if (threadIdx.x == 0) {
    s.deadline = nanoseconds() + p.time_limit_ns;
    s.given_up = 0;
    for (int& entry : s.doing) entry = 0;  // of a role that gives up before its first one
    for (int i = 0; i < RING_SLOTS; ++i) barrier_init(&s.ring_full[i], 1), barrier_init(&s.ring_empty[i], CONSUMERS);
    for (int i = 0; i < 2; ++i) barrier_init(&s.chunk_full[i], 1);
    barrier_init(&s.route_ready, 1), barrier_init(&s.route_weighed, 1);
    barrier_init(&s.finished, CONSUMERS + 3);
    for (int i = 0; i < ENTRIES; ++i) {
      barrier_init(&s.entry_full[i], 1), barrier_init(&s.entry_go[i], 1);
      barrier_init(&s.entry_empty[i], CONSUMERS + 2);  // consumers, producer, storer
    }
    for (int i = 0; i < TILES_RING; ++i) barrier_init(&s.tile_full[i], CONSUMERS), barrier_init(&s.tile_empty[i], 1);
    fence_barrier_init();
    start_trace(p);
  }
  __syncthreads();
  planted_race(s);
  // Registers move from the third warpgroup to the two that keep activations in them.
  if (warp < CONSUMERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Consumer(p, s).run();
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHER_REGISTERS));
    if (warp == CONTROLLER) {
      Controller(p, s).run();
    } else if (warp == PRODUCER) {
      if (threadIdx.x % 32 < Producer::LANES) Producer(p, s).run();
    } else if (warp == STORER) {
      Storer(p, s).run();
    } else {
      Aside(p, s).run();
    }
  }
}

extern "C" {

// Sizes the host checks against its own idea of them.
int mk_params_bytes() { return sizeof(StepParams); }
int mk_shared_bytes() { return sizeof(Shared); }
int mk_ring_slots() { return RING_SLOTS; }

// Prepares the kernel; returns the number of blocks an SM can hold, or a negative CUDA error.
int mk_prepare() {
  cudaError_t e = cudaFuncSetAttribute(decode_step, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (e != cudaSuccess) return -static_cast<int>(e);
  int blocks = 0;
  e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, decode_step, THREADS, sizeof(Shared));
  return e == cudaSuccess ? blocks : -static_cast<int>(e);
}

// Launches one step on `stream`: n_sm cooperative blocks. Returns a CUDA error code.
int mk_launch(const StepParams* params, void* stream) {
  void* args[] = {const_cast<StepParams*>(params)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(decode_step), dim3(params->n_sm), dim3(THREADS), args,
                                     sizeof(Shared), static_cast<cudaStream_t>(stream));
}

const char* mk_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
}

#include "launches.cuh"     // a step as many launches, for comparison
#include "stream_card.cuh"  // the loop that launches served steps
