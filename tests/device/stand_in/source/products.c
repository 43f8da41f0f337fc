// cuBLAS and cuBLASLt: every product is one launch, and nothing is computed.
#include "stand_in.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SUCCEEDS(name)                                                                                                 \
    int name(void) { return 0; }
#define IS_A_LAUNCH(name)                                                                                              \
    int name(void) {                                                                                                   \
        stand_in_counts.launches++;                                                                                    \
        return 0;                                                                                                      \
    }

int cublasCreate_v2(void **handle) {
    *handle = calloc(1, 64);
    return 0;
}
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
IS_A_LAUNCH(cublasGemmEx)
IS_A_LAUNCH(cublasGemmStridedBatchedEx)
IS_A_LAUNCH(cublasSgemm_v2)
IS_A_LAUNCH(cublasDgemm_v2)
IS_A_LAUNCH(cublasSgemmEx)
IS_A_LAUNCH(cublasSgemmStridedBatched)
IS_A_LAUNCH(cublasDgemmStridedBatched)
IS_A_LAUNCH(cublasSgemv_v2)
IS_A_LAUNCH(cublasDgemv_v2)
IS_A_LAUNCH(cublasSdot_v2)
IS_A_LAUNCH(cublasDotEx)

size_t cublasLtGetVersion(void) { return 130100; }
static int made(void **object) {
    *object = calloc(1, 512);
    return 0;
}
int cublasLtMatmulDescCreate(void **object, int compute, int scale) { return made(object); }
int cublasLtMatmulPreferenceCreate(void **object) { return made(object); }
int cublasLtMatrixLayoutCreate(void **object, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    return made(object);
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    memset(results, 0, 64);
    *found = 1;
    return 0;
}
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
IS_A_LAUNCH(cublasLtMatmul)
