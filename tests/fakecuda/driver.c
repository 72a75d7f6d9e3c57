// A CUDA driver for tests: what PyCUDA needs of libcuda.so.1, on a CPU. build.py adds all other entry points as stubs.
//
// "Device" memory is host memory, so tensors of torch's CPU build can be given to kernels. A module is a library that the stand-in
// nvcc has made of a .cu file; each kernel in it is a function KERNEL__cusim (tests/cusim), which runs a whole grid.
//
// Contexts and streams are checked as a driver does: a launch needs its function's context to be current in the calling thread,
// and a stream of the same device.
//
// Environment, read by cuInit:
//   FAKECUDA_DEVICES     how many devices, default 2
//   FAKECUDA_CAPABILITY  their compute capability, default 9.0
//   FAKECUDA_INIT        what cuInit returns, default 0
//   FAKECUDA_LOG         a file to which a line a call is appended
//   FAKECUDA_DEFER       not set: what is enqueued runs at once. Else streams are queues which run when somebody waits for them, in an
//                        order that the events allow but nobody would wish for: `last`, other streams only when an event says that
//                        they must come first; `first`, other streams as far ahead as their events let them
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_DEVICES = 8, MAX_STREAMS = 1024, MAX_DEPTH = 32, PARAMETERS_NBYTES = 4352 };

typedef int Kernel(const void *arguments, unsigned grid, unsigned threads, char *error, unsigned error_nbytes);

struct CUctx_st {
    int device;
    int retained;
};

struct CUmod_st {
    CUcontext context;
    void *library;
};

struct CUfunc_st {
    CUcontext context;
    Kernel *kernel;
    char name[128];
};

// Counts: how often it was recorded in program order, and the last of those records that has run.
struct CUevent_st {
    unsigned long recorded, done;
    CUstream stream; // of the last record
};

typedef enum { LAUNCH, COPY, FILL, RECORD, WAIT } Kind;

typedef struct Operation {
    struct Operation *next;
    Kind kind;
    CUfunction function;
    unsigned grid, threads;
    void *to;
    const void *from;
    size_t nbytes;
    int value;
    CUevent event;
    unsigned long version;
    CUstream other; // WAIT: the stream that records
    _Alignas(16) unsigned char arguments[];
} Operation;

struct CUstream_st {
    int device;
    unsigned number;
    bool destroyed;
    Operation *head, *tail;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // of all that follows
static bool initialised;
static int n_devices;
static int capability_major, capability_minor;
static enum { AT_ONCE, FIRST, LAST } defer;
static struct CUctx_st contexts[MAX_DEVICES];
static struct CUstream_st default_streams[MAX_DEVICES];
static CUstream streams[MAX_STREAMS];
static unsigned n_streams;
static CUresult failure; // of a kernel; stays, as on a device
static char failure_text[768];
static FILE *log_file;

static __thread CUcontext stack[MAX_DEPTH]; // of current contexts, per thread
static __thread int depth;

static void say(const char *format, ...) {
    if (log_file == NULL)
        return;
    va_list arguments;
    va_start(arguments, format);
    fprintf(log_file, "%d ", (int)gettid());
    vfprintf(log_file, format, arguments);
    fputc('\n', log_file);
    fflush(log_file);
    va_end(arguments);
}

static CUcontext current(void) { return depth > 0 ? stack[depth - 1] : NULL; }

#define NEEDS_INIT                                                                                                               \
    if (!initialised)                                                                                                            \
    return CUDA_ERROR_NOT_INITIALIZED
#define NEEDS_CONTEXT                                                                                                            \
    if (current() == NULL)                                                                                                       \
    return CUDA_ERROR_INVALID_CONTEXT
#define NEEDS_DEVICE(device)                                                                                                     \
    NEEDS_INIT;                                                                                                                  \
    if ((device) < 0 || (device) >= n_devices)                                                                                   \
    return CUDA_ERROR_INVALID_DEVICE

// ---- queues ----

static void execute(Operation *operation) {
    switch (operation->kind) {
    case LAUNCH:
        if (failure == CUDA_SUCCESS) {
            char text[600] = "";
            if (operation->function->kernel(operation->arguments, operation->grid, operation->threads, text, sizeof text)) {
                failure = CUDA_ERROR_LAUNCH_FAILED;
                snprintf(failure_text, sizeof failure_text, "%s: %s", operation->function->name, text);
            }
        }
        break;
    case COPY: memmove(operation->to, operation->from, operation->nbytes); break;
    case FILL: memset(operation->to, operation->value, operation->nbytes); break;
    case RECORD:
        if (operation->event->done < operation->version)
            operation->event->done = operation->version;
        break;
    case WAIT: break;
    }
}

static bool is_blocked(const Operation *operation) {
    return operation->kind == WAIT && operation->event->done < operation->version;
}

static void run_head(CUstream stream) {
    Operation *operation = stream->head;
    stream->head = operation->next;
    if (stream->head == NULL)
        stream->tail = NULL;
    execute(operation);
    free(operation);
}

static void run_ahead(CUstream stream) {
    while (stream->head != NULL && !is_blocked(stream->head))
        run_head(stream);
}

// The first operation of a stream, and before it what events demand.
static void step(CUstream stream) {
    if (defer == FIRST) {
        for (unsigned i = n_streams; i-- > 0;)
            if (streams[i] != stream)
                run_ahead(streams[i]);
        for (int i = 0; i < n_devices; i++)
            if (&default_streams[i] != stream)
                run_ahead(&default_streams[i]);
    }
    while (is_blocked(stream->head)) {
        if (stream->head->other->head == NULL) { // cannot be: it is recorded after all that it waits for
            failure = CUDA_ERROR_LAUNCH_TIMEOUT;
            break;
        }
        step(stream->head->other);
    }
    run_head(stream);
}

static CUresult drain(CUstream stream) {
    while (stream->head != NULL)
        step(stream);
    return failure;
}

static CUresult drain_device(int device) {
    for (unsigned i = 0; i < n_streams; i++)
        if (streams[i]->device == device)
            drain(streams[i]);
    return drain(&default_streams[device]);
}

static CUresult enqueue(CUstream stream, Operation *operation) {
    if (stream->tail != NULL)
        stream->tail->next = operation;
    else
        stream->head = operation;
    stream->tail = operation;
    return defer == AT_ONCE ? drain(stream) : failure;
}

static Operation *new_operation(Kind kind, size_t arguments_nbytes) {
    Operation *operation = aligned_alloc(16, (sizeof *operation + arguments_nbytes + 15) / 16 * 16);
    memset(operation, 0, sizeof *operation);
    operation->kind = kind;
    return operation;
}

// A stream by its handle; NULL is the current device's default stream.
static CUstream resolve(CUstream handle) {
    if (handle == NULL)
        return current() ? &default_streams[current()->device] : NULL;
    for (unsigned i = 0; i < n_streams; i++)
        if (streams[i] == handle && !handle->destroyed)
            return handle;
    return NULL;
}

#define LOCKED(call)                                                                                                             \
    pthread_mutex_lock(&lock);                                                                                                   \
    const CUresult result = call;                                                                                                \
    pthread_mutex_unlock(&lock);                                                                                                 \
    return result

// ---- devices ----

CUresult cuInit(unsigned flags) {
    (void)flags;
    const char *text = getenv("FAKECUDA_INIT");
    if (text != NULL && atoi(text) != 0)
        return (CUresult)atoi(text);
    pthread_mutex_lock(&lock);
    if (!initialised) {
        text = getenv("FAKECUDA_DEVICES");
        n_devices = text ? atoi(text) : 2;
        if (n_devices > MAX_DEVICES)
            n_devices = MAX_DEVICES;
        capability_major = 9;
        capability_minor = 0;
        if ((text = getenv("FAKECUDA_CAPABILITY")) != NULL)
            sscanf(text, "%d.%d", &capability_major, &capability_minor);
        if ((text = getenv("FAKECUDA_DEFER")) != NULL && *text != '\0')
            defer = strcmp(text, "first") == 0 ? FIRST : LAST;
        if ((text = getenv("FAKECUDA_LOG")) != NULL)
            log_file = fopen(text, "a");
        for (int i = 0; i < n_devices; i++)
            contexts[i].device = default_streams[i].device = i;
        initialised = true;
    }
    pthread_mutex_unlock(&lock);
    return n_devices > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int *count) {
    NEEDS_INIT;
    return *count = n_devices, CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    NEEDS_DEVICE(ordinal);
    return *device = ordinal, CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int nbytes, CUdevice device) {
    NEEDS_DEVICE(device);
    snprintf(name, (size_t)nbytes, "stand-in device %d", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    NEEDS_DEVICE(device);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability_major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability_minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    NEEDS_DEVICE(device);
    *major = capability_major;
    *minor = capability_minor;
    return CUDA_SUCCESS;
}

// ---- contexts ----

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    NEEDS_DEVICE(device);
    pthread_mutex_lock(&lock);
    contexts[device].retained++;
    say("retain %d", device);
    pthread_mutex_unlock(&lock);
    return *context = &contexts[device], CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    NEEDS_DEVICE(device);
    pthread_mutex_lock(&lock);
    contexts[device].retained--;
    say("release %d", device);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    if (context < contexts || context >= contexts + n_devices || context->retained <= 0 || depth == MAX_DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    say("push %d", context->device);
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    NEEDS_CONTEXT;
    CUcontext popped = stack[--depth];
    say("pop %d", popped->device);
    if (context != NULL)
        *context = popped;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return *context = current(), CUDA_SUCCESS; }

CUresult cuCtxSetCurrent(CUcontext context) {
    if (depth > 0)
        depth--;
    if (context != NULL)
        stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    NEEDS_CONTEXT;
    return *device = current()->device, CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    NEEDS_CONTEXT;
    LOCKED(drain_device(current()->device));
}

// ---- streams and events ----

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (n_streams < MAX_STREAMS) {
        *stream = calloc(1, sizeof **stream);
        (*stream)->device = current()->device;
        (*stream)->number = n_streams;
        streams[n_streams++] = *stream;
        say("stream %p device %d flags %u", (void *)*stream, (*stream)->device, flags);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult destroy(CUstream stream) {
    if (stream == NULL || resolve(stream) == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    drain(stream);
    stream->destroyed = true;
    say("destroy stream %p", (void *)stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) { LOCKED(destroy(stream)); }

static CUresult synchronize(CUstream handle) {
    const CUstream stream = resolve(handle);
    return stream ? drain(stream) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuStreamSynchronize(CUstream stream) { LOCKED(synchronize(stream)); }
CUresult cuStreamQuery(CUstream stream) { LOCKED(synchronize(stream)); } // whoever asks waits

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    (void)flags;
    NEEDS_CONTEXT;
    return *event = calloc(1, sizeof **event), CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) { return (void)event, CUDA_SUCCESS; } // a queue may still know it

static CUresult record(CUevent event, CUstream handle) {
    const CUstream stream = resolve(handle);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    Operation *operation = new_operation(RECORD, 0);
    operation->event = event;
    operation->version = ++event->recorded;
    event->stream = stream;
    say("record %p stream %p", (void *)event, (void *)handle);
    return enqueue(stream, operation);
}

CUresult cuEventRecord(CUevent event, CUstream stream) { LOCKED(record(event, stream)); }

static CUresult wait_for(CUstream handle, CUevent event) {
    const CUstream stream = resolve(handle);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    say("wait %p stream %p", (void *)event, (void *)handle);
    if (event->recorded == 0)
        return CUDA_SUCCESS;
    Operation *operation = new_operation(WAIT, 0);
    operation->event = event;
    operation->version = event->recorded;
    operation->other = event->stream;
    return enqueue(stream, operation);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    (void)flags;
    LOCKED(wait_for(stream, event));
}

static CUresult reach(CUevent event) {
    while (event->done < event->recorded && event->stream->head != NULL)
        step(event->stream);
    return failure;
}

CUresult cuEventSynchronize(CUevent event) { LOCKED(reach(event)); }
CUresult cuEventQuery(CUevent event) { LOCKED(reach(event)); }

// ---- memory ----

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t nbytes) {
    NEEDS_CONTEXT;
    void *memory = NULL;
    if (posix_memalign(&memory, 256, nbytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(memory, 0xa5, nbytes);
    return *pointer = (CUdeviceptr)memory, CUDA_SUCCESS;
}

static CUresult release(CUdeviceptr pointer) {
    for (int i = 0; i < n_devices; i++)
        drain_device(i);
    free((void *)pointer);
    return failure;
}

CUresult cuMemFree(CUdeviceptr pointer) { LOCKED(release(pointer)); }

static CUresult copy(void *to, const void *from, size_t nbytes, CUstream handle) {
    const CUstream stream = resolve(handle);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    Operation *operation = new_operation(COPY, 0);
    operation->to = to;
    operation->from = from;
    operation->nbytes = nbytes;
    return enqueue(stream, operation);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    LOCKED(copy((void *)to, (const void *)from, nbytes, stream));
}

static CUresult fill(void *to, int value, size_t nbytes, CUstream handle) {
    const CUstream stream = resolve(handle);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    Operation *operation = new_operation(FILL, 0);
    operation->to = to;
    operation->value = value;
    operation->nbytes = nbytes;
    return enqueue(stream, operation);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream stream) {
    LOCKED(fill((void *)to, value, nbytes, stream));
}

// ---- modules and launches ----

static CUresult load(CUmodule *module, const void *image) {
    const Elf64_Ehdr *header = image;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_type != ET_DYN)
        return CUDA_ERROR_INVALID_IMAGE;
    // The image comes without its length: linkers put the table of sections at its end.
    const size_t nbytes = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    const int file = memfd_create("kernels", 0);
    if (file < 0 || write(file, image, nbytes) != (ssize_t)nbytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file); // stays open: dlopen knows libraries by their paths
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        say("dlopen: %s", dlerror());
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *module = malloc(sizeof **module);
    (*module)->context = current();
    (*module)->library = library;
    say("module device %d", current()->device);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n_options, CUjit_option *options, void **values) {
    for (unsigned i = 0; i < n_options; i++) // it logs nothing, and says so
        if (options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES || options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
            values[i] = NULL;
    NEEDS_CONTEXT;
    LOCKED(load(module, image));
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    NEEDS_CONTEXT;
    LOCKED(load(module, image));
}

CUresult cuModuleUnload(CUmodule module) { return say("unload"), free(module), CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    NEEDS_CONTEXT;
    char symbol[160];
    snprintf(symbol, sizeof symbol, "%s__cusim", name);
    Kernel *kernel = (Kernel *)dlsym(module->library, symbol);
    if (kernel == NULL)
        return CUDA_ERROR_NOT_FOUND;
    *function = malloc(sizeof **function);
    (*function)->context = module->context;
    (*function)->kernel = kernel;
    snprintf((*function)->name, sizeof (*function)->name, "%s", name);
    return CUDA_SUCCESS;
}

// PyCUDA still says the shape in advance, in vain: it says it with each launch, too.
CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z) {
    (void)function, (void)x, (void)y, (void)z;
    NEEDS_CONTEXT;
    return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, unsigned grid, unsigned threads, CUstream handle, const void *arguments, size_t nbytes) {
    const CUstream stream = resolve(handle);
    if (function->context != current())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (stream == NULL || stream->device != current()->device)
        return CUDA_ERROR_INVALID_HANDLE;
    say("launch %s grid %u stream %p device %d", function->name, grid, (void *)handle, stream->device);
    Operation *operation = new_operation(LAUNCH, nbytes);
    operation->function = function;
    operation->grid = grid;
    operation->threads = threads;
    memcpy(operation->arguments, arguments, nbytes);
    return enqueue(stream, operation);
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared_nbytes, CUstream stream, void **parameters, void **extra) {
    NEEDS_CONTEXT;
    if (grid_x == 0 || block_x == 0 || block_x > 1024 || grid_x > 0x7fffffff || parameters != NULL || extra == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_nbytes != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    const void *arguments = NULL;
    size_t nbytes = 0;
    for (int i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
        if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            arguments = extra[i + 1];
        if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            nbytes = *(size_t *)extra[i + 1];
    }
    if (arguments == NULL || nbytes > PARAMETERS_NBYTES)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(launch(function, grid_x, block_x, stream, arguments, nbytes));
}

// ---- errors ----

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_LAUNCH_FAILED && failure_text[0] != '\0' ? failure_text
            : error == CUDA_ERROR_NOT_SUPPORTED                          ? "not in the stand-in driver"
            : error == CUDA_ERROR_NO_DEVICE                              ? "no CUDA-capable device is detected"
                                                                         : "an error of the stand-in driver";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    static __thread char name[32];
    snprintf(name, sizeof name, "CUresult %d", (int)error);
    return *text = name, CUDA_SUCCESS;
}
