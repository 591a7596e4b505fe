// Where a step's time goes: one record a descriptor that an SM runs, kept with -DMK_TRACE: the main track's from record 1
// on, those of the track aside from the last record backwards.
//
// mk/trace.py reads the words of a record from here. Times are cycles of the SM's own clock, low words; record 0 of a block
// puts the kernel's start there on the card's clock, which all SMs share.
#pragma once
#include "params.cuh"

enum TraceWord : int {
  T_OPCODE,     // record 0: the SM that the block is on
  T_LAYER,      // record 0: low word of the card's clock at the SM's start, ns
  T_TASK,       // record 0: its high word
  T_PUBLISHED,  // the controller put the descriptor into the task ring; record 0: the SM's clock at its start
  T_GO,         // the controller found its counters reached
  T_STREAM,     // the producer began to stream for it
  T_STREAMED,   // and had issued its last copy
  T_RING_FULL,  // cycles the producer waited for a free slot
  T_WINDOW,     // cycles it waited for a copy to land
  T_TAKEN,      // consumer warp 0 came to it
  T_OPENED,     // and was let in
  T_DONE,       // and had handed over its last tile
  T_RING_EMPTY,  // cycles consumer warp 0 waited for a slot to land
  T_TILE_FULL,   // cycles it waited for the storer to take a tile
  T_STORING,     // the storer was let in
  T_SIGNALLED,   // its results were stored and told
  TRACE_WORDS,
};

enum Spent : int { SPENT_RING_FULL, SPENT_WINDOW, SPENT_RING_EMPTY, SPENT_TILE_FULL, SPENT_KINDS };

#ifdef MK_TRACE
struct Tallies {
  uint32_t cycles[SPENT_KINDS];
};

DEVICE uint32_t trace_clock() { return static_cast<uint32_t>(sm_cycles()); }
// Adds a wait, without waiting for the sum. One thread of a role counts: consumer warp 0's and the producer's first.
DEVICE void trace_wait(Tallies& t, Spent kind, uint32_t since) {
  constexpr int PRODUCER_THREAD = 9 * 32;
  if (kind != SPENT_KINDS && (threadIdx.x == 0 || threadIdx.x == PRODUCER_THREAD))
    atomicAdd(&t.cycles[kind], trace_clock() - since);
}

DEVICE void trace_word(const StepParams& p, int entry, TraceWord word, uint32_t value) {
  if (entry < p.trace_records) p.trace[(static_cast<size_t>(blockIdx.x) * p.trace_records + entry) * TRACE_WORDS + word] = value;
}
// Record 0, and the tallies at zero; before the block's first barrier.
DEVICE void start_trace(const StepParams& p, Tallies& t) {
  if (threadIdx.x != 0) return;
  for (int kind = 0; kind < SPENT_KINDS; ++kind) t.cycles[kind] = 0;
  uint64_t now = nanoseconds();
  trace_word(p, 0, T_OPCODE, sm_number());
  trace_word(p, 0, T_LAYER, static_cast<uint32_t>(now)), trace_word(p, 0, T_TASK, static_cast<uint32_t>(now >> 32));
  trace_word(p, 0, T_PUBLISHED, trace_clock());
}
// The record of the entry that ends the track: both clocks once more, to tell how fast the SM's runs.
DEVICE void end_trace(const StepParams& p, int entry) {
  trace_word(p, entry, T_STORING, static_cast<uint32_t>(nanoseconds())), trace_word(p, entry, T_SIGNALLED, trace_clock());
}
// The `count`-th task aside, from 0, that one warp worked at from `begun` until now.
DEVICE void trace_aside(const StepParams& p, int count, const int* d, uint32_t begun) {
  const int record = p.trace_records - 1 - count;
  if (threadIdx.x % 32 != 0 || record <= 0) return;
  trace_word(p, record, T_OPCODE, d[W_OPCODE]), trace_word(p, record, T_LAYER, d[W_LAYER]);
  trace_word(p, record, T_TASK, d[W_TASK]);
  trace_word(p, record, T_STORING, begun), trace_word(p, record, T_SIGNALLED, trace_clock());
}
// One lane of a role calls these; `entry` counts the descriptors of the main track from 1.
DEVICE void trace_mark(const StepParams& p, int entry, TraceWord word) { trace_word(p, entry, word, trace_clock()); }
DEVICE void trace_spent(const StepParams& p, Tallies& t, int entry, TraceWord word, Spent kind) {
  trace_word(p, entry, word, t.cycles[kind]);
  t.cycles[kind] = 0;
}
#else
struct Tallies {};
DEVICE uint32_t trace_clock() { return 0; }
DEVICE void trace_wait(Tallies&, Spent, uint32_t) {}
DEVICE void start_trace(const StepParams&, Tallies&) {}
DEVICE void end_trace(const StepParams&, int) {}
DEVICE void trace_aside(const StepParams&, int, const int*, uint32_t) {}
DEVICE void trace_word(const StepParams&, int, TraceWord, uint32_t) {}
DEVICE void trace_mark(const StepParams&, int, TraceWord) {}
DEVICE void trace_spent(const StepParams&, Tallies&, int, TraceWord, Spent) {}
#endif
