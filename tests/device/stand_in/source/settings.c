// The card that is pretended: everything about it comes from the environment.
//
//   STAND_IN_DEVICES     how many there are (1)
//   STAND_IN_NAME        as the driver tells it (NVIDIA H100 80GB HBM3)
//   STAND_IN_MIB         memory of each (81079)
//   STAND_IN_CAPABILITY  times ten (90)
//   STAND_IN_PROCESSORS  streaming multiprocessors (132)
//   STAND_IN_SHARED_KIB  shared memory that a block may ask for (227)
//   STAND_IN_LOCK_MIB    most that the host may lock in one piece (any)
//   STAND_IN_MOST_COPIED bytes of a copy that is still done (any)
//   STAND_IN_ZEROS       1: memory of the card holds nothing; what the host brings is lost, what it fetches is zero (0)
//   STAND_IN_TRAFFIC     file to which each collective is appended, one a line
#define _GNU_SOURCE
#include "stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct stand_in_counts stand_in_counts;
void (*stand_in_on_synchronisation)(void);

void stand_in_synchronised(void) {
    stand_in_counts.synchronisations++;
    if (stand_in_on_synchronisation) stand_in_on_synchronisation();
}

long stand_in_setting(const char *name, long otherwise) {
    char whole[64];
    snprintf(whole, sizeof whole, "STAND_IN_%s", name);
    const char *value = getenv(whole);
    return value && *value ? atol(value) : otherwise;
}

int stand_in_devices(void) {
    int there = (int)stand_in_setting("DEVICES", 1);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return there;
    int named = 0;
    for (const char *at = visible; *at && *at != '-'; named++) { // numbers up to the first that is negative
        at = strchr(at, ',');
        if (!at) return named + 1 < there ? named + 1 : there;
        at++;
    }
    return named < there ? named : there;
}

size_t stand_in_device_bytes(void) { return (size_t)stand_in_setting("MIB", 81079) << 20; }

size_t stand_in_most_copied(void) {
    static size_t most;
    if (!most) most = (size_t)stand_in_setting("MOST_COPIED", 1L << 40);
    return most;
}

int stand_in_zeros(void) {
    static int zeros = -1;
    if (zeros < 0) zeros = (int)stand_in_setting("ZEROS", 0);
    return zeros;
}
