// Where consumer warp 0 spends its cycles, by opcode; compiled in with -DMK_PROFILE.
#pragma once
#include "isa.h"
#include "ptx.cuh"

enum Spent : int { SPENT_GO, SPENT_RING, SPENT_TILE, SPENT_ALL, SPENT_SCORES, SPENT_SOFTMAX, SPENT_VALUES, SPENT_KINDS };
constexpr int PROFILE_OPCODES = 32;

#ifdef MK_PROFILE
struct Profile {
  long long cycles[PROFILE_OPCODES][SPENT_KINDS];
  int opcode;
};
// Adds the cycles of a scope to (current opcode, kind); only the first consumer thread counts.
class Spend {
 public:
  DEVICE Spend(Profile& profile, Spent kind) : p(profile), kind_(kind), begin_(sm_cycles()) {}
  DEVICE ~Spend() {
    if (threadIdx.x == 0) p.cycles[p.opcode][kind_] += sm_cycles() - begin_;
  }

 private:
  Profile& p;
  Spent kind_;
  long long begin_;
};
#else
struct Profile {};
class Spend {
 public:
  DEVICE Spend(Profile&, Spent) {}
};
#endif
