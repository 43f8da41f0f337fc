// NCCL: nothing leaves a process. A gather repeats this rank's part, a sum is this rank's term; what was asked for is
// written down, so that the walk can compare what the ranks of a group asked for.
#define _GNU_SOURCE
#include "stand_in.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SUCCEEDS(name)                                                                                                 \
    int name(void) { return 0; }

typedef struct communicator {
    int rank, size;
    int number; // of this process's communicators
} *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

// Bytes of ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64,
// ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2.
static const int width[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

// "PROCESS COMMUNICATOR RANK SIZE WHAT BYTES PEER"
static void tell(ncclComm_t communicator, const char *what, size_t bytes, int peer) {
    stand_in_counts.collectives++;
    const char *path = getenv("STAND_IN_TRAFFIC");
    if (!path) return;
    char line[160];
    int length = snprintf(line, sizeof line, "%d %d %d %d %s %zu %d\n", getpid(), communicator->number,
                          communicator->rank, communicator->size, what, bytes, peer);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (file < 0) return;
    ssize_t written = write(file, line, (size_t)length);
    (void)written;
    close(file);
}

static int move(void *to, const void *from, size_t bytes) {
    if (!stand_in_zeros() && to != from && bytes <= stand_in_most_copied()) memmove(to, from, bytes);
    return 0;
}

static int made(ncclComm_t *communicator, int rank, int size) {
    static int number;
    *communicator = calloc(1, sizeof **communicator);
    **communicator = (struct communicator){rank, size, number++};
    tell(*communicator, "init", 0, -1);
    return 0;
}

int ncclGetVersion(int *version) {
    *version = 22809;
    return 0;
}
int ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 7, sizeof *id);
    return 0;
}
int ncclCommInitRank(ncclComm_t *communicator, int size, ncclUniqueId id, int rank) {
    return made(communicator, rank, size);
}
int ncclCommInitRankConfig(ncclComm_t *communicator, int size, ncclUniqueId id, int rank, void *how) {
    return made(communicator, rank, size);
}
int ncclCommInitRankScalable(ncclComm_t *communicator, int size, int rank, int count, ncclUniqueId *ids, void *how) {
    return made(communicator, rank, size);
}
int ncclCommSplit(ncclComm_t whole, int color, int key, ncclComm_t *part, void *how) {
    *part = NULL; // of a rank that is in no part
    return color < 0 ? 0 : made(part, key, whole->size);
}
int ncclCommCount(ncclComm_t communicator, int *size) {
    *size = communicator->size;
    return 0;
}
int ncclCommUserRank(ncclComm_t communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}
int ncclCommGetAsyncError(ncclComm_t communicator, int *error) { return *error = 0; }
const char *ncclGetErrorString(int error) { return "error of the stand-in"; }
const char *ncclGetLastError(ncclComm_t communicator) { return ""; }
int ncclCommRegister(ncclComm_t communicator, void *buffer, size_t bytes, void **handle) {
    *handle = buffer;
    return 0;
}
int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int where, ncclComm_t communicator) {
    *operation = 5;
    return 0;
}
SUCCEEDS(ncclCommAbort)
SUCCEEDS(ncclCommDestroy)
SUCCEEDS(ncclCommFinalize)
SUCCEEDS(ncclCommDeregister)
SUCCEEDS(ncclCommWindowDeregister)
SUCCEEDS(ncclGroupStart)
SUCCEEDS(ncclGroupEnd)
SUCCEEDS(ncclGroupSimulateEnd)
SUCCEEDS(ncclRedOpDestroy)

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, ncclComm_t communicator,
                  void *stream) {
    tell(communicator, "all_reduce", count * width[type], -1);
    return move(to, from, count * width[type]);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, ncclComm_t communicator,
                      void *stream) {
    tell(communicator, "reduce_scatter", count * width[type], -1);
    return move(to, (const char *)from + communicator->rank * count * width[type], count * width[type]);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, ncclComm_t communicator, void *stream) {
    size_t bytes = count * width[type];
    tell(communicator, "all_gather", bytes, -1);
    for (int rank = 0; rank < communicator->size; rank++)
        move((char *)to + rank * bytes, from, bytes);
    return 0;
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, ncclComm_t communicator, void *stream) {
    tell(communicator, "broadcast", count * width[type], root);
    return move(to, from, count * width[type]);
}
int ncclBcast(void *buffer, size_t count, int type, int root, ncclComm_t communicator, void *stream) {
    tell(communicator, "broadcast", count * width[type], root);
    return 0;
}
int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, ncclComm_t communicator,
               void *stream) {
    tell(communicator, "reduce", count * width[type], root);
    return move(to, from, count * width[type]);
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, ncclComm_t communicator, void *stream) {
    tell(communicator, "all_to_all", count * width[type], -1);
    return move(to, from, count * width[type] * communicator->size);
}
int ncclSend(const void *buffer, size_t count, int type, int peer, ncclComm_t communicator, void *stream) {
    tell(communicator, "send", count * width[type], peer);
    return 0;
}
int ncclRecv(void *buffer, size_t count, int type, int peer, ncclComm_t communicator, void *stream) {
    tell(communicator, "receive", count * width[type], peer);
    return 0;
}
