// Bounded waits. Every wait of the kernel goes through a Guard, so a wrong schedule ends in a report, not in a hang.
//
// All of a layer's code must stay in the instruction cache from one layer to the next, and there are many waits: what
// stands at each is a try and a look at one word of shared memory. The controller keeps that word: it alone watches the
// clock and what other SMs say.
#pragma once
#include "shared.cuh"

enum Role : int { ROLE_CONSUMER, ROLE_CONTROLLER, ROLE_PRODUCER, ROLE_STORER, ROLE_ASIDE };

// A value without state: every part of a role keeps its own copy, so that none needs the address of another and all
// of them live in registers. A wait calls nothing: a call would push what lives across it out of registers.
class Guard {
 public:
  DEVICE Guard(const StepParams& params, Shared& shared, int role) : p(params), s(shared), role_(role) {}

  // Waits for a phase of an mbarrier; false when the step was given up.
  DEVICE bool wait(Barrier* b, uint32_t parity) const {
    // a look at shared memory at every try would slow the whole SM: nine warps wait here most of the time
    uint32_t tries = 0;
#pragma unroll 1
    while (!barrier_try(b, parity))
      if ((++tries & 63) == 0 && given_up()) return false;
    return true;
  }
  // The same, and adds how long it took.
  DEVICE bool wait(Barrier* b, uint32_t parity, Tally& waited) const {
#ifdef MK_TRACE_WAITS
    if (barrier_test(b, parity)) return true;  // reading the clock twice where nobody waits would slow it
    const uint32_t since = trace_clock();
    const bool ok = wait(b, parity);
    trace_wait(waited, since);
    return ok;
#else
    return wait(b, parity);
#endif
  }
  DEVICE bool given_up() const { return *reinterpret_cast<volatile int*>(&s.given_up); }
  // The controller's: whether this SM must give up, because somebody did or the time limit has passed.
  DEVICE bool expired() const {
    bool over = *reinterpret_cast<volatile uint32_t*>(p.abort_word) || nanoseconds() >= s.deadline;
    if (over) *reinterpret_cast<volatile int*>(&s.given_up) = 1;
    return over;
  }
  // Gives the step up for everybody and leaves a record of what this role was at. Every role that stops early reports;
  // the first of an SM is kept, and the first of all is in the abort word.
  DEVICE void report(int counter, uint32_t target, uint32_t seen) const {
    if (threadIdx.x % 32) return;
    atomicCAS(p.abort_word, 0u, 1u + blockIdx.x);
    StallRecord& record = p.stalls[blockIdx.x];
    // those who polled know the counter, so their account replaces another role's
    const int weight = counter != NONE ? 2 : 1;
    if (atomicMax(&record.taken, weight) >= weight) return;
    const int* words = role_ == ROLE_ASIDE ? s.aside : s.entry[s.doing[role_]];
    record.role = role_, record.opcode = words[W_OPCODE], record.layer = words[W_LAYER], record.task = words[W_TASK];
    record.counter = counter, record.target = target, record.seen = seen;
    __threadfence_system();
  }
  // The role has come to its end, well or not.
  DEVICE void finish() const {
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.finished);
  }
  // Notes the entry this role is at, for the record.
  DEVICE void at(int entry) const { s.doing[role_] = entry; }

 private:
  const StepParams& p;
  Shared& s;
  int role_;
};

// A counter's target in this step: what it gains a step, and how far into this one.
DEVICE uint32_t counter_target(const StepParams& p, int per_step, int count) {
  return p.epoch * static_cast<uint32_t>(per_step) + count;
}
// One look at a counter by one lane, for a whole warp. MK_ZERO_WAIT builds a kernel that waits for no other SM: its
// numbers are wrong, its bytes are right, and no schedule can be faster.
DEVICE bool counter_reached(const StepParams& p, int counter, uint32_t target, uint32_t& seen) {
#ifdef MK_ZERO_WAIT
  return seen = target, true;
#endif
  uint32_t value = 0;
  if (threadIdx.x % 32 == 0) {
    const uint32_t* at = p.counters + static_cast<size_t>(counter) * COUNTER_STRIDE;
#ifdef MK_RELAXED_POLLS
    value = load_l2(at);
    if (static_cast<int>(value - target) >= 0) acquire_fence();
#else
    value = load_acquire(at);
#endif
  }
  seen = __shfl_sync(~0u, value, 0);
  __syncwarp();  // carries lane 0's acquire to the others
  return static_cast<int>(seen - target) >= 0;
}
// Polls one of a descriptor's counters until it was reached; false when the step was given up.
DEVICE bool await_counter(const StepParams& p, const Guard& g, const int* d, int slot) {
  const int counter = d[slot];
  if (counter == NONE) return true;
  const uint32_t target = counter_target(p, d[slot + 2], d[slot + 1]);
  uint32_t seen;
#pragma unroll 1
  while (!counter_reached(p, counter, target, seen))
    if (g.given_up()) return g.report(counter, target, seen), false;
  return true;
}

// What a task tells others when all its lanes' stores are done; one lane does it for its warp.
DEVICE void tell(const StepParams& p, const int* d) {
  if (d[W_SIGNAL] != NONE)
    signal_release(p.counters + static_cast<size_t>(d[W_SIGNAL]) * COUNTER_STRIDE, d[W_SIGNAL_VALUE]);
}
// Operations on a layer's normed input: the norm's weight multiplies it as it is loaded, 1 / rms the products.
DEVICE bool reads_normed(int op) {
  return op == OP_QKV || op == OP_ROUTER || op == OP_MOE_UP || op == OP_DENSE_UP || op == OP_LM_HEAD;
}

// All consumer warps meet here; none may stay away, not even one that gave up.
DEVICE void consumers_meet() { block_meets<CONSUMERS * 32>(false); }
// At the end of a warp's work. Others may still be on their way to meetings, as when the step was given up while they
// were at a later entry than this warp: it comes to those meetings too, until all are leaving.
DEVICE void consumers_leave() {
  while (!block_meets<CONSUMERS * 32>(true)) {
  }
}

// The task ring as one of its readers sees it: entries in order, each released when done with.
class EntryReader {
 public:
  DEVICE EntryReader(const StepParams& params, Shared& shared, Guard guard) : p(params), s(shared), g(guard) {}
  DEVICE bool next() {
    if (!g.wait(&s.entry_full[at.index], at.lap)) return false;
    words = s.entry[at.index];
    g.at(at.index);
    return true;
  }
  // Waits until what the entry's counters stand for has happened.
  DEVICE bool opened() const {
#ifdef MK_POLL_BY_WARPS
    if (!await_counter(p, g, words, W_WAIT0) || !await_counter(p, g, words, W_WAIT1)) return false;
#endif
    return g.wait(&s.entry_go[at.index], at.lap);
  }
  DEVICE void report() const { g.report(NONE, 0, 0); }
  DEVICE void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.entry_empty[at.index]);
    at.next();
  }
  DEVICE int index() const { return at.index; }
  const int* words = nullptr;

 private:
  const StepParams& p;
  Shared& s;
  const Guard g;
  Cursor<ENTRIES> at;
};

constexpr int OP_END = -1;  // closes the main track of an SM
