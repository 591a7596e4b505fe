// The C interface of the decode loop, for the one source of a library that says how a loop is made: mk_loop_start.
#pragma once
#include "decode_loop.cuh"

extern "C" {

int mk_loop_resume(DecodeLoop* loop, const void* params, const LoopRun* run) { return loop->resume(params, *run); }
void mk_loop_park(DecodeLoop* loop) { loop->park(); }
void mk_loop_grant(DecodeLoop* loop, int row, int keys) { loop->grant(row, keys); }
int mk_loop_read(DecodeLoop* loop, StepRecord* out, int room, int64_t patience_ns) {
  return loop->read(out, room, std::chrono::nanoseconds(patience_ns));
}
void mk_loop_state(DecodeLoop* loop, LoopState* state) { *state = loop->state(); }
// 0: its thread is in a call to the card that does not return, so the loop is left as it is.
int mk_loop_stop(DecodeLoop* loop, int64_t patience_ns) {
  if (!loop->end(std::chrono::nanoseconds(patience_ns))) return 0;
  delete loop;
  return 1;
}
}
