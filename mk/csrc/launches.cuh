// A step as many launches, a part of it each, and such a step as a CUDA graph: what the megakernel is compared with.
#pragma once
#include "params.cuh"

// What a part of a step has of its own; the rest is the step's. mk/kernel/launches.py has the same fields.
struct StepPart {
  const int* words;
  const int* offsets;
  uint32_t* counters;
  uint32_t* trace;  // of a trace build, else null
};

extern "C" {

// Launches the parts in order. dependent: each may have an SM as soon as the one before has left it, and waits there for
// the rest (a build with MK_DEPENDENT_LAUNCH). Not cooperative: a part whose blocks wait for each other has no more of
// them than there are SMs, and every launch before it ends without it. Returns a CUDA error code.
int mk_launch_parts(const StepParams* step, const StepPart* parts, int count, int dependent, void* stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(step->n_sm), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = sizeof(Shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early, config.numAttrs = dependent ? 1 : 0;
  StepParams p = *step;
  void* args[] = {&p};
  for (int i = 0; i < count; ++i) {
    p.words = parts[i].words, p.offsets = parts[i].offsets, p.counters = parts[i].counters;
    p.trace = parts[i].trace;
    if (cudaError_t e = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(decode_step), args)) return e;
  }
  return cudaSuccess;
}

// From here on this thread's launches on the stream are kept, not run.
int mk_capture_begin(void* stream) {
  return cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeThreadLocal);
}
// Makes what was kept a graph that is on the device already; mk_graph_destroy ends it.
int mk_capture_end(void* stream, void** graph) {
  cudaGraph_t kept = nullptr;
  cudaGraphExec_t made = nullptr;
  cudaError_t e = cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &kept);
  if (e == cudaSuccess) e = cudaGraphInstantiate(&made, kept, 0);
  if (e == cudaSuccess) e = cudaGraphUpload(made, static_cast<cudaStream_t>(stream));
  if (kept) cudaGraphDestroy(kept);
  *graph = made;
  return e;
}
int mk_graph_launch(void* graph, void* stream) {
  return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), static_cast<cudaStream_t>(stream));
}
int mk_graph_destroy(void* graph) { return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }
}
