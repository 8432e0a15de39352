/* A libnvidia-ml.so.1 without GPUs. The file $FAKE_NVML says what it answers, one line each:
 *
 *   gpus N                     the number of GPUs
 *   driver VERSION             the driver's version
 *   block FUNCTION             FUNCTION does not return while the file says so
 *   error FUNCTION CODE        FUNCTION returns the NVML error CODE
 *   only FUNCTION INDEX        the error is that of one GPU
 *   INDEX KEY VALUE            a value of a GPU; without one, its function is not supported. The keys of the functions
 *                              that each GPU has are utilization, memory, power (mW), limit (mW), clocks (bit mask)
 *   event N INDEX TYPE DATA    the Nth event, from 1 on: nvmlEventType and its data
 *
 * With -DOLD, functions that an old driver lacks are missing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, VERSION_MISMATCH = 25 };
typedef unsigned long long u64;
typedef struct { int index; } Device;
static Device devices[64];

static int look_up(const char *first, const char *second, char *value, size_t size) {
    char line[256], a[64], b[64], c[128];
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "/dev/null", "r");
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        int count = sscanf(line, "%63s %63s %127[^\n]", a, b, c);
        if (count >= 2 && !strcmp(a, first) && (!second || !strcmp(b, second))) {
            snprintf(value, size, "%s", second ? (count == 3 ? c : "") : b);
            found = 1;
        }
    }
    if (file) fclose(file);
    return found;
}

static int result_of(const char *function, Device *device) {
    char value[128];
    while (look_up("block", function, value, sizeof value)) usleep(20000);
    if (device && look_up("only", function, value, sizeof value) && atoi(value) != device->index) return OK;
    return look_up("error", function, value, sizeof value) ? atoi(value) : OK;
}

static int has(Device *device, const char *key, char *value, size_t size) {
    char index[16];
    snprintf(index, sizeof index, "%d", device->index);
    return look_up(index, key, value, size);
}

static unsigned number(Device *device, const char *key) {
    char value[128];
    return has(device, key, value, sizeof value) ? (unsigned)strtoul(value, NULL, 10) : 0;
}

/* Up to four numbers of a key. */
static int numbers(Device *device, const char *key, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
    char value[128];
    unsigned unused;
    if (!has(device, key, value, sizeof value)) return NOT_SUPPORTED;
    sscanf(value, "%u %u %u %u", a, b ? b : &unused, c ? c : &unused, d ? d : &unused);
    return OK;
}

static int number64(Device *device, const char *key, u64 *result) {
    char value[128];
    if (!has(device, key, value, sizeof value)) return NOT_SUPPORTED;
    *result = strtoull(value, NULL, 10);
    return OK;
}

#define ANSWER() do { int result = result_of(__func__, NULL); if (result) return result; } while (0)
#define ANSWER_OF(device) do { int result = result_of(__func__, device); if (result) return result; } while (0)
#define ONE_NUMBER(function, key) \
    int function(Device *device, unsigned *value) { \
        ANSWER_OF(device); \
        return numbers(device, key, value, NULL, NULL, NULL); \
    }

int nvmlInitWithFlags(unsigned flags) { (void)flags; ANSWER(); return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake"; }

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    ANSWER();
    return look_up("driver", NULL, version, size) ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char value[128];
    ANSWER();
    *count = look_up("gpus", NULL, value, sizeof value) ? (unsigned)atoi(value) : 0;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    devices[index].index = (int)index;
    ANSWER_OF(&devices[index]);
    *device = &devices[index];
    return OK;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
    ANSWER_OF(device);
    if (!has(device, "name", name, size)) snprintf(name, size, "Fake H100");
    return OK;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
    ANSWER_OF(device);
    snprintf(uuid, size, "GPU-0000-%d", device->index);
    return OK;
}

int nvmlDeviceGetVbiosVersion(Device *device, char *version, unsigned size) {
    ANSWER_OF(device);
    return has(device, "vbios", version, size) ? OK : NOT_SUPPORTED;
}

typedef struct { unsigned gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *utilization) {
    ANSWER_OF(device);
    utilization->gpu = number(device, "utilization");
    utilization->memory = number(device, "memory");
    return OK;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    ANSWER_OF(device);
    *milliwatts = number(device, "power");
    return OK;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius) {
    (void)sensor;
    ANSWER_OF(device);
    return numbers(device, "temperature", celsius, NULL, NULL, NULL);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, u64 *reasons) {
    ANSWER_OF(device);
    *reasons = number(device, "clocks");
    return OK;
}

typedef struct { u64 total, free, used; } Memory;

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    ANSWER_OF(device);
    memory->free = 0;
    return number64(device, "total", &memory->total) || number64(device, "used", &memory->used) ? NOT_SUPPORTED : OK;
}

typedef struct { unsigned pid; u64 used; unsigned instance, compute_instance; } Process;

int nvmlDeviceGetComputeRunningProcesses_v2(Device *device, unsigned *count, Process *processes) {
    char value[128];
    ANSWER_OF(device);
    if (!has(device, "pid", value, sizeof value)) { *count = 0; return OK; }
    if (!processes) { *count = 1; return INSUFFICIENT_SIZE; }
    *count = 1;
    processes[0].pid = (unsigned)atoi(value);
    return OK;
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ANSWER_OF(device);
    return numbers(device, "rows", corrected, uncorrected, pending, failed);
}

int nvmlDeviceGetEccMode(Device *device, unsigned *current, unsigned *pending) {
    ANSWER_OF(device);
    return numbers(device, "ecc", current, pending, NULL, NULL);
}

int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, u64 *count) {
    ANSWER_OF(device);
    return type == 1 && counter == 0 ? number64(device, "uncorrected", count) : INVALID_ARGUMENT;
}

int nvmlDeviceGetMemoryErrorCounter(Device *device, int type, int counter, int location, u64 *count) {
    ANSWER_OF(device);
    if (type != 0 || counter != 0) return INVALID_ARGUMENT;
    return number64(device, location == 7 ? "sram_corrected" : location == 2 ? "dram_corrected" : "", count);
}

int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *is_active) {
    char value[128];
    ANSWER_OF(device);
    if (!has(device, "nvlinks", value, sizeof value)) return NOT_SUPPORTED;
    if (link >= strlen(value)) return INVALID_ARGUMENT;
    *is_active = value[link] == '1';
    return OK;
}

typedef struct { unsigned id, scope; long long time, latency; unsigned type, result; union { unsigned u; u64 ull; } value; } Field;

int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    char key[32];
    ANSWER_OF(device);
    for (int i = 0; i < count; i++) {
        snprintf(key, sizeof key, "field%u", fields[i].id);
        fields[i].type = fields[i].id == 230 ? 1 : 3;
        fields[i].value.ull = 0;
        fields[i].result = (unsigned)number64(device, key, &fields[i].value.ull);
    }
    return OK;
}

ONE_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie")
ONE_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_max")
ONE_NUMBER(nvmlDeviceGetDisplayActive, "display")

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    ANSWER_OF(device);
    return numbers(device, "mig", current, pending, NULL, NULL);
}

/* Events. */

#ifdef OLD
#define EVENTS 0x1bULL
#else
#define EVENTS 0xc01bULL
#endif

typedef struct { Device *device; u64 type, data; unsigned instance, compute_instance; } Event;
static u64 registered[64];

int nvmlEventSetCreate(void **set) { ANSWER(); *set = registered; return OK; }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceGetSupportedEventTypes(Device *device, u64 *types) { ANSWER_OF(device); *types = EVENTS; return OK; }

int nvmlDeviceRegisterEvents(Device *device, u64 types, void *set) {
    (void)set;
    ANSWER_OF(device);
    if (types & ~EVENTS) return NOT_SUPPORTED;
    registered[device->index] = types;
    return OK;
}

int nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds) {
    static int next = 1;
    char key[16], value[128];
    int index;
    (void)set;
    for (unsigned waited = 0; waited < milliseconds; waited += 10, usleep(10000)) {
        ANSWER();
        snprintf(key, sizeof key, "%d", next);
        if (!look_up("event", key, value, sizeof value)) continue;
        next++;
        memset(event, 0, sizeof *event);
        sscanf(value, "%d %llu %llu", &index, &event->type, &event->data);
        event->device = &devices[index];
        if (registered[index] & event->type) return OK;
    }
    return TIMEOUT;
}

#ifndef OLD
int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *milliwatts) {
    ANSWER_OF(device);
    *milliwatts = number(device, "limit");
    return OK;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem_id; char bus_id[32]; } PciInfo;

int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info) {
    ANSWER_OF(device);
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + (unsigned)device->index;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return OK;
}

typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;

int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory2 *memory) {
    Memory old;
    int result;
    ANSWER_OF(device);
    if (memory->version != (sizeof *memory | 2 << 24)) return VERSION_MISMATCH;
    result = nvmlDeviceGetMemoryInfo(device, &old);
    memory->total = old.total;
    memory->reserved = number(device, "reserved");
    memory->used = old.used - memory->reserved;
    return result;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *processes) {
    ANSWER_OF(device);
    return nvmlDeviceGetComputeRunningProcesses_v2(device, count, processes);
}

ONE_NUMBER(nvmlDeviceGetDefaultEccMode, "ecc_default")

typedef struct { unsigned version; u64 counts[11]; unsigned is_exceeded; } SramStatus;

int nvmlDeviceGetSramEccErrorStatus(Device *device, SramStatus *status) {
    ANSWER_OF(device);
    if (status->version != (sizeof *status | 1 << 24)) return VERSION_MISMATCH;
    return numbers(device, "sram_worn", &status->is_exceeded, NULL, NULL, NULL);
}

typedef struct { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, health; unsigned char summary; } Fabric;

int nvmlDeviceGetGpuFabricInfoV(Device *device, Fabric *fabric) {
    char value[128];
    unsigned known = look_up("fabric", NULL, value, sizeof value) ? (unsigned)atoi(value) : 3;
    ANSWER_OF(device);
    if (fabric->version != 0x2000024 && !(known == 3 && fabric->version == 0x3000028)) return VERSION_MISMATCH;
    return numbers(device, "fabric", &fabric->state, &fabric->status, &fabric->health, NULL);
}

typedef struct { unsigned version; int margin; } Margin;

int nvmlDeviceGetMarginTemperature(Device *device, Margin *margin) {
    char value[128];
    ANSWER_OF(device);
    if (margin->version != (sizeof *margin | 1 << 24)) return VERSION_MISMATCH;
    if (!has(device, "margin", value, sizeof value)) return NOT_SUPPORTED;
    margin->margin = atoi(value);
    return OK;
}
#endif
