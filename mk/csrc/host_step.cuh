// What a step tells the host, in pinned memory: the kernel writes it, the decode loop reads it. Plain C++.
#pragma once
#include <cstdint>

constexpr int MAX_ROWS = 8;  // of a step

// `step` is written last: the launch's number from 1 on.
struct alignas(128) HostStep {
  int tokens[MAX_ROWS], status[MAX_ROWS];
  uint64_t step;
};
constexpr int HOST_STEPS = 1024;  // a step may be this many launches ahead of the host that reads it
