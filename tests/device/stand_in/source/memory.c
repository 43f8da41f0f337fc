// Memory of devices and of the host: virtual, so that a card of 80 GB needs none until it is written to, and counted.
#define _GNU_SOURCE
#include "memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cuda_runtime_api.h>

__thread int current_device = 0;
__thread cudaError_t last_error = cudaSuccess;

static size_t used[MOST_DEVICES], peak[MOST_DEVICES];
static struct block *blocks; // all that is there, the newest first
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

cudaError_t failed(cudaError_t error) { return last_error = error; }

static void count_bytes(int device, size_t bytes) {
    used[device] += bytes;
    if (used[device] > peak[device]) peak[device] = used[device];
}

int has_room(size_t bytes) { return used[current_device] + bytes <= stand_in_device_bytes(); }

size_t stand_in_used(int device) { return used[device]; }

size_t stand_in_peak(int device) { return peak[device]; }

void note(void *start, size_t bytes, int device, int counts) {
    struct block *block = malloc(sizeof *block);
    *block = (struct block){start, bytes, device, counts, NULL};
    pthread_mutex_lock(&guard);
    block->next = blocks;
    blocks = block;
    if (counts) count_bytes(device, bytes);
    pthread_mutex_unlock(&guard);
}

size_t forget(void *start) {
    size_t bytes = 0;
    pthread_mutex_lock(&guard);
    for (struct block **at = &blocks; *at; at = &(*at)->next) {
        if ((*at)->start != start) continue;
        struct block *block = *at;
        *at = block->next;
        bytes = block->bytes;
        if (block->counts) used[block->device] -= bytes;
        free(block);
        break;
    }
    pthread_mutex_unlock(&guard);
    return bytes;
}

struct block find(const void *pointer) {
    struct block found = {NULL, 0, NOWHERE, 0, NULL};
    const char *wanted = pointer;
    pthread_mutex_lock(&guard);
    for (struct block *block = blocks; block; block = block->next) {
        const char *start = block->start;
        if (wanted < start || wanted >= start + block->bytes) continue;
        found = *block;
        break;
    }
    pthread_mutex_unlock(&guard);
    return found;
}

void *reserve(size_t bytes, int access) {
    void *start = mmap(NULL, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

// Memory of the runtime.

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = stand_in_device_bytes();
    *available = *total - used[current_device];
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    if (!has_room(bytes) || !(*pointer = reserve(bytes, PROT_READ | PROT_WRITE)))
        return failed(cudaErrorMemoryAllocation);
    note(*pointer, bytes, current_device, 1);
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    size_t bytes = pointer ? forget(pointer) : 0;
    if (bytes) munmap(pointer, bytes);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { return cudaMalloc(pointer, bytes); }

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    if (!(*pointer = reserve(bytes, PROT_READ | PROT_WRITE))) return failed(cudaErrorMemoryAllocation);
    note(*pointer, bytes, ON_HOST, 0);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    long most = stand_in_setting("LOCK_MIB", -1);
    if (most >= 0 && bytes >> 20 > (size_t)most) return failed(cudaErrorMemoryAllocation);
    struct block block = find(pointer);
    if (block.start == pointer && block.device == ON_HOST) return failed(cudaErrorHostMemoryAlreadyRegistered);
    note(pointer, bytes, ON_HOST, 0);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    return forget(pointer) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    struct block block = find(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->devicePointer = (void *)pointer;
    if (block.device == NOWHERE) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2;
    } else if (block.device == ON_HOST) {
        attributes->type = cudaMemoryTypeHost;
        attributes->hostPointer = (void *)pointer;
    } else {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = block.device;
    }
    return cudaSuccess;
}

// Copies are done at once, whatever the stream, unless they are too large: what the host brings, it can read again.

static cudaError_t copy(void *to, const void *from, size_t bytes) {
    stand_in_counts.copies++;
    if (!to || !from || bytes > stand_in_most_copied()) return cudaSuccess;
    if (stand_in_zeros() && find(to).device >= 0) return cudaSuccess;
    if (stand_in_zeros() && find(from).device >= 0) memset(to, 0, bytes);
    else memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    stand_in_synchronised();
    return copy(to, from, bytes);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, cudaStream_t stream) {
    return copy(to, from, bytes);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    stand_in_counts.copies++;
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
    return cudaSuccess;
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
    size_t most = stand_in_zeros() ? 0 : stand_in_most_copied();
    memset(pointer, value, bytes < most ? bytes : most);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(pointer, value, bytes);
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    *pointer = (void *)symbol;
    return cudaSuccess;
}

// Pools: asked about, not used by the allocator that trains.

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)8;
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(size_t *)value = 0;
    return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) { return cudaSuccess; }

// Memory of the driver, for expandable segments: an address range, and physical memory that is mapped into it.

struct physical {
    size_t bytes;
    int device;
};

CUresult driver_reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                        unsigned long long flags) {
    void *start = reserve(bytes, PROT_NONE);
    if (!start) return CUDA_ERROR_OUT_OF_MEMORY;
    note(start, bytes, current_device, 0);
    *address = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult driver_free_addresses(CUdeviceptr address, size_t bytes) {
    forget((void *)address);
    munmap((void *)address, bytes);
    return CUDA_SUCCESS;
}

CUresult driver_create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                       unsigned long long flags) {
    if (!has_room(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct physical *memory = malloc(sizeof *memory);
    *memory = (struct physical){bytes, current_device};
    pthread_mutex_lock(&guard);
    count_bytes(current_device, bytes);
    pthread_mutex_unlock(&guard);
    *handle = (CUmemGenericAllocationHandle)memory;
    return CUDA_SUCCESS;
}

CUresult driver_release(CUmemGenericAllocationHandle handle) {
    struct physical *memory = (struct physical *)handle;
    pthread_mutex_lock(&guard);
    used[memory->device] -= memory->bytes;
    pthread_mutex_unlock(&guard);
    return CUDA_SUCCESS; // kept: a handle may be asked about after it was released
}

CUresult driver_map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags) {
    mprotect((void *)address, bytes, PROT_READ | PROT_WRITE);
    return CUDA_SUCCESS;
}

CUresult driver_unmap(CUdeviceptr address, size_t bytes) {
    madvise((void *)address, bytes, MADV_DONTNEED);
    mprotect((void *)address, bytes, PROT_NONE);
    return CUDA_SUCCESS;
}

CUresult driver_granularity(size_t *bytes, const CUmemAllocationProp *properties,
                            CUmemAllocationGranularity_flags flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}
