// qkv: a strip of the fused projection of the normed x. RoPE, q and the new k and v for this step's attention, and the
// append to the token's page.
#pragma once
#include "../tile.cuh"

// The K block of the page that holds a row's new token; the V block follows it.
DEVICE uint8_t* newest_block(const StepParams& p, const Shared& s, int layer, int row, int head) {
  bool sliding = KIND_SLIDING[layer];
  size_t page = s.newest_page[sliding][row];
  size_t unit = page * (sliding ? SLIDING_LAYERS : FULL_LAYERS) + KIND_INDEX[layer];
  return (sliding ? p.pool_sliding : p.pool_full) + (unit * KV_HEADS + head) * 2 * KV_BLOCK_BYTES;
}

// K: [keys/16][d/32][16][32], two neighbouring dims at once.
DEVICE void append_key(uint8_t* block, int position, int dim, uint32_t pair) {
  int key = position % PAGE;
  int offset = (key / 16 * 4 + dim / 32) * 1024 + key % 16 * 64 + dim % 32 * 2;
  *reinterpret_cast<uint32_t*>(block + offset) = pair;
}

// V transposed: [d/16][keys/32][16][32], dims `dim` and dim + 8.
DEVICE void append_value(uint8_t* block, int position, int dim, float a, float b) {
  int key = position % PAGE;
  int at = (dim % 128 / 16 * 2 + key / 32) * 1024 + dim % 16 * 64 + key % 32 * 2;
  *reinterpret_cast<bf16*>(block + KV_BLOCK_BYTES + at) = __float2bfloat16_rn(a);
  *reinterpret_cast<bf16*>(block + KV_BLOCK_BYTES + at + 8 * 64) = __float2bfloat16_rn(b);
}

DEVICE void store_qkv(const StepParams& p, const Shared& s, const Place& at, const int* d, int strip,
                      const float (&v)[4]) {
  constexpr int Q_STRIPS = Q_WIDTH / 16, K_END = (Q_WIDTH + KV_WIDTH) / 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int row = at.n + i;
    if (row >= p.rows) continue;
    int keys = s.keys[row];
    if (keys == 0) continue;
    float even = v[i], odd = v[2 + i];
    bf16* out = p.qkv + row * QKV_ROWS;
    if (strip >= K_END) {  // V: dims r and r + 8 of the strip
      int dim = (strip - K_END) * 16 + at.r;
      out[Q_WIDTH + KV_WIDTH + dim] = __float2bfloat16_rn(even);
      out[Q_WIDTH + KV_WIDTH + dim + 8] = __float2bfloat16_rn(odd);
      append_value(newest_block(p, s, d[W_LAYER], row, dim / 128), keys - 1, dim, even, odd);
      continue;
    }
    int head = strip / 8, pair = strip % 8 * 8 + at.r;  // dims 2 pair and 2 pair + 1
    if (d[W_FLAGS] & FLAG_ROPE) {
      float2 cs = s.rope[row][pair];
      float rotated = even * cs.x - odd * cs.y;
      odd = odd * cs.x + even * cs.y;
      even = rotated;
    }
    uint32_t both = pack_bf16(even, odd);
    *reinterpret_cast<uint32_t*>(out + head * 128 + pair * 2) = both;
    if (strip >= Q_STRIPS) append_key(newest_block(p, s, d[W_LAYER], row, head - Q_HEADS), keys - 1, pair * 2, both);
  }
}
