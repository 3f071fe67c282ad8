// Kernels, the driver that Triton and NVRTC call, and libraries that must answer.
#include "stub.h"

extern "C" {
// ---- kernels
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Configuration> configurations;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return fail(cudaErrorInvalidValue);
  auto top = configurations.back();
  configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *(void**)stream = top.stream;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) { return (void**)malloc(16); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  LOCK;
  names[host] = device;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return launch((const void*)function, grid, block);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return launch(function, grid, block);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return launch(function, grid, block);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* function, void**) {
  return launch(function, c->gridDim, c->blockDim);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  for (int built : {75, 80, 86, 90, 100, 120})
    if (built <= capability()) a->ptxVersion = a->binaryVersion = built;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- the driver, for Triton and NVRTC
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* n) {
  *n = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)0x20;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (context) *context = (CUcontext)0x20;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = (CUcontext)0x20;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, 0);
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "stub";
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  LOCK;
  char* key = strdup(name);
  names[key] = std::string("compiled ") + name;
  *function = (CUfunction)key;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                                : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  bool shared = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  return shared && value > generation().shared_per_block ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned, CUstream, void**, void**) {
  return (CUresult)launch(f, dim3(gx, gy, gz), dim3(bx, by, bz));
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  return (CUresult)launch(f, dim3(c->gridDimX, c->gridDimY, c->gridDimZ),
                          dim3(c->blockDimX, c->blockDimY, c->blockDimZ));
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr place) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = place;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}

// ---- libraries that must answer
#define CREATE(name)           \
  int name(void** made, ...) { \
    *made = malloc(64);        \
    return 0;                  \
  }
CREATE(cublasCreate_v2)
CREATE(cublasLtCreate)
CREATE(cublasLtMatmulDescCreate) CREATE(cublasLtMatrixLayoutCreate) CREATE(cublasLtMatmulPreferenceCreate)
    CREATE(cudnnCreate) CREATE(cusparseCreate) CREATE(cusolverDnCreate)
#define PRODUCT(name)         \
  int name(...) {             \
    LOCK;                     \
    count(#name, "launches"); \
    return 0;                 \
  }
        PRODUCT(cublasGemmEx) PRODUCT(cublasSgemm_v2) PRODUCT(cublasGemmStridedBatchedEx)
            PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasLtMatmul) PRODUCT(cublasSgemv_v2) PRODUCT(cublasDgemm_v2)
                PRODUCT(cublasHgemm) PRODUCT(cublasHgemmStridedBatched) size_t cublasLtGetVersion() {
  return 130000;
}
int cublasGetVersion_v2(void*, int* version) {
  *version = 130000;
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* n) {
  *n = 1;
  return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
size_t cudnnGetVersion() { return 90100; }
size_t cudnnGetCudartVersion() { return CUDA_VERSION; }
int nvmlDeviceGetGpuFabricInfoV(...) { return 3; }  // not supported
int ncclGetVersion(int* version) {
  *version = 22800;
  return 0;
}
int nvrtcVersion(int* major, int* minor) {
  *major = CUDA_VERSION / 1000;
  *minor = CUDA_VERSION % 1000 / 10;
  return 0;
}
int nvrtcGetCUBINSize(void*, size_t* size) {
  *size = 16;
  return 0;
}
int nvrtcGetPTXSize(void*, size_t* size) {
  *size = 16;
  return 0;
}
int nvrtcGetProgramLogSize(void*, size_t* size) {
  *size = 1;
  return 0;
}
int nvrtcGetLoweredName(void*, const char*, const char** name) {
  *name = "nvrtc_kernel";
  return 0;
}
}
