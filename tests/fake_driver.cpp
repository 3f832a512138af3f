// A CUDA driver without a GPU: it counts what is loaded and fails where it is told to.
#include <cstddef>

extern "C" {
int fakeSm = 90;
int fakeFailingLoad = -1;    // index of the cuLibraryLoadData call that fails
int fakeFailingKernel = -1;  // index of the cuLibraryGetKernel call that fails
int fakeLoads = 0, fakeKernels = 0, fakeUnloads = 0, fakeLaunches = 0;

int cuGetErrorName(int, char const** name) { return *name = "CUDA_ERROR_OUT_OF_MEMORY", 0; }
int cuCtxGetCurrent(void** context) { return *context = &fakeSm, 0; }
int cuCtxGetId(void*, unsigned long long* identifier) { return *identifier = 7, 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  return *value = attribute == 75 ? fakeSm / 10 : fakeSm % 10, 0;
}
int cuLibraryLoadData(void** library, void const*, void*, void*, unsigned, void*, void*, unsigned) {
  *library = nullptr;
  if (fakeLoads == fakeFailingLoad) return 2;
  *library = &fakeLoads;
  return ++fakeLoads, 0;
}
int cuLibraryUnload(void* library) { return fakeUnloads += library == &fakeLoads, 0; }
int cuLibraryGetKernel(void** kernel, void*, char const*) {
  if (fakeKernels == fakeFailingKernel) return 2;
  *kernel = &fakeKernels;
  return ++fakeKernels, 0;
}
int cuKernelGetFunction(void** function, void*) { return *function = &fakeKernels, 0; }
int cuKernelSetAttribute(int, int, void*, int) { return 0; }
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void**) {
  return ++fakeLaunches, 0;
}
}
