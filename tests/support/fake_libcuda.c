/* A CUDA driver without a device: enough for compiling ahead of time for the chip FAKE_CC (90, 100).
 *
 * Every entry point succeeds; those below also answer what a compiler asks. No kernel can run.
 */
#include <stdlib.h>
#include <string.h>

static int capability(void) {
    const char *given = getenv("FAKE_CC");
    return given ? atoi(given) : 90;
}

static void *const HANDLE = (void *)16; /* of contexts, libraries, kernels: never looked into */

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetCurrent(void **context) { *context = HANDLE; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = HANDLE; return 0; }
int cuLibraryLoadData(void **library) { *library = HANDLE; return 0; }
int cuLibraryGetKernel(void **kernel) { *kernel = HANDLE; return 0; }
int cuLibraryEnumerateKernels(void **kernels) { *kernels = HANDLE; return 0; }
int cuKernelGetFunction(void **function) { *function = HANDLE; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { *blocks = 1; return 0; }
int cuOccupancyMaxActiveClusters(int *clusters) {
    *clusters = capability() == 90 ? 66 : 74;
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) { /* numbers of CUdevice_attribute */
    case 1: *value = 1024; break;                            /* threads of a block */
    case 8: *value = 48 << 10; break;                        /* shared memory of a block */
    case 10: *value = 32; break;                             /* threads of a warp */
    case 16: *value = capability() == 90 ? 132 : 148; break; /* multiprocessors */
    case 75: *value = capability() / 10; break;
    case 76: *value = capability() % 10; break;
    case 97: *value = 227 << 10; break; /* shared memory of a block that asks for it */
    default: *value = 1;
    }
    return 0;
}

static int succeed(void) { return 0; }

int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long flags, void *s) {
    static const struct { const char *name; void *entry; } ours[] = {
        {"cuInit", cuInit},
        {"cuDriverGetVersion", cuDriverGetVersion},
        {"cuDeviceGetCount", cuDeviceGetCount},
        {"cuDeviceGet", cuDeviceGet},
        {"cuDeviceGetAttribute", cuDeviceGetAttribute},
        {"cuCtxGetDevice", cuCtxGetDevice},
        {"cuCtxGetCurrent", cuCtxGetCurrent},
        {"cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain},
        {"cuOccupancyMaxActiveClusters", cuOccupancyMaxActiveClusters},
        {"cuOccupancyMaxActiveBlocksPerMultiprocessor", cuOccupancyMaxActiveBlocksPerMultiprocessor},
    };
    *found = (void *)succeed;
    for (unsigned i = 0; i < sizeof ours / sizeof *ours; i++)
        if (!strcmp(name, ours[i].name)) *found = ours[i].entry;
    return 0;
}

int cuGetProcAddress(const char *name, void **found, int version, unsigned long flags) {
    return cuGetProcAddress_v2(name, found, version, flags, 0);
}
