// What the parts of the stand-in share: the card that is pretended, and what is counted.
#ifndef STAND_IN_H
#define STAND_IN_H

#include <stddef.h>

enum { MOST_DEVICES = 16 };

// What is counted in a process, over all devices.
struct stand_in_counts {
    unsigned long launches;         // of kernels, those of Triton and of libraries of products included
    unsigned long synchronisations; // the host waited for a device: a stream, an event, a device, a copy that waits
    unsigned long copies;           // asked for by the program, in any direction
    unsigned long collectives;      // of NCCL, sends and receives included
};
extern struct stand_in_counts stand_in_counts;

// The host waited for a device. Counts it, and tells whoever asked to be told.
void stand_in_synchronised(void);
extern void (*stand_in_on_synchronisation)(void);

// A setting in the environment, STAND_IN_<name>; `otherwise` where it is not set.
long stand_in_setting(const char *name, long otherwise);

// Devices that this process sees: STAND_IN_DEVICES, or fewer by CUDA_VISIBLE_DEVICES.
int stand_in_devices(void);

// Bytes of memory of each device.
size_t stand_in_device_bytes(void);

// Copies of more bytes than this are counted and not done: real shapes need no real memory then.
size_t stand_in_most_copied(void);
int stand_in_zeros(void);

#endif
