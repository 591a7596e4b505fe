// Bounded waits. Every wait of the kernel goes through a Guard, so a wrong schedule ends in a report, not in a hang.
#pragma once
#include "shared.cuh"

enum Role : int { ROLE_CONSUMER, ROLE_CONTROLLER, ROLE_PRODUCER, ROLE_STORER };

// A value without state: every part of a role keeps its own copy, so that none needs the address of another and all
// of them live in registers. A wait calls nothing: a call would push what lives across it out of registers.
class Guard {
 public:
  DEVICE Guard(const StepParams& params, Shared& shared, int role)
      : p(params), s(shared), role_(role), deadline_(nanoseconds() + params.time_limit_ns) {}

  // Waits for a phase of an mbarrier; false when the step was given up.
  DEVICE bool wait(Barrier* b, uint32_t parity) const {
    // a look at the abort word is a trip to L2, which a barrier that completes meanwhile would have to wait for
    uint32_t tries = 0;
#pragma unroll 1
    while (!barrier_try(b, parity))
      if ((++tries & 63) == 0 && expired()) return false;
    return true;
  }
  // True when the step must be given up: somebody did, or the time limit has passed.
  DEVICE bool expired() const {
    return *reinterpret_cast<volatile uint32_t*>(p.abort_word) || nanoseconds() >= deadline_;
  }
  // Gives the step up for everybody and leaves a record of what this role was at. Every role that stops early reports;
  // the first of an SM is kept, and the first of all is in the abort word.
  DEVICE void report(int counter, uint32_t target, uint32_t seen) const {
    if (threadIdx.x % 32 && role_ != ROLE_PRODUCER) return;
    atomicCAS(p.abort_word, 0u, 1u + blockIdx.x);
    StallRecord& record = p.stalls[blockIdx.x];
    // the controller knows the counter, so its account replaces another role's
    if (atomicExch(&record.taken, 1) && role_ != ROLE_CONTROLLER) return;
    const int* words = s.entry[s.doing[role_]];
    record.role = role_, record.opcode = words[W_OPCODE], record.layer = words[W_LAYER], record.task = words[W_TASK];
    record.counter = counter, record.target = target, record.seen = seen;
    __threadfence_system();
  }
  // Notes the entry this role is at, for the record.
  DEVICE void at(int entry) const { s.doing[role_] = entry; }

 private:
  const StepParams& p;
  Shared& s;
  int role_;
  uint64_t deadline_;
};

// All consumer warps meet here; none may stay away, not even one that gave up.
DEVICE void consumers_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// The task ring as one of its readers sees it: entries in order, each released when done with.
class EntryReader {
 public:
  DEVICE EntryReader(Shared& shared, Guard guard) : s(shared), g(guard) {}
  DEVICE bool next() {
    if (!g.wait(&s.entry_full[at.index], at.lap)) return false;
    words = s.entry[at.index];
    g.at(at.index);
    return true;
  }
  // Waits until what the entry's counters stand for has happened.
  DEVICE bool opened() { return g.wait(&s.entry_go[at.index], at.lap); }
  DEVICE void report() const { g.report(NONE, 0, 0); }
  DEVICE void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.entry_empty[at.index]);
    at.next();
  }
  const int* words = nullptr;

 private:
  Shared& s;
  const Guard g;
  Cursor<ENTRIES> at;
};

constexpr int OP_END = -1;  // closes the list of an SM
