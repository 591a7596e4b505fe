// Matrix-vector products of up to eight rows: a strip of 16 weight rows as mma's m, the batch as its n.
//
// k is split over the eight consumer warps, in one of two ways. Strips of at least eight ring slots (16 x 256) are dealt
// by slots: slot j belongs to warp j % 8, which alone waits for it and gives it back. Shorter strips are cut within the
// slot: warp w takes sub-tile w (16 x 32) of every slot. Either way the eight partial tiles of a strip meet in shared
// memory and the storer adds them in warp order.
//
// A lane's pieces of a weight sub-tile and of the activations are 16 bytes each, under a permutation of k that both
// share (mk/model/packing.py).
#pragma once
#include "wait.cuh"

constexpr int SUBTILES = 8;  // 16 x 32 sub-tiles of a slot

// A barrier's parity tells a warp which lap a slot is in only while the slot's copy of the lap before has landed. A warp
// passes over at most MAX_PASSED slots between two that it waits for: the other seven of an eight-slot strip, and two of
// K where a chunk lacks its first page. That the first of the two was issued says that all those before it have landed
// but the window's and the PRODUCER_LANES - 1 of its own batch: copies land, and lanes issue, in any order.
constexpr int MAX_PASSED = 9, MAX_WINDOW = RING_SLOTS - MAX_PASSED - PRODUCER_LANES - 1;

// A consumer warp's view of the weight ring and of the tile ring.
class Streams {
 public:
  DEVICE Streams(Shared& shared, Guard guard) : s(shared), g(guard), warp(threadIdx.x / 32) {}

  DEVICE bool await_slot() {
    return g.wait(&s.ring_full[ring.index], ring.lap, ring_empty);
  }
  DEVICE uint8_t* slot() const { return s.ring[ring.index]; }
  // Done with the current slot on behalf of `warps` consumers.
  DEVICE void release_slot(int warps) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.ring_empty[ring.index], warps);
    ring.next();
  }
  // Passes over slots that are other warps' to wait for and to release.
  DEVICE void skip_slots(int n) { ring.skip(n); }

  // Hands this warp's part of a tile to the storer: 4 values a lane.
  DEVICE bool put(const float (&c)[4]) {
    if (!await_tile()) return false;
    reinterpret_cast<float4*>(s.tile[tile.index][warp])[threadIdx.x % 32] = make_float4(c[0], c[1], c[2], c[3]);
    arrive_tile();
    return true;
  }
  // A tile without data: this warp's global stores of the task are done.
  DEVICE bool put_done() {
    if (!await_tile()) return false;
    arrive_tile();
    return true;
  }
  DEVICE int tile_index() const { return tile.index; }
  DEVICE bool await_tile() {
    return g.wait(&s.tile_empty[tile.index], tile.lap ^ 1, tile_full);
  }

 private:
  DEVICE void arrive_tile() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.tile_full[tile.index]);
    tile.next();
  }
  Shared& s;
  const Guard g;
  Cursor<RING_SLOTS> ring;
  Cursor<TILES_RING> tile;

 public:
  Tally ring_empty, tile_full;  // waits for a slot to land, and for the storer to take a tile
  const int warp;
};

// The activations of one warp for strips of SLOTS slots, 16 bytes a piece: piece i of lane (n, t) is
// x[n][offset(i) .. + 7], n = lane / 4, t = lane % 4.
template <int SLOTS>
struct Fragment {
  static constexpr bool BY_SLOT = SLOTS >= CONSUMERS;
  static constexpr int ROUNDS = (SLOTS + CONSUMERS - 1) / CONSUMERS;  // slots of a warp
  static constexpr int PIECES = BY_SLOT ? ROUNDS * SUBTILES : SLOTS;
  uint4 v[PIECES];

  // offset(i) = origin() + delta(i): one address register and immediate offsets
  static DEVICE int origin() {
    return hidden((BY_SLOT ? threadIdx.x / 32 * 256 : threadIdx.x / 32 * 32) + threadIdx.x % 4 * 8);
  }
  static DEVICE constexpr int delta(int i) {
    return BY_SLOT ? i / SUBTILES * CONSUMERS * 256 + i % SUBTILES * 32 : i * 256;
  }
  static DEVICE bool exists(int i) { return !BY_SLOT || threadIdx.x / 32 + i / SUBTILES * CONSUMERS < SLOTS; }
};

// Loads rows of SLOTS * 256 elements written in this launch; rows outside `mask` are zero.
template <int SLOTS>
DEVICE void load_fragment(Fragment<SLOTS>& b, const bf16* x, uint32_t mask) {
  int n = threadIdx.x % 32 / 4;
  bool used = mask >> n & 1;
  const bf16* row = x + n * SLOTS * 256 + b.origin();
#pragma unroll
  for (int i = 0; i < b.PIECES; ++i)
    b.v[i] = used && b.exists(i) ? load_l2(reinterpret_cast<const uint4*>(row + b.delta(i))) : make_uint4(0, 0, 0, 0);
}

// Two products, each rounded once to bf16.
DEVICE uint32_t scale_pair(uint32_t x, uint32_t w) {
  __nv_bfloat162 v = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&x), *reinterpret_cast<__nv_bfloat162*>(&w));
  return *reinterpret_cast<uint32_t*>(&v);
}

// A norm's weights in the same places; they do not depend on the step, so they are loaded before the wait.
template <int SLOTS>
DEVICE void load_norm(Fragment<SLOTS>& w, const bf16* norm) {
  const int origin = w.origin();
#pragma unroll
  for (int i = 0; i < w.PIECES; ++i)
    w.v[i] = w.exists(i) && origin + w.delta(i) < HIDDEN
                 ? __ldg(reinterpret_cast<const uint4*>(norm + origin + w.delta(i)))
                 : make_uint4(0, 0, 0, 0);
}

// The normed input: bf16(x * norm weight); 1 / rms is applied in the epilogue, so nobody waits for it here.
template <int SLOTS>
DEVICE void apply_norm(Fragment<SLOTS>& b, const Fragment<SLOTS>& norm) {
#pragma unroll
  for (int i = 0; i < b.PIECES; ++i) {
    uint4 w = norm.v[i];
    b.v[i] = make_uint4(scale_pair(b.v[i].x, w.x), scale_pair(b.v[i].y, w.y), scale_pair(b.v[i].z, w.z),
                        scale_pair(b.v[i].w, w.w));
  }
}

// c += (sub-tile at `a`) x (fragment b): two mma steps.
DEVICE void mma_subtile(float (&c)[4], const uint4* a, uint4 b) {
  const int lane = threadIdx.x % 32;
  uint4 lo = a[lane], hi = a[lane + 32];  // rows g and g + 8
  mma_16x8x16(c, lo.x, hi.x, lo.y, hi.y, b.x, b.y);
  mma_16x8x16(c, lo.z, hi.z, lo.w, hi.w, b.z, b.w);
}

// c += the whole of the current slot x eight pieces. Two chains of mma hide each other's latency.
DEVICE void mma_slot(float (&c)[4], const uint8_t* slot, const uint4* b) {
  const uint4* a = reinterpret_cast<const uint4*>(slot);
  float odd[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int j = 0; j < SUBTILES; j += 2) {
    mma_subtile(c, a + j * 64, b[j]);
    mma_subtile(odd, a + (j + 1) * 64, b[j + 1]);
    if (j == SUBTILES / 2 - 2) asm volatile("" ::: "memory");  // half a slot's loads at once: registers
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += odd[i];
}

// c += this warp's part of the next strip.
template <int SLOTS>
DEVICE bool mma_strip(Streams& streams, float (&c)[4], const Fragment<SLOTS>& b) {
  if constexpr (b.BY_SLOT) {
#pragma unroll
    for (int round = 0; round < b.ROUNDS; ++round) {
      int slots = min(CONSUMERS, SLOTS - round * CONSUMERS);
      if (streams.warp < slots) {
        streams.skip_slots(streams.warp);
        if (!streams.await_slot()) return false;
        mma_slot(c, streams.slot(), b.v + round * SUBTILES);
        streams.release_slot(streams.warp == slots - 1 ? slots : CONSUMERS);
        streams.skip_slots(slots - streams.warp - 1);
      } else {  // not this warp's, but it waits for the last and has a part in giving it back: see MAX_PASSED
        streams.skip_slots(slots - 1);
        if (!streams.await_slot()) return false;
        streams.release_slot(1);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
      if (!streams.await_slot()) return false;
      mma_subtile(c, reinterpret_cast<const uint4*>(streams.slot()) + streams.warp * 64, b.v[j]);
      streams.release_slot(1);
    }
  }
  return true;
}

// `strips` strips with the same activations, each handed to the storer.
template <int SLOTS>
DEVICE bool mma_strips(Streams& streams, const Fragment<SLOTS>& b, int strips) {
#pragma unroll 1
  for (int strip = 0; strip < strips; ++strip) {
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    if (!mma_strip(streams, c, b) || !streams.put(c)) return false;
  }
  return true;
}
