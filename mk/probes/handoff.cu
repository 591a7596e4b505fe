// How long a hand-off takes between any two SMs: a counter in global memory, signalled by one and polled by the other
// with the instructions of the decode kernel.
//
// Block b stands for SM b, as it does in the decode kernel, and fills it. Pairs take turns, in the order (0, 1), (0, 2),
// .., (1, 2), ..; who has no turn looks at the turn's word now and then. In its turn a pair hands a counter back and
// forth on several lines, one after the other: where a line's home lies in L2 is then nothing of the pair's own.
#include "../csrc/ptx.cuh"

constexpr int LINE = 32;  // words of a counter's 128-byte line
constexpr int NAP_NS = 500;
constexpr uint32_t LOOK = 1024;  // tries between two looks at the clock

struct HandoffParams {
  uint32_t* lines;      // [lines][LINE], 0
  uint32_t* turn;       // 0: the pair whose turn it is
  uint32_t* gave_up;    // 0; 1 + the block that waited for too long
  uint32_t* cycles;     // [pairs]: of a pair's hand-offs together, the first round of each line left out
  uint32_t* smid;       // [blocks]: the SM that a block lies on
  uint64_t* clocks;     // [2]: what the last block, which is there to the end, spent in all: cycles and nanoseconds
  uint64_t limit_ns;
  int blocks, n_lines, rounds;
};

class Waiter {
 public:
  DEVICE Waiter(const HandoffParams& params) : p(params), deadline_(nanoseconds() + params.limit_ns) {}
  // False when somebody's time is up.
  DEVICE bool wait(const uint32_t* word, uint32_t target, bool nap) {
    for (uint32_t tries = 1; static_cast<int>(load_acquire(word) - target) < 0; ++tries) {
      if (nap) __nanosleep(NAP_NS);
      if ((nap || tries % LOOK == 0) && over()) return false;
    }
    return true;
  }

 private:
  DEVICE bool over() {
    if (load_acquire(p.gave_up)) return true;
    if (nanoseconds() < deadline_) return false;
    atomicCAS(p.gave_up, 0u, 1u + blockIdx.x);
    return true;
  }
  const HandoffParams& p;
  const uint64_t deadline_;
};

// One side's part of a turn; `first` begins. The counters gain 2 (rounds + 1) in every turn.
DEVICE bool hand_over(const HandoffParams& p, Waiter& waiter, uint32_t pair, bool first, uint32_t& cycles) {
  const uint32_t base = pair * 2 * (p.rounds + 1);
  cycles = 0;
  for (int line = 0; line < p.n_lines; ++line) {
    uint32_t* word = p.lines + line * LINE;
    long long since = 0;
    for (int round = 0; round <= p.rounds; ++round) {
      if (round == 1) since = sm_cycles();
      const uint32_t at = base + 2 * round;
      if (first) signal_release(word, 1);
      if (!waiter.wait(word, at + (first ? 2 : 1), false)) return false;
      if (!first) signal_release(word, 1);
    }
    cycles += static_cast<uint32_t>(sm_cycles() - since);
  }
  return true;
}

__global__ void handoffs(const __grid_constant__ HandoffParams p) {
  if (threadIdx.x) return;
  const int mine = blockIdx.x;
  uint32_t smid;
  asm volatile("mov.u32 %0, %smid;" : "=r"(smid));
  p.smid[mine] = smid;
  const long long cycles = sm_cycles();
  const uint64_t ns = nanoseconds();
  Waiter waiter(p);
  uint32_t pair = 0;
  for (int a = 0; a < p.blocks; ++a)
    for (int b = a + 1; b < p.blocks; ++b, ++pair) {
      if (mine != a && mine != b) continue;
      uint32_t spent;
      if (!waiter.wait(p.turn, pair, true) || !hand_over(p, waiter, pair, mine == a, spent)) return;
      if (mine == a) {
        p.cycles[pair] = spent;
        signal_release(p.turn, 1);
      }
    }
  if (mine != p.blocks - 1) return;
  p.clocks[0] = sm_cycles() - cycles, p.clocks[1] = nanoseconds() - ns;
}

extern "C" {

int handoff_params_bytes() { return sizeof(HandoffParams); }

// One launch of cooperative blocks on `stream`, each with `shared_bytes`, so that no two share an SM. Returns a CUDA
// error code.
int handoff_launch(const HandoffParams* params, int shared_bytes, void* stream) {
  cudaError_t e = cudaFuncSetAttribute(handoffs, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (e != cudaSuccess) return e;
  void* args[] = {const_cast<HandoffParams*>(params)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(handoffs), dim3(params->blocks), dim3(32), args,
                                     shared_bytes, static_cast<cudaStream_t>(stream));
}

const char* handoff_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
}
