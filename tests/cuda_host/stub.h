// NVIDIA's libraries without a GPU, under torch's CUDA build: device memory is host memory that takes no room until it
// is touched, kernels do nothing and are counted by name, what a CUDA graph may not capture is refused as the driver
// refuses it.
//
// STUB_CC is the compute capability (90, 89, 75 …), STUB_CARD_GB the card's memory in GB, STUB_LAUNCHES the number of
// kernels after which it hangs. Functions that are not here answer 0, success (build.py adds them). What numbers a
// kernel would have written, emulate.py computes on the host.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

inline std::recursive_mutex lock_of_all;
#define LOCK std::lock_guard<std::recursive_mutex> lock_(lock_of_all)

// ---- the card
inline double setting(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text ? atof(text) : otherwise;
}
inline size_t card() {
  static size_t size = (size_t)(setting("STUB_CARD_GB", 24) * 1e9);
  return size;
}
inline int capability() {
  static int value = (int)setting("STUB_CC", 90);
  return value;
}

struct Generation {
  int capability, processors, threads, shared_per_processor, shared_per_block;
};
inline const Generation& generation() {
  static const Generation known[] = {{75, 40, 1024, 65536, 65536},    {80, 108, 2048, 167936, 166912},
                                     {86, 82, 1536, 102400, 101376},  {89, 128, 1536, 102400, 101376},
                                     {90, 132, 2048, 233472, 232448}, {100, 148, 2048, 233472, 232448},
                                     {120, 170, 1536, 102400, 101376}};
  for (auto& each : known)
    if (each.capability == capability()) return each;
  fprintf(stderr, "stub: no figures for compute capability %d\n", capability());
  abort();
}

// ---- what happened
enum Kind { DEVICE, PINNED, RESERVED };
struct Block {
  size_t size;
  Kind kind;
};
struct Graph {
  long nodes;
};
inline std::map<uintptr_t, Block> blocks;
inline size_t used = 0, peak = 0;
inline std::unordered_map<const void*, std::string> names;
inline std::map<std::string, long> totals, counts, captured_counts;
inline std::vector<std::string> violations;
inline cudaError_t last = cudaSuccess;
inline cudaError_t fail(cudaError_t error) {
  last = error;
  return error;
}

// ---- capture: one at a time
inline struct {
  bool on, broken;
  cudaStream_t stream;
  cudaStreamCaptureMode mode;
  pthread_t thread;
  unsigned long long id;
  Graph* graph;
} capture;
inline thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

inline bool forbidden_here() {
  bool watched = capture.mode == cudaStreamCaptureModeGlobal || pthread_equal(pthread_self(), capture.thread);
  return capture.on && watched && mode_of_thread != cudaStreamCaptureModeRelaxed &&
         capture.mode != cudaStreamCaptureModeRelaxed;
}
inline cudaError_t forbid(const char* what) {
  violations.push_back(what);
  capture.broken = true;
  return fail(cudaErrorStreamCaptureUnsupported);
}
inline void count(const std::string& name, const char* total) {
  (capture.on ? captured_counts : counts)[name]++;
  totals[total]++;
  if (capture.on) {
    totals["captured"]++;
    capture.graph->nodes++;
  }
}

// ---- memory
inline cudaError_t take(void** place, size_t size, Kind kind) {
  LOCK;
  *place = nullptr;
  if (kind == DEVICE && used + size > card()) return fail(cudaErrorMemoryAllocation);
  void* made = mmap(nullptr, (size + 4095) & ~(size_t)4095, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  blocks[(uintptr_t)made] = {size, kind};
  if (kind == DEVICE) {
    used += size;
    peak = used > peak ? used : peak;
    totals["mallocs"]++;
  }
  *place = made;
  return cudaSuccess;
}
inline cudaError_t drop(void* place) {
  LOCK;
  if (!place) return cudaSuccess;
  auto block = blocks.find((uintptr_t)place);
  if (block == blocks.end()) return fail(cudaErrorInvalidValue);
  if (block->second.kind == DEVICE) used -= block->second.size;
  munmap(place, (block->second.size + 4095) & ~(size_t)4095);
  blocks.erase(block);
  return cudaSuccess;
}
inline int kind_of(const void* place) {
  auto block = blocks.upper_bound((uintptr_t)place);
  if (block == blocks.begin()) return -1;
  --block;
  if ((uintptr_t)place >= block->first + block->second.size) return -1;
  return block->second.kind == PINNED ? PINNED : DEVICE;
}
inline const size_t SMALL =
    4u << 20;  // larger copies between buffers of the card, and fills with 0, leave the pages unbacked
// What is captured is not done yet.
inline bool recorded() { return capture.on && pthread_equal(pthread_self(), capture.thread); }
inline void copy(void* to, const void* from, size_t size) {
  LOCK;
  bool out = kind_of(from) == DEVICE, in = kind_of(to) == DEVICE;
  const char* way = out && in ? "d2d" : in ? "h2d" : "d2h";
  count(std::string("copy ") + way, way);
  if (!recorded() && (!(out && in) || size <= SMALL)) memmove(to, from, size);
}
inline void fill(void* place, int value, size_t size) {
  LOCK;
  count("memset", "memsets");
  if (!recorded() && (value || size <= SMALL)) memset(place, value, size);
}

// ---- kernels
inline cudaError_t launch(const void* function, dim3 grid, dim3 block) {
  LOCK;
  static double most = setting("STUB_LAUNCHES", INFINITY);
  while (totals["launches"] >= most) pause();
  auto name = names.find(function);
  count(name == names.end() ? "?" : name->second, "launches");
  bool valid = grid.x && grid.y && grid.z && block.x && grid.y <= 65535 && grid.z <= 65535 &&
               (size_t)block.x * block.y * block.z <= 1024;
  if (valid) return cudaSuccess;
  violations.push_back("invalid configuration of " + (name == names.end() ? "?" : name->second));
  return fail(cudaErrorInvalidConfiguration);
}
inline double milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}
inline cudaStream_t next_stream() {
  static uintptr_t number = 0x1000;
  return (cudaStream_t)(number += 16);
}
