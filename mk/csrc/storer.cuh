// The storer: adds the eight warps' partial tiles in warp order, applies an operation's epilogue, publishes, signals.
//
// A lane holds four values of a tile: columns (batch rows) n and n + 1 with n = 2 (lane % 4), at strip rows r = lane / 4
// (value[0], value[1]) and r + 8 (value[2], value[3]).
#pragma once
#include "gemm.cuh"
#include "splits.cuh"

class Storer {
 public:
  DEVICE Storer(const StepParams& params, Shared& shared)
      : p(params), s(shared), g(params, shared, ROLE_STORER), entries(shared, g), lane(threadIdx.x % 32), r(lane / 4),
        n(lane % 4 * 2) {}

  DEVICE void run() {
    while (entries.next()) {
      const int* d = entries.words;
      if (d[W_OPCODE] == OP_END) return;
      // opened: an entry may only store and signal after its waits, also when it has nothing to do
      if (!entries.opened() || !store(d)) break;
      __syncwarp();
      if (lane == 0 && d[W_SIGNAL] != NONE)
        signal_release(p.counters + static_cast<size_t>(d[W_SIGNAL]) * COUNTER_STRIDE, d[W_SIGNAL_VALUE]);
      entries.release();
    }
    entries.report();
  }

 private:
  DEVICE bool store(const int* d) {
    switch (d[W_OPCODE]) {
      case OP_EMBED: return embed(d);
      case OP_QKV: return normed(d, [&](int strip, const float (&v)[4]) { qkv(d, strip, v); });
      case OP_ROUTER: return normed(d, [&](int strip, const float (&v)[4]) { router(d, strip, v); });
      case OP_DENSE_UP:
        return normed(d, [&](int strip, const float (&v)[4]) { gated(p.dense_hidden, DENSE_SLOTS * 256, strip, ~0u, v); });
      case OP_MOE_UP: return normed(d, [&](int flat, const float (&v)[4]) { expert_gated(d, flat, v); });
      case OP_LM_HEAD: return lm_head(d);
      case OP_O_PROJ: return contribution(d, s.acc_attn, d[W_DST] == BUF_ACC_ATTN, p.oproj_out);
      case OP_DENSE_DOWN: return contribution(d, s.acc_ffn, d[W_DST] == BUF_ACC_FFN, p.ffn_out);
      case OP_MOE_DOWN_OWNED: return contribution(d, s.acc_ffn, true, nullptr);
      case OP_MOE_DOWN: return each_tile(d, [&](int flat, const float (&v)[4]) { expert_part(d, flat, v); });
      case OP_MOE_COMBINE: return moe_combine(d);
      case OP_RESIDUAL: return residual(d);
      case OP_ATTENTION: return await_tile() && (give_back(), true);
      case OP_ATTN_COMBINE: return attn_combine(d);
      case OP_ROUTE_SETUP: return route_setup(d);
      case OP_SAMPLE: return sample(d);
      default: return true;
    }
  }

  // ---- tiles from the consumers ----
  DEVICE bool await_tile() { return g.wait(&s.tile_full[tile_.index], tile_.lap); }
  DEVICE bool take(float (&v)[4]) {
    if (!await_tile()) return false;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < CONSUMERS; ++w) {
      float4 part = reinterpret_cast<const float4*>(s.tile[tile_.index][w])[lane];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
    give_back();
    return true;
  }
  DEVICE void give_back() {
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.tile_empty[tile_.index]);
    tile_.next();
  }
  template <class Body>
  DEVICE bool each_tile(const int* d, Body body) {
    for (int i = 0; i < d[W_TILES]; ++i) {
      float v[4];
      if (!take(v)) return false;
      body(d[W_TILE] + i, v);
    }
    return true;
  }
  // The same for products of the normed input: 1 / rms of the two columns is applied here.
  template <class Body>
  DEVICE bool normed(const int* d, Body body) {
    if (d[W_LAYER] != norm_layer_) load_rstd(d[W_LAYER]);
    return each_tile(d, [&](int tile, float (&v)[4]) {
      v[0] *= rstd_[0], v[2] *= rstd_[0], v[1] *= rstd_[1], v[3] *= rstd_[1];
      body(tile, v);
    });
  }
  DEVICE void load_rstd(int layer) {
    norm_layer_ = layer;
    // lane: rows 4 (lane % 2) .. + 3 of every sixteenth strip, all loads in flight at once
    const float4* parts = reinterpret_cast<const float4*>(p.sumsq + (layer & 1) * (HIDDEN / 16) * MAX_ROWS) + lane;
    constexpr int LOADS = (HIDDEN / 16 + 15) / 16;
    float4 part[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      part[i] = i * 16 + lane / 2 < HIDDEN / 16 ? load_l2(parts + i * 32) : make_float4(0.f, 0.f, 0.f, 0.f);
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < LOADS; ++i) sum[0] += part[i].x, sum[1] += part[i].y, sum[2] += part[i].z, sum[3] += part[i].w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      for (int step = 2; step < 32; step *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
      float rstd = rsqrtf(sum[i] / HIDDEN + RMS_EPS);
      float low = __shfl_sync(~0u, rstd, 0), high = __shfl_sync(~0u, rstd, 1);  // rows i and i + 4
      if (n % 4 == (i & ~1)) rstd_[i & 1] = n < 4 ? low : high;
    }
  }

  // ---- epilogues ----
  DEVICE void qkv(const int* d, int strip, const float (&v)[4]) {
    constexpr int Q_STRIPS = Q_WIDTH / 16, K_END = (Q_WIDTH + KV_WIDTH) / 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int row = n + i;
      if (row >= p.rows) continue;
      int keys = s.keys[row];
      if (keys == 0) continue;
      float even = v[i], odd = v[2 + i];
      bf16* out = p.qkv + row * QKV_ROWS;
      if (strip >= K_END) {  // V: dims r and r + 8 of the strip
        int dim = (strip - K_END) * 16 + r;
        out[Q_WIDTH + KV_WIDTH + dim] = __float2bfloat16_rn(even);
        out[Q_WIDTH + KV_WIDTH + dim + 8] = __float2bfloat16_rn(odd);
        append_value(d[W_LAYER], row, keys - 1, dim, even, odd);
        continue;
      }
      int head = strip / 8, pair = strip % 8 * 8 + r;  // dims 2 pair and 2 pair + 1
      if (d[W_FLAGS] & FLAG_ROPE) {
        float2 cs = s.rope[row][pair];
        float rotated = even * cs.x - odd * cs.y;
        odd = odd * cs.x + even * cs.y;
        even = rotated;
      }
      uint32_t both = pack_bf16(even, odd);
      *reinterpret_cast<uint32_t*>(out + head * 128 + pair * 2) = both;
      if (strip >= Q_STRIPS) append_key(d[W_LAYER], row, keys - 1, head - Q_HEADS, pair * 2, both);
    }
  }
  // The K block of the page that holds a row's new token; the V block follows it.
  DEVICE uint8_t* kv_block(int layer, int row, int head) const {
    bool sliding = KIND_SLIDING[layer];
    size_t page = s.newest_page[sliding][row];
    size_t unit = page * (sliding ? SLIDING_LAYERS : FULL_LAYERS) + KIND_INDEX[layer];
    return (sliding ? p.pool_sliding : p.pool_full) + (unit * KV_HEADS + head) * 2 * KV_BLOCK_BYTES;
  }
  DEVICE void append_key(int layer, int row, int position, int head, int dim, uint32_t pair) const {
    int key = position % PAGE;  // [keys/16][d/32][16][32]
    int offset = (key / 16 * 4 + dim / 32) * 1024 + key % 16 * 64 + dim % 32 * 2;
    *reinterpret_cast<uint32_t*>(kv_block(layer, row, head) + offset) = pair;
  }
  DEVICE void append_value(int layer, int row, int position, int dim, float a, float b) const {
    int key = position % PAGE;  // [d/16][keys/32][16][32]
    uint8_t* block = kv_block(layer, row, dim / 128) + KV_BLOCK_BYTES;
    int at = (dim % 128 / 16 * 2 + key / 32) * 1024 + dim % 16 * 64 + key % 32 * 2;
    *reinterpret_cast<bf16*>(block + at) = __float2bfloat16_rn(a);
    *reinterpret_cast<bf16*>(block + at + 8 * 64) = __float2bfloat16_rn(b);
  }

  DEVICE void router(const int* d, int strip, const float (&v)[4]) {
    float* out = p.router_part + d[W_K_SLOT] * MAX_ROWS * 128 + strip * 16 + r;
#pragma unroll
    for (int i = 0; i < 2; ++i) out[(n + i) * 128] = v[i], out[(n + i) * 128 + 8] = v[2 + i];
  }

  // silu(gate) * up of hidden column 8 strip + r, for the rows of `mask`.
  DEVICE void gated(bf16* out, int stride, int strip, uint32_t mask, const float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (mask >> (n + i) & 1) {
        float gate = v[i];
        out[(n + i) * stride + strip * 8 + r] = __float2bfloat16_rn(gate / (1.f + expf(-gate)) * v[2 + i]);
      }
  }
  DEVICE void expert_gated(const int* d, int flat, const float (&v)[4]) {
    const Route& route = s.route[d[W_LAYER] & 1];
    int expert = route.active[flat / UP_STRIPS];
    gated(p.hidden + static_cast<size_t>(expert) * MAX_ROWS * FFN_SLOTS * 256, FFN_SLOTS * 256, flat % UP_STRIPS,
          route.rows[expert], v);
  }
  DEVICE void expert_part(const int* d, int flat, const float (&v)[4]) {
    const Route& route = s.route[d[W_LAYER] & 1];
    int expert = route.active[flat / HIDDEN_STRIPS];
    columns(p.ffn_part + static_cast<size_t>(expert) * MAX_ROWS * HIDDEN, flat % HIDDEN_STRIPS, route.rows[expert], v);
  }
  DEVICE void columns(float* out, int strip, uint32_t mask, const float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (mask >> (n + i) & 1) {
        out[(n + i) * HIDDEN + strip * 16 + r] = v[i];
        out[(n + i) * HIDDEN + strip * 16 + r + 8] = v[2 + i];
      }
  }

  // A contribution to the residual: kept here by the strips' owner, in fp32 memory otherwise.
  DEVICE bool contribution(const int* d, float (*owned)[128], bool keep, float* out) {
    for (int i = 0; i < d[W_TILES]; ++i) {
      float v[4];
      if (!take(v)) return false;
      if (keep)
        reinterpret_cast<float4*>(owned[i])[lane] = make_float4(v[0], v[1], v[2], v[3]);
      else
        columns(out, d[W_TILE] + i, (1u << p.rows) - 1, v);
    }
    return true;
  }

  DEVICE bool attn_combine(const int* d) {
    if (!await_tile()) return false;
    float denominator = s.denominator[tile_.index];
    float v[4];
    take(v);
    bool active = s.keys[d[W_ROW]] > 0;
    float scale = active ? 1.f / denominator : 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = active ? v[i] * scale : 0.f;
    *reinterpret_cast<uint2*>(p.attn_out + d[W_ROW] * Q_PAD + d[W_HEAD] * 128 + lane * 4) =
        make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
    return true;
  }

  // ---- operations without a matrix product ----
  DEVICE bool embed(const int* d) {
    int row = lane / 4, part = lane % 4;  // four columns a lane
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
      if (i < OWNED) {  // fragment order: element (strip row, batch row), see above
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
    return true;
  }

  // x' = bf16(x + (attention + ffn)) and the strip's part of the sum of squares.
  DEVICE bool residual(const int* d) {
    int layer = d[W_LAYER];
    const bf16* x = p.x + (layer & 1) * MAX_ROWS * HIDDEN_PAD;
    bf16* out = p.x + (~layer & 1) * MAX_ROWS * HIDDEN_PAD;
    for (int i = 0; i < d[W_TILES]; ++i) {
      int strip = d[W_TILE] + i;
      float squares[2] = {0.f, 0.f};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int row = n + j % 2, column = strip * 16 + r + j / 2 * 8;
        if (row >= p.rows) continue;
        float attn, ffn, old;
        bool owned = d[W_SRC] == BUF_ACC_ATTN;
        if (owned) {
          attn = s.acc_attn[i][lane * 4 + j], ffn = s.acc_ffn[i][lane * 4 + j], old = s.x[i][lane * 4 + j];
        } else {
          attn = load_l2(p.oproj_out + row * HIDDEN + column), ffn = load_l2(p.ffn_out + row * HIDDEN + column);
          old = __bfloat162float(load_l2(x + row * HIDDEN_PAD + column));
        }
        bf16 v = __float2bfloat16_rn(old + (attn + ffn));
        out[row * HIDDEN_PAD + column] = v;
        if (owned) s.x[i][lane * 4 + j] = __bfloat162float(v);
        squares[j % 2] += __bfloat162float(v) * __bfloat162float(v);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        for (int step = 4; step < 32; step *= 2) squares[j] += __shfl_xor_sync(~0u, squares[j], step);
        if (r == 0) p.sumsq[((~layer & 1) * (HIDDEN / 16) + strip) * MAX_ROWS + n + j] = squares[j];
      }
    }
    return true;
  }

  DEVICE bool moe_combine(const int* d) {
    const Route& route = s.route[d[W_LAYER] & 1];
    for (int i = 0; i < d[W_TILES]; ++i) {
      int strip = d[W_TILE] + i;
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      for (int a = 0; a < route.n_active; ++a) {
        int expert = route.active[a];
        const float* part = p.ffn_part + static_cast<size_t>(expert) * MAX_ROWS * HIDDEN + strip * 16 + r;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (route.rows[expert] >> (n + j % 2) & 1)
            sum[j] += route.weight[expert][n + j % 2] * load_l2(part + (n + j % 2) * HIDDEN + j / 2 * 8);
      }
      columns(p.ffn_out, strip, (1u << p.rows) - 1, sum);
    }
    return true;
  }

  DEVICE bool route_setup(const int* d) {
    uint32_t* idle = p.queues + (~p.epoch & 1) * p.n_queues + d[W_QUEUE];
    if (lane < d[W_TILES]) idle[lane] = 0;
    return true;
  }

  // ---- the head ----
  DEVICE bool lm_head(const int* d) {
    bool ok = normed(d, [&](int strip, const float (&v)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int row = n + j % 2, id = strip * 16 + r + j / 2 * 8;
        float logit = v[j] * LOGIT_SCALE;
        if (row < p.rows) p.logits[static_cast<size_t>(row) * VOCAB_PAD + id] = logit;
        bad_[j % 2] |= !(fabsf(logit) < INFINITY);
        // ids arrive in ascending order within a lane's half, so a strict comparison keeps the lower id of equals
        if (id < VOCAB && (logit > best_[j % 2] || (logit == best_[j % 2] && id < best_id_[j % 2])))
          best_[j % 2] = logit, best_id_[j % 2] = id;
      }
    });
    if (!ok) return false;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float value = best_[j];
      int id = best_id_[j];
      for (int step = 4; step < 32; step *= 2) better(value, id, step);
      uint32_t bad = __ballot_sync(~0u, bad_[j]) & 0x11111111u << lane % 4;  // lanes of this column
      if (r == 0) {
        if (bad && n + j < p.rows) p.status[n + j] |= STATUS_LOGITS;
        p.candidate_value[blockIdx.x * MAX_ROWS + n + j] = value;
        p.candidate_id[blockIdx.x * MAX_ROWS + n + j] = id;
      }
    }
    return true;
  }
  DEVICE void better(float& value, int& id, int step) const {
    float other = __shfl_xor_sync(~0u, value, step);
    int other_id = __shfl_xor_sync(~0u, id, step);
    if (other > value || (other == value && other_id < id)) value = other, id = other_id;
  }
  DEVICE bool sample(const int* d) {
    for (int row = 0; row < p.rows; ++row) {
      float value = -INFINITY;
      int id = 0x7fffffff;
      for (int sm = lane; sm < p.n_sm; sm += 32) {
        float v = load_l2(p.candidate_value + sm * MAX_ROWS + row);
        int candidate = load_l2(p.candidate_id + sm * MAX_ROWS + row);
        if (v > value || (v == value && candidate < id)) value = v, id = candidate;
      }
      for (int step = 1; step < 32; step *= 2) better(value, id, step);
      if (lane == 0) {
        bool active = s.keys[row] > 0;
        if (active) p.tokens[row] = id;
        if (active && id == 0x7fffffff) p.status[row] |= STATUS_LOGITS;
        if (active && p.advance) p.keys[row] = s.keys[row] + 1;
      }
    }
    if (lane == 0) p.step_time[1] = nanoseconds();
    return true;
  }

  const StepParams& p;
  Shared& s;
  const Guard g;
  EntryReader entries;
  const int lane, r, n;
  Cursor<TILES_RING> tile_;
  int norm_layer_ = NONE;
  float rstd_[2] = {0.f, 0.f};
  float best_[2] = {-INFINITY, -INFINITY};
  int best_id_[2] = {0x7fffffff, 0x7fffffff};
  bool bad_[2] = {false, false};
};
