// Shared memory of an SM: the ring that every operation streams through, and the small rings between the roles.
#pragma once
#include "params.cuh"
#include "trace.cuh"

constexpr int CONSUMERS = 8;  // warps that multiply
constexpr int CONTROLLER = 8, PRODUCER = 9, STORER = 10, ASIDE = 11;
constexpr int THREADS = 384;  // three warpgroups
// A block owns LAUNCH_REGISTERS x THREADS registers; the warpgroups may only redistribute those, or `setmaxnreg` waits
// for ever.
constexpr int LAUNCH_REGISTERS = 168, CONSUMER_REGISTERS = 200, OTHER_REGISTERS = 104;
static_assert(CONSUMERS * 32 * CONSUMER_REGISTERS + (THREADS - CONSUMERS * 32) * OTHER_REGISTERS <=
                  LAUNCH_REGISTERS * THREADS,
              "registers of a block");

#ifndef MK_RING_SLOTS  // fewer, for an ablation
#define MK_RING_SLOTS 22
#endif
#ifndef MK_COPY_BYTES  // of one bulk copy; smaller ones for an ablation
#define MK_COPY_BYTES 8192
#endif
constexpr int RING_ROOM = 22, RING_SLOTS = MK_RING_SLOTS;
static_assert(RING_SLOTS <= RING_ROOM, "ring slots of an SM");
constexpr int COPY_BYTES = MK_COPY_BYTES;
constexpr int PRODUCER_LANES = 4;  // slots that are issued at once
constexpr int TILES_RING = 4;   // partial tiles between consumers and storer
constexpr int CHUNK = 16;       // descriptors fetched at once
constexpr int OWNED = 4;        // residual strips an SM may own
constexpr int KEYS_CHUNK = 128;  // keys that attention handles at once: one 16-key strip a warp
constexpr int MAX_STRIDE = (SPLIT_STRIDE + 31) / 32 * 32;  // splits of a head that combine has room for
constexpr int P_STRIDE = KEYS_CHUNK + 32;  // bf16 elements; + 64 bytes keeps P's fragment loads free of bank conflicts

// Top-k's outcome for one layer, private to the SM.
struct Route {
  float weight[128][MAX_ROWS];  // meaningful where `rows` has the row's bit
  uint8_t rows[128];            // bit n: row n goes to this expert
  uint8_t active[128];          // routed experts, ascending id
  int n_active;
  uint32_t lap;  // of route_weighed, when the weights are there
};

struct Shared {
  uint8_t ring[RING_ROOM][SLOT_BYTES];
  int chunk[2][CHUNK][DESCRIPTOR_WORDS];
  int entry[ENTRIES][DESCRIPTOR_WORDS];
  float tile[TILES_RING][CONSUMERS][128];  // 16 x 8 partial products, one a warp
  bf16 p[8][P_STRIDE];                     // attention: probabilities, [query head][key]
  float head_max[CONSUMERS][8];            // attention: each warp's largest score of a head
  // the owner's strips, in fragment order: the two contributions of this layer, and the residual they go to
  float acc_attn[OWNED][128], acc_ffn[OWNED][128], x[OWNED][128];
  float2 rope[MAX_ROWS][64];  // cos and sin at each row's position
  int newest_page[2][MAX_ROWS];  // page that each row's new token goes to, full and sliding
  Route route[2];  // by layer parity
  int keys[MAX_ROWS];  // context lengths of this step
  uint64_t deadline;   // nanoseconds: when the step must be given up
  int given_up;        // the controller's word that it was
  int doing[4];    // entry each role of the main track is at, for the stall record
  int aside[DESCRIPTOR_WORDS];  // what the track aside is at
  float split_weight[MAX_STRIDE];  // attention combine
  Marks marks;
#ifdef MK_PLANTED_RACE
  int planted;
#endif
  Barrier ring_full[RING_SLOTS], ring_empty[RING_SLOTS];
  Barrier chunk_full[2];
  Barrier route_ready;  // top-k's list of experts
  Barrier entry_full[ENTRIES], entry_empty[ENTRIES], entry_go[ENTRIES];
  Barrier tile_full[TILES_RING], tile_empty[TILES_RING];
  Barrier route_weighed;  // and their weights
  Barrier finished;  // consumer warps, producer, storer and the warp aside, at their ends
};

static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of an SM");
static_assert(offsetof(Shared, entry) % 128 == 0 && offsetof(Shared, tile) % 16 == 0, "alignment of copies");

// A position in a ring of N: index and the parity of its current lap.
template <int N>
struct Cursor {
  int index = 0;
  uint32_t lap = 0;
  DEVICE void next() { skip(1); }
  DEVICE void skip(int n) {  // n <= N
    index += n;
    if (index >= N) index -= N, lap ^= 1;
  }
};
