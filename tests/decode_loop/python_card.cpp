// The decode loop over a card that Python plays: `play` says which functions launch. A launch returns when it is over.
#include "loop_interface.cuh"

static_assert(sizeof(LoopRun) == 160 && sizeof(StepRecord) == 80 && sizeof(LoopState) == 16);  // and so in Python

using LaunchIt = int (*)(const void* params, uint64_t number);
using AskIt = int (*)();

namespace {

// Of cards that are made from now on.
LaunchIt played_launch = nullptr;
AskIt played_state = nullptr;

class PythonCard final : public Card {
 public:
  void load(const void* params) override { params_ = params, started_.clear(); }
  void attach() override {}
  int launch(uint64_t number) override {
    started_.push_back(std::chrono::steady_clock::now().time_since_epoch().count());
    return launch_(params_, number);
  }
  int state() override { return ask_(); }
  int64_t started_ns() override {
    const int64_t first = started_.front();
    started_.erase(started_.begin());
    return first;
  }

 private:
  const LaunchIt launch_ = played_launch;
  const AskIt ask_ = played_state;
  const void* params_ = nullptr;
  std::vector<int64_t> started_;
};

}  // namespace

extern "C" void play(LaunchIt launch, AskIt state) { played_launch = launch, played_state = state; }

extern "C" DecodeLoop* mk_loop_start(int, void*, const HostStep* ring, int ahead, int capacity, int64_t limit_ns) {
  return new DecodeLoop(std::make_unique<PythonCard>(), ring, HOST_STEPS, ahead, capacity,
                        std::chrono::nanoseconds(limit_ns));
}
