// lm_head, sample: logits, each SM's best candidate of every row, and the step's tokens.
#pragma once
#include "../tile.cuh"

// A lane's best (logit, id) of its two batch rows over all head strips this SM has finished.
struct Candidates {
  float best[2] = {-INFINITY, -INFINITY};
  int id[2] = {0x7fffffff, 0x7fffffff};
  bool bad[2] = {false, false};  // a logit was NaN or infinite
};

DEVICE void store_logits(const StepParams& p, const Place& at, Candidates& c, int strip, const float (&v)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int row = at.row(j), id = strip * 16 + at.strip_row(j);
    float logit = v[j] * LOGIT_SCALE;
    if (row < p.rows) p.logits[static_cast<size_t>(row) * VOCAB_PAD + id] = logit;
    c.bad[j % 2] |= !(fabsf(logit) < INFINITY);
    if (id < VOCAB && (logit > c.best[j % 2] || (logit == c.best[j % 2] && id < c.id[j % 2])))
      c.best[j % 2] = logit, c.id[j % 2] = id;
  }
}

// This SM's candidates so far; the last of its head tasks leaves the final ones.
DEVICE void publish_candidates(const StepParams& p, const Place& at, const Candidates& c) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float value = c.best[j];
    int id = c.id[j];
    for (int step = 4; step < 32; step *= 2) keep_better(value, id, step);
    uint32_t bad = __ballot_sync(~0u, c.bad[j]) & 0x11111111u << at.lane % 4;  // lanes of this column
    if (at.r == 0) {
      if (bad && at.n + j < p.rows) atomicOr(p.status + at.n + j, STATUS_LOGITS);
      p.candidate_value[blockIdx.x * MAX_ROWS + at.n + j] = value;
      p.candidate_id[blockIdx.x * MAX_ROWS + at.n + j] = id;
    }
  }
}

// Greedy: the best candidate of all SMs, equal logits to the lower id. The token is fed back to the next step.
DEVICE void sample(const StepParams& p, const Shared& s, const Place& at) {
  for (int row = 0; row < p.rows; ++row) {
    float value = -INFINITY;
    int id = 0x7fffffff;
    for (int sm = at.lane; sm < p.n_sm; sm += 32) {
      float v = load_l2(p.candidate_value + sm * MAX_ROWS + row);
      int candidate = load_l2(p.candidate_id + sm * MAX_ROWS + row);
      if (v > value || (v == value && candidate < id)) value = v, id = candidate;
    }
    for (int step = 1; step < 32; step *= 2) keep_better(value, id, step);
    if (at.lane == 0) {
      if (s.keys[row] == 0) continue;
      // without a comparable logit the row keeps its token: the next step reads the head's row of it
      if (id < VOCAB)
        p.tokens[row] = id;
      else
        atomicOr(p.status + row, STATUS_LOGITS);
      if (p.advance) p.keys[row] = s.keys[row] + 1;
    }
  }
}
