// The card as the decode loop sees it: a stream that steps are queued on, with an event before each of them for its time.
#pragma once
#include <cmath>

#include "loop_interface.cuh"
#include "params.cuh"

extern "C" int mk_launch(const StepParams* params, void* stream);

class StreamCard final : public Card {
 public:
  StreamCard(int device, cudaStream_t stream, int ahead) : device_(device), stream_(stream), events_(ahead + 1) {}
  ~StreamCard() override {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  // params->epoch is that of the next launch.
  void load(const void* params) override {
    params_ = *static_cast<const StepParams*>(params);
    asked_ = launched_;  // nobody asks for the launches of a run that failed
  }
  void attach() override {
    cudaSetDevice(device_);
    for (cudaEvent_t& event : events_) cudaEventCreate(&event);
  }
  int launch(uint64_t number) override {
    if (cudaError_t e = cudaEventRecord(event(launched_), stream_)) return e;
    params_.launched = number;
    if (int e = mk_launch(&params_, stream_)) return e;
    ++params_.epoch, ++launched_;
    return 0;
  }
  int state() override {
    const cudaError_t e = cudaStreamQuery(stream_);
    return e == cudaErrorNotReady ? BUSY : e == cudaSuccess ? IDLE : static_cast<int>(e);
  }
  // The times between starts add up: a float of milliseconds since the first one would soon be coarse.
  int64_t started_ns() override {
    const uint64_t at = asked_++;
    if (at == 0) return 0;
    float ms = 0;
    cudaError_t e = cudaEventSynchronize(event(at));  // over: the step that it precedes has sampled
    if (e == cudaSuccess) e = cudaEventElapsedTime(&ms, event(at - 1), event(at));
    return e == cudaSuccess ? since_ns_ += std::llround(ms * 1e6) : -1;
  }

 private:
  cudaEvent_t event(uint64_t launch) { return events_[launch % events_.size()]; }

  const int device_;
  const cudaStream_t stream_;
  std::vector<cudaEvent_t> events_;  // of the launches in flight, and of the one before them
  StepParams params_{};
  uint64_t launched_ = 0, asked_ = 0;
  int64_t since_ns_ = 0;
};

// A loop of `device` over `stream`, parked; ring: as of StepParams::host_steps. mk_loop_stop ends it.
extern "C" DecodeLoop* mk_loop_start(int device, void* stream, const HostStep* ring, int ahead, int capacity,
                                     int64_t limit_ns) {
  auto card = std::make_unique<StreamCard>(device, static_cast<cudaStream_t>(stream), ahead);
  return new DecodeLoop(std::move(card), ring, HOST_STEPS, ahead, capacity, std::chrono::nanoseconds(limit_ns));
}
