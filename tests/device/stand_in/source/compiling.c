// NVRTC, with which torch compiles some kernels of one operation as they are first called: programs of nothing.
#define _GNU_SOURCE
#include "stand_in.h"

#include <nvrtc.h>
#include <stdlib.h>
#include <string.h>

nvrtcResult nvrtcCreateProgram(nvrtcProgram *program, const char *source, const char *name, int count,
                               const char *const *headers, const char *const *names) {
    *program = calloc(1, 64);
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) {
    free(*program);
    *program = NULL;
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char *name) { return NVRTC_SUCCESS; }
nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options) { return NVRTC_SUCCESS; }
nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *name, const char **lowered) {
    *lowered = name;
    return NVRTC_SUCCESS;
}

static nvrtcResult sized(size_t *bytes) {
    *bytes = 1;
    return NVRTC_SUCCESS;
}
static nvrtcResult written(char *text) {
    *text = '\0';
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes) { return sized(bytes); }
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *code) { return written(code); }
nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *bytes) { return sized(bytes); }
nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *code) { return written(code); }
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes) { return sized(bytes); }
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *text) { return written(text); }
nvrtcResult nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}
