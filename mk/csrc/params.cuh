// What a launch gets: device pointers and the step's numbers. mk/kernel/step_params.py reads the fields from here.
#pragma once
#include <cstdint>

#include "geometry.h"  // generated: the model's constants
#include "host_step.cuh"
#include "isa.h"       // generated from mk/isa.py
#include "ptx.cuh"

constexpr int PAGE = 64;                       // tokens of a KV page
constexpr int ENTRIES = 16;                    // task ring; a trace has a place beside each
constexpr int SLOT_BYTES = 8192;               // ring slot: 16 rows x 256 k of bf16
constexpr int KV_BLOCK_BYTES = PAGE * 128 * 2;  // K or V of one page, layer and head
constexpr int COUNTER_STRIDE = 32;             // counters stand 128 bytes apart

// Flags of a row, as in mk/interpreter/step.py.
constexpr int STATUS_LOGITS = 1, STATUS_ROUTER_NAN = 2, STATUS_EXPERT_ID = 4;

// Where and on what an SM gave up, for the host to name (one record an SM).
struct alignas(32) StallRecord {
  int taken, role, opcode, layer, task, counter;
  uint32_t target, seen;
};

// How a row is sampled; mk/kernel/step_params.py packs the same. temperature 0: greedy.
struct RowSampling {
  uint64_t seed;
  double top_p;       // 1: off
  float temperature;
  float rate;         // log2(e) / temperature
  int top_k;          // 0: off
  int cuts;           // whether top_k or top_p may keep any token from being drawn
};

// How the cuts pass through a row's shortlist, the undecided tokens by falling logit.
struct Cuts {
  uint64_t over;         // undecided tokens that top-k leaves out
  uint64_t mass_before;  // of the tokens that are sure to be kept
  uint64_t mass_beside;  // of all that top-p's total counts and the shortlist does not hold
};

struct StepParams {
  // weights
  const uint8_t* slots;   // packed matrices, 8 KB slots
  const bf16* norms;      // [LAYERS + 1][HIDDEN]
  // schedule
  const int* words;       // descriptors, track after track
  const int* offsets;     // [2 n_sm + 1]: main tracks, then those aside
  uint32_t* counters;     // 128 bytes apart
  uint32_t* queues;       // [2][n_queues] ticket heads
  // the step's inputs
  int* keys;              // [rows] context length, this token included; 0 = inactive
  const int* table_full;     // [rows][table_stride] physical page of a block
  const int* table_sliding;  // the same for sliding layers
  const float* rope;      // [positions][64][2] cos and sin
  uint8_t* pool_full;     // [page][layer of the kind][kv head][K, V] blocks of 16 KB
  uint8_t* pool_sliding;
  // activations
  bf16* x;                // [2][MAX_ROWS][HIDDEN_PAD]
  float* sumsq;           // [2][HIDDEN / 16][MAX_ROWS]
  bf16* qkv;              // [MAX_ROWS][QKV_ROWS] after RoPE, heads in logical order
  float* partial_o;       // [MAX_ROWS][KV_HEADS][SPLIT_STRIDE][GROUP][128]
  float* partial_ml;      // [MAX_ROWS][KV_HEADS][SPLIT_STRIDE][2][8] max (log2 units) and sum
  bf16* attn_out;         // [MAX_ROWS][Q_PAD]
  float* router_part;     // [HIDDEN_SLOTS][MAX_ROWS][128]
  bf16* hidden;           // [EXPERTS][MAX_ROWS][FFN_PAD]; padding stays zero
  bf16* dense_hidden;     // [MAX_ROWS][DENSE_PAD]
  float* oproj_out;       // [MAX_ROWS][HIDDEN]
  float* ffn_part;        // [EXPERTS][MAX_ROWS][HIDDEN]
  float* ffn_out;         // [MAX_ROWS][HIDDEN]
  float* logits;          // [MAX_ROWS][VOCAB_PAD]
  float* candidate_value;  // [n_sm][MAX_ROWS] best logit of an SM's strips
  float* candidate_low;    // [n_sm][MAX_ROWS] and the smallest
  int* candidate_id;       // [n_sm][MAX_ROWS]
  int* tokens;            // [MAX_ROWS] fed back from step to step
  // sampling; what is added to comes in two sets by step parity, the idle one is cleared for the next step
  const RowSampling* sampling;  // [MAX_ROWS]
  uint64_t* bin_mass;     // [2][MAX_ROWS][BINS], stored as Bins::place says
  uint32_t* bin_count;    // [2][MAX_ROWS][BINS]
  uint4* undecided;       // [MAX_ROWS][VOCAB_PAD] the shortlist in any order: ~id, key of the logit, noise, mass
  uint32_t* undecided_count;  // [2][MAX_ROWS]
  Cuts* cuts;             // [MAX_ROWS] of rows with bins
  double* best_score;     // [n_sm][MAX_ROWS] of a slice's tokens that are sure to be kept
  int* best_id;           // [n_sm][MAX_ROWS]
  HostStep* host_steps;   // [HOST_STEPS] ring in pinned host memory
  // routing
  int* route_ids;         // [LAYERS][MAX_ROWS][TOP_K] published ids
  const int* forced_ids;  // the same shape: ids that replace the router's, or null
  int* status;            // [MAX_ROWS] STATUS_ flags of the rows
  // safety
  uint32_t* abort_word;
  StallRecord* stalls;    // [n_sm]
  uint32_t* trace;        // [n_sm][trace_records][16] of a trace build, else null; trace.cuh
  uint64_t time_limit_ns;
  uint64_t launched;      // launches before this one, whatever the program
  uint32_t epoch;
  int rows, n_sm, n_queues, table_stride, window_slots, trace_records;
  // of a build with MK_DELAYS (delay.cuh), else unused
  int* tiles_taken;       // [n_sm] attention splits and expert tiles of a step so far
  uint32_t delay_seed;
  int delay_ns, slow_sm, slow_ns;
  int advance;            // 1: sampling adds one to the context of every active row, for steps queued ahead
};
