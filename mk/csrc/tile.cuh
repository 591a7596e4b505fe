// What the storer sees of a finished tile, and the stores that several operations share.
#pragma once
#include "splits.cuh"

// A lane's place in a 16 x 8 tile: values 0 and 1 are strip row `r`, 2 and 3 strip row r + 8; values 0 and 2 are batch
// row `n`, 1 and 3 batch row n + 1.
struct Place {
  int lane, r, n;
  DEVICE explicit Place(int lane_) : lane(lane_), r(lane_ / 4), n(lane_ % 4 * 2) {}
  DEVICE int row(int value) const { return n + value % 2; }
  DEVICE int strip_row(int value) const { return r + value / 2 * 8; }
};

// fp32 columns of a strip, out[row][HIDDEN], for the rows of `mask`.
DEVICE void store_columns(const Place& at, float* out, int strip, uint32_t mask, const float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (mask >> (at.n + i) & 1) {
      out[(at.n + i) * HIDDEN + strip * 16 + at.r] = v[i];
      out[(at.n + i) * HIDDEN + strip * 16 + at.r + 8] = v[2 + i];
    }
}

// The larger of two (value, id) of lanes `step` apart; equal values go to the lower id.
DEVICE void keep_better(float& value, int& id, int step) {
  float other = __shfl_xor_sync(~0u, value, step);
  int other_id = __shfl_xor_sync(~0u, id, step);
  if (other > value || (other == value && other_id < id)) value = other, id = other_id;
}
