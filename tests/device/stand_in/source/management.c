// libnvidia-ml.so.1: devices are there, and nobody else uses them.
#include "stand_in.h"

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)stand_in_devices();
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    *device = (void *)8;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    *count = 0;
    return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return 3; } // not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return 3; }
