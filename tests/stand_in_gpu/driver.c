/* A CUDA driver and runtime for one GPU that can do nothing, as far as torch asks for one before it dispatches an operation.
   Preloaded under the name of the real driver; 0 is success. */
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return device; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -1; return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamQuery(void *stream) { return 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = 0; return 0; }
int cudaEventDestroy(void *event) { return 0; }
int cudaEventQuery(void *event) { return 0; }
int cudaEventRecord(void *event, void *stream) { return 0; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }

int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
