// lm_head, sample: logits, each SM's best candidate of every row, and the step's tokens.
#pragma once
#include "draw.cuh"

// A lane's best (logit, id) and smallest logit of its two batch rows over all head strips this SM has finished.
struct Candidates {
  float best[2] = {-INFINITY, -INFINITY}, low[2] = {INFINITY, INFINITY};
  int id[2] = {MAX_ID, MAX_ID};
  bool bad[2] = {false, false};  // a logit was NaN or infinite
};

DEVICE void store_logits(const StepParams& p, const Place& at, Candidates& c, int strip, const float (&v)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int row = at.row(j), id = strip * 16 + at.strip_row(j);
    float logit = v[j] * LOGIT_SCALE;
    if (row < p.rows) p.logits[static_cast<size_t>(row) * VOCAB_PAD + id] = logit;
    c.bad[j % 2] |= !(fabsf(logit) < INFINITY);
    if (id >= VOCAB) continue;
    c.low[j % 2] = fminf(c.low[j % 2], logit);
    if (logit > c.best[j % 2] || (logit == c.best[j % 2] && id < c.id[j % 2])) c.best[j % 2] = logit, c.id[j % 2] = id;
  }
}

// This SM's candidates so far; the last of its head tasks leaves the final ones.
DEVICE void publish_candidates(const StepParams& p, const Place& at, const Candidates& c) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float value = c.best[j], low = c.low[j];
    int id = c.id[j];
    for (int step = 4; step < 32; step *= 2) {
      keep_better(value, id, step);
      low = fminf(low, __shfl_xor_sync(~0u, low, step));
    }
    uint32_t bad = __ballot_sync(~0u, c.bad[j]) & 0x11111111u << at.lane % 4;  // lanes of this column
    if (at.r == 0) {
      if (bad && at.n + j < p.rows) atomicOr(p.status + at.n + j, STATUS_LOGITS);
      p.candidate_value[blockIdx.x * MAX_ROWS + at.n + j] = value;
      p.candidate_low[blockIdx.x * MAX_ROWS + at.n + j] = low;
      p.candidate_id[blockIdx.x * MAX_ROWS + at.n + j] = id;
    }
  }
}

// Ends the step: lane r feeds row r's token back and all of them tell the host. Without a comparable logit a row keeps
// its token: the next step reads the head's row of it.
DEVICE void publish_tokens(const StepParams& p, const Shared& s, int lane, int token) {
  HostStep& out = p.host_steps[p.launched % HOST_STEPS];
  if (lane < p.rows) {
    bool active = s.keys[lane] != 0, drawn = token < VOCAB;
    if (active && drawn) p.tokens[lane] = token;
    if (active && !drawn) atomicOr(p.status + lane, STATUS_LOGITS);
    if (active && p.advance) p.keys[lane] = s.keys[lane] + 1;
    out.tokens[lane] = active && drawn ? token : NONE;
    out.status[lane] = active ? load_l2(p.status + lane) : 0;
  }
  __syncwarp();
  if (lane == 0) store_release_system(&out.step, p.launched + 1);
}

// Greedy: the best candidate of all SMs, equal logits to the lower id. Four rows are loaded at a time.
DEVICE void sample(const StepParams& p, const Shared& s, const Place& at) {
  int token = MAX_ID;
#pragma unroll 1
  for (int row = 0; row < p.rows; row += 4) {
    float value[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    int id[4] = {MAX_ID, MAX_ID, MAX_ID, MAX_ID};
#pragma unroll 5
    for (int sm = at.lane; sm < p.n_sm; sm += 32) {
      float4 v = load_l2(reinterpret_cast<const float4*>(p.candidate_value + sm * MAX_ROWS + row));
      uint4 of = load_l2(reinterpret_cast<const uint4*>(p.candidate_id + sm * MAX_ROWS + row));
      const float values[4] = {v.x, v.y, v.z, v.w};
      const uint32_t ids[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int other = static_cast<int>(ids[i]);
        if (values[i] > value[i] || (values[i] == value[i] && other < id[i])) value[i] = values[i], id[i] = other;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      for (int step = 1; step < 32; step *= 2) keep_better(value[i], id[i], step);
      if (at.lane == row + i) token = id[i];
    }
  }
  publish_tokens(p, s, at.lane, token);
}
