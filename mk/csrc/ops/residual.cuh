// embed, residual: what enters a layer, bf16, and each strip's part of its sum of squares.
#pragma once
#include "../tile.cuh"

// x = the token's row of the packed head; four columns a lane. An inactive row enters as zeros.
DEVICE void embed(const StepParams& p, Shared& s, const Place& at, const int* d) {
  int row = at.lane / 4, part = at.lane % 4;
#pragma unroll 1
  for (int i = 0; i < d[W_TILES]; ++i) {
    int strip = d[W_TILE] + i, column = strip * 16 + part * 4;
    uint2 v = make_uint2(0, 0);
    if (row < p.rows && s.keys[row] > 0) {
      int token = load_l2(p.tokens + row);
      size_t slot = d[W_WEIGHT] + static_cast<size_t>(token / 16) * d[W_STRIP_PITCH] + column / 256;
      v = *reinterpret_cast<const uint2*>(p.slots + slot * SLOT_BYTES + column % 256 / 32 * 1024 + token % 16 * 64 +
                                          column % 32 * 2);
    }
    float2 a = unpack_bf16(v.x), b = unpack_bf16(v.y);
    float squares = a.x * a.x + a.y * a.y + (b.x * b.x + b.y * b.y);
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    *reinterpret_cast<uint2*>(p.x + row * HIDDEN_PAD + column) = v;
    if (i < OWNED) {  // the owner keeps its strips, in the order of a tile's values
      float values[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int strip_row = part * 4 + j;
        s.x[i][(strip_row % 8 * 4 + row / 2) * 4 + strip_row / 8 * 2 + row % 2] = values[j];
      }
      __syncwarp();
    }
    if (part == 0) p.sumsq[strip * MAX_ROWS + row] = squares;
  }
}

// x' = bf16(x + (attention + ffn)). In a part of a step no earlier task has left the owner its x, and its two sums go
// to memory, where other placements have them.
DEVICE void residual(const StepParams& p, Shared& s, const Place& at, const int* d) {
  const int layer = d[W_LAYER];
  const bool part = d[W_FLAGS] & FLAG_PART;
  const bf16* x = p.x + (layer & 1) * MAX_ROWS * HIDDEN_PAD;
  bf16* out = p.x + (~layer & 1) * MAX_ROWS * HIDDEN_PAD;
#pragma unroll 1
  for (int i = 0; i < d[W_TILES]; ++i) {
    int strip = d[W_TILE] + i;
    const bool owned = d[W_SRC] == BUF_ACC_ATTN;
    float4 attn = make_float4(0.f, 0.f, 0.f, 0.f), ffn = attn, old = attn;  // owned: as the tile's lane holds them
    if (owned) {
      attn = reinterpret_cast<const float4*>(s.acc_attn[i])[at.lane];
      ffn = reinterpret_cast<const float4*>(s.acc_ffn[i])[at.lane];
      old = reinterpret_cast<const float4*>(s.x[i])[at.lane];
    }
    if (owned && part) {  // read again below, by the lane that stores it
      const float to_attn[4] = {attn.x, attn.y, attn.z, attn.w}, to_ffn[4] = {ffn.x, ffn.y, ffn.z, ffn.w};
      store_columns(at, p.oproj_out, strip, (1u << p.rows) - 1, to_attn);
      store_columns(at, p.ffn_out, strip, (1u << p.rows) - 1, to_ffn);
    }
    float sum[4] = {old.x + (attn.x + ffn.x), old.y + (attn.y + ffn.y), old.z + (attn.z + ffn.z), old.w + (attn.w + ffn.w)};
    float squares[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = at.row(j), column = strip * 16 + at.strip_row(j);
      if (row >= p.rows) continue;
      if (!owned || part)
        sum[j] = __bfloat162float(load_l2(x + row * HIDDEN_PAD + column)) +
                 (load_l2(p.oproj_out + row * HIDDEN + column) + load_l2(p.ffn_out + row * HIDDEN + column));
      const bf16 v = __float2bfloat16_rn(sum[j]);
      out[row * HIDDEN_PAD + column] = v;
      sum[j] = __bfloat162float(v);
      squares[j % 2] += sum[j] * sum[j];
    }
    if (owned) reinterpret_cast<float4*>(s.x[i])[at.lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      for (int step = 4; step < 32; step *= 2) squares[j] += __shfl_xor_sync(~0u, squares[j], step);
      if (at.r == 0) p.sumsq[((~layer & 1) * (HIDDEN / 16) + strip) * MAX_ROWS + at.n + j] = squares[j];
    }
  }
}
