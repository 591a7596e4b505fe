// Where a step's time goes: one record a descriptor that an SM runs, kept with -DMK_TRACE, and with -DMK_TRACE_WAITS too,
// which costs more, how long it waited. The main track's are from record 1 on, those of the track aside from the last
// record backwards.
//
// Roles leave their moments in shared memory, beside the entry of the task ring; the controller takes a record to global
// memory when it puts the next entry there, so that to note a moment costs a role a store.
//
// mk/kernel/trace.py reads the words of a record from here. Times are cycles of the SM's own clock, low words; record 0
// of a block puts the kernel's start there on the card's clock, which all SMs share.
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

#ifdef MK_TRACE
struct Marks {
  uint32_t words[ENTRIES][TRACE_WORDS];
};

DEVICE uint32_t trace_clock() { return static_cast<uint32_t>(sm_cycles()); }
// One lane of a role calls these; `entry`: its place in the task ring.
DEVICE void trace_mark(Marks& m, int entry, TraceWord word) { m.words[entry][word] = trace_clock(); }

// A lane's word of a record of this block.
DEVICE void trace_word(const StepParams& p, int record, int word, uint32_t value) {
  if (word < TRACE_WORDS && record > 0 && record < p.trace_records)
    p.trace[(static_cast<size_t>(blockIdx.x) * p.trace_records + record) * TRACE_WORDS + word] = value;
}
// Record 0, by one thread.
DEVICE void start_trace(const StepParams& p) {
  if (!p.trace_records) return;
  uint32_t* begin = p.trace + static_cast<size_t>(blockIdx.x) * p.trace_records * TRACE_WORDS;
  const uint64_t now = nanoseconds();
  begin[T_OPCODE] = sm_number();
  begin[T_LAYER] = static_cast<uint32_t>(now), begin[T_TASK] = static_cast<uint32_t>(now >> 32);
  begin[T_PUBLISHED] = trace_clock();
}
// The controller's, a word a lane: the record of what was at `entry` goes out, the `record`-th is begun there. A moment
// that no role comes to stays 0.
DEVICE void trace_turn(const StepParams& p, Marks& m, int entry, int record, int lane) {
  __syncwarp();
  if (lane >= TRACE_WORDS) return;
  trace_word(p, record - ENTRIES, lane, m.words[entry][lane]);
  m.words[entry][lane] = 0;
}
// What was published there, from the lane that holds a word of the descriptor.
DEVICE void trace_published(Marks& m, int entry, int lane, int value) {
  if (lane == W_OPCODE) m.words[entry][T_OPCODE] = value, trace_mark(m, entry, T_PUBLISHED);
  if (lane == W_LAYER) m.words[entry][T_LAYER] = value;
  if (lane == W_TASK) m.words[entry][T_TASK] = value;
}
// The entry that ends the track: both clocks once more, to tell how fast the SM's runs.
DEVICE void trace_end(Marks& m, int entry) {
  m.words[entry][T_STORING] = static_cast<uint32_t>(nanoseconds()), trace_mark(m, entry, T_SIGNALLED);
}
// The records that are still in shared memory when every role has come to its end; `last`: the number of the newest.
DEVICE void flush_trace(const StepParams& p, Marks& m, int last, int lane) {
  for (int record = max(1, last - ENTRIES + 1); record <= last; ++record)
    trace_turn(p, m, (record - 1) % ENTRIES, record + ENTRIES, lane);
}
// The `count`-th task aside, from 0, that one warp worked at from `begun` until now.
DEVICE void trace_aside(const StepParams& p, int count, const int* d, uint32_t begun) {
  const int lane = threadIdx.x % 32;
  const int what = lane == T_OPCODE ? W_OPCODE : lane == T_LAYER ? W_LAYER : W_TASK;
  const uint32_t value = lane == T_STORING ? begun : lane == T_SIGNALLED ? trace_clock() : lane <= T_TASK ? d[what] : 0;
  trace_word(p, p.trace_records - 1 - count, lane, value);
}
#else
struct Marks {};
DEVICE uint32_t trace_clock() { return 0; }
DEVICE void trace_mark(Marks&, int, TraceWord) {}
DEVICE void start_trace(const StepParams&) {}
DEVICE void trace_turn(const StepParams&, Marks&, int, int, int) {}
DEVICE void trace_published(Marks&, int, int, int) {}
DEVICE void trace_end(Marks&, int) {}
DEVICE void flush_trace(const StepParams&, Marks&, int, int) {}
DEVICE void trace_aside(const StepParams&, int, const int*, uint32_t) {}
#endif

// Cycles that a thread waited since its last entry.
#ifdef MK_TRACE_WAITS
struct Tally {
  uint32_t cycles = 0;
};
DEVICE void trace_wait(Tally& t, uint32_t since) { t.cycles += trace_clock() - since; }
DEVICE void trace_spent(Marks& m, int entry, TraceWord word, const Tally& t) { m.words[entry][word] = t.cycles; }
#else
struct Tally {};
DEVICE void trace_spent(Marks&, int, TraceWord, const Tally&) {}
#endif
