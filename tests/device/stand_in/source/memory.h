// Blocks of memory that the stand-in gave out, and the driver's part of it that the runtime looks up by name.
#ifndef STAND_IN_MEMORY_H
#define STAND_IN_MEMORY_H

#include "stand_in.h"

#include <cuda.h>
#include <driver_types.h>

enum { ON_HOST = -1, NOWHERE = -2 }; // in place of a device

struct block {
    void *start;
    size_t bytes;
    int device;
    int counts; // whether it takes memory of its device: a range of addresses alone does not
    struct block *next;
};

extern __thread int current_device;
extern __thread cudaError_t last_error;

cudaError_t failed(cudaError_t error); // kept for cudaGetLastError
int has_room(size_t bytes);            // on the current device
void note(void *start, size_t bytes, int device, int counts);
size_t forget(void *start); // bytes it had; 0 where it is not known
struct block find(const void *pointer);
void *reserve(size_t bytes, int access);

CUresult driver_reserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
CUresult driver_free_addresses(CUdeviceptr, size_t);
CUresult driver_create(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CUresult driver_release(CUmemGenericAllocationHandle);
CUresult driver_map(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CUresult driver_unmap(CUdeviceptr, size_t);
CUresult driver_granularity(size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);

#endif
