// Device, memory, streams, events and graphs of the CUDA runtime.
#include "stub.h"

extern "C" {
// ---- for the tests
void stub_reset() {
  LOCK;
  totals.clear();
  counts.clear();
  captured_counts.clear();
  violations.clear();
  peak = used;
}
long stub_get(const char* key) {
  LOCK;
  std::string name(key);
  if (name == "used") return used;
  if (name == "peak") return peak;
  if (name == "violations") return violations.size();
  auto total = totals.find(name);
  return total == totals.end() ? 0 : total->second;
}
void stub_dump(const char* path) {
  LOCK;
  FILE* file = fopen(path, "w");
  for (auto& each : counts) fprintf(file, "outside\t%ld\t%s\n", each.second, each.first.c_str());
  for (auto& each : captured_counts) fprintf(file, "captured\t%ld\t%s\n", each.second, each.first.c_str());
  for (auto& each : violations) fprintf(file, "violation\t1\t%s\n", each.c_str());
  fclose(file);
}

// ---- device
cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  auto& g = generation();
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Stub");
  p->totalGlobalMem = card();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = 1024;
  p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = 65535;
  p->maxGridSize[2] = 65535;
  p->major = g.capability / 10;
  p->minor = g.capability % 10;
  p->multiProcessorCount = g.processors;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = g.threads;
  p->sharedMemPerMultiprocessor = g.shared_per_processor;
  p->sharedMemPerBlockOptin = g.shared_per_block;
  p->unifiedAddressing = 1;
  p->concurrentKernels = 1;
  p->memoryBusWidth = 384;
  p->maxBlocksPerMultiProcessor = 32;
  p->regsPerMultiprocessor = 65536;
  p->textureAlignment = 512;
  p->cooperativeLaunch = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  auto& g = generation();
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = g.processors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = g.capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = g.capability % 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = g.shared_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = g.shared_per_processor; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = g.threads; break;
    case cudaDevAttrClockRate: *value = 1700000; break;
    case cudaDevAttrMemoryClockRate: *value = 2600000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 384; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  snprintf(text, size, "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  *least = 0;
  *most = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = (cudaMemPool_t)0x10;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  LOCK;
  if (forbidden_here()) return forbid("cudaDeviceSynchronize");
  totals["syncs"]++;
  return cudaSuccess;
}

// ---- memory
cudaError_t cudaMalloc(void** place, size_t size) {
  return forbidden_here() ? forbid("cudaMalloc") : take(place, size, DEVICE);
}
cudaError_t cudaFree(void* place) { return forbidden_here() ? forbid("cudaFree") : drop(place); }
cudaError_t cudaMallocAsync(void** place, size_t size, cudaStream_t) { return take(place, size, DEVICE); }
cudaError_t cudaFreeAsync(void* place, cudaStream_t) { return drop(place); }
cudaError_t cudaHostAlloc(void** place, size_t size, unsigned) {
  return forbidden_here() ? forbid("cudaHostAlloc") : take(place, size, PINNED);
}
cudaError_t cudaFreeHost(void* place) { return drop(place); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  LOCK;
  *free = card() - used;
  *total = card();
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* place) {
  LOCK;
  memset(a, 0, sizeof *a);
  int kind = kind_of(place);
  a->type = kind == DEVICE ? cudaMemoryTypeDevice : kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = kind < 0 ? -2 : 0;
  a->devicePointer = kind >= 0 ? (void*)place : nullptr;
  a->hostPointer = kind == PINNED ? (void*)place : nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  if (forbidden_here()) return forbid("cudaMemcpy");
  copy(to, from, size);
  totals["syncs"]++;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  copy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t) {
  copy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; row++) memmove((char*)to + row * to_pitch, (const char*)from + row * pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** place, const void* symbol) {
  *place = (void*)symbol;
  return cudaSuccess;
}
cudaError_t cudaMemset(void* place, int value, size_t size) {
  fill(place, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* place, int value, size_t size, cudaStream_t) {
  fill(place, value, size);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }

// ---- memory in expandable segments: addresses first, memory when it is needed
CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = 2 << 20;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* place, size_t size, size_t, CUdeviceptr, unsigned long long) {
  void* made;
  if (take(&made, size, RESERVED) != cudaSuccess) return CUDA_ERROR_OUT_OF_MEMORY;
  *place = (CUdeviceptr)made;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr place, size_t) { return (CUresult)drop((void*)place); }
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*,
                     unsigned long long) {
  LOCK;
  if (forbidden_here()) return (CUresult)forbid("cuMemCreate");
  if (used + size > card()) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size;
  peak = used > peak ? used : peak;
  totals["mallocs"]++;
  *handle = size;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  LOCK;
  used -= handle;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr place, size_t size) {
  madvise((void*)place, size, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

// ---- errors
cudaError_t cudaGetLastError() {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorString(cudaError_t error) {
  static char other[40];
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    default: snprintf(other, sizeof other, "stub error %d", (int)error); return other;
  }
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorStub"; }

// ---- streams, events
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = next_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = next_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = next_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return capture.on && stream == capture.stream ? forbid("cudaStreamQuery") : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  LOCK;
  if (capture.on && (stream == capture.stream || (stream == nullptr && forbidden_here())))
    return forbid("cudaStreamSynchronize");
  totals["syncs"]++;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  if (capture.on && stream == capture.stream) return forbid("cudaStreamAddCallback");
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) {
  call(data);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = (cudaEvent_t)calloc(1, sizeof(double));
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free((void*)event);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) { return forbidden_here() ? forbid("cudaEventQuery") : cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *(double*)event = milliseconds();
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  LOCK;
  if (forbidden_here()) return forbid("cudaEventSynchronize");
  totals["syncs"]++;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = (float)(*(double*)to - *(double*)from);
  return cudaSuccess;
}

// ---- graphs
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  LOCK;
  if (stream == nullptr) return forbid("a capture of the legacy stream");
  capture = {true, false, stream, mode, pthread_self(), capture.id + 1, new Graph{0}};
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*,
                                          const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(stream, mode);
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  LOCK;
  capture.on = false;
  *graph = capture.broken ? nullptr : (cudaGraph_t)capture.graph;
  return capture.broken ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  bool own = capture.on && stream == capture.stream;
  *status = !own             ? cudaStreamCaptureStatusNone
            : capture.broken ? cudaStreamCaptureStatusInvalidated
                             : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = capture.id;
  if (graph) *graph = (cudaGraph_t)capture.graph;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                unsigned) {
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  LOCK;
  totals["replays"]++;
  counts["graph launch"]++;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph ? ((Graph*)graph)->nodes : 0;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
}
