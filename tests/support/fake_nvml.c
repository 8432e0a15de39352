/* A libnvidia-ml.so.1 without GPUs. The file $FAKE_NVML says what it answers, one line each:
 *
 *   gpus N               the number of GPUs
 *   block FUNCTION       FUNCTION never returns
 *   error FUNCTION CODE  FUNCTION returns the NVML error CODE
 *   INDEX KEY VALUE      a value of a GPU: name, utilization, memory, power (mW), limit (mW),
 *                        clocks (bit mask of the reasons why they are lowered)
 *
 * With -DOLD, functions that an old driver lacks are missing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

static int result_of(const char *function) {
    char value[128];
    if (look_up("block", function, value, sizeof value)) for (;;) pause();
    return look_up("error", function, value, sizeof value) ? atoi(value) : 0;
}

static unsigned number(Device *device, const char *key) {
    char index[16], value[128];
    snprintf(index, sizeof index, "%d", device->index);
    return look_up(index, key, value, sizeof value) ? (unsigned)strtoul(value, NULL, 10) : 0;
}

#define ANSWER() do { int result = result_of(__func__); if (result) return result; } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; ANSWER(); return 0; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    char value[128];
    ANSWER();
    *count = look_up("gpus", NULL, value, sizeof value) ? (unsigned)atoi(value) : 0;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    ANSWER();
    devices[index].index = (int)index;
    *device = &devices[index];
    return 0;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
    char index[16];
    ANSWER();
    snprintf(index, sizeof index, "%d", device->index);
    if (!look_up(index, "name", name, size)) snprintf(name, size, "Fake H100");
    return 0;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
    ANSWER();
    snprintf(uuid, size, "GPU-0000-%d", device->index);
    return 0;
}

typedef struct { unsigned gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *utilization) {
    ANSWER();
    utilization->gpu = number(device, "utilization");
    utilization->memory = number(device, "memory");
    return 0;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    ANSWER();
    *milliwatts = number(device, "power");
    return 0;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    ANSWER();
    *reasons = number(device, "clocks");
    return 0;
}

#ifndef OLD
int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *milliwatts) {
    ANSWER();
    *milliwatts = number(device, "limit");
    return 0;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem_id; char bus_id[32]; } PciInfo;

int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info) {
    ANSWER();
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + (unsigned)device->index;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return 0;
}
#endif
