// top-k's device code, compiled for the CPU (tests/emulated/ptx.cuh), behind a C interface.
#include "ops/topk.cuh"

static Shared shared;

extern "C" {

int params_bytes() { return sizeof(StepParams); }

// One top-k task; what it left in the SM: bits of rows of every expert, the active experts and their number, and the
// weights [128][MAX_ROWS], which are meaningful where a row's bit is set.
int topk(const StepParams* p, const int* d, uint8_t* rows, uint8_t* active, float* weights) {
  for (int row = 0; row < MAX_ROWS; ++row) shared.keys[row] = row < p->rows ? p->keys[row] : 0;
  run_block(32, [&] {
    const int lane = threadIdx.x;
    const ReplacedIds replaced(*p, d[W_LAYER], lane);
    TopK(*p, shared, d, lane).run(replaced, 0);
  });
  const Route& route = shared.route[d[W_LAYER] & 1];
  std::memcpy(rows, route.rows, sizeof(route.rows));
  std::memcpy(active, route.active, sizeof(route.active));
  std::memcpy(weights, route.weight, sizeof(route.weight));
  return route.n_active;
}
}
