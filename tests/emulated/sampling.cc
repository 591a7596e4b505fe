// The sampler's device code, compiled for the CPU (tests/emulated/ptx.cuh), behind a C interface.
#include <map>
#include <optional>

#include "ops/head.cuh"

// What an SM keeps from wave to wave: its shared memory, by slice, and its threads' state.
struct alignas(128) Kept {
  Shared shared;
  std::optional<Drawing> row[CONSUMERS * 32];
};
static std::map<int, Kept> of_slice;

extern "C" {

int params_bytes() { return sizeof(StepParams); }
int sampling_bytes() { return sizeof(RowSampling); }
int host_step_bytes() { return sizeof(HostStep); }
int bins() { return BINS; }

void noise(const uint32_t* words, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = gumbel(words[i]);
}
void noise_of_ids(int n, uint32_t position, uint64_t seed, float* out) {
  uint32_t word[4];
  for (int id = 0; id < n; ++id) {
    philox(word, id / 4, position, seed);
    out[id] = gumbel(word[id % 4]);
  }
}
void masses(const float* below, int n, float rate, uint32_t* out) {
  for (int i = 0; i < n; ++i) out[i] = token_mass(below[i], rate);
}
void row_bins(const float* logits, int n, float top, float floor, const RowSampling* sampling, int* out) {
  RowView view(*sampling, top, floor);
  for (int i = 0; i < n; ++i) out[i] = view.bin(logits[i]);
}

// lm_head's epilogue on given logits [MAX_ROWS][VOCAB_PAD] of the strips that SM `sm` has.
void head(const StepParams* p, const float* logits, int sm, const int* strips, int n) {
  blockIdx.x = sm;
  run_block(32, [&] {
    Place at(threadIdx.x);
    Candidates candidates;
    for (int i = 0; i < n; ++i) {
      const int strip = strips[i];
      float v[4];
      for (int j = 0; j < 4; ++j) v[j] = logits[at.row(j) * VOCAB_PAD + strip * 16 + at.strip_row(j)];
      store_logits(*p, at, candidates, strip, v);
    }
    publish_candidates(*p, at, candidates);
  });
}

// One task of `opcode`, its consumers and then its storer.
void task(const StepParams* p, const int* d) {
  Kept& sm = of_slice[d[W_RANK]];
  Shared& shared = sm.shared;
  for (int row = 0; row < MAX_ROWS; ++row) shared.keys[row] = row < p->rows ? p->keys[row] : 0;
  run_block(CONSUMERS * 32, [&] {
    Streams st(shared, Guard(*p, shared, ROLE_CONSUMER));
    std::optional<Drawing>& row = sm.row[threadIdx.x];
    if (d[W_OPCODE] != OP_SHORTLIST) row.emplace(*p, shared, threadIdx.x);
    if (d[W_OPCODE] == OP_HISTOGRAM) fill_histogram(*p, shared, st, d, *row, true);
    if (d[W_OPCODE] == OP_SHORTLIST) make_shortlist(*p, shared, st, d, *row, true);
    if (d[W_OPCODE] == OP_DRAW) draw(*p, shared, st, *row, true);
  });
  run_block(32, [&] {
    Place at(threadIdx.x);
    if (d[W_OPCODE] == OP_SHORTLIST) store_offers(*p, at, d, offers(shared, 0));
    if (d[W_OPCODE] == OP_DRAW)
      publish_tokens(*p, shared, at.lane, at.lane < CONSUMERS ? offers(shared, 0)[at.lane].id : MAX_ID);
    if (d[W_OPCODE] == OP_SAMPLE) sample(*p, shared, at);
  });
}
}
