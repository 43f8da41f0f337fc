// The CUDA runtime: devices, streams, events, kernels. Nothing is computed, and everything is done at once, so that
// streams need no queues: what a stream would have waited for is over.
#define _GNU_SOURCE
#include "memory.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((destructor)) static void report(void) {
    if (!stand_in_setting("REPORT", 0)) return;
    extern size_t stand_in_peak(int);
    fprintf(stderr, "stand-in, process %d: %lu launches, %lu synchronisations, %lu copies, %lu collectives, %zu MB\n",
            getpid(), stand_in_counts.launches, stand_in_counts.synchronisations, stand_in_counts.copies,
            stand_in_counts.collectives, stand_in_peak(0) >> 20);
}

// Devices.

cudaError_t cudaGetDeviceCount(int *count) {
    *count = stand_in_devices();
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= stand_in_devices()) return failed(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

cudaError_t cudaDeviceSynchronize(void) {
    stand_in_synchronised();
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorOfStandIn"; }

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    default: break;
    }
    static __thread char text[64];
    snprintf(text, sizeof text, "error %d of the stand-in", (int)error);
    return text;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= stand_in_devices()) return failed(cudaErrorInvalidDevice);
    const char *name = getenv("STAND_IN_NAME");
    int capability = (int)stand_in_setting("CAPABILITY", 90);
    size_t shared = (size_t)stand_in_setting("SHARED_KIB", 227) << 10;
    *properties = (struct cudaDeviceProp){
        .totalGlobalMem = stand_in_device_bytes(),
        .sharedMemPerBlock = 48 << 10,
        .sharedMemPerBlockOptin = shared,
        .sharedMemPerMultiprocessor = shared + 1024,
        .reservedSharedMemPerBlock = 1024,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .totalConstMem = 65536,
        .major = capability / 10,
        .minor = capability % 10,
        .multiProcessorCount = (int)stand_in_setting("PROCESSORS", 132),
        .textureAlignment = 512,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .memoryBusWidth = 5120,
        .l2CacheSize = 50 << 20,
        .cooperativeLaunch = 1,
        .hostRegisterSupported = 1,
        .pciBusID = device + 1,
    };
    snprintf(properties->name, sizeof properties->name, "%s", name ? name : "NVIDIA H100 80GB HBM3");
    properties->uuid.bytes[0] = (char)(device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error) return error;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)properties.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)properties.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimZ: *value = properties.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[1]; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = properties.memoryBusWidth; break;
    default: *value = 1; // what else is asked for is whether something is supported
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
    snprintf(text, (size_t)bytes, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

// Streams and events.

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = calloc(1, 64);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    stand_in_synchronised();
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    if (status) *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *given, unsigned flags) {
    call(stream, cudaSuccess, given);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *given) {
    call(given);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = calloc(1, 64);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    stand_in_synchronised();
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t began, cudaEvent_t ended) {
    *milliseconds = 1.0f; // of anything: rates that come out of it mean nothing
    return cudaSuccess;
}

// Kernels: known by name, counted when launched, never run.

// The newest generation that builds of torch have kernels for and that is not newer than the card: its kernels are those
// that the card runs. A card of 8.9 runs those for 8.6, and CUB refuses (98) generations that it was not built for.
static int generation(void) {
    static const int built[] = {75, 80, 86, 90, 100, 120};
    int capability = (int)stand_in_setting("CAPABILITY", 90), newest = built[0];
    for (size_t i = 0; i < sizeof built / sizeof *built; i++)
        if (built[i] <= capability) newest = built[i];
    return newest;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .ptxVersion = generation(),
        .binaryVersion = generation(),
        .maxDynamicSharedSizeBytes = (int)stand_in_setting("SHARED_KIB", 227) << 10,
    };
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

static cudaError_t launched(void) {
    stand_in_counts.launches++;
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **given, size_t shared,
                             cudaStream_t stream) {
    return launched();
}
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **given, size_t shared, cudaStream_t stream) {
    return launched();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **given) { return launched(); }
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **given, size_t shared,
                                        cudaStream_t stream) {
    return launched();
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}

// What compiled launches (`kernel<<<grid, block, shared, stream>>>`) leave for the stub that they call.
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed[8];
static __thread int num_pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed[num_pushed].grid = grid;
    pushed[num_pushed].block = block;
    pushed[num_pushed].shared = shared;
    pushed[num_pushed++].stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    num_pushed--;
    *grid = pushed[num_pushed].grid;
    *block = pushed[num_pushed].block;
    *shared = pushed[num_pushed].shared;
    *(void **)stream = pushed[num_pushed].stream;
    return cudaSuccess;
}

// Libraries tell of their kernels when they are loaded.
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[2];
    return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(void **handle, const char *stub, char *device_stub, const char *name, int threads, void *a,
                            void *b, void *c, void *d, int *warp) {}
void __cudaRegisterVar(void **handle, char *variable, char *device_variable, const char *name, int external,
                       size_t bytes, int constant, int global) {}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

// The driver's functions, which torch looks up by name.

static CUresult anything(void) { return CUDA_SUCCESS; }
static CUresult driver_device(CUdevice *device, int number) {
    *device = number;
    return CUDA_SUCCESS;
}
static CUresult driver_attribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device); // numbered alike
}
static CUresult driver_error(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the stand-in's driver";
    return CUDA_SUCCESS;
}
static CUresult driver_context_state(CUdevice device, unsigned *flags, int *active) {
    *active = 1;
    if (flags) *flags = 0;
    return CUDA_SUCCESS;
}
static CUresult driver_context(CUcontext *context) {
    *context = (CUcontext)16;
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    static const struct {
        const char *name;
        void *function;
    } known[] = {
        {"cuDeviceGet", driver_device},
        {"cuDeviceGetAttribute", driver_attribute},
        {"cuMemAddressReserve", driver_reserve},
        {"cuMemAddressFree", driver_free_addresses},
        {"cuMemCreate", driver_create},
        {"cuMemRelease", driver_release},
        {"cuMemMap", driver_map},
        {"cuMemUnmap", driver_unmap},
        {"cuMemGetAllocationGranularity", driver_granularity},
        {"cuGetErrorString", driver_error},
        {"cuDevicePrimaryCtxGetState", driver_context_state},
        {"cuCtxGetCurrent", driver_context},
    };
    if (result) *result = cudaDriverEntryPointSuccess;
    *function = anything;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name)) *function = known[i].function;
    return cudaSuccess;
}
